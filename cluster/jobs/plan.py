"""`job=plan`: predicts the speed of every layout and shows the best, as one line to paste.

Files: `plan.json`, `plan.csv`, `plan.png`, and `costs.yaml`, the pass costs in the form that `job.costs=` reads; with
layer-parallel layouts also `fidelity.csv` and `fidelity.png`. With `job.fleet=` the layouts are those of a fleet, and
the files `fleet.json`, `fleet.csv` and `fleet.png`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from msgspec import to_builtins

from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal, figure
from cluster.io.prompts import read_prompts
from cluster.io.text import read_eos_token_ids
from cluster.observability.report import notes, versions, write_csv, write_json
from cluster.tools.bench.machine import machine
from cluster.tools.fleet.description import read_fleet
from cluster.tools.fleet.planning import plan_fleet
from cluster.tools.fleet.plots import draw_fleet
from cluster.tools.fleet.tables import flat_rows, fleet_table, loss_table, places
from cluster.tools.planning.cost_file import read_costs, write_costs
from cluster.tools.planning.costs import PassCosts, RankCores
from cluster.tools.planning.fidelity import INTERVALS, compare, input_similarity
from cluster.tools.planning.layouts import Layout, described_layouts, draft_model, local_layouts, simplest
from cluster.tools.planning.measuring import derive_costs, find_devices, measure_all, parts_of, role_pair
from cluster.tools.planning.plots import draw_fidelity, draw_plan
from cluster.tools.planning.prediction import Prediction, Workload, predict_all
from cluster.tools.planning.tables import (
    Entry,
    fidelity_rows,
    fidelity_table,
    layout_rows,
    parts_table,
    plan_table,
    trial_table,
)
from cluster.tools.planning.transcript import record
from cluster.tools.planning.trials import probe, try_out, worth_trying


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for costs that make no sense, EngineError if a request failed, KeyboardInterrupt."""
    if config.job.fleet:
        _plan_fleet(config, run_dir)
        return
    terminal, translated = Terminal(), config.drafter.translated_models()
    if translated:
        raise ValueError(
            f"drafter.path={translated[0]}: its tokenizer is not the target's; job=plan predicts others only"
        )
    with terminal.starting() as progress:
        plan = (_described if config.job.costs else _measured)(config, progress)
    if not plan.predictions:
        raise ValueError("job=plan: no layout fits these devices and the job's axes; widen an axis or add passes")
    entries = plan.entries()
    _write(run_dir, config, plan, entries)
    _show(terminal, plan, entries, run_dir)


def _plan_fleet(config: LaunchConfig, run_dir: Path) -> None:
    terminal, job = Terminal(), config.job
    fleet = read_fleet(Path(job.fleet))
    with terminal.starting() as progress:
        entries = plan_fleet(fleet, job.pool_targets, progress)
    report = {"job": job.name, "best": entries[0], "layouts": entries, "fleet": to_builtins(fleet)}
    report |= {"machine": machine(), "versions": versions(), "config": asdict(config)}
    write_json(run_dir / "fleet.json", report)
    write_csv(run_dir / "fleet.csv", flat_rows(entries))
    draw_fleet(run_dir / "fleet.png", entries)
    terminal.table("Layouts of the fleet, simulated", *fleet_table(entries))
    terminal.table("What was lost meanwhile", *loss_table(entries))
    best, different = entries[0], sum(entry["num_different"] for entry in entries)
    if not best["bears_load"]:
        terminal.line("no layout bears the load at the asked speed: requests wait, and tokens/s are what each can give")
    terminal.line(
        f"best: {best['layout']} ({places(best)}), {figure(best['tokens_per_s'], 0)} tokens/s, "
        f"{figure(best['dollars_per_million'])} dollars per million tokens"
    )
    terminal.line(f"tokens that differ from plain decoding, in all layouts: {different}")
    terminal.line(f"written to {run_dir}")


@dataclass(slots=True)
class LayoutPlan:
    """Costs, the predictions that follow from them, and measurements."""

    costs: PassCosts
    predictions: list[Prediction]
    measured: dict[Layout, dict[str, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parts: list[Entry] = field(default_factory=list)
    fidelity: list[Entry] = field(default_factory=list)
    input_similarity: list[float] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        plain = max((one.tokens_per_s for one in self.predictions if one.layout.shape is None), default=None)
        return [
            asdict(prediction)
            | {
                "layout": prediction.layout.describe(),
                "overrides": prediction.overrides,
                "over_plain": prediction.tokens_per_s / plain if plain else None,
                "measured": self.measured.get(prediction.layout),
            }
            for prediction in self.predictions
        ]


def _described(config: LaunchConfig, progress: Callable[[str], None]) -> LayoutPlan:
    """The layouts for the costs of a file."""
    job = config.job
    costs = read_costs(Path(job.costs))
    target_ranks, shapes = [cost.ranks for cost in costs.target], [cost.shape for cost in costs.drafter]
    layouts = [(layout, RankCores()) for layout in described_layouts(target_ranks, shapes, costs.num_devices, job)]
    progress(f"predicting {len(layouts)} layouts")
    workload = Workload(draft_model(config), job.batch, context=job.context)
    return LayoutPlan(costs, predict_all(layouts, job.draft_lengths, costs, workload))


def _measured(config: LaunchConfig, progress: Callable[[str], None]) -> LayoutPlan:
    """The layouts for what is measured on this machine."""
    job = config.job
    prompts = read_prompts(Path(job.prompts), job.limit)
    progress("looking at the devices")
    devices = find_devices(config)
    on_gpus = devices.num_gpus > 0 and config.target.device != "cpu"
    num_devices = devices.num_gpus if on_gpus else len(devices.cores)
    layouts = local_layouts(config, num_devices, threads=not on_gpus)
    probed = probe(config, simplest(layouts), prompts, progress)

    progress("comparing layer-parallel drafts with exact ones")
    device = "cuda:0" if on_gpus else "cpu"
    options = draft_model(config)
    longest = replace(options, num_draft_tokens=max(job.draft_lengths))
    partitions = dict.fromkeys(layout.shape.partition for layout in layouts if layout.shape and layout.shape.partition)
    intervals = INTERVALS if job.ablation else INTERVALS[:1]
    fidelity = compare(longest, probed.texts, probed.sampling, intervals, device, partitions)
    acceptance: dict[tuple[int, ...], tuple[float, ...]] = {(): fidelity[0].acceptance}
    for one in fidelity:
        acceptance.setdefault(one.partition, one.acceptance)  # calibrated every round: the others only compare

    pairs = [role_pair(layout, config, devices) for layout in layouts]
    found, refused = measure_all(pairs, config, probed.texts, probed.sampling, progress)
    costs = derive_costs(found, num_devices, probed.hop_s, acceptance)
    progress("recording the drafter's choices")
    eos_token_ids = read_eos_token_ids(Path(config.target.path))
    transcript = record(options, device, probed.texts, probed.sampling, eos_token_ids)

    progress(f"predicting {len(layouts)} layouts")
    placed = [(layout, pair.cores) for layout, pair in zip(layouts, pairs, strict=True)]
    predictions = predict_all(placed, job.draft_lengths, costs, Workload(options, job.batch, transcript))
    plan = LayoutPlan(costs, predictions, refused=refused, notes=notes(config), parts=list(parts_of(found)))
    plan.fidelity = [asdict(one) for one in fidelity]
    if job.ablation:
        plan.input_similarity = input_similarity(options, probed.texts, device)
    for number, prediction in enumerate(worth_trying(predictions, job.trials), 1):
        progress(f"trying {number} of {job.trials}: {prediction.layout.describe()}")
        plan.measured[prediction.layout] = try_out(prediction, config, prompts)
    return plan


def _write(run_dir: Path, config: LaunchConfig, plan: LayoutPlan, entries: list[Entry]) -> None:
    report = {
        "job": config.job.name,
        "best": entries[0],
        "layouts": entries,
        "described": bool(config.job.costs),
        "costs": asdict(plan.costs),
        "parts": plan.parts,
        "fidelity": plan.fidelity,
        "input_similarity": plan.input_similarity,
        "refused": plan.refused,
        "notes": plan.notes,
        "machine": machine(),
        "versions": versions(),
        "config": asdict(config),
    }
    write_json(run_dir / "plan.json", report)
    write_costs(run_dir / "costs.yaml", plan.costs)
    write_csv(run_dir / "plan.csv", layout_rows(entries))
    draw_plan(run_dir / "plan.png", entries)
    if len(plan.fidelity) > 1:
        write_csv(run_dir / "fidelity.csv", fidelity_rows(plan.fidelity))
        draw_fidelity(run_dir / "fidelity.png", plan.fidelity)


def _show(terminal: Terminal, plan: LayoutPlan, entries: list[Entry], run_dir: Path) -> None:
    tables = {
        "Predicted speed": plan_table(entries),
        "Predicted and measured": trial_table(entries),
        "Where the time of a pass goes": parts_table(plan.parts),
        "Layers side by side against exact drafting": fidelity_table(plan.fidelity),
    }
    for title, (columns, rows) in tables.items():
        if rows:
            terminal.table(title, columns, rows)
    for subject, reason in plan.refused.items():
        terminal.line(f"left out: {subject}: {reason}")
    for note in plan.notes:
        terminal.line(f"note: {note}")
    best = entries[0]
    terminal.line(f"best: {best['layout']}, {figure(best['tokens_per_s'], 1)} tokens/s predicted")
    terminal.line("python -m cluster.launch " + " ".join(best["overrides"]))
    terminal.line(f"written to {run_dir}")
