"""What a run of prompts came to: every request as it ended, and what the coordinator counted meanwhile.

Records only. `cluster/run_prompts.py` fills them, `report.py` derives figures from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.coordinator.stats import TimelineSpan
from actors.protocol.messages import RequestStats
from cluster.io.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Served:
    """How one request ended. `error` is set where it failed; it may have got tokens before that."""

    index: int
    prompt: Prompt
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = "error"
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    ttft_s: float | None = None
    latency_s: float | None = None


@dataclass(slots=True)
class Run:
    """The requests of one run in the order they ended, and what the coordinator counted meanwhile."""

    requests: list[Served] = field(default_factory=list)
    wall_s: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)
    spans: tuple[TimelineSpan, ...] = ()
    interrupted: bool = False

    @property
    def completed(self) -> list[Served]:
        """Requests without an error, in the order of the prompts."""
        return sorted((served for served in self.requests if served.error is None), key=lambda served: served.index)

    @property
    def failed(self) -> list[Served]:
        """Requests with an error, in the order of the prompts."""
        return sorted((served for served in self.requests if served.error is not None), key=lambda served: served.index)

    @property
    def num_tokens(self) -> int:
        return sum(len(served.token_ids) for served in self.requests)
