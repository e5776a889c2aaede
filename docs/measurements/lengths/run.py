"""Which rule for the length of a draft is best for this target and drafter, on the same drafts:
`python -m docs.measurements.lengths.run drafter=self KEY=VALUE ...`, with the keys of `job=generate`.

The target completes prompts; the drafter proposes its longest chain after every token of the texts; then every rule
runs through the recorded drafts (`chain_lengths.py`). In one process, no engine. Writes `runs/lengths/lengths.json`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from actors.drafters.interface import Context
from actors.drafters.model.chain_rules import GapRule, ProbabilityRule, ThompsonRule, ThresholdRule
from actors.drafters.model.config import ModelDrafterConfig, PassDrafterConfig, Translation
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.prefill import prefill
from actors.options import VerifyRule
from cluster.config.compose import load_config
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal, figure
from cluster.observability.report import write_json
from cluster.tools.offline import open_alone, read_task, setup_beside
from cluster.tools.planning.layer_choice import LayerValues, write_texts
from docs.measurements.lengths.chain_lengths import (
    Outcome,
    PassTimes,
    RecordedDraft,
    record_drafts,
    replay_fixed,
    replay_known,
    replay_ordered,
    replay_rule,
)
from parallel.kv.pass_plan import Span
from parallel.ranges import require
from parallel.runtime.decoder_runner import DecoderRunner

_RULES = {
    **{f"threshold {chance}": lambda chance=chance: ThresholdRule(chance) for chance in (0.3, 0.5, 0.7)},
    "thompson": ThompsonRule,
    "probability": ProbabilityRule,
    **{f"probability {least}": lambda least=least: ProbabilityRule(least) for least in (0.4, 0.6)},
    **{f"gap {chance}": lambda chance=chance: GapRule(chance) for chance in (0.3, 0.6)},
}
_REPEATS = 25


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read or leave no room for their completions, and for a drafter whose
    drafts have no length."""
    terminal, task, record = Terminal(), read_task(config), check(config)
    longest = record.num_draft_tokens
    target = open_alone(config.target, 3 * len(task.prompts) * (task.longest + longest + 2))
    task.check_room(target.config.max_positions - longest)
    drafter, _ = record.build(setup_beside(target, config, task))
    assert isinstance(drafter, ModelDrafter)
    with terminal.starting() as progress, torch.inference_mode():
        progress("completing prompts")
        written = write_texts(target, task, config.scheduler.prefill_chunk)
        values = LayerValues(target, written, longest, coupled=True)
        progress("drafting after every token")
        recorded = _record(target, drafter, written, longest)
        times = PassTimes(_draft_s(target, drafter, written[0], longest), values.costs.verify_s)
    outcomes: dict[str, Outcome] = {f"fixed {k}": replay_fixed(recorded, times, k) for k in range(longest + 1)}
    outcomes["ordered"] = replay_ordered(recorded, times, longest)
    outcomes |= {name: replay_rule(recorded, times, rule(), longest) for name, rule in _RULES.items()}
    outcomes["known"] = replay_known(recorded, times, longest)
    plain = outcomes.pop("fixed 0").tokens_per_s
    found = {
        name: {
            "speedup": one.tokens_per_s / plain,
            "tokens_per_round": one.tokens / one.rounds,
            "mean_length": one.drafted / one.rounds,
            "accepted": one.accepted / one.drafted if one.drafted else 0.0,
        }
        for name, one in outcomes.items()
    }
    report = {"rules": found, "draft_pass_s": times.draft_s, "verify_s": times.verify_s}
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "lengths.json", {**report, "config": asdict(config)})
    draft, verify = times.draft_s / times.verify_s[0], times.verify_s[-1] / times.verify_s[0]
    terminal.line(
        f"{sum(map(len, recorded)):,} drafts; a draft pass takes {draft:.2f} of a pass of the target, "
        f"a pass over {longest} draft tokens {verify:.2f}"
    )
    if wrong := values.contradiction:
        terminal.line(f"warning: {wrong}: this machine was busy, and the speeds may be wrong; measure again")
    rows = [[name, figure(one["speedup"], 3), *map(figure, list(one.values())[1:])] for name, one in found.items()]
    terminal.table("rules", ["rule", "over plain", "tokens a round", "mean length", "accepted"], rows)


def check(config: LaunchConfig) -> PassDrafterConfig:
    """The drafter; ValueError, one line, for one whose drafts have no length."""
    drafter = config.drafter
    remedy = "drafts no chains by passes of a model; take drafter=model or self"
    require(drafter.name in ("model", "self"), "drafter.name", drafter.name, remedy)
    assert isinstance(drafter, PassDrafterConfig)
    require(drafter.is_chain, "drafter.strategy", drafter.strategy, "has no length; drop it")
    if isinstance(drafter, ModelDrafterConfig):
        remedy = "drafts strings, of which no rule reads a chance; take drafter.translate=intersection"
        require(drafter.translate is not Translation.strings, "drafter.translate", drafter.translate, remedy)
        require(not drafter.online, "drafter.online", drafter.online, "drafts change as it learns; drop it")
    remedy = "accepts by chance; lengths are compared where text and drafts decide, with verify=coupled"
    require(config.verify.rule == VerifyRule.coupled, "verify.rule", config.verify.rule, remedy)
    return drafter


def _again(target: DecoderRunner, written: Context, request_id: int) -> Context:
    """A request with the same prompt, whose text begins anew; the target has rows of all of it but the last token."""
    context = Context(request_id, 0, written.prompt, written.prompt_len, written.sampling)
    target.open(request_id)
    prefill(target, request_id, context.token_ids, leave=1, chunk=len(context.token_ids))
    return context


def _record(
    target: DecoderRunner, drafter: ModelDrafter, written: Sequence[Context], longest: int
) -> list[list[RecordedDraft]]:
    """Drafts after every token of the texts; drafting is repeated for each thing that rules read."""
    shares = drafter.capabilities.shares_rows

    def read_next(contexts: Sequence[Context]) -> None:
        if shares is None:
            return
        shares.release_rows()
        spans = [Span(context.request_id, 1, num_logits=0) for context in contexts]
        target.forward(spans, [context.token_ids[-1] for context in contexts])
        for context in contexts:
            target.commit(context.request_id, [0])

    texts, seen = [context.token_ids for context in written], []
    for reads_gaps in (False, True):
        again = [_again(target, context, len(written) + i) for i, context in enumerate(written)]
        seen.append(record_drafts(drafter, again, texts, longest, read_next, reads_gaps=reads_gaps))
        for context in again:
            target.close(context.request_id)
    return [
        [RecordedDraft(right, chances, gaps) for (right, chances), (_, gaps) in zip(*pair, strict=True)]
        for pair in zip(*seen, strict=True)
    ]


def _draft_s(target: DecoderRunner, drafter: ModelDrafter, written: Context, longest: int) -> float:
    """Seconds of one draft token of a draft of the longest length, one request alone; the median of some drafts."""
    context, times = _again(target, written, -1), []
    drafter.open(context)
    for _ in range(_REPEATS):
        started = time.perf_counter()
        drafter.propose([context], [longest])
        times.append((time.perf_counter() - started) / longest)
        drafter.truncate(context)
    drafter.release(context.request_id)
    target.close(context.request_id)
    return statistics.median(times)


if __name__ == "__main__":
    run(load_config(sys.argv[1:]), Path("runs") / "lengths")
