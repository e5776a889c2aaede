"""How the tokens of a request are sampled, and the bounds of that. Standard library only; `actors/sampling` carries it
out, and can carry out whatever `check` accepts, at a cost that the bounds limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from parallel.ranges import Range, check_ranges

TEMPERATURE = Range(1e-5, 1000, zero="greedy")
"""Less overflows when float32 logits are divided by it, more leaves nothing of them."""
REPETITION_PENALTY = Range(0.01, 100)
ADDED_PENALTY = Range(-2, 2)
NGRAM = Range(0, 16, zero="off")
"""Longer ones cost every row of every pass as many looks at the whole text."""
SEED = Range(-(2**63), 2**64 - 1)
MOST_BIASES = 300
"""OpenAI's limit. Each is read by every role that gets the request, and edits a cell of every row."""
LARGEST_BIAS = 100
"""The limit of OpenAI and vLLM: more than any model's logits differ by."""
MOST_ALLOWED = 1024
"""Each is read and edits as a bias does."""
MOST_BAD_WORDS = 300
MOST_BAD_WORD_TOKENS = 8192
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 8192
MOST_STOP_TOKENS = 128
"""vLLM's limit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and defaults are vLLM's, and of the last three transformers'. Everything is in token ids except `stop`,
    which the engine matches in the text. Without `allowed_token_ids` all tokens may come; with them no other does, end
    tokens among them.

    No `no_repeat_ngram_size` tokens of the text, prompt included, stand in it twice in the same order. The first token
    of the output is `forced_bos_token_id`, its last one at `max_tokens` is `forced_eos_token_id`, where they are given.
    """

    temperature: Annotated[float, TEMPERATURE] = 0.0
    top_k: Annotated[int, Range(0, zero="all")] = 0
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    presence_penalty: Annotated[float, ADDED_PENALTY] = 0.0
    frequency_penalty: Annotated[float, ADDED_PENALTY] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: Annotated[int, Range(0)] = 0
    max_tokens: Annotated[int, Range(1)] = 128
    ignore_eos: bool = False
    seed: Annotated[int, SEED] = 0
    no_repeat_ngram_size: Annotated[int, NGRAM] = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None

    @property
    def forced_token_ids(self) -> list[int]:
        return [token for token in (self.forced_bos_token_id, self.forced_eos_token_id) if token is not None]

    def stops(self, token: int, eos_token_ids: Collection[int]) -> bool:
        """Whether the output ends with this token."""
        return token in self.stop_token_ids or (token in eos_token_ids and not self.ignore_eos)

    @property
    def edits_tokens(self) -> bool:
        """Whether they change the logits of single tokens."""
        listed = self.logit_bias or self.bad_words or self.allowed_token_ids or self.forced_token_ids
        return bool(listed or self.min_tokens or self.no_repeat_ngram_size) or self.penalises

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def completed(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These with the checkpoint's own `defaults` in place of fields that are at theirs; `bad_words` are added."""
        plain = SamplingParams()
        known = {name: value for name, value in defaults.items() if getattr(self, name) == getattr(plain, name)}
        if "bad_words" in known:
            known["bad_words"] = tuple(tuple(word) for word in known["bad_words"])
        if "min_tokens" in known:
            known["min_tokens"] = min(known["min_tokens"], self.max_tokens)
        return replace(self, **known) if known else self

    def check(self) -> None:
        """Raise ValueError, one line, for the first field that is out of range, holds too much or makes no sense. Sizes
        are compared before anything is looked through."""
        check_ranges(self, "sampling")
        if self.min_tokens > self.max_tokens:
            remedy = f"must be between 0 and sampling.max_tokens={self.max_tokens}"
            raise ValueError(f"sampling.min_tokens={self.min_tokens}: {remedy}")
        self._check_sizes()
        if not all(-LARGEST_BIAS <= bias <= LARGEST_BIAS for _, bias in self.logit_bias):
            remedy = f"must all be between -{LARGEST_BIAS} and {LARGEST_BIAS}; to rule a token out use bad_words"
            raise ValueError(f"sampling.logit_bias: {remedy}")
        for name, entries, what in (("bad_words", self.bad_words, "word"), ("stop", self.stop, "string")):
            if not all(entries):
                raise ValueError(f"sampling.{name}: must not hold an empty {what}; drop it")

    def _check_sizes(self) -> None:
        counts = (
            ("logit_bias", self.logit_bias, MOST_BIASES),
            ("bad_words", self.bad_words, MOST_BAD_WORDS),
            ("allowed_token_ids", self.allowed_token_ids, MOST_ALLOWED),
            ("stop", self.stop, MOST_STOPS),
            ("stop_token_ids", self.stop_token_ids, MOST_STOP_TOKENS),
        )
        for name, entries, most in counts:
            if len(entries) > most:
                raise ValueError(f"sampling.{name}: has {len(entries)} entries; give at most {most}")
        lengths = (
            ("bad_words", self.bad_words, MOST_BAD_WORD_TOKENS, "tokens"),
            ("stop", self.stop, MOST_STOP_CHARACTERS, "characters"),
        )
        for name, entries, most, unit in lengths:
            if (size := sum(map(len, entries))) > most:
                raise ValueError(f"sampling.{name}: has {size} {unit} in all; give at most {most}")
