"""One step of a masked-diffusion target: which masks of a block are filled, with which tokens, in which order.

A state is a block's tokens, `MASKED` where there is none yet; behind a full block stand the masks of the next one, and
the two are a state of their own, where a pass over the full block is the next one's first. The step of a decoder fills
the mask of which the model is surest or, with a threshold, all of which it is that sure, and at least that one. It is a
function of the state alone: sampled tokens draw noise of (seed, position, number of tokens filled so far in the block),
which is the same whatever else is computed beside the state. Confidences are compared in float32 and tie often, in low
precision mostly at 1; the earlier position then comes first.

FreeDave (arXiv 2510.00294): states further on are guessed from one state's predictions, computed in one pass, and
accepted as far as each *equals* what the step makes of the one before. Knows no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.protocol.messages import NO_TOKEN, SamplingParams, TokenTree
from actors.sampling.logits import LogitRows, is_greedy, process_batch
from actors.sampling.noise import NoiseStream, gumbel, noise_key
from parallel.transfers import to_host, upload

MASKED = -1
State = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnmaskingStep:
    """What a pass over a state says of its masks: (offset, token) of each, the surest first. The decoder fills the
    first `num_sure`. `num_full` tokens are a full block before the present one, and `num_next` masks follow that
    once it is full; 0: the state of a full block is no pass's."""

    num_full: int
    num_next: int
    state: State
    fills: tuple[tuple[int, int], ...]
    num_sure: int

    def after(self, num_filled: int) -> State:
        """The state with so many masks filled."""
        tokens = [*self.state]
        for offset, token in self.fills[:num_filled]:
            tokens[offset] = token
        return tuple(tokens) if num_filled < len(self.fills) else (*tokens, *[MASKED] * self.num_next)

    @property
    def following(self) -> State:
        """The decoder's next state."""
        return self.after(self.num_sure)

    def guesses(self, most: int) -> list[State]:
        """The next state and guesses of those after it, at most so many, up to that of the full block."""
        return [self.after(count) for count in range(self.num_sure, len(self.fills) + bool(self.num_next))[:most]]

    def of_last_block(self) -> UnmaskingStep:
        """The same without what is full."""
        fills = tuple([(offset - self.num_full, token) for offset, token in self.fills])
        return UnmaskingStep(0, self.num_next, self.state[self.num_full :], fills, self.num_sure)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The masked rows of one state in a pass: `first` is its position, `params` those of the request, `num_full` and
    `num_next` as in `UnmaskingStep`. `in_order`: its step fills the first mask, however sure the model is of it."""

    num_full: int
    num_next: int
    state: State
    first: int
    params: SamplingParams
    in_order: bool = False

    @property
    def num_filled(self) -> int:
        """Tokens of the block that is being filled."""
        return sum([token != MASKED for token in self.state[self.num_full :]])

    def offsets(self) -> list[int]:
        return [offset for offset, token in enumerate(self.state) if token == MASKED]


def steps(
    logits: Tensor, batch: Sequence[MaskedRows], mask_token: int, threshold: float, eos_token_ids: Sequence[int]
) -> list[UnmaskingStep | None]:
    """What the logits [n, V] of all masked rows of these states, in order, say of each; None where a distribution is
    impossible. Threshold 0 fills one mask a step."""
    tokens, confidences = _choices(logits, batch, mask_token, eos_token_ids)
    found, start = list[UnmaskingStep | None](), 0
    for rows in batch:
        offsets = rows.offsets()
        stop = start + len(offsets)
        chosen = list(zip(confidences[start:stop], offsets, tokens[start:stop], strict=True))
        start = stop
        if any(token == NO_TOKEN for *_, token in chosen):
            found.append(None)
            continue
        chosen.sort(key=lambda one: (-one[0], one[1]))
        num_sure = sum([confidence >= threshold for confidence, *_ in chosen]) if threshold else 1
        fills = [(offset, token) for _, offset, token in chosen]
        if rows.in_order:
            fills.sort(key=lambda one: one[0] != offsets[0])  # stable: the others stay in order
            num_sure = 1
        found.append(UnmaskingStep(rows.num_full, rows.num_next, rows.state, tuple(fills), max(1, num_sure)))
    return found


def accepted(found: Sequence[UnmaskingStep]) -> list[int]:
    """The indices of the decoder's states among those of a pass, of which the first one is its."""
    path, states = [0], [step.state for step in found]
    while (following := found[path[-1]].following) in states[path[-1] + 1 :]:
        path.append(states.index(following, path[-1] + 1))
    return path


def _choices(
    logits: Tensor, batch: Sequence[MaskedRows], mask_token: int, eos_token_ids: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Token and confidence of every masked row: the probability of the token in the distribution that it is chosen
    from, after temperature and truncation. The mask itself is never chosen."""
    logits = logits.index_fill(1, upload([mask_token], logits.device), -torch.inf)
    rows = [(own.params, own.first + offset, own.num_filled) for own in batch for offset in own.offsets()]
    root = TokenTree.root(0)
    scores = process_batch(logits, [LogitRows(params, 0, (0,), root) for params, *_ in rows], eos_token_ids)
    raced, sampled = scores, [row for row, (params, *_) in enumerate(rows) if not is_greedy(params)]
    if sampled:
        keys = [noise_key(rows[row][0].seed, NoiseStream.UNMASKING, *rows[row][1:]) for row in sampled]
        noise = gumbel(keys, torch.arange(scores.shape[1], device=scores.device))
        raced = scores.index_add(0, upload(sampled, scores.device), noise)
    values, token_ids = raced.max(-1, keepdim=True)
    token_ids = token_ids.masked_fill(~values.isfinite(), 0)
    confidences = scores.softmax(-1, dtype=torch.float32).gather(1, token_ids)
    chosen, sure, greatest = to_host([token_ids, confidences, values.isfinite()])
    tokens = [token if is_finite else NO_TOKEN for (token,), (is_finite,) in zip(chosen, greatest, strict=True)]
    return [int(token) for token in tokens], [float(confidence) for (confidence,) in sure]
