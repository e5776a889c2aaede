"""Counters and gauges in Ray's metrics: the dashboard and Prometheus see what the coordinator counts.

Names are vLLM's where vLLM has one, with the prefix `specdec_`. Updated about once a second from the coordinator's
tally, never inside a round.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.tally import Tally

_COUNTERS = {
    "num_tokens": ("generation_tokens_total", "Tokens committed"),
    "num_prompt_tokens": ("prompt_tokens_total", "Prompt tokens admitted"),
    "num_requests_finished": ("requests_finished_total", "Requests that ended"),
    "num_rounds": ("rounds_total", "Target passes"),
    "num_preemptions": ("preemptions_total", "Sequences put back for want of KV slots"),
    "num_spec_steps": ("spec_decode_num_drafts_total", "Proposals verified"),
    "num_draft_tokens": ("spec_decode_num_draft_tokens_total", "Draft tokens verified"),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens_total", "Draft tokens accepted"),
    "num_stale": ("stale_messages_total", "Records recognised as stale"),
    "draft_busy_s": ("draft_busy_seconds_total", "Seconds the draft role worked"),
    "target_busy_s": ("target_busy_seconds_total", "Seconds the target role worked"),
}


class MetricsWatch:
    """Feeds the growth of a `Tally` to counters; a tally that was reset starts again from zero."""

    def __init__(self, make_counter: Callable[[str, str], Callable[[float], None]]) -> None:
        self._increments = {field: make_counter(f"specdec_{name}", text) for field, (name, text) in _COUNTERS.items()}
        self._tally: Tally | None = None
        self._seen: dict[str, float] = {}

    def __call__(self, tally: Tally) -> None:
        if tally is not self._tally:
            if self._tally is not None:
                self._feed(self._tally)  # what it counted between the last look and its reset
            self._tally, self._seen = tally, dict.fromkeys(_COUNTERS, 0.0)
        self._feed(tally)

    def _feed(self, tally: Tally) -> None:
        for field, increment in self._increments.items():
            value = getattr(tally, field)
            if value > self._seen[field]:
                increment(value - self._seen[field])
                self._seen[field] = value


def make_ray_watch() -> MetricsWatch:
    """Built inside the coordinator's process, where the counters live."""
    from ray.util.metrics import Counter

    return MetricsWatch(lambda name, text: Counter(name, description=text).inc)
