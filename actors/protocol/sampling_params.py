"""How the tokens of a request are sampled. Standard library only; `actors/sampling` carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and defaults are vLLM's. Everything is in token ids except `stop`, which the engine matches in the text."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 128
    ignore_eos: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError naming the first field that is out of range."""
        bounds = (
            ("temperature", 0 <= self.temperature < inf, "must be 0 (greedy) or above"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "must be in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "must be above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be in [-2, 2]"),
            ("logit_bias", all(isfinite(bias) for _, bias in self.logit_bias), "must be finite numbers"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens"),
            ("stop", all(self.stop), "must not hold an empty string"),
            ("seed", -(2**63) <= self.seed < 2**64, "must fit 64 bits"),
        )
        for name, good, rule in bounds:
            if not good:
                raise ValueError(f"sampling.{name}={getattr(self, name)!r} {rule}")
