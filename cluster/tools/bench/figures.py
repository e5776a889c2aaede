"""What the trials of a setting came to: medians over the repeats, their spread, and ratios that name both sides.

A ratio is taken within each repeat, where both sides saw the same machine, and only then is the median taken. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cluster.observability.report import decode_ms_per_token, figures, num_unequal_requests
from cluster.observability.results import Run
from cluster.tools.bench.categories import by_category
from cluster.tools.bench.sides import PLAIN, SPECULATIVE, Trial, peer_sides

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
"""Figures that differ from repeat to repeat; of the others, which only depend on the tokens, one repeat is given."""

BASELINES = {
    "speedup_vs_ar": "plain decoding: the same engine, prompts and settings with speculation off, in the same repeat",
    "speculative / transformers": "transformers generate on the same checkpoint and prompts, one request at a time",
    "speculative / transformers assisted": "the same with the same draft model, or prompt lookup, at the same length",
    "plain / transformers": "transformers generate against this engine's plain decoding",
}


def summarise(trials: Sequence[Trial], *, greedy: bool) -> dict[str, object]:
    """The figures of a setting; `trials` must not be empty. Sampled tokens are not compared with a peer's."""
    each = [figures(trial[SPECULATIVE], trial[PLAIN]) for trial in trials]
    typical = sorted(each, key=lambda one: one["tokens_per_s"])[(len(each) - 1) // 2]
    timed = {name: spread([one[name] for one in each]) for name in TIMED}
    return {
        **typical,
        **{name: value and value["median"] for name, value in timed.items()},
        "repeats": len(trials),
        "spread": timed,
        "sides": {side: _side(trials, side, comparable=greedy or side == PLAIN) for side in trials[0]},
        "ratios": ratios(trials),
        "categories": by_category(trials),
    }


def ratios(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Tokens per second of one side over another's: speculation over everything else, plain decoding over peers."""
    peers = peer_sides(trials[0])
    pairs = [(SPECULATIVE, PLAIN), *((side, peer) for side in (SPECULATIVE, PLAIN) for peer in peers)]
    return {
        f"{side} / {other}": spread([_tokens_per_s(trial[side]) / _tokens_per_s(trial[other]) for trial in trials])
        for side, other in pairs
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, least and most; None where nothing was measured."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def _side(trials: Sequence[Trial], side: str, *, comparable: bool) -> dict[str, object]:
    """One side by itself; `num_unequal_requests` compares its tokens with the speculative ones."""
    runs = [trial[side] for trial in trials]
    firsts = [one.ttft_s for run in runs for one in run.completed if one.ttft_s is not None]
    unequal = [num_unequal_requests(trial[SPECULATIVE], trial[side]) for trial in trials]
    return {
        "tokens": runs[0].num_tokens,
        "tokens_per_s": spread([_tokens_per_s(run) for run in runs]),
        "decode_ms_per_token": spread([decode_ms_per_token(run.completed) for run in runs]),
        "ttft_s": spread(firsts),
        "num_unequal_requests": max(unequal) if comparable else None,
    }


def _tokens_per_s(run: Run) -> float:
    return run.num_tokens / run.wall_s
