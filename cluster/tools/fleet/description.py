"""What a YAML file says of a fleet: regions and prices, links, both roles' costs, load, and losses.

The records below are the form of the file; msgspec holds the file against them. Must not know how a fleet is simulated.
"""

from __future__ import annotations

import csv
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field, structs

from cluster.io.yaml_files import read_yaml
from cluster.tools.simulation import Language, PassCost, power_law
from parallel.ranges import errors_of

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Ms = Annotated[float, Meta(ge=0, le=600_000)]
_Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_Slots = Annotated[int, Meta(ge=1, le=1 << 62)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Rate = Annotated[float, Meta(ge=0, le=600)]
_Price = Annotated[float, Meta(ge=0, le=1e6)]
_Name = Annotated[str, Meta(min_length=1, max_length=40)]
_PassMs = Annotated[float, Meta(gt=0, le=600_000)] | dict[_Count, Annotated[float, Meta(gt=0, le=600_000)]]
"""Milliseconds by rows, or of any number of rows."""


class Merging(StrEnum):
    """How a pool merges: what a pass of it has rows of."""

    passes = "passes"
    """Whatever every role has next, so that one joins in the middle of the drafts of others: the engine's pools
    where a draft model works ahead (`actors/pool/merged_passes.py`)."""
    calls = "calls"
    """All drafts that were ordered when the first of them begins, to their end; else a part of a text to read and a
    step of draft-ahead of all in turns: the engine's pools with other drafters."""
    none = "none"
    """One role's work, to its end."""


class _FleetPart(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One mapping of the file."""


class Region(_FleetPart, frozen=True):
    """Devices at one place, and what one of them costs an hour."""

    name: _Name
    devices: _Count
    price: _Price
    draft_price: _Price | None = None
    """Price of a device that drafts, where that is another kind, or a spot offer; None: as `price`."""

    @property
    def price_of_drafter(self) -> float:
        return self.price if self.draft_price is None else self.draft_price


class Links(_FleetPart, frozen=True):
    """Milliseconds of a message, one way. `between` has pairs of regions as keys, `west-east`; each message between
    regions takes up to a few times `jitter_ms` more (exponential, that mean), and none overtakes another."""

    local_ms: _Ms = 0.05
    between_ms: _Ms = 30.0
    between: dict[str, _Ms] = field(default_factory=dict)
    jitter_ms: _Ms = 0.0

    def delay_s(self, one: str, other: str) -> float:
        if one == other:
            return self.local_ms / 1e3
        known = self.between.get(f"{one}-{other}", self.between.get(f"{other}-{one}", self.between_ms))
        return known / 1e3


class TargetReplica(_FleetPart, frozen=True):
    """A replica of the target: its ranks are the devices that one pass takes."""

    pass_ms: _PassMs
    ranks: _Count = 1
    context_ms: _Ms = 0.0
    """Further milliseconds of a pass for every 1,000 rows of KV that its sequences have."""
    kv_slots: _Slots = 1 << 40
    max_num_seqs: _Count = 16

    @property
    def passes(self) -> PassCost:
        return PassCost.of_ms(self.pass_ms, self.context_ms)


class PoolDrafter(_FleetPart, frozen=True):
    """The draft model, on devices of its own or on the target's."""

    pass_ms: _PassMs
    attached_ms: _PassMs | None = None
    """A pass on the target's ranks; None: as `pass_ms`."""
    ranks: _Count = 1
    context_ms: _Ms = 0.0
    kv_slots: _Slots = 1 << 40
    """Rows of a pool; each lease has an equal part."""
    host_ms: _Ms = 0.0
    """What a pass of a pool takes more for every target that has rows in it: its trees and records on the host."""
    longest_draft: Annotated[int, Meta(ge=1, le=64)] = 5
    fan_out: Annotated[int, Meta(ge=1, le=64)] = 4
    ahead_width: Annotated[int, Meta(ge=1, le=192)] = 12
    merging: Annotated[list[Merging], Meta(min_length=1)] = field(default_factory=lambda: [Merging.passes])
    """What pools are simulated with; several are so many layouts of pools that serve more than one target."""
    most_targets: _Count = 16
    """Targets that a pool serves at most, those of lost pools included."""

    @property
    def passes(self) -> PassCost:
        return PassCost.of_ms(self.pass_ms, self.context_ms)

    @property
    def attached_passes(self) -> PassCost:
        return PassCost.of_ms(self.pass_ms if self.attached_ms is None else self.attached_ms, self.context_ms)


class FleetLoad(_FleetPart, frozen=True):
    """Requests arrive at random (Poisson), each at a region drawn by `shares` (in proportion to devices if empty)."""

    requests_per_s: Annotated[float, Meta(gt=0, le=1e6)]
    seconds: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    """Virtual seconds in all; what is measured begins after `warmup_s`."""
    warmup_s: _Seconds = 10.0
    prompt: list[_Count] = field(default_factory=lambda: [128])
    """Tokens of a prompt, drawn from these."""
    output: list[_Count] = field(default_factory=lambda: [128])
    lengths: str = ""
    """CSV file with columns prompt_tokens and output_tokens, one request a line, in place of the two lists; a
    relative path is one beside this file."""
    shares: dict[str, _Share] = field(default_factory=dict)
    least_tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Tokens per second that nine of ten streams must reach for a layout to be acceptable."""


class Outage(_FleetPart, frozen=True):
    """All targets of a region stop, and their streams go to other regions."""

    region: _Name
    at_s: _Seconds
    seconds: _Seconds = 10.0


class Losses(_FleetPart, frozen=True):
    """Devices that vanish, at random, and come back."""

    drafters_per_minute: _Rate = 0.0
    """Mean losses of each drafter on a device of its own in a minute: 0.3 where 30 % are lost each minute."""
    targets_per_minute: _Rate = 0.0
    recovery_s: _Seconds = 20.0
    detect_s: _Seconds = 1.0
    """Seconds from a loss until the coordinators, or the clients of a lost target, know of it."""
    outages: list[Outage] = field(default_factory=list)


class Fleet(_FleetPart, frozen=True):
    """A fleet to simulate."""

    regions: Annotated[list[Region], Meta(min_length=1, max_length=100)]
    target: TargetReplica
    drafter: PoolDrafter
    load: FleetLoad
    links: Links = field(default_factory=Links)
    losses: Losses = field(default_factory=Losses)
    acceptance: _Share | Annotated[list[_Share], Meta(min_length=1)] = 0.8
    runners_up: Annotated[float, Meta(gt=0, le=10)] = 1.0
    """Exponent of the power law of the drafter's other choices."""
    pipeline: Literal["sync", "pearl", "branches", "tree"] = "branches"
    """What drafters on devices of their own do ahead; attached ones draft in turn with their target."""
    adaptive: bool = True
    """The value of `pipeline.adaptive`."""
    coordinator_ms: _Ms = 0.0
    seed: int = 0

    @property
    def language(self) -> Language:
        acceptance = tuple(self.acceptance) if isinstance(self.acceptance, list) else (self.acceptance,)
        return Language(acceptance, power_law(self.runners_up), seed=self.seed)

    def check(self) -> None:
        """Raises ValueError with one line for what the types do not show."""
        names = [region.name for region in self.regions]
        if len(set(names)) < len(names):
            raise ValueError("regions: two have the same name")
        for pair in self.links.between:
            if pair not in {f"{one}-{other}" for one in names for other in names if one != other}:
                raise ValueError(f"links.between.{pair}: names no two regions; write ONE-OTHER with names of regions")
        for where, name in (
            *(("load.shares", name) for name in self.load.shares),
            *(("losses.outages", outage.region) for outage in self.losses.outages),
        ):
            if name not in names:
                raise ValueError(f"{where}: there is no region {name!r}; name one of {', '.join(names)}")
        if self.load.shares and not sum(self.load.shares.values()):
            raise ValueError("load.shares: are all 0; give a region a part of the requests")
        if self.load.warmup_s >= self.load.seconds:
            raise ValueError("load.warmup_s: must be below load.seconds, or nothing is measured")
        if max(region.devices for region in self.regions) < self.target.ranks:
            raise ValueError(f"target.ranks: no region has {self.target.ranks} devices")
        longest = max(prompt + output for prompt, output in self.lengths)
        if longest >= self.target.kv_slots:
            raise ValueError(f"target.kv_slots: a request of {longest} tokens does not fit; raise it")

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, output) tokens to draw from."""
        load = self.load
        return read_lengths(Path(load.lengths)) if load.lengths else [(p, o) for p in load.prompt for o in load.output]


def read_fleet(path: Path) -> Fleet:
    """Raises ValueError with one line that names the wrong entry."""
    with errors_of(f"job.fleet={path}", "see docs/fleet.md"):
        fleet = read_yaml(path, Fleet)
        if fleet.load.lengths:
            lengths = str(path.parent / fleet.load.lengths)
            fleet = structs.replace(fleet, load=structs.replace(fleet.load, lengths=lengths))
        fleet.check()
        return fleet


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of requests, from a CSV file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    except OSError as error:
        raise ValueError(f"load.lengths={path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        remedy = "needs columns prompt_tokens and output_tokens with a whole number on every line"
        raise ValueError(f"load.lengths={path}: {remedy}") from error
    if not rows or min(map(min, rows)) < 1:
        raise ValueError(f"load.lengths={path}: needs at least one request, and lengths of 1 or more")
    return rows
