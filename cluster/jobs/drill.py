"""`job=drill`: kill and freeze an engine's processes under load, and see that every request keeps its tokens.

Files: `drill.json` with every fault. A request that fails or differs ends the job with an error: scripts notice.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from cluster.config.jobs import DrillConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.console import Terminal, figure
from cluster.io.prompts import read_prompts
from cluster.observability.report import circumstances, write_json
from cluster.tools.chaos.drill import Drill, Fault, Load, plan_faults

TIMES = ("noticed_s", "replaced_s", "stalled_s")


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read, EngineError if a fault is not got over or tokens differ."""
    job: DrillConfig = config.job
    prompts = read_prompts(Path(job.prompts), job.limit)
    restarts = max(config.cluster.max_restarts, 2 * job.faults)
    config = replace(config, cluster=replace(config.cluster, max_restarts=restarts))
    terminal = Terminal()
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    with engine:
        sampling = config.sampling_params(engine.tokenizer)
        with terminal.counting("decoding plainly, undisturbed", len(prompts)) as bar:
            contents = [prompt.content for prompt in prompts]
            plain = engine.generate(contents, sampling, speculate=False, on_finished=lambda _: bar.advance())
        drill = Drill(engine, prompts, sampling, [one.token_ids for one in plain])
        choose = random.Random(job.seed)
        plan = plan_faults(sorted(engine.pids()), job.signals, job.faults, choose, pairs=job.pairs)
        try:
            with terminal.counting("killing and freezing", job.faults) as bar:
                drill.run(plan, job, lambda fault: bar.advance())
            counters = engine.report().counters
        finally:
            facts = circumstances(config, engine.places, engine.ready)
            write_json(run_dir / "drill.json", {**_summary(drill.faults, drill.load), **facts})
    write_json(run_dir / "drill.json", {**_summary(drill.faults, drill.load), "counters": counters, **facts})
    _show(terminal, drill.faults, drill.load, run_dir)
    if drill.load.failed or drill.load.unequal:
        raise RuntimeError(
            f"job=drill: {len(drill.load.failed)} requests failed, {len(drill.load.unequal)} of "
            f"{drill.load.num_requests} have other tokens than plain decoding; see drill.json"
        )


def _summary(faults: list[Fault], load: Load) -> dict[str, object]:
    return {
        "job": "drill",
        "num_faults": len(faults),
        "num_requests": load.num_requests,
        "tokens": load.num_tokens,
        "num_failed": len(load.failed),
        "num_unequal_requests": len(load.unequal),
        "faults": [{"kind": fault.kind, "signal": fault.signal, **asdict(fault)} for fault in faults],
        "kinds": [_of_kind(kind, name, members) for (kind, name), members in sorted(_by_kind(faults).items())],
    }


def _by_kind(faults: list[Fault]) -> dict[tuple[str, str], list[Fault]]:
    kinds: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        kinds.setdefault((fault.kind, fault.signal), []).append(fault)
    return kinds


def _of_kind(kind: str, name: str, faults: list[Fault]) -> dict[str, object]:
    times = {field: [getattr(one, field) for one in faults] for field in TIMES}
    summary = {field: {"median": median(values), "max": max(values)} for field, values in times.items()}
    return {"kind": kind, "signal": name, "num_faults": len(faults), **summary}


def _show(terminal: Terminal, faults: list[Fault], load: Load, run_dir: Path) -> None:
    rows = []
    for one in _summary(faults, load)["kinds"]:
        times = (one[field][which] for field in TIMES for which in ("median", "max"))
        rows.append([one["kind"], one["signal"], str(one["num_faults"]), *(figure(value, 3) for value in times)])
    columns = ("process", "signal", "faults", "noticed s", "max", "replaced s", "max", "without tokens s", "max")
    terminal.table("Faults", columns, rows)
    differ = f"{len(load.unequal)} with other tokens, {len(load.failed)} failed"
    terminal.line(f"{load.num_requests} requests, {load.num_tokens} tokens while it went on: {differ}")
    terminal.line(f"results: {run_dir}")
