"""Floating point: how far logits move with the shape of a pass, and which choices are closer than that.

Speculation scores several rows in one pass where plain decoding scores one; sums in another order round differently.
A choice whose two best candidates are closer than twice that movement is a tie: either answer is the target's. Ties are
counted everywhere, and a divergence of tokens is excused only where it begins at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.options import VerifyRule
from actors.protocol.messages import TokenTree
from actors.sampling.logits import is_greedy, probabilities, process_logits
from actors.sampling.noise import Stream, gumbel, noise_key, uniform
from cluster.tools.certify.goodness import Fit, fit_distribution
from cluster.tools.certify.identity import Output
from cluster.tools.certify.reader import Reader

EXPLAINED = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Movement of a logit that rounding in this dtype can explain; more is a mistake."""
NUM_CELLS = 20
"""Of the ranks of sampled tokens, cells of equal probability."""


@dataclass(frozen=True, slots=True)
class Movement:
    """Largest change of a logit between one pass for all rows and one pass per row, and what changed with it."""

    num_rows: int
    largest: float
    num_flips: int


class Scorer:
    """The target's own view of outputs: scores as it chose by them, read back in one pass per output."""

    def __init__(self, reader: Reader, rule: VerifyRule, eos_token_ids: Sequence[int]) -> None:
        self._reader = reader
        self._shares_noise = rule is VerifyRule.coupled
        self._eos_token_ids = tuple(eos_token_ids)

    def movement(self, outputs: Sequence[Output]) -> Movement:
        """Compare both shapes on what plain decoding said."""
        rows, largest, flips = 0, 0.0, 0
        for output in outputs:
            text, start = [*output.prompt_ids, *output.plain], len(output.prompt_ids)
            wide, narrow = self._reader.in_one_pass(text, start), self._reader.row_by_row(text, start)
            largest = max(largest, float((wide - narrow).abs().max()))
            flips += int((wide.argmax(dim=-1) != narrow.argmax(dim=-1)).sum())
            rows += len(wide)
        return Movement(rows, largest, flips)

    def gaps(self, output: Output) -> list[float]:
        """How far ahead of the next best every token of plain decoding was, in logits before the temperature."""
        scores = self._scores(output, output.plain)
        params = output.sampling
        if not is_greedy(params):
            positions = range(len(output.prompt_ids), len(output.prompt_ids) + len(output.plain))
            keys = [noise_key(params.seed, Stream.COUPLED, position) for position in positions]
            scores = scores + gumbel(keys, torch.arange(scores.shape[-1]))
        best = scores.topk(2, dim=-1).values
        return ((best[:, 0] - best[:, 1]) * (1.0 if is_greedy(params) else params.temperature)).tolist()

    def ranks(self, output: Output) -> list[float]:
        """For every token of speculation, where it stands in the target's law, from 0 (likeliest) to 1.

        If the tokens are the target's draws, these are independent and uniform, whatever the texts
        (randomised probability integral transform).
        """
        distribution = probabilities(self._scores(output, output.speculative), output.sampling).numpy()
        tokens = np.array(output.speculative)
        own = distribution[np.arange(len(tokens)), tokens]
        likelier = np.where(distribution > own[:, None], distribution, 0.0).sum(axis=1)
        keys = (noise_key(output.sampling.seed, Stream.DRAFT, output.prompt, i) for i in range(len(tokens)))
        return [float(before + own * uniform(key)) for before, own, key in zip(likelier, own, keys, strict=False)]

    def _scores(self, output: Output, token_ids: Sequence[int]) -> Tensor:
        """Processed logits [n, V] behind which every one of `token_ids` was chosen."""
        prompt = output.prompt_ids
        logits = self._reader.in_one_pass([*prompt, *token_ids], len(prompt))
        tree = TokenTree.chain(prompt[-1], list(token_ids[:-1]))
        return process_logits(logits, output.sampling, self._eos_token_ids, len(prompt), prompt, tree)

    def has_ties(self, output: Output) -> bool:
        """Whether the tokens are arg-maxes, with or without noise; a draw by inversion has no second best."""
        return self._shares_noise or is_greedy(output.sampling)


def fit_ranks(scorer: Scorer, outputs: Sequence[Output]) -> Fit | None:
    """The sampled tokens that left the engine, against the target's law at each of them."""
    ranks = [rank for output in outputs if not is_greedy(output.sampling) for rank in scorer.ranks(output)]
    if not ranks:
        return None
    cells = np.minimum((np.array(ranks) * NUM_CELLS).astype(int), NUM_CELLS - 1)
    counts = np.bincount(cells, minlength=NUM_CELLS)
    return fit_distribution("the engine's sampled tokens", counts, np.full(NUM_CELLS, 1.0 / NUM_CELLS))
