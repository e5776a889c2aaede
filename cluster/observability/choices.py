"""One line on what a run chose by itself and why: the drafter's place, which of several drafters drafted, and whether.

From the configuration and the figures of `report.py`; measures nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.drafters.config import PlacedDrafterConfig
from cluster.config.schema import LaunchConfig
from cluster.observability.report import RunFigures


def describe_choices(config: LaunchConfig, run: RunFigures) -> str | None:
    """None where nothing is drafted."""
    if not config.drafter.member_names or config.pipeline.name == "plain":
        return None
    return "; ".join([_place(config, run), *_members(config, run), *_decoding(run)])


def _place(config: LaunchConfig, run: RunFigures) -> str:
    drafter, pipeline = config.drafter, config.pipeline.name
    is_attached = drafter.is_attached(pipeline)
    if pools := [address for address, _ in drafter.lenders]:
        return _pools(pools, drafter.num_seats, drafts=bool(run["num_spec_steps"]))
    where = "on the target's ranks" if is_attached else "on ranks of its own"
    if not isinstance(drafter, PlacedDrafterConfig):
        return where
    if drafter.placement != "auto":
        return f"{where}, as drafter.placement={drafter.placement} says"
    if is_attached:
        return f"{where}, since the two work in turn (pipeline={pipeline}) and each has all devices so"
    if pipeline == "sync":
        return f"{where}, since the drafter's keys ask for them"
    return f"{where}, since it drafts beside the target (pipeline={pipeline})"


def _pools(pools: list[str], num_seats: int, *, drafts: bool) -> str:
    listed = ", ".join(pools)
    if not drafts:
        return f"no draft verified of {listed}"
    if len(pools) == 1:
        return f"lent by the pool {listed}"
    which = "the pool" if num_seats == 1 else f"the {num_seats} pools"
    return f"lent by {which} whose drafts come soonest, of {listed}"


def _members(config: LaunchConfig, run: RunFigures) -> Iterator[str]:
    """How often each of several drafters drafted, where they are chosen by expected tokens per second."""
    levels = run["levels"] or {}
    drafts = {name: levels[name]["num_drafts"] or 0 for name in config.drafter.member_names if name in levels}
    total = sum(drafts.values())
    if config.drafter.name == "auto" and total:
        shares = [f"{name} {count / total:.0%}" for name, count in sorted(drafts.items(), key=lambda one: -one[1])]
        yield f"drafts by tokens per second: {', '.join(shares)}"


def _decoding(run: RunFigures) -> Iterator[str]:
    """Whether speculation went on, and the measurement behind it."""
    if run["guard"] is None:
        return
    gain, rest_s = run["guard"].get("gain"), run["fallback_s"] or 0.0
    if gain is None and not run["num_spec_steps"]:
        yield "decoding was plain"
        return
    measured = "never measured against plain decoding" if gain is None else f"measured at {gain:.2f}x of plain rounds"
    share = rest_s / run["wall_s"] if run["wall_s"] else 0.0
    yield f"{measured}, plain decoding for {share:.0%} of the time"
