"""One draft pool for several targets: `python docs/measurements/draft_pools.py OUT.jsonl [options]`.

Real engines, each a process with paced passes of the bundled target (`target.pace_ms`), and one `job=pool` whose passes
are paced too, so that shared cores decide less; beside them the same engines with a drafter each, and without one. All
engines of a setting complete the same prompts at the same time. A line for each setting: tokens per second of each
target, how many draft tokens were accepted, and whether all tokens equal those of plain decoding. `--table` prints the
file; `--simulated` also what the simulator of fleets gives for plain decoding and for the pool, at the same costs of
passes, with and without the host time that the pool measured, and with the acceptance by distance that the engines of a
pool had with the fewest targets: drafts are cut shorter with more of them, and tokens that were not drafted look like
rejected ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import mean, median
from typing import Any

from cluster.tools.fleet.description import Fleet, FleetLoad, PoolDrafter, Region, TargetReplica
from cluster.tools.fleet.layouts import Drafting, FleetLayout
from cluster.tools.fleet.merging import Merging
from cluster.tools.fleet.simulation import simulate_fleet

COMMON = ("cluster=inprocess", "pipeline.adaptive=false", "sampling.max_tokens=96", "job.baseline=false")
MODEL = ("drafter=model", "drafter.num_draft_tokens=5", "verify=coupled")


def launch(*overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "cluster.launch", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@contextmanager
def pool(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ...]]:
    """Overrides of an engine that uses it."""
    process = launch(
        "job=pool",
        "cluster=inprocess",
        "job.listen=tcp://127.0.0.1:*",
        f"job.secret_file={folder / 'pool'}",
        f"hydra.run.dir={folder / 'run'}",
        f"pipeline={options.pipeline}",
        f"drafter.pace_ms={options.draft_ms}",
        "job.max_leases=64",
        *MODEL,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("lending "))
        address = line.split(" at ")[1].split(",")[0]
        yield ("drafter=pool", f"drafter.pools=[{address}]", f"drafter.key_files=[{folder / 'pool.keys' / 'secret'}]")
    finally:
        process.terminate()
        process.wait()


def run(options: argparse.Namespace, drafter: Sequence[str], num_targets: int, folder: Path) -> dict[str, Any]:
    """All targets at once; those with a plain pipeline have no drafter."""
    pipeline = options.pipeline if drafter else "plain"
    runs = [folder / f"{i}" for i in range(num_targets)]
    started = [
        launch(
            f"hydra.run.dir={place}",
            f"pipeline={pipeline}",
            f"target.pace_ms={options.target_ms}",
            f"job.limit={options.limit}",
            *COMMON,
            *drafter,
        )
        for place in runs
    ]
    codes = [one.wait() for one in started]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")
    reports = [json.loads((place / "report.json").read_text()) for place in runs]
    texts = [[json.loads(line)["token_ids"] for line in (place / "completions.jsonl").open()] for place in runs]
    speeds = [report["tokens_per_s"] for report in reports]
    histograms = [report["acceptance_histogram"] or [] for report in reports]
    accepted = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
    return {"tokens_per_s": speeds, "mean": mean(speeds), "accepted": accepted, "texts": texts}


def host_ms(report: Path, pass_ms: float) -> float:
    """Milliseconds that a pass of this pool took more than `pass_ms` for each target in it: calls of the drafter that
    took longer, and the time outside them in which a target's lease had something to do."""
    pool = json.loads(report.read_text(encoding="utf-8"))
    calls = pool["merged"]["num_calls"]
    return (1e3 * (pool["pass_s"] + pool["host_s"]) - pass_ms * calls) / pool["merged"]["num_in_calls"]


def measure(options: argparse.Namespace) -> None:
    plain: list[list[int]] | None = None
    for start in range(options.starts):
        for num_targets in options.targets:
            own = (*MODEL, f"drafter.pace_ms={options.draft_ms}")
            for name in options.settings:
                with tempfile.TemporaryDirectory() as text:
                    folder = Path(text)
                    if name == "pool":
                        with pool(options, folder) as drafter:
                            found = run(options, drafter, num_targets, folder)
                        found["host_ms"] = host_ms(folder / "run" / "leases.json", options.draft_ms)
                    else:
                        found = run(options, own if name == "own" else (), num_targets, folder)
                texts = found.pop("texts")
                plain = plain or texts[0]
                equal = all(one == plain for one in texts)
                line = {"setting": name, "targets": num_targets, "start": start, "equal": equal} | found
                with options.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                sys.stderr.write(f"{line}\n")


def simulated(
    options: argparse.Namespace, name: str, num_targets: int, rows: Sequence[dict[str, Any]], host_ms: float
) -> float:
    """Tokens per second of a target, on the virtual clock; `rows` are those whose acceptance it has."""
    counts = [sum(one) for one in zip_longest(*(row["accepted"] for row in rows), fillvalue=0)]
    at_least = [sum(counts[length:]) for length in range(len(counts))]  # rounds that accepted so many
    acceptance = [more / fewer for fewer, more in pairwise(at_least)] or [0.0]
    fleet = Fleet(
        regions=[Region(name="here", devices=2 * num_targets, price=1.0)],
        target=TargetReplica(pass_ms=options.target_ms, max_num_seqs=1),
        drafter=PoolDrafter(pass_ms=options.draft_ms, host_ms=host_ms, longest_draft=5, fan_out=6, ahead_width=8),
        load=FleetLoad(requests_per_s=10 * num_targets, seconds=30, warmup_s=3, prompt=[64], output=[96]),
        acceptance=acceptance,
        pipeline=options.pipeline,
        adaptive=False,
    )
    drafting, pools = (Drafting.plain, (0,)) if name == "plain" else (Drafting.pools, (1,))
    layout = FleetLayout(name, drafting, (num_targets,), pools, num_targets, Merging.passes)
    return simulate_fleet(fleet, layout).tokens_per_s / num_targets


def table(options: argparse.Namespace) -> str:
    file = options.file
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault((row["setting"], row["targets"]), []).append(row)
    rows = [
        "| drafter | targets | tokens/s of each target, median of starts (range) | host of the pool, ms for each target"
        " in a pass | simulated with it | without | tokens equal |",
        "|---|---|---|---|---|---|---|",
    ]
    fewest = next(lines for key, lines in sorted(groups.items()) if key[0] == "pool")
    for (name, targets), lines in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        means = [line["mean"] for line in lines]
        spread = f"{median(means):.1f} ({min(means):.1f} to {max(means):.1f})"
        measured = median(line.get("host_ms", 0.0) for line in lines)
        host = measured if options.host_ms is None else options.host_ms
        is_simulated = options.simulated and name != "own"
        models = [f"{simulated(options, name, targets, fewest, ms):.1f}" if is_simulated else "" for ms in (host, 0.0)]
        equal = "yes" if all(line["equal"] for line in lines) else "NO"
        cells = [name, f"{targets}", spread, f"{measured:.2f}" if name == "pool" else "", *models, equal]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", choices=("plain", "own", "pool"), default=["plain", "own", "pool"])
    parser.add_argument("--pipeline", default="branches")
    parser.add_argument("--target-ms", type=float, default=30)
    parser.add_argument("--draft-ms", type=float, default=3)
    parser.add_argument(
        "--host-ms", type=float, help="of a simulated pass of the pool, for each target in it; default: as measured"
    )
    parser.add_argument("--limit", type=int, default=4, help="prompts of each engine")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print what the file has")
    parser.add_argument("--simulated", action="store_true", help="and what the simulator gives")
    options = parser.parse_args()
    if options.table or options.simulated:
        sys.stdout.write(table(options) + "\n")
    else:
        measure(options)


if __name__ == "__main__":
    main()
