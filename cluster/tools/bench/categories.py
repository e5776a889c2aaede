"""Figures by category of prompt, as Spec-Bench reports them. Pure.

Categories share a run, so a category's speed is taken from its own requests: tokens over the time they were in the
engine. With more than one request in flight that is what a client sees, not throughput.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.observability.results import Served
from cluster.tools.bench.sides import SPECULATIVE, Trial


def by_category(trials: Sequence[Trial]) -> dict[str, dict[str, float | None]]:
    """Category -> figures over all repeats; empty where prompts have no categories."""
    categories = (one.prompt.category for one in trials[0][SPECULATIVE].completed)
    names = dict.fromkeys(category for category in categories if category is not None)
    return {name: _figures(trials, name) for name in names}


def _figures(trials: Sequence[Trial], category: str) -> dict[str, float | None]:
    speculative = list(_requests(trials, SPECULATIVE, category))
    steps = sum(one.stats.num_spec_steps for one in speculative)
    accepted = sum(one.stats.num_accepted_tokens for one in speculative)
    speed = _tokens_per_s(speculative)
    others = [side for side in trials[0] if side != SPECULATIVE]
    return {
        "num_requests": len(speculative) // len(trials),
        "tokens_per_s": speed,
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        **{f"{SPECULATIVE} / {side}": speed / _tokens_per_s(_requests(trials, side, category)) for side in others},
    }


def _requests(trials: Sequence[Trial], side: str, category: str) -> Iterable[Served]:
    return (one for trial in trials for one in trial[side].completed if one.prompt.category == category)


def _tokens_per_s(requests: Iterable[Served]) -> float:
    tokens, seconds = zip(*((len(one.token_ids), one.latency_s) for one in requests), strict=True)
    return sum(tokens) / sum(seconds)
