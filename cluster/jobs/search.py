"""`job=search`: which sublayers drafts of the target by itself should leave out, for `drafter.layers`.

Draft & Verify's offline search: the target completes prompts, then masks are evaluated by the tokens per second that
drafting with them would bring, from measured acceptance and measured passes (`cluster/tools/planning/layer_choice.py`).
Other searches can run on the same prompts; the curves of all go into `search.png` and `search.json`. In one process, no
engine.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.self_speculation.drafter import SelfDrafter
from actors.drafters.self_speculation.layer_files import write_layers
from actors.drafters.self_speculation.mask_search import MaskSearch, MaskSpace
from actors.drafters.self_speculation.sublayers import Sublayers, names_of_skipped
from actors.verification.verifier import Verifier
from cluster.config.jobs import SearchConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.observability.report import write_json
from cluster.tools.bench.rounds import complete
from cluster.tools.offline import OfflineTask, open_alone, read_task, setup_beside
from cluster.tools.planning.layer_choice import Evaluation, LayerValues, search_masks, write_texts
from cluster.tools.planning.plots import draw_searches
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.whole_files import make_folder

_RANDOM_SHARE = 6
"""One of so many evaluations is of a mask drawn at random, before the process proposes."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read or leave no room for their completions."""
    job: SearchConfig = config.job
    terminal, drafter = Terminal(), config.drafter
    assert isinstance(drafter, SelfDrafterConfig)
    task, draft_len = read_task(config), drafter.num_draft_tokens
    target = open_alone(config.target, 2 * len(task.prompts) * (task.longest + draft_len + 2))
    task.check_room(target.config.max_positions - draft_len)
    with terminal.starting() as progress, torch.inference_mode():
        progress("completing prompts")
        contexts = write_texts(target, task, config.scheduler.prefill_chunk)
        values = LayerValues(target, contexts, draft_len, coupled=str(config.verify.rule) == "coupled")
    sublayers = Sublayers.every(target.config.num_layers)
    curves: dict[str, list[Evaluation]] = {}
    for method in job.methods:
        if method == "swift":
            curves[method] = _swift(config, target, task, values)
            continue
        num_random = job.evaluations // _RANDOM_SHARE if method == "bayesian" else job.evaluations
        search = MaskSearch(MaskSpace(len(sublayers.places)), seed=job.seed, num_random=num_random)
        with terminal.counting(f"{method}: evaluating masks", job.evaluations) as bar:
            curves[method] = search_masks(values, sublayers, search, job.evaluations, bar.advance)
    best = max((curve[-1] for curve in curves.values() if curve), key=lambda found: found.best)
    again = values.value(best.layers)  # the largest of many noisy measurements is too large
    out = Path(job.out).expanduser() if job.out else run_dir / "layers.json"
    make_folder(out.parent)
    skipped = names_of_skipped(target.config.num_layers, best.layers)
    about = {
        "expected_speedup": again.speedup,
        "num_draft_tokens": again.num_draft_tokens,
        "acceptance": again.chances,
        "pass_share": again.pass_share,
        "plain_pass_s": values.costs.verify_s[0],
        "contradiction": values.contradiction,
        "verify": str(config.verify.rule),
        "sampling": asdict(config.sampling),
    }
    write_layers(out, target.config.num_layers, skipped, about)
    shown = {
        name: [[one.at_s, one.value, one.best, names_of_skipped(target.config.num_layers, one.layers)] for one in curve]
        for name, curve in curves.items()
    }
    report = {"job": job.name, "layers": str(out), "skip": skipped, **about}
    write_json(run_dir / "search.json", {**report, "curves": shown, "config": asdict(config)})
    draw_searches(run_dir / "search.png", {name: [(one.at_s, one.best) for one in c] for name, c in curves.items()})
    terminal.line(
        f"expected {again.speedup:.2f} times plain decoding with {again.num_draft_tokens} draft tokens, "
        f"a draft pass in {again.pass_share:.2f} of a pass of the target, without [{','.join(skipped)}]"
    )
    if wrong := values.contradiction:
        terminal.line(f"warning: {wrong}: this machine was busy, and the choice may be wrong; search again")
    terminal.line(f"written to {out}; curves in {run_dir / 'search.png'}:")
    terminal.line(f"drafter=self drafter.layers={out} drafter.num_draft_tokens={again.num_draft_tokens}")


def _swift(config: LaunchConfig, target: DecoderRunner, task: OfflineTask, values: LayerValues) -> list[Evaluation]:
    """The search of `drafter.search=swift` while it completes the prompts one after the other; its masks are evaluated
    afterwards, so that all curves show the same quantity. The text is generated in the time that is shown."""
    assert isinstance(config.drafter, SelfDrafterConfig)
    record = replace(config.drafter, search=Search.swift, layers="", exit=0, skip=[])
    drafter, _ = record.build(setup_beside(target, config, task))
    assert isinstance(drafter, SelfDrafter)
    assert drafter.search is not None
    verifier = Verifier(target, str(config.verify.rule), task.eos_token_ids)
    with torch.inference_mode():
        for i, (prompt, own) in enumerate(zip(task.prompts, task.sampling, strict=True), start=len(task.prompts)):
            rounds = complete(verifier, drafter, [prompt], own, record.num_draft_tokens, task.num_tokens, first_id=i)
            list(rounds)
        steps = drafter.search.history
        measured = {layers: values.value(layers).speedup for layers in {step.layers for step in steps}}
    return [Evaluation(step.at_s, step.value, measured[step.layers], step.layers) for step in steps]
