"""`job=bench`: time settings against plain decoding, and against other engines, in one run.

Files: `report.json` with every figure of every setting, `bench.csv`, `bench.md`, `bench.png`, `acceptance.png` and
`drafters.png`; after Ctrl-C, of the repeats that were finished.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from cluster.config.compose import workload_prompts
from cluster.config.jobs import BenchConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.io.prompts import read_prompts
from cluster.observability.report import versions, write_csv, write_json
from cluster.tools.bench.entries import entry_of, remarks_on
from cluster.tools.bench.figures import BASELINES, BenchEntry
from cluster.tools.bench.machine import machine
from cluster.tools.bench.peers.registry import baselines, check_peers
from cluster.tools.bench.plan import expand, setting_names
from cluster.tools.bench.plots import draw_acceptance, draw_drafters, draw_speed
from cluster.tools.bench.tables import (
    category_table,
    csv_row,
    drafter_table,
    peer_table,
    round_table,
    speed_table,
    write_markdown,
)
from cluster.tools.bench.trials import EnginePool, TrialRunner


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for settings that cannot be run, EngineError if a request failed, KeyboardInterrupt."""
    job: BenchConfig = config.job
    check_peers(job.peers, config.sampling.params())
    settings = expand(config)
    files = {name: workload_prompts(job.prompts, name) for name in job.workloads} or {"": Path(job.prompts)}
    prompts = {name: read_prompts(file, job.limit) for name, file in files.items()}
    terminal = Terminal()
    runner = TrialRunner(config, prompts)
    num_steps = len(settings) * (job.warmup + job.repeats)
    try:
        counting = terminal.counting("starting", num_steps)
        with counting as bar, EnginePool(config, bar.say, run_dir / "logs") as pool, runner:
            runner.run(settings, pool, bar)
    finally:
        measured = [each for each in runner.measured if each.trials]
        if measured:
            is_complete = len(measured) == len(settings) and len(measured[-1].trials) == job.repeats
            labels = setting_names([each.task.setting for each in measured])
            entries = [
                entry_of(name, each, len(prompts[each.task.setting.workload]))
                for name, each in zip(labels, measured, strict=True)
            ]
            remarks = remarks_on(config, measured, entries)
            _write(run_dir, config, entries, runner.described, remarks, is_complete=is_complete)
            _show(terminal, entries, remarks, run_dir)


def _write(
    run_dir: Path,
    config: LaunchConfig,
    entries: list[BenchEntry],
    peers: dict[str, dict[str, object]],
    remarks: list[str],
    *,
    is_complete: bool,
) -> None:
    report = {
        "job": config.job.name,
        "complete": is_complete,
        "settings": entries,
        "baselines": {**BASELINES, **baselines(config.job.peers)},
        "peers": peers,
        "machine": machine(),
        "stretch": config.target.stretch,
        "notes": remarks,
        "versions": versions(),
        "config": asdict(config),
    }
    write_json(run_dir / "report.json", report)
    write_csv(run_dir / "bench.csv", [csv_row(entry) for entry in entries])
    write_markdown(run_dir / "bench.md", entries)
    draw_drafters(run_dir / "drafters.png", entries)
    draw_speed(run_dir / "bench.png", entries)
    draw_acceptance(run_dir / "acceptance.png", entries)


def _show(terminal: Terminal, entries: list[BenchEntry], remarks: list[str], run_dir: Path) -> None:
    tables = {
        "Speed against plain decoding": speed_table(entries),
        "Rounds": round_table(entries),
        "Drafters": drafter_table(entries),
        "Other engines": peer_table(entries),
        "Speed-up and acceptance length by category": category_table(entries),
    }
    for title, table in tables.items():
        if table is not None:
            terminal.table(title, *table)
    for remark in remarks:
        terminal.line(f"note: {remark}")
    terminal.line(f"written to {run_dir}")
