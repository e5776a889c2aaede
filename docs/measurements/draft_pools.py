"""One draft pool for several targets: `python docs/measurements/draft_pools.py OUT.jsonl [options]`.

Real engines, each a process with paced passes of the bundled target (`target.pace_ms`), and one `job=pool` whose passes
are paced too, so that shared cores decide less; beside them the same engines with a drafter each, and without one. All
engines of a setting complete the same prompts at the same time. A line for each setting: tokens per second of each
target, and whether all tokens equal those of plain decoding. `--table` prints the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

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
        yield ("drafter=pool", f"drafter.pools=[{address}]", f"drafter.key_files=[{folder / 'pool.key'}]")
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
    return {"tokens_per_s": speeds, "mean": mean(speeds), "texts": texts}


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
                    else:
                        found = run(options, own if name == "own" else (), num_targets, folder)
                texts = found.pop("texts")
                plain = plain or texts[0]
                equal = all(one == plain for one in texts)
                line = {"setting": name, "targets": num_targets, "start": start, "equal": equal} | found
                with options.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                sys.stderr.write(f"{line}\n")


def table(file: Path) -> str:
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault((row["setting"], row["targets"]), []).append(row)
    rows = [
        "| drafter | targets | tokens/s of each target, median of starts (range) | tokens equal |",
        "|---|---|---|---|",
    ]
    for (name, targets), lines in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        means = [line["mean"] for line in lines]
        spread = f"{median(means):.0f} ({min(means):.0f} to {max(means):.0f})"
        rows.append(f"| {name} | {targets} | {spread} | {'yes' if all(line['equal'] for line in lines) else 'NO'} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", choices=("plain", "own", "pool"), default=["plain", "own", "pool"])
    parser.add_argument("--pipeline", default="branches")
    parser.add_argument("--target-ms", type=float, default=30)
    parser.add_argument("--draft-ms", type=float, default=3)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each engine")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print what the file has")
    options = parser.parse_args()
    if options.table:
        sys.stdout.write(table(options.file) + "\n")
    else:
        measure(options)


if __name__ == "__main__":
    main()
