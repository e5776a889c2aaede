"""Recorded text as a language of the simulator: the target's text and the drafter's ranked choices for each token.

The synthetic language draws from probabilities; this one plays back a measurement, so that runs of easy and hard
tokens keep their measured lengths. After the true text, a draft model's choices do not depend on how drafts are made:
one pass of the model over each text records them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import SamplingParams, TokenTree
from actors.sampling.logits import LogitRows, process_batch, top_children
from cluster.tools.offline import open_alone
from cluster.tools.planning.rounds import KnownText
from parallel.kv.pass_plan import Span

CHOICES = 8
"""Ranked choices kept of every position."""
STRIDE = 61
"""Tokens by which the texts of two simulated requests are shifted."""


@dataclass(frozen=True, slots=True)
class RecordedToken:
    """A token of the target, and the drafter's ranked choices for its position, given the true text before it."""

    token: int
    choices: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """Recorded texts, concatenated; each simulated request starts `STRIDE` tokens after the one before.

    `kept`: by distance from the committed text, the share of right first choices that a worse drafter than the
    recorded one keeps (layer-parallel passes); the last value repeats.
    """

    tokens: tuple[RecordedToken, ...]
    kept: tuple[float, ...] = (1.0,)
    seed: int = 0

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> TranscriptText:
        start = request_id * STRIDE % len(self.tokens)
        return TranscriptText(self, prompt, self.tokens[start:] + self.tokens[:start])


@dataclass(slots=True)
class TranscriptText:
    """One request's text; at its end it starts again."""

    _transcript: Transcript
    _prompt: tuple[int, ...]
    _tokens: Sequence[RecordedToken]
    _marks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self._transcript.seed)
        self._marks = [draw.random() for _ in self._tokens]

    def token(self, position: int) -> int:
        return self._prompt[position] if position < len(self._prompt) else self._tokens[self._index(position)].token

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        """The recorded choices; where a worse drafter errs, the first two change places."""
        index = self._index(position)
        recorded = self._tokens[index]
        tokens, log_probs = list(recorded.choices[:count]), list(recorded.log_probs[:count])
        kept = self._transcript.kept[min(distance, len(self._transcript.kept) - 1)]
        if recorded.choices[0] == recorded.token and self._marks[index] > kept:
            tokens[0] = recorded.choices[1]
            tokens[1:2] = [recorded.token] * (len(tokens) > 1)
        return tokens, log_probs

    def _index(self, position: int) -> int:
        return (position - len(self._prompt)) % len(self._tokens)


@torch.inference_mode()
def record(
    config: ModelDrafterConfig,
    device: str,
    texts: Sequence[KnownText],
    sampling: SamplingParams,
    eos_token_ids: tuple[int, ...],
) -> Transcript:
    longest = max(len(text.token_ids) for text in texts)
    runner = open_alone(config, longest, device)
    tokens: list[RecordedToken] = []
    for text in texts:
        prompt, written = text.token_ids[: text.prompt_len], text.token_ids[text.prompt_len :]
        rows = LogitRows(sampling, text.prompt_len, prompt, TokenTree.chain(prompt[-1], written[:-1]))
        runner.open(0)
        spans = [Span(0, len(text.token_ids) - 1, num_logits=len(written))]
        scores = process_batch(runner.forward(spans, text.token_ids[:-1]).logits, [rows], eos_token_ids)
        runner.close(0)
        ranked = top_children(scores, [sampling] * len(written), rows.positions(), CHOICES)
        choices, log_probs = (values.tolist() for values in ranked)
        tokens += map(RecordedToken, written, map(tuple, choices), map(tuple, log_probs))
    return Transcript(tuple(tokens))
