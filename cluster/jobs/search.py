"""`job=search`: which sublayers drafts of the target by itself should leave out, for `drafter.layers`.

Draft & Verify's offline search: the target completes prompts, then masks are evaluated by the tokens per second that
drafting with them would bring, from measured acceptance and measured passes (`cluster/tools/planning/layer_choice.py`).
Other searches can run on the same prompts; the curves of all go into `search.png` and `search.json`. In one process, no
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from actors.drafters.config import DraftSetup
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.self_speculation.drafter import SelfDrafter
from actors.drafters.self_speculation.layer_files import write_layers
from actors.drafters.self_speculation.mask_search import MaskSearch, MaskSpace
from actors.drafters.self_speculation.sublayers import Sublayers, names_of_skipped
from actors.protocol.messages import SamplingParams
from actors.verification.verifier import Verifier
from cluster.config.jobs import SearchConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.observability.report import write_json
from cluster.tools.bench.rounds import complete
from cluster.tools.planning.layer_choice import Evaluation, LayerValues, open_target, search_masks, write_texts
from cluster.tools.planning.plots import draw_searches
from parallel.comm.group import SINGLE
from parallel.runtime.decoder_runner import DecoderRunner

_RANDOM_SHARE = 6
"""One of so many evaluations is of a mask drawn at random, before the process proposes."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read or leave no room for their completions."""
    job: SearchConfig = config.job
    terminal, drafter = Terminal(), config.drafter
    assert isinstance(drafter, SelfDrafterConfig)
    checkpoint = Path(config.target.path)
    tokenizer, eos = load_tokenizer(checkpoint), read_eos_token_ids(checkpoint)
    texts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in read_prompts(Path(job.prompts), job.limit)]
    params, num_tokens = config.sampling_params(tokenizer), config.sampling.max_tokens
    sampling = [replace(params, seed=params.seed + i) for i in range(len(texts))]
    longest = max(map(len, texts)) + num_tokens
    target = open_target(config.target, 2 * len(texts) * (longest + drafter.num_draft_tokens + 2))
    if longest + drafter.num_draft_tokens > target.config.max_positions:
        raise ValueError(
            f"sampling.max_tokens={num_tokens}: prompt and completion exceed the target's "
            f"{target.config.max_positions} positions; lower it"
        )
    with terminal.starting() as progress, torch.inference_mode():
        progress("completing prompts")
        contexts = write_texts(target, texts, sampling, num_tokens, config.scheduler.prefill_chunk)
        values = LayerValues(target, contexts, drafter.num_draft_tokens, coupled=str(config.verify.rule) == "coupled")
    sublayers = Sublayers.every(target.config.num_layers)
    curves: dict[str, list[Evaluation]] = {}
    for method in job.methods:
        if method == "swift":
            curves[method] = _swift(config, target, texts, params, values, eos)
            continue
        num_random = job.evaluations // _RANDOM_SHARE if method == "bayesian" else job.evaluations
        search = MaskSearch(MaskSpace(len(sublayers.places)), seed=job.seed, num_random=num_random)
        with terminal.counting(f"{method}: evaluating masks", job.evaluations) as bar:
            curves[method] = search_masks(values, sublayers, search, job.evaluations, bar.advance)
    best = max((curve[-1] for curve in curves.values() if curve), key=lambda found: found.best)
    again = values.value(best.layers)  # the largest of many noisy measurements is too large
    out = Path(job.out).expanduser() if job.out else run_dir / "layers.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    skipped = names_of_skipped(target.config.num_layers, best.layers)
    about = {
        "expected_speedup": again.speedup,
        "num_draft_tokens": again.num_draft_tokens,
        "acceptance": again.chances,
        "pass_share": again.pass_share,
        "plain_pass_s": values.costs.verify_s[0],
        "doubt": values.doubt,
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
    if values.doubt:
        terminal.line(f"warning: {values.doubt}: this machine was busy, and the choice may be wrong; search again")
    terminal.line(f"written to {out}; curves in {run_dir / 'search.png'}:")
    terminal.line(f"drafter=self drafter.layers={out} drafter.num_draft_tokens={again.num_draft_tokens}")


def _swift(
    config: LaunchConfig,
    target: DecoderRunner,
    texts: Sequence[Sequence[int]],
    params: SamplingParams,
    values: LayerValues,
    eos: tuple[int, ...],
) -> list[Evaluation]:
    """The search of `drafter.search=swift` while it completes the prompts one after the other; its masks are evaluated
    afterwards, so that all curves show the same quantity. The text is generated in the time that is shown."""
    assert isinstance(config.drafter, SelfDrafterConfig)
    device = str(target.decoder.device)
    record = replace(config.drafter, search=Search.swift, layers="", exit=0, skip=[])
    setup = DraftSetup(config.verify, "sync", config.scheduler, SINGLE, device, eos, config.target, target)
    drafter, _ = record.build(setup)
    assert isinstance(drafter, SelfDrafter)
    assert drafter.search is not None
    verifier = Verifier(target, str(config.verify.rule), eos)
    with torch.inference_mode():
        for i, text in enumerate(texts):
            own, length = replace(params, seed=params.seed + i), config.sampling.max_tokens
            for _ in complete(verifier, drafter, [text], own, record.num_draft_tokens, length, first_id=len(texts) + i):
                pass
        steps = drafter.search.history
        measured = {layers: values.value(layers).speedup for layers in {step.layers for step in steps}}
    return [Evaluation(step.at_s, step.value, measured[step.layers], step.layers) for step in steps]
