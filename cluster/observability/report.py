"""`report.json`: figures of a run in the words and conventions of vLLM, derived from counters and requests.

Pure functions. What was not measured is null, never estimated. Acceptance length counts the bonus token; fractions of
time are of the time in which there were requests.
"""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from actors.options import PipelineName, VerifyRule
from actors.protocol.membership import Ready
from actors.protocol.messages import RequestStats
from cluster.config.schema import LaunchConfig, PlacementName
from cluster.observability.results import Run, Served
from cluster.placement.ranks import RankPlacement
from cluster.pocket import is_bundled
from parallel.whole_files import replaced_whole, write_text

PACKAGE = "specdec"
"""Name of this distribution."""


class RequestMetrics(TypedDict):
    """How speculation went in one request, or in several, under vLLM's names."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RunFigures(TypedDict):
    """What was measured in one run."""

    num_requests: int
    num_failed: int
    tokens: int
    wall_s: float
    tokens_per_s: float | None
    plain_tokens_per_s: float | None
    speedup_vs_ar: float | None
    tokens_equal_plain: bool | None
    num_unequal_requests: int | None
    ttft_s: dict[str, float] | None
    latency_s: dict[str, float] | None
    decode_ms_per_token: float | None
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int] | None
    per_position_acceptance: list[float] | None
    num_spec_steps: int | None
    num_draft_tokens: int | None
    num_accepted_tokens: int | None
    num_guessed_states: int | None
    """States of blocks that a target which fills masks guessed."""
    num_accepted_states: int | None
    branch_hit_rate: float | None
    """Share of the proposals of a drafter that works ahead that were prepared before their verdict."""
    foreseen_rate: float | None
    """Share of the same proposals that had reached the coordinator before their verdict."""
    drafts_by_source: dict[str, dict[str, int]] | None
    """Verified drafts, their tokens and accepted ones, of `far` and `local`, if there is a `pipeline.local_drafter`."""
    levels: dict[str, dict[str, float | None]] | None
    learning: dict[str, float] | None
    """What `drafter.online=true` has learned by the end of the run, as in `LearningWork`."""
    draft_busy: float | None
    target_busy: float | None
    round_ms: float | None
    round_overhead_ms: float | None
    num_rounds: int | None
    passes_ahead: int | None
    dropped_pass_s: float | None
    waits: dict[str, float] | None
    """Seconds one role waited for another, or for records, in rounds with speculation."""
    bound_by: str | None
    """What most of the time of those rounds went to: target, drafter, or messages (links and coordinator)."""
    exported_bytes: int | None
    """Hidden states that the target sent to a drafter on ranks of its own."""
    exported_bytes_per_round: float | None
    """Bytes of the mean pass that sent some."""
    preemptions: int | None
    stale: int | None
    lost_records: int | None
    role_losses: dict[str, int] | None
    refused_records: dict[str, int] | None
    """Invalid records of ranks, by role; each cost its rank the place."""
    resume_s: dict[str, list[float]] | None
    draft_lengths: list[int]
    """How often each draft length was ordered, from 0 on."""
    fallback_s: float
    """Seconds of plain decoding in which speculation was possible, or would have been with the lost drafter."""
    num_probes: int
    num_trials: int
    guard: dict[str, Any] | None
    """What the never-slower guard measured last: its mode, plain tokens per second, the gain of speculation."""


def memory_bound_speedup(counters: Mapping[str, Any], ready: Mapping[str, Ready]) -> float | None:
    """Speed over plain decoding if passes took the time that reading their weights takes, and nothing else took any
    (MBSU, arXiv 2403.00858): tokens of a round over its passes, in passes of the target. A draft takes a pass for each
    depth, or as many as its rank reports. None where rounds had no draft, or passes of a drafter read what is not
    reported: modules on the target's states share its head and tables, and levels of a cascade take turns."""
    steps = counters.get("num_spec_steps")
    target = sum([rank.facts.get("pass_bytes", 0) for rank in ready.values() if rank.role == "target"])
    parts = [rank.facts.get("drafter", {}) if rank.role == "target" else rank.facts for rank in ready.values()]
    is_known = all("pass_bytes" in part or not part.get("weight_bytes") for part in parts)
    if not steps or not target or not is_known or counters.get("levels"):
        return None
    share = max([part.get("draft_share", 0.0) for part in parts])
    read = sum([part.get("pass_bytes", 0) for part in parts]) + share * target
    depth = sum(counters.get("num_drafted_per_pos", ())) / steps
    passes = next((part["passes_per_draft"] for part in parts if "passes_per_draft" in part), depth)
    return (1 + counters["num_accepted_tokens"] / steps) * target / (target + passes * read)


class RankLayout(TypedDict):
    """Where every rank is, and what its role holds in memory."""

    layout: list[dict[str, Any]]
    bytes_per_role: dict[str, dict[str, int]]
    drafter_bytes: dict[str, int]
    """Weights and KV of the drafter, on its own ranks or beside the target's."""


class Circumstances(RankLayout):
    """What a run was measured on."""

    stretch: int
    notes: list[str]
    versions: dict[str, str | None]
    config: dict[str, Any]


def figures(run: Run, plain: Run | None = None) -> RunFigures:
    """The figures of one run; `plain` is plain decoding of the same prompts."""
    counters = run.counters
    tokens_per_s = _ratio(run.num_tokens, run.wall_s)
    plain_tokens_per_s = _ratio(plain.num_tokens, plain.wall_s) if plain else None
    num_unequal = num_unequal_requests(run, plain) if plain else None
    steps, drafted = counters.get("num_spec_steps"), counters.get("num_draft_tokens")
    accepted, histogram = counters.get("num_accepted_tokens"), counters.get("acceptance_histogram")
    per_position = zip(counters.get("num_accepted_per_pos", ()), counters.get("num_drafted_per_pos", ()), strict=True)
    lookups = counters.get("num_branch_lookups")
    active_s, num_spec_rounds = counters.get("active_s"), counters.get("num_spec_rounds")
    entered = counters.get("num_by_mode", {})
    waits = _waits(counters)
    return {
        "num_requests": len(run.requests),
        "num_failed": len(run.failed),
        "tokens": run.num_tokens,
        "wall_s": run.wall_s,
        "tokens_per_s": tokens_per_s,
        "plain_tokens_per_s": plain_tokens_per_s,
        "speedup_vs_ar": _ratio(tokens_per_s, plain_tokens_per_s),
        "tokens_equal_plain": None if num_unequal is None else num_unequal == 0,
        "num_unequal_requests": num_unequal,
        "ttft_s": middle(served.ttft_s for served in run.completed),
        "latency_s": middle(served.latency_s for served in run.completed),
        "decode_ms_per_token": decode_ms_per_token(run.completed),
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": None if histogram is None else list(histogram),
        "per_position_acceptance": [kept / offered for kept, offered in per_position] if steps else None,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_guessed_states": counters.get("num_guessed_states"),
        "num_accepted_states": counters.get("num_accepted_states"),
        "branch_hit_rate": _ratio(counters.get("num_branch_hits"), lookups),
        "foreseen_rate": _ratio(counters.get("num_prefetched"), lookups),
        "drafts_by_source": counters.get("drafts_by_source") or None,
        "levels": _levels(counters.get("levels") or {}),
        "learning": counters.get("learning") or None,
        "draft_busy": _ratio(counters.get("draft_busy_s"), active_s),
        "target_busy": _ratio(counters.get("target_busy_s"), active_s),
        "round_ms": _ratio(counters.get("spec_round_s"), num_spec_rounds, 1e3),
        "round_overhead_ms": _ratio(counters.get("spec_round_overhead_s"), num_spec_rounds, 1e3),
        "num_rounds": counters.get("num_rounds"),
        "passes_ahead": counters.get("num_passes_ahead"),
        "dropped_pass_s": counters.get("dropped_pass_s"),
        "waits": waits,
        "bound_by": _bound_by(counters["spec_round_s"], waits) if waits else None,
        "exported_bytes": counters.get("exported_bytes"),
        "exported_bytes_per_round": _ratio(counters.get("exported_bytes"), counters.get("num_exports")),
        "preemptions": counters.get("num_preemptions"),
        "stale": counters.get("num_stale"),
        "lost_records": counters.get("num_lost_records"),
        "role_losses": counters.get("num_role_losses"),
        "refused_records": counters.get("num_refused"),
        "resume_s": counters.get("resume_s"),
        "draft_lengths": list(counters.get("orders_by_length", ())),
        "fallback_s": counters.get("rested_s", 0.0) + counters.get("no_drafter_s", 0.0),
        "num_probes": entered.get("probe", 0),
        "num_trials": entered.get("trial", 0),
        "guard": counters.get("guard"),
    }


def _levels(counted: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]] | None:
    """Each level of a cascade, or drafter of several: its passes, what its drafts cost, and how they were judged."""
    return {
        name: {
            "num_passes": work["num_passes"],
            "ms_per_pass": _ratio(work["busy_s"], work["num_passes"], 1e3),
            "num_drafts": work["num_drafts"],
            "ms_per_draft": _ratio(work["busy_s"], work["num_drafts"], 1e3),
            "num_draft_tokens": work["num_draft_tokens"],
            "num_accepted_tokens": work["num_accepted_tokens"],
            "draft_acceptance_rate": _ratio(work["num_accepted_tokens"], work["num_draft_tokens"]),
        }
        for name, work in sorted(counted.items())
    } or None


def _waits(counters: Mapping[str, Any]) -> dict[str, float] | None:
    """The last figure is of the whole run, the others of rounds with speculation; None without such a round."""
    if not counters.get("spec_round_s"):
        return None
    return {
        "target_for_drafter_s": counters["wait_for_draft_s"],
        "target_for_messages_s": counters["wait_for_messages_s"],
        "drafter_for_target_s": max(0.0, counters["active_s"] - counters["draft_busy_s"]),
    }


def _bound_by(round_s: float, waits: Mapping[str, float]) -> str:
    drafter_s, messages_s = waits["target_for_drafter_s"], waits["target_for_messages_s"]
    shares = {"target": round_s - drafter_s - messages_s, "drafter": drafter_s, "messages": messages_s}
    return max(shares, key=lambda name: shares[name])


def mean_draft_length(lengths: Sequence[int]) -> float | None:
    """Mean over the orders that asked for a draft; `lengths[k]` counts the orders of k draft tokens."""
    return _ratio(sum(length * count for length, count in enumerate(lengths)), sum(lengths[1:]))


def request_metrics(stats: RequestStats, num_spec_tokens: int) -> RequestMetrics:
    """One request's metrics under vLLM's names; `num_spec_tokens` is the most the drafter may propose in a round.

    As vLLM's, the histogram has an entry for each of 0 .. `num_spec_tokens` accepted tokens, and a ratio without a step
    is 0.0: AIPerf leaves out a record of another form.
    """
    histogram = stats.acceptance_histogram
    steps, drafted, accepted = stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": _ratio(accepted, drafted) or 0.0,
        "acceptance_histogram": [*histogram, *[0] * (num_spec_tokens + 1 - len(histogram))],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }


def decode_ms_per_token(requests: Sequence[Served]) -> float | None:
    """Milliseconds per token after the first, over all requests: decoding without the reading of the prompts."""
    seconds, tokens = 0.0, 0
    for served in requests:
        if served.ttft_s is not None and served.latency_s is not None and len(served.token_ids) > 1:
            seconds += served.latency_s - served.ttft_s
            tokens += len(served.token_ids) - 1
    return _ratio(seconds, tokens, 1e3)


def num_unequal_requests(run: Run, other: Run) -> int:
    """Requests that ended in both runs, neither failed nor aborted, with different tokens."""
    tokens, others = (
        {served.index: served.token_ids for served in each.completed if served.finish_reason != "abort"}
        for each in (run, other)
    )
    return sum(tokens[index] != others[index] for index in tokens.keys() & others.keys())


def bytes_per_role(ready: Mapping[str, Ready]) -> dict[str, dict[str, int]]:
    """Bytes of weights and KV, summed over the ranks of each role; zeros for a role that holds neither."""
    total: dict[str, dict[str, int]] = {}
    for rank in ready.values():
        role = total.setdefault(rank.role, {"weights": 0, "kv": 0})
        role["weights"] += rank.facts.get("weight_bytes", 0)
        role["kv"] += rank.facts.get("kv_bytes", 0)
    return total


def drafter_bytes(ready: Mapping[str, Ready]) -> dict[str, int]:
    """Bytes of the drafter's weights and KV over all ranks; zeros for one that has none of its own, as `self`."""
    parts = [rank.facts.get("drafter", {}) if rank.role == "target" else rank.facts for rank in ready.values()]
    return {
        "weights": sum(part.get("weight_bytes", 0) for part in parts),
        "kv": sum(part.get("kv_bytes", 0) for part in parts),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a figure; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (PACKAGE, "torch", "ray", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def circumstances(config: LaunchConfig, places: Sequence[RankPlacement], ready: Mapping[str, Ready]) -> Circumstances:
    return {
        **layout(places, ready),
        "stretch": config.target.stretch,
        "notes": [*notes(config), *_shared_cores(config, places)],
        "versions": versions(),
        "config": asdict(config),
    }


def layout(places: Sequence[RankPlacement], ready: Mapping[str, Ready]) -> RankLayout:
    ranks = [{"identity": place.identity, **asdict(place), "cores": place.bound_to} for place in places]
    return {"layout": ranks, "bytes_per_role": bytes_per_role(ready), "drafter_bytes": drafter_bytes(ready)}


def notes(config: LaunchConfig) -> list[str]:
    """What makes the figures differ from those of other runs."""
    found = []
    if config.target.stretch:
        found.append(
            f"target.stretch={config.target.stretch}: the target has that many extra layers, which cost time and "
            "change no token"
        )
    found += _pace_notes(config)
    if config.verify.rule != VerifyRule.coupled and config.sampling.temperature > 0:
        found.append(
            f"verify.rule={config.verify.rule} keeps the distribution of the output, not its tokens: sampled requests "
            "differ from plain decoding"
        )
    if (
        config.pipeline.name.drafts
        and any(map(is_bundled, config.drafter.models()))
        and not is_bundled(config.target.path)
    ):
        found.append("drafter.path: names the bundled drafter, which was trained for another target than this one")
    if config.cluster.oversubscribe:
        found.append("cluster.oversubscribe=true: ranks may share cores, so their times mean little")
    return found


def _shared_cores(config: LaunchConfig, places: Sequence[RankPlacement]) -> list[str]:
    """Two roles that compute on the same cores are slower than the target alone on few of them."""
    roles = {place.role for place in places if place.kind == "cpu" and place.share < 1}
    if config.placement.name != PlacementName.colocated or not {"target", "draft"} <= roles:
        return []
    if not config.drafter.runs_passes or config.drafter.paces_ms:
        return []
    remedy = "drafter.placement=attached drafts on the target's ranks, with all of their threads"
    if config.pipeline.name != PipelineName.sync:
        remedy = "placement=separate gives each its own, and pipeline=sync lets them work in turn"
    return [f"placement=colocated: drafter and target wait for each other's threads on the same CPU cores; {remedy}"]


def _pace_notes(config: LaunchConfig) -> list[str]:
    """Passes that wait for a pace are not those of this machine."""
    drafter = config.drafter.paces_ms if config.pipeline.name.drafts else []
    paces = {"target": [config.target.pace_ms] if config.target.pace_ms else [], "drafter": drafter}
    listed = ", ".join(f"{role} {' and '.join(map(str, ms))}" for role, ms in paces.items() if ms)
    text = "passes took at least so many milliseconds, as on devices that are not here: times are not this machine's"
    return [f"pace_ms: {listed}: {text}"] if listed else []


def write_json(path: Path, content: object) -> None:
    """Replace the file atomically: a reader, or a process killed meanwhile, never leaves or sees half of it."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A column for every key of any row."""
    with replaced_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)


def _ratio(part: float | None, whole: float | None, factor: float = 1.0) -> float | None:
    return factor * part / whole if part is not None and whole else None


def middle(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": median(known), "max": max(known)} if known else None
