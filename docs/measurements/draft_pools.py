"""One draft pool for several targets: `python -m docs.measurements.draft_pools OUT.jsonl [options]`.

Real engines, each a process with paced passes of the bundled target (`target.pace_ms`), and one `job=pool` whose passes
are paced too, so that shared cores decide less; beside them the same engines with a drafter each, and without one. All
engines of a setting complete the same prompts at the same time. A line for each setting: tokens per second of each
target, and whether all tokens equal those of plain decoding. `--table` prints the file; `--simulated` also what the
simulator of fleets gives for plain decoding and for the pool, on the very texts and with the draft model's own choices
at each of their tokens: at the costs of passes that were set, and at those that were measured, which are a round of
plain decoding beside as many other targets, a pass of the pool, and the pool's host time outside its passes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from actors.drafters.model.config import ModelDrafterConfig
from cluster.config import load_config
from cluster.tools.fleet.description import Fleet, FleetLoad, Merging, PoolDrafter, Region, TargetReplica
from cluster.tools.fleet.layouts import Drafting, FleetLayout
from cluster.tools.fleet.simulation import simulate_fleet
from cluster.tools.offline import open_alone, read_task
from cluster.tools.planning.layer_choice import write_texts
from cluster.tools.planning.rounds import KnownText
from cluster.tools.planning.transcript import Transcript, record
from cluster.tools.simulation.language import RequestText
from docs.measurements import lines
from docs.measurements.serving import launched

COMMON = ("cluster=inprocess", "pipeline.adaptive=false", "sampling.max_tokens=96", "job.baseline=false")
MODEL = ("drafter=model", "drafter.num_draft_tokens=5", "verify=coupled")


@contextmanager
def pool(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ...]]:
    """Overrides of an engine that uses it."""
    process = launched(
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
        launched(
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
    decode_ms = mean(report["decode_ms_per_token"] for report in reports)
    return {"tokens_per_s": speeds, "mean": mean(speeds), "decode_ms": decode_ms, "texts": texts}


def pool_costs(report: Path) -> dict[str, float]:
    """Milliseconds of a call of the drafter, and for each target in it those outside calls in which a target's lease
    had something to do."""
    pool = json.loads(report.read_text(encoding="utf-8"))
    merged = pool["merged"]
    return {
        "draft_ms": 1e3 * pool["pass_s"] / merged["num_calls"],
        "host_ms": 1e3 * pool["host_s"] / merged["num_in_calls"],
    }


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
                        found |= pool_costs(folder / "run" / "leases.json")
                    else:
                        found = run(options, own if name == "own" else (), num_targets, folder)
                texts = found.pop("texts")
                plain = plain or texts[0]
                equal = all(one == plain for one in texts)
                line = {"setting": name, "targets": num_targets, "start": start, "equal": equal} | found
                lines.append(options.file, line)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The texts of the engines, for the simulator: request i has text i of them, in turn.

    The prompts of the simulator have one length, and tokens of their own, which no draft is compared with.
    """

    texts: Sequence[Transcript]

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> RequestText:
        return self.texts[request_id % len(self.texts)].text(0, prompt)


def recorded(options: argparse.Namespace) -> Recorded:
    """What the target writes after each prompt, and what the draft model would choose at each of its tokens."""
    config = load_config([*COMMON, *MODEL, f"job.limit={options.limit}"])
    drafter, task = config.drafter, read_task(config)
    assert isinstance(drafter, ModelDrafterConfig)
    target = open_alone(config.target, len(task.prompts) * (task.longest + 1), "cpu")
    with torch.inference_mode():
        written = write_texts(target, task, config.scheduler.prefill_chunk)
    texts = [KnownText(tuple(one.token_ids), one.prompt_len) for one in written]
    return Recorded([record(drafter, "cpu", [text], task.sampling[0], task.eos_token_ids) for text in texts])


def simulated(
    options: argparse.Namespace,
    name: str,
    num_targets: int,
    costs: Mapping[str, float],
    texts: Recorded,
    seconds: float = 60,
) -> float:
    """Tokens per second of a target, on the virtual clock."""
    fleet = Fleet(
        regions=[Region(name="here", devices=2 * num_targets, price=1.0)],
        target=TargetReplica(pass_ms=costs["target_ms"], max_num_seqs=1),
        drafter=PoolDrafter(
            pass_ms=costs["draft_ms"], host_ms=costs["host_ms"], longest_draft=5, fan_out=6, ahead_width=8
        ),
        load=FleetLoad(requests_per_s=10 * num_targets, seconds=seconds, warmup_s=3, prompt=[64], output=[96]),
        pipeline=options.pipeline,
        adaptive=False,
    )
    drafting, pools = (Drafting.plain, (0,)) if name == "plain" else (Drafting.pools, (1,))
    layout = FleetLayout(name, drafting, (num_targets,), pools, num_targets, Merging.passes)
    return simulate_fleet(fleet, layout, texts=texts).tokens_per_s / num_targets


def table(options: argparse.Namespace) -> str:
    groups = lines.grouped(lines.read(options.file), "setting", "targets")
    columns = ["drafter", "targets", "tokens/s of each target, median of starts (range)", "simulated, costs as set"]
    columns += ["as measured", "round of plain decoding, pass of the pool, its host for each target: ms"]
    rows = [lines.head(*columns, "tokens equal")]
    texts = recorded(options) if options.simulated else Recorded([])
    for (name, targets), starts in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        means = [line["mean"] for line in starts]
        paces = {"target_ms": options.target_ms, "draft_ms": options.draft_ms, "host_ms": 0.0}
        plain = groups.get(("plain", targets), starts)
        measured = paces | {"target_ms": median(line["decode_ms"] for line in plain)}
        if name == "pool":
            measured |= {key: median(line[key] for line in starts) for key in ("draft_ms", "host_ms")}
        models = ["", ""]
        if options.simulated and name != "own":
            speeds = [simulated(options, name, targets, costs, texts) for costs in (paces, measured)]
            models = [f"{speed:.1f} ({speed / median(means):.2f})" for speed in speeds]
        shown = {"plain": ("target_ms",), "pool": ("target_ms", "draft_ms", "host_ms")}.get(name, ())
        costs = ", ".join(f"{measured[key]:.2f}" for key in shown)
        equal = "yes" if all(line["equal"] for line in starts) else "NO"
        rows.append(lines.row(name, targets, lines.spread(means, ".1f"), *models, costs, equal))
    return "\n".join(rows)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", choices=("plain", "own", "pool"), default=["plain", "own", "pool"])
    parser.add_argument("--pipeline", default="branches")
    parser.add_argument("--target-ms", type=float, default=30)
    parser.add_argument("--draft-ms", type=float, default=3)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each engine")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print what the file has")
    parser.add_argument("--simulated", action="store_true", help="and what the simulator gives")
    options = parser.parse_args()
    if options.table or options.simulated:
        print(table(options))
    else:
        measure(options)


if __name__ == "__main__":
    main()
