"""`job=plan`: predicts the speed of every layout and shows the best, as one line to paste.

Files: `plan.json`, `plan.csv`, `plan.png`, and `costs.yaml`, the pass costs in the form that `job.costs=` reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cluster.config.jobs import PlanConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal, figure
from cluster.io.prompts import read_prompts
from cluster.io.text import read_eos_token_ids
from cluster.observability.report import notes, versions, write_json
from cluster.tools.bench.machine import machine
from cluster.tools.planning.costs import Costs, read_costs, write_costs
from cluster.tools.planning.fidelity import POLICIES, compare, input_similarity
from cluster.tools.planning.layouts import Layout, described_layouts, local_layouts, simplest
from cluster.tools.planning.measuring import (
    Measurer,
    cores_of,
    derive_costs,
    find_devices,
    measure_all,
    parts_of,
    uses_gpus,
)
from cluster.tools.planning.plots import draw_fidelity, draw_plan
from cluster.tools.planning.prediction import Cores, Prediction, Workload, predict_all
from cluster.tools.planning.recording import record
from cluster.tools.planning.tables import (
    Entry,
    fidelity_table,
    parts_table,
    plan_table,
    trial_table,
    write_csv,
    write_fidelity,
)
from cluster.tools.planning.trials import probe, try_out, worth_trying


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for costs that make no sense, EngineError if a request failed, KeyboardInterrupt."""
    terminal = Terminal()
    plan = _described(config, terminal) if config.job.costs else _measured(config, terminal)
    if not plan.predictions:
        raise ValueError("job=plan: no layout fits these devices and the job's axes; widen an axis or add passes")
    _write(run_dir, config, plan)
    _show(terminal, plan, run_dir)


@dataclass(slots=True)
class Plan:
    """Costs, what follows from them, and what was seen of it."""

    costs: Costs
    predictions: list[Prediction]
    measured: dict[Layout, dict[str, float | None]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parts: list[Entry] = field(default_factory=list)
    fidelity: list[Entry] = field(default_factory=list)
    input_similarity: list[float] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        return [_entry(prediction, self) for prediction in self.predictions]


def _described(config: LaunchConfig, terminal: Terminal) -> Plan:
    """From the costs of a file."""
    job: PlanConfig = config.job
    costs = read_costs(Path(job.costs))
    target_ranks, shapes = [cost.ranks for cost in costs.target], [cost.shape for cost in costs.drafter]
    layouts = [(layout, Cores()) for layout in described_layouts(target_ranks, shapes, costs.num_devices, job)]
    with terminal.starting() as say:
        say(f"predicting {len(layouts)} layouts")
        return Plan(costs, predict_all(layouts, job.draft_lengths, costs, Workload(config.drafter, job.batch)))


def _measured(config: LaunchConfig, terminal: Terminal) -> Plan:
    """From what this machine shows."""
    job: PlanConfig = config.job
    prompts = read_prompts(Path(job.prompts), job.limit)
    with terminal.starting() as say:
        say("looking at the devices")
        devices = find_devices(config)
        on_gpus = uses_gpus(config, devices)
        num_devices = devices.num_gpus if on_gpus else len(devices.cores)
        layouts = local_layouts(config, num_devices, threads=not on_gpus)
        seen = probe(config, simplest(layouts), prompts, say)
        say("comparing layer-parallel drafts with exact ones")
        device = "cuda:0" if on_gpus else "cpu"
        drafter = replace(config.drafter, num_draft_tokens=max(job.draft_lengths))
        policies = POLICIES if job.ablation else POLICIES[:1]
        planned = dict.fromkeys(layout.shape.partition for layout in layouts if layout.shape)
        fidelity = compare(drafter, seen.texts, seen.sampling, policies, device, filter(None, planned))
        acceptance = {(): fidelity[0].acceptance}
        for one in fidelity:
            acceptance.setdefault(one.partition, one.acceptance)  # calibrated every round: the others only compare
        measurer = Measurer(config, seen.texts, seen.sampling)
        found, refused = measure_all(layouts, measurer, config, devices, say)
        costs = derive_costs(found, num_devices, seen.hop_s, acceptance)
        say("recording the drafter's choices")
        eos_token_ids = read_eos_token_ids(Path(config.target.path))
        transcript = record(config.drafter, device, seen.texts, seen.sampling, eos_token_ids)
        say(f"predicting {len(layouts)} layouts")
        placed = [(layout, cores_of(layout, config, devices)) for layout in layouts]
        workload = Workload(config.drafter, job.batch, transcript)
        predictions = predict_all(placed, job.draft_lengths, costs, workload)
        plan = Plan(costs, predictions, refused=refused, notes=notes(config), parts=parts_of(found))
        plan.fidelity = [asdict(one) for one in fidelity]
        if job.ablation:
            plan.input_similarity = input_similarity(config.drafter, seen.texts, device)
        for number, prediction in enumerate(worth_trying(plan.predictions, job.trials), 1):
            say(f"trying {number} of {job.trials}: {prediction.layout.describe()}")
            plan.measured[prediction.layout] = try_out(prediction, config, prompts, lambda stage: None)
    return plan


def _entry(prediction: Prediction, plan: Plan) -> dict[str, object]:
    plain = [one.tokens_per_s for one in plan.predictions if one.layout.shape is None]
    return {
        "layout": prediction.layout.describe(),
        "overrides": prediction.overrides,
        "num_draft_tokens": prediction.num_draft_tokens,
        "tokens_per_s": prediction.tokens_per_s,
        "over_plain": prediction.tokens_per_s / max(plain) if plain else None,
        "round_ms": prediction.round_ms,
        "tokens_per_round": prediction.tokens_per_round,
        "branch_hit_rate": prediction.branch_hit_rate,
        "target_busy": prediction.target_busy,
        "draft_busy": prediction.draft_busy,
        "binding": prediction.binding,
        "measured": plan.measured.get(prediction.layout),
    }


def _write(run_dir: Path, config: LaunchConfig, plan: Plan) -> None:
    entries = plan.entries()
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
    write_csv(run_dir / "plan.csv", entries)
    draw_plan(run_dir / "plan.png", entries)
    if len(plan.fidelity) > 1:
        write_fidelity(run_dir / "fidelity.csv", plan.fidelity)
        draw_fidelity(run_dir / "fidelity.png", plan.fidelity)


def _show(terminal: Terminal, plan: Plan, run_dir: Path) -> None:
    entries = plan.entries()
    terminal.table("Predicted speed", *plan_table(entries))
    tables = {
        "Predicted and measured": trial_table(entries),
        "Where the time of a pass goes": parts_table(plan.parts),
        "Layers side by side against exact drafting": fidelity_table(plan.fidelity),
    }
    for title, table in tables.items():
        if table is not None:
            terminal.table(title, *table)
    for subject, reason in plan.refused.items():
        terminal.line(f"left out: {subject}: {reason}")
    for note in plan.notes:
        terminal.line(f"note: {note}")
    best = entries[0]
    terminal.line(f"best: {best['layout']}, {figure(best['tokens_per_s'], 1)} tokens/s predicted")
    terminal.line("python -m cluster.launch " + " ".join(best["overrides"]))
    terminal.line(f"written to {run_dir}")
