"""Figures of a setting from its trials: medians over the repeats, their spread, ratios, categories, a prediction.

A ratio names both sides. It is taken within each repeat, where both sides ran on the same machine, before the median.
Figures by category of prompt follow Spec-Bench: categories share a run, so the speed of a category is its requests'
tokens over the time they were in the engine, which, with more than one request in flight, is what a client sees and not
throughput. The predicted speed is that of the walltime formula with costs of the same trial, for decoding only, the
time after each request's first token; the formula holds for chains of fixed lengths that are drafted and verified in
turn, one request at a time, and nothing is predicted for other settings. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import ne
from statistics import median
from typing import Any, TypedDict, cast

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.config import DrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import PipelineName
from actors.policy.cascade_model import LevelCost, measured_cost, tokens_per_s
from actors.protocol.messages import LevelWork
from cluster.observability.report import RankLayout, RunFigures, decode_ms_per_token, figures, num_unequal_requests
from cluster.observability.results import Run, Served
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import PLAIN, SPECULATIVE, Trial, peer_sides

TIMED = (
    "wall_s",
    "tokens_per_s",
    "plain_tokens_per_s",
    "speedup_vs_ar",
    "decode_ms_per_token",
    "draft_busy",
    "target_busy",
    "round_ms",
    "round_overhead_ms",
)
"""Figures that differ from repeat to repeat; the others depend on the tokens only and are those of one repeat."""

BASELINES = {
    "speedup_vs_ar": "plain decoding of the same prompts in the same repeat, in the engine that `baseline` names: one "
    "of its own with all cores where a drafter on this CPU leaves the target fewer",
}


class Spread(TypedDict):
    """One figure over the repeats."""

    median: float
    min: float
    max: float


class SideFigures(TypedDict):
    """One side by itself; requests with other tokens than the speculative ones, how many tokens those are, and the
    share of the requests with equal tokens."""

    tokens: int
    tokens_per_s: Spread | None
    decode_ms_per_token: Spread | None
    ttft_s: Spread | None
    num_unequal_requests: int | None
    num_different_tokens: int | None
    equal_share: float | None


class DraftingFigures(TypedDict):
    """Cost and speed of drafting; the error is (predicted - measured) / measured, the median over the repeats."""

    ms_per_draft: float | None
    draft_share: float | None
    """Time of drafts over that of rounds with speculation; above 1 where they overlap with passes and exceed them."""
    verify_ms: float | None
    decode_tokens_per_s: float | None
    predicted_tokens_per_s: float | None
    prediction_error: float | None


class SettingFigures(RunFigures):
    """Those of `TIMED` are medians, the others of a run of median speed."""

    repeats: int
    spread: dict[str, Spread | None]
    sides: dict[str, SideFigures]
    ratios: dict[str, Spread]
    categories: dict[str, dict[str, float | None]]


class BenchEntry(SettingFigures, DraftingFigures, RankLayout):
    """A setting in `report.json`."""

    name: str
    setting: dict[str, Any]
    mbsu: float | None
    """Memory-bound speed-up of the last repeat."""
    first_prediction: float | None
    """Tokens per second that the first repeat alone predicts."""
    num_skipped_prompts: int
    num_threads: dict[str, int]
    baseline: str
    """What plain decoding ran on."""
    resident_bytes: dict[str, int]


def summarise(trials: Sequence[Trial], *, greedy: bool) -> SettingFigures:
    """The figures of a setting; `trials` must not be empty. Sampled tokens are not compared with a peer's."""
    each = [figures(trial[SPECULATIVE], trial[PLAIN]) for trial in trials]
    typical = sorted(each, key=lambda repeat: repeat["tokens_per_s"] or 0.0)[(len(each) - 1) // 2]
    timed = {name: spread(repeat[name] for repeat in each) for name in TIMED}
    medians = {name: value and value["median"] for name, value in timed.items()}
    return cast(
        "SettingFigures",
        {
            **typical,
            **medians,
            "repeats": len(trials),
            "spread": timed,
            "sides": {side: _side(trials, side, comparable=greedy or side == PLAIN) for side in trials[0]},
            "ratios": ratios(trials),
            "categories": by_category(trials),
        },
    )


def ratios(trials: Sequence[Trial]) -> dict[str, Spread]:
    """Tokens per second of one side over another's: speculation over everything else, plain decoding over peers."""
    peers = peer_sides(trials[0])
    pairs = [(SPECULATIVE, PLAIN), *((side, peer) for side in (SPECULATIVE, PLAIN) for peer in peers)]
    return {
        f"{side} / {other}": _spread([_tokens_per_s(trial[side]) / _tokens_per_s(trial[other]) for trial in trials])
        for side, other in pairs
    }


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the values that were measured; None without one."""
    known = [value for value in values if value is not None]
    return _spread(known) if known else None


def _spread(values: Sequence[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _side(trials: Sequence[Trial], side: str, *, comparable: bool) -> SideFigures:
    runs = [trial[side] for trial in trials]
    unequal = [num_unequal_requests(trial[SPECULATIVE], trial[side]) for trial in trials]
    different = [num_different_tokens(trial[SPECULATIVE], trial[side]) for trial in trials]
    return {
        "tokens": runs[0].num_tokens,
        "tokens_per_s": spread(_tokens_per_s(run) for run in runs),
        "decode_ms_per_token": spread(decode_ms_per_token(run.completed) for run in runs),
        "ttft_s": spread(served.ttft_s for run in runs for served in run.completed),
        "num_unequal_requests": max(unequal) if comparable else None,
        "num_different_tokens": max(different) if comparable else None,
        "equal_share": 1 - max(unequal) / len(runs[0].requests) if comparable else None,
    }


def num_different_tokens(run: Run, other: Run) -> int:
    """Places at which requests that completed in both runs have different tokens, or one of them has none."""
    others = {served.index: served.token_ids for served in other.completed}
    pairs = [(served.token_ids, others[served.index]) for served in run.completed if served.index in others]
    return sum(sum(map(ne, one, two)) + abs(len(one) - len(two)) for one, two in pairs)


def _tokens_per_s(run: Run) -> float:
    return run.num_tokens / run.wall_s


# --- categories -------------------------------------------------------------------------------------------------------


def by_category(trials: Sequence[Trial]) -> dict[str, dict[str, float | None]]:
    """Category -> figures over all repeats; empty if prompts have no categories."""
    categories = (served.prompt.category for served in trials[0][SPECULATIVE].completed)
    return {name: _category(trials, name) for name in dict.fromkeys(categories) if name is not None}


def _category(trials: Sequence[Trial], category: str) -> dict[str, float | None]:
    requests: dict[str, list[Served]] = {
        side: [served for trial in trials for served in trial[side].completed if served.prompt.category == category]
        for side in trials[0]
    }
    speed = {
        side: sum(len(served.token_ids) for served in requests[side])
        / sum(served.latency_s or 0.0 for served in requests[side])
        for side in requests
    }
    speculative = requests[SPECULATIVE]
    steps = sum(served.stats.num_spec_steps for served in speculative)
    accepted = sum(served.stats.num_accepted_tokens for served in speculative)
    return {
        "num_requests": len(speculative) // len(trials),
        "tokens_per_s": speed[SPECULATIVE],
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        **{f"{SPECULATIVE} / {side}": speed[SPECULATIVE] / speed[side] for side in speed if side != SPECULATIVE},
    }


# --- drafting and its prediction --------------------------------------------------------------------------------------


def drafting_figures(setting: Setting, trials: Sequence[Trial]) -> tuple[DraftingFigures, float | None]:
    """Medians over the repeats, and the tokens per second that the first repeat alone predicts."""
    each = [_drafting(setting, trial[SPECULATIVE]) for trial in trials]
    spreads = {name: spread(repeat[name] for repeat in each) for name in DraftingFigures.__annotations__}
    medians = {name: value and value["median"] for name, value in spreads.items()}
    return cast("DraftingFigures", medians), each[0]["predicted_tokens_per_s"]


def _drafting(setting: Setting, run: Run) -> DraftingFigures:
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
        "draft_share": sum(draft_s) / round_s if (round_s := run.counters.get("spec_round_s")) else None,
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
    chains = all(not isinstance(level, ModelDrafterConfig) or level.strategy is Strategy.chain for level in levels)
    in_turn = setting.pipeline.name is PipelineName.sync and not setting.pipeline.adaptive
    return chains and in_turn and setting.batch == 1 and not isinstance(drafter, AutoDrafterConfig)


def _costs(drafter: DrafterConfig, run: Run, drafting_s: float) -> list[LevelCost]:
    """The cheapest level first; the last one's length is that of the drafter as a whole."""
    levels: Sequence[DrafterConfig] = (drafter,)
    if isinstance(drafter, CascadeDrafterConfig):
        counted = [LevelWork(name, **work) for name, work in sorted(run.counters["levels"].items())]
        levels = drafter.levels
    else:
        counted = [_single_level_work(drafter, run, drafting_s)]
    lengths = [level.num_draft_tokens for level in levels[:-1]] + [drafter.num_draft_tokens]
    return [
        measured_cost(work, length, is_first=place == 0, drafts_at_once=not isinstance(level, ModelDrafterConfig))
        for place, (work, length, level) in enumerate(zip(counted, lengths, levels, strict=True))
        if work.num_drafts
    ]


def _single_level_work(drafter: DrafterConfig, run: Run, drafting_s: float) -> LevelWork:
    """Counters of a drafter without levels. Tokens that a lookup does not find count as rejected, in every round."""
    steps, drafted = run.counters["num_spec_steps"], run.counters["num_draft_tokens"]
    accepted = run.counters["num_accepted_tokens"]
    if not isinstance(drafter, ModelDrafterConfig):
        steps = run.num_tokens - len(run.completed) - accepted
        drafted = steps * drafter.num_draft_tokens
    return LevelWork(drafter.name, steps, drafting_s, steps, drafted, accepted)


def _seconds(run: Run, lane: str, names: Sequence[str]) -> list[float]:
    return [finished - started for at, name, started, finished, _ in run.spans if at == lane and name in names]
