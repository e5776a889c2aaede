"""What a bench reports of each setting, and the limits of its figures."""

from __future__ import annotations

from cluster.config.schema import LaunchConfig
from cluster.observability.report import layout, memory_bound_speedup, notes
from cluster.tools.bench.figures import BenchEntry, drafting_figures, summarise
from cluster.tools.bench.tables import choices
from cluster.tools.bench.tasks import SPECULATIVE, num_target_threads
from cluster.tools.bench.trials import SettingTrials


def entry_of(name: str, measured: SettingTrials, num_prompts: int) -> BenchEntry:
    engine, task = measured.engine, measured.task
    drafting, first_prediction = drafting_figures(task.setting, measured.trials)
    return {
        "name": name,
        "setting": task.setting.labels(),
        **summarise(measured.trials, greedy=task.setting.temperature == 0),
        **drafting,
        "mbsu": memory_bound_speedup(measured.trials[-1][SPECULATIVE].counters, engine.ready),
        "first_prediction": first_prediction,
        "num_skipped_prompts": num_prompts - len(task.prompts),
        "num_threads": {
            "target": num_target_threads(engine.places),
            "plain": task.num_threads,
            "peers": task.num_threads,
        },
        "baseline": measured.baseline,
        "resident_bytes": measured.resident_bytes,
        **layout(engine.places, engine.ready),
    }


def remarks_on(config: LaunchConfig, measured: list[SettingTrials], entries: list[BenchEntry]) -> list[str]:
    """Limits of the figures that a reader must know."""
    remarks = [note for each in measured for note in notes(each.task.setting.configure(config))]
    remarks += [f"plain decoding was timed in {baseline}" for baseline in {each.baseline: None for each in measured}]
    skipped = max(entry["num_skipped_prompts"] for entry in entries)
    if skipped:
        remarks.append(f"{skipped} prompts were left out: they leave no room for sampling.max_tokens")
    if any("+" in ranks for entry in entries for ranks in entry["resident_bytes"]):
        remarks.append("memory is that of all processes of this run together: ranks of every open engine, Ray, peers")
    return [*dict.fromkeys(remarks), *choices(entries)]
