"""Logits of whole texts, read beside the engine, and how far they move with the shape of a pass.

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

from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig, VerifyRule
from actors.protocol.messages import TokenTree
from actors.sampling.logits import LogitRows, is_greedy, probabilities, process_logits
from actors.sampling.noise import NoiseStream, gumbel, noise_key, uniform
from cluster.tools.certify.goodness import GoodnessOfFit, fit_distribution
from cluster.tools.certify.identity import OutputPair
from cluster.tools.offline import open_alone
from parallel.kv.pass_plan import Span
from parallel.kv.pool import FP8
from parallel.runtime.kv_sizing import choose_kv_dtype

EXPLAINED = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1, FP8: 0.1}
"""Movement of a logit that rounding in this dtype, of numbers or of KV rows, can explain; more is a mistake."""
NUM_CELLS = 20
"""Cells of equal probability for the ranks of sampled tokens."""
_TEXT = 0


class TextReader:
    """A model on one rank of its own, in the engine's dtype; a text and its children hold at most `num_slots` rows."""

    def __init__(self, model: TargetConfig | ModelDrafterConfig, num_slots: int) -> None:
        self.runner = open_alone(model, num_slots)
        self.dtype = self.runner.decoder.dtype
        self.explained = max(EXPLAINED[self.dtype], EXPLAINED[choose_kv_dtype(model.kv_dtype, self.dtype)])
        if isinstance(model, TargetConfig) and model.is_invariant:
            self.explained = 0.0

    @property
    def vocab_size(self) -> int:
        return self.runner.config.vocab_size

    def after(self, token_ids: Sequence[int], children: Sequence[int] = ()) -> Tensor:
        """Logits after the text and after the text with each child, [1 + C, V] on the host, in one pass."""
        root = len(token_ids) - 1
        parents = [*range(-1, root), *[root] * len(children)]
        span = Span(_TEXT, len(parents), parents, 1 + len(children))
        return self._read([(span, [*token_ids, *children])])

    def in_one_pass(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Logits [n, V] that chose each of `token_ids[start:]`, all rows fed together."""
        fed = list(token_ids[:-1])
        return self._read([(Span(_TEXT, len(fed), num_logits=len(token_ids) - start), fed)])

    def row_by_row(self, token_ids: Sequence[int], start: int) -> Tensor:
        """The same as plain decoding computes it: the text up to `start`, then one row a pass."""
        passes = [(Span(_TEXT, start), list(token_ids[:start]))]
        passes += [(Span(_TEXT, 1), [token]) for token in token_ids[start:-1]]
        return self._read(passes)

    def _read(self, passes: Sequence[tuple[Span, list[int]]]) -> Tensor:
        self.runner.open(_TEXT)
        try:
            logits = []
            for span, token_ids in passes:
                logits.append(self.runner.forward([span], token_ids).logits.cpu())
                if len(passes) > 1:
                    self.runner.commit(_TEXT, range(len(token_ids)))
            return torch.cat(logits)
        finally:
            self.runner.close(_TEXT)


@dataclass(frozen=True, slots=True)
class LogitMovement:
    """Largest change of a logit between one pass for all rows and one pass per row, and the greedy choices it flips."""

    num_rows: int
    largest: float
    num_flips: int

    @property
    def tie_below(self) -> float:
        """A choice with a smaller lead is a tie."""
        return 2 * self.largest


class OutputScorer:
    """Scores by which the target chose the tokens of an output, read in one pass per output."""

    def __init__(self, reader: TextReader, rule: VerifyRule, eos_token_ids: Sequence[int]) -> None:
        self._reader = reader
        self._shares_noise = rule is VerifyRule.coupled
        self._eos_token_ids = tuple(eos_token_ids)

    def movement(self, outputs: Sequence[OutputPair]) -> LogitMovement:
        """Compare both shapes of a pass on the tokens of plain decoding."""
        rows, largest, flips = 0, 0.0, 0
        for output in outputs:
            text, start = [*output.prompt_ids, *output.plain], len(output.prompt_ids)
            wide, narrow = self._reader.in_one_pass(text, start), self._reader.row_by_row(text, start)
            largest = max(largest, float((wide - narrow).abs().max()))
            flips += int((wide.argmax(dim=-1) != narrow.argmax(dim=-1)).sum())
            rows += len(wide)
        return LogitMovement(rows, largest, flips)

    def gaps(self, output: OutputPair) -> list[float]:
        """Lead of every token of plain decoding over the next best, in logits before the temperature."""
        scores = self._scores(output, output.plain)
        params = output.sampling
        if not is_greedy(params):
            positions = range(len(output.prompt_ids), len(output.prompt_ids) + len(output.plain))
            keys = [noise_key(params.seed, NoiseStream.COUPLED, position) for position in positions]
            scores = scores + gumbel(keys, torch.arange(scores.shape[-1]))
        best = scores.topk(2, dim=-1).values
        return ((best[:, 0] - best[:, 1]) * (1.0 if is_greedy(params) else params.temperature)).tolist()

    def ranks(self, output: OutputPair) -> list[float]:
        """The place of every token of speculation in the target's distribution, from 0 (likeliest) to 1.

        If the tokens are the target's draws, these are independent and uniform, whatever the texts
        (randomised probability integral transform).
        """
        distribution = probabilities(self._scores(output, output.speculative), output.sampling).numpy()
        tokens = np.array(output.speculative)
        own = distribution[np.arange(len(tokens)), tokens]
        likelier = np.where(distribution > own[:, None], distribution, 0.0).sum(axis=1)
        keys = [noise_key(output.sampling.seed, NoiseStream.DRAFT, output.prompt, i) for i in range(len(tokens))]
        return (likelier + own * np.array([uniform(key) for key in keys])).tolist()

    def _scores(self, output: OutputPair, token_ids: Sequence[int]) -> Tensor:
        """Processed logits [n, V] from which every one of `token_ids` was chosen."""
        prompt = output.prompt_ids
        logits = self._reader.in_one_pass([*prompt, *token_ids], len(prompt))
        tree = TokenTree.chain(prompt[-1], list(token_ids[:-1]))
        return process_logits(logits, LogitRows(output.sampling, len(prompt), prompt, tree), self._eos_token_ids)

    def has_ties(self, output: OutputPair) -> bool:
        """Whether the tokens are arg-maxes, with or without noise; a draw by inversion has no second best."""
        return self._shares_noise or is_greedy(output.sampling)


def fit_ranks(scorer: OutputScorer, outputs: Sequence[OutputPair]) -> list[GoodnessOfFit]:
    """The sampled tokens of the engine against the target's distribution at each; empty if there are none."""
    ranks = [rank for output in outputs if not is_greedy(output.sampling) for rank in scorer.ranks(output)]
    if not ranks:
        return []
    cells = np.minimum((np.array(ranks) * NUM_CELLS).astype(int), NUM_CELLS - 1)
    counts = np.bincount(cells, minlength=NUM_CELLS)
    return [fit_distribution("the engine's sampled tokens", counts, np.full(NUM_CELLS, 1.0 / NUM_CELLS))]
