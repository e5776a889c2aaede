"""`job=drill`: kill and freeze an engine's processes under load, and check that every request keeps its tokens.

File: `drill.json` with every fault. A request that fails or differs ends the job with an error.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.protocol.messages import PLAIN_DECODING
from cluster.config.jobs import DrillConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.console import Terminal, figure
from cluster.io.prompts import read_prompts
from cluster.observability.report import circumstances, write_json
from cluster.tools.chaos.drill import Drill, plan_faults
from cluster.tools.chaos.summary import TIMES, summarise


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read, EngineError if a role does not recover, RuntimeError if tokens
    differ."""
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
            plain = engine.generate(contents, sampling, drafter=PLAIN_DECODING, on_finished=lambda _: bar.advance())
        drill = Drill(engine, prompts, sampling, [one.token_ids for one in plain])
        choose = random.Random(job.seed)
        plan = plan_faults(sorted(engine.pids()), job.signals, job.faults, choose, pairs=job.pairs)
        counters: dict[str, Any] = {}
        try:
            with terminal.counting("killing and freezing", job.faults) as bar:
                drill.run(plan, job, lambda _: bar.advance())
            counters = {"counters": engine.report().counters}
        finally:
            summary = summarise(drill.faults, drill.load, len(plan))
            facts = circumstances(config, engine.places, engine.ready)
            write_json(run_dir / "drill.json", {**summary, **counters, **facts})
    load = drill.load
    columns = ("process", "signal", "faults", "noticed s", "max", "replaced s", "max", "without tokens s", "max")
    rows = []
    for kind in summary["kinds"]:
        times = [figure(kind[name][which], 3) for name in TIMES for which in ("median", "max")]
        rows.append([kind["kind"], kind["signal"], str(kind["num_faults"]), *times])
    terminal.table("Faults", columns, rows)
    differ = f"{len(load.unequal)} with other tokens, {len(load.failed)} failed"
    terminal.line(f"{load.num_requests} requests, {load.num_tokens} tokens while it went on: {differ}")
    terminal.line(f"results: {run_dir}")
    if not load.num_requests:
        raise RuntimeError("job=drill: no request ended during the faults, so that nothing was compared")
    if not summary["passed"]:
        raise RuntimeError(
            f"job=drill: {len(load.failed)} requests failed, {len(load.unequal)} of "
            f"{load.num_requests} have other tokens than plain decoding; see drill.json"
        )
