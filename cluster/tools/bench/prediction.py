"""What a draft of a setting cost, and how fast the walltime formula says it should be, from costs of the same trial.

Decoding only: the time behind each request's first token. The formula holds for chains of fixed lengths that are
drafted and verified in turn, one request at a time; nothing is predicted for others. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.config import DrafterConfig
from actors.drafters.model.config import Strategy
from actors.options import PipelineName
from actors.policy.cascade_model import LevelCost, measured_cost, tokens_per_s
from actors.protocol.messages import LevelWork
from cluster.observability.report import decode_ms_per_token
from cluster.observability.results import Run
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.sides import SPECULATIVE, Trial

DRAFTING = ("ms_per_draft", "verify_ms", "decode_tokens_per_s", "predicted_tokens_per_s", "prediction_error")
"""The error is (predicted - measured) / measured, the median over the repeats."""


def drafting_figures(setting: Setting, trials: Sequence[Trial]) -> dict[str, object]:
    """Medians of `DRAFTING` over the repeats, and what the first repeat alone would have predicted."""
    each = [_of_run(setting, trial[SPECULATIVE]) for trial in trials]
    return {
        **{name: _median([one[name] for one in each]) for name in DRAFTING},
        "first_prediction": each[0]["predicted_tokens_per_s"],
    }


def _of_run(setting: Setting, run: Run) -> dict[str, float | None]:
    steps = run.counters.get("num_spec_steps", 0)
    draft_s = _seconds(run, "draft", ("propose", "hit", "miss", "ahead"))
    verify_s = _seconds(run, "target", ("verify",))
    measured = 1e3 / ms if (ms := decode_ms_per_token(run.completed)) else None
    predicted = None
    if steps and measured and _is_predictable(setting):
        overhead_s = run.counters["spec_round_overhead_s"] / run.counters["num_spec_rounds"]
        predicted = tokens_per_s(_costs(setting.drafter, run, sum(draft_s)), median(verify_s) + overhead_s)
    return {
        "ms_per_draft": 1e3 * sum(draft_s) / steps if steps else None,
        "verify_ms": 1e3 * median(verify_s) if verify_s else None,
        "decode_tokens_per_s": measured,
        "predicted_tokens_per_s": predicted,
        "prediction_error": predicted / measured - 1 if predicted and measured else None,
    }


def _is_predictable(setting: Setting) -> bool:
    drafter = setting.drafter
    levels: Sequence[DrafterConfig] = (drafter,)
    if isinstance(drafter, CascadeDrafterConfig):
        if drafter.lengths is LevelLengths.auto or any(drafter.tails) or drafter.merge:
            return False
        levels = drafter.levels
    if setting.pipeline.adaptive:
        return False
    chains = all(getattr(level, "strategy", Strategy.chain) is Strategy.chain for level in levels)
    return chains and setting.pipeline.name is PipelineName.sync and setting.batch == 1


def _costs(drafter: DrafterConfig, run: Run, drafting_s: float) -> list[LevelCost]:
    """The cheapest level first; the last one drafts what the drafter as a whole does."""
    counters = run.counters
    if isinstance(drafter, CascadeDrafterConfig):
        counted = [LevelWork(name, **work) for name, work in sorted(counters["levels"].items())]
        levels = drafter.levels
    else:
        counted, levels = [_alone(drafter, run, drafting_s)], (drafter,)
    lengths = [level.num_draft_tokens for level in levels[:-1]] + [drafter.num_draft_tokens]
    return [
        measured_cost(work, length, is_first=place == 0, drafts_at_once=not hasattr(level, "path"))
        for place, (work, length, level) in enumerate(zip(counted, lengths, levels, strict=True))
        if work.num_drafts
    ]


def _alone(drafter: DrafterConfig, run: Run, drafting_s: float) -> LevelWork:
    """A drafter without levels. What a lookup does not find counts as rejected: it is asked in every round."""
    steps, drafted = run.counters["num_spec_steps"], run.counters["num_draft_tokens"]
    accepted = run.counters["num_accepted_tokens"]
    if not hasattr(drafter, "path"):
        steps = run.num_tokens - len(run.completed) - accepted
        drafted = steps * drafter.num_draft_tokens
    return LevelWork(drafter.name, steps, drafting_s, steps, drafted, accepted)


def _seconds(run: Run, lane: str, names: Sequence[str]) -> list[float]:
    return [finished - started for at, name, started, finished, _ in run.spans if at == lane and name in names]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
