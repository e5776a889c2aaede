"""One draft pool and more and more targets: `python -m docs.measurements.pools [--out FOLDER] [--batches 1,8,64]`.

For each batch, tokens per second of a target by the number of targets that one draft device serves: drafts or passes
merged (`cluster/tools/fleet/description.py`), or one target after the other. Costs of passes are those of `COSTS`. The
engine's own coordinators and draft roles on the virtual clock (`docs/fleet.md`). Writes `pools.csv` and `pools.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.io.pictures import COLOURS, picture
from cluster.observability.report import write_csv
from cluster.tools.fleet.description import Fleet, FleetLoad, Merging, PoolDrafter, Region, TargetReplica
from cluster.tools.fleet.layouts import Drafting, FleetLayout
from cluster.tools.fleet.simulation import FleetResult, simulate_fleet
from docs.measurements import lines

FLAT = (15.0, 1.5)
"""Milliseconds of a target pass and of a draft pass, however many rows they have."""
TARGET_ROWS = {1: 15.0, 128: 15.6, 256: 18.0, 512: 31.0, 1024: 61.0, 2048: 121.0}
DRAFT_ROWS = {1: 1.5, 128: 1.55, 256: 1.8, 512: 3.0, 1024: 5.9, 2048: 11.7}
"""Milliseconds of a pass by its rows, derived, not measured: 70 billion parameters on four devices and 1.2 billion on
one, of 3.35 TB/s and 990 dense bfloat16 TFLOP/s each, at 70 % of the bandwidth for the target and half of it for the
drafter, and 60 % and 42 % of the arithmetic; from about 250 rows on a pass is bound by it."""
HOST_MS = 0.15
"""Core time for every target in a draft pass: a step of draft-ahead over 12 rows, its tree included."""
COSTS: Mapping[str, tuple[float | dict[int, float], float | dict[int, float], float]] = {
    "flat": (*FLAT, 0.0),
    "by rows": (TARGET_ROWS, DRAFT_ROWS, 0.0),
    "by rows, with host": (TARGET_ROWS, DRAFT_ROWS, HOST_MS),
}
POOLS = {Merging.calls: "drafts merged", Merging.passes: "passes merged", Merging.none: "in turn"}
MOST_TOKENS = 240
"""Tokens of each stream that are measured, about; fewer of larger batches, down to an eighth."""
TARGETS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the picture."""

    batch: int
    costs: str
    merging: Merging
    num_targets: int

    def result(self, tokens: int, pipeline: str = "branches") -> FleetResult:
        """Simulates streams that do not end, so that each target has its batch; about `tokens` of each are measured."""
        target_ms, draft_ms, host_ms = COSTS[self.costs]
        seconds = 0.3 + tokens / 100
        fleet = Fleet(
            regions=[Region(name="here", devices=4 * self.num_targets, price=1.0)],
            target=TargetReplica(pass_ms=target_ms, ranks=4, max_num_seqs=self.batch),
            drafter=PoolDrafter(
                pass_ms=draft_ms,
                host_ms=host_ms,
                longest_draft=5,
                fan_out=6,
                ahead_width=12,
                most_targets=64,
            ),
            load=FleetLoad(
                requests_per_s=20 * self.batch * self.num_targets,
                seconds=seconds,
                warmup_s=0.3,
                prompt=[16],
                output=[100_000],
            ),
            pipeline="branches",
            adaptive=self.batch > 1,
        )
        pools = (1,) if pipeline != "plain" else (0,)
        drafting = Drafting.pools if pipeline != "plain" else Drafting.plain
        layout = FleetLayout("pool", drafting, (self.num_targets,), pools, self.num_targets, self.merging)
        return simulate_fleet(fleet, layout)


def settings(batches: Sequence[int], targets: Sequence[int] = TARGETS) -> Iterator[Setting]:
    for batch in batches:
        for costs in COSTS:
            for merging in POOLS:
                for num_targets in targets:
                    yield Setting(batch, costs, merging, num_targets)


def row_of(setting: Setting, tokens: int) -> dict[str, Any]:
    result = setting.result(tokens)
    assert not result.num_different
    return {
        "batch": setting.batch,
        "costs": setting.costs,
        "pool": POOLS[setting.merging],
        "targets": setting.num_targets,
        "tokens_per_s_per_target": round(result.tokens_per_s / setting.num_targets, 1),
        "pool_busy": round(result.pool_busy, 3),
        "rows_per_draft_pass": round(result.rows_per_draft_pass, 1),
        "on_drafts": round(result.drafted_share, 3),
    }


def draw(path: Path, rows: Sequence[Mapping[str, Any]], plain: Mapping[tuple[int, str], float]) -> None:
    """A panel per batch and kind of costs; grey is plain decoding."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    with picture(path, 13, 3.2 * len(batches), len(batches), len(COSTS), sharex=True) as panels:
        for line, batch in zip(panels, batches, strict=True):
            for axes, costs in zip(line, COSTS, strict=True):
                for colour, pool in zip(COLOURS, POOLS.values(), strict=False):
                    points = [
                        (row["targets"], row["tokens_per_s_per_target"])
                        for row in rows
                        if (row["batch"], row["costs"], row["pool"]) == (batch, costs, pool)
                    ]
                    axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=pool)
                axes.axhline(plain[batch, costs], color="#b8b8b8", label="plain decoding")
                axes.set_ylim(0)
                axes.set_title(f"batch {batch}, costs {costs}")
                axes.grid(axis="y")
        for axes in panels[-1]:
            axes.set_xlabel("targets of one draft device")
        for line in panels:
            line[0].set_ylabel("tokens/s of a target")
        panels[0][0].legend(loc="lower left")


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/pools"))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    arguments = parser.parse_args()
    batches, targets = ([int(one) for one in text.split(",")] for text in (arguments.batches, arguments.targets))
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in settings(batches, targets):
        rows.append(row_of(setting, max(MOST_TOKENS // 8, MOST_TOKENS // setting.batch)))
        sys.stdout.write(" ".join(f"{name}={value}" for name, value in rows[-1].items()) + "\n")
        sys.stdout.flush()
    plain = {
        (batch, costs): Setting(batch, costs, Merging.none, 1).result(60, "plain").tokens_per_s
        for batch in batches
        for costs in COSTS
    }
    rows += [
        {"batch": batch, "costs": costs, "pool": "plain", "targets": 1, "tokens_per_s_per_target": round(speed, 1)}
        for (batch, costs), speed in plain.items()
    ]
    write_csv(arguments.out / "pools.csv", rows)
    draw(arguments.out / "pools.png", rows, plain)


if __name__ == "__main__":
    main()
