"""Turns logits into tokens: logit processors with every tree node's own history, and the coupled draw at a node.

Plain decoding, verification and drafting use the same functions, so that all choose the next token in the same way.
Knows logits, tokens and trees; knows no model and no verification rule.

The coupled draw is arg-max(processed logits + Gumbel noise of (seed, position, token)): a sample of the processed
distribution that is the same for every role (drafter-invariant sampling, arXiv 2408.07978; the drafter's children are
the Gumbel-top-k under the same noise). Greedy decoding is its zero-temperature case: no noise, ties to the lowest token
id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from actors.protocol.messages import NO_TOKEN, SamplingParams, TokenTree
from actors.sampling.noise import NoiseStream, gumbel, noise_key, spread_keys
from parallel.comm.group import Group
from parallel.kernels.choice import Race, chosen_rows, has_choice, largest_rows
from parallel.kernels.triton_launch import has_triton
from parallel.transfers import to_device, upload

BANNED = -torch.inf
_GREEDY_BELOW = 1e-5  # as vLLM: a smaller temperature would overflow the division
_PARTLY_RANKED = 1024
"""Up to this many of the likeliest tokens are selected from a row; for more, sorting all of it is faster."""
_RANKED_AT_ONCE = 1 << 21, 1 << 24
"""Logits ranked at a time, on a CPU and on a GPU: a large batch needs no more than tens or hundreds of megabytes; on a
GPU 128 rows of a large vocabulary are one call."""


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The meaning of one sequence's logit rows: row i holds the logits at tree node `nodes[i]`.

    `token_ids` are the committed tokens, the first `prompt_len` of them the prompt; the last one is the tree's root.
    `nodes` None means all nodes of the tree, in order.
    """

    params: SamplingParams
    prompt_len: int
    token_ids: Sequence[int]
    tree: TokenTree
    nodes: Sequence[int] | None = None

    def row_nodes(self) -> Sequence[int]:
        return range(len(self.tree.parents)) if self.nodes is None else self.nodes

    def positions(self) -> list[int]:
        """Index in the text of the token that each row chooses: the key of its noise."""
        depths = self.tree.depths()
        return [len(self.token_ids) + depths[node] for node in self.row_nodes()]


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY_BELOW


def is_plain(params: SamplingParams) -> bool:
    """Whether nothing but the temperature changes the logits."""
    return is_unedited(params) and not truncates(params)


def is_unedited(params: SamplingParams) -> bool:
    """Whether nothing but the temperature and truncation changes the logits, so that no text does."""
    return not params.edits_tokens


def truncates(params: SamplingParams) -> bool:
    """Whether sampling leaves out unlikely tokens."""
    return not is_greedy(params) and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


# --- logit processors ------------------------------------------------------------------------------------------------


def process_logits(logits: Tensor, rows: LogitRows, eos_token_ids: Sequence[int]) -> Tensor:
    """Processed logits [n, V]; the history of row i is the committed tokens and the path to its node.

    Order of vLLM: logit bias, bad words, min tokens, repetition, presence and frequency penalty, allowed tokens (which
    vLLM has first, to the same effect), temperature, min-p, top-k, top-p. Bad words and the repetition penalty look at
    prompt and output, as in transformers; presence and frequency at the output only. Tokens that tie with the last kept
    one are kept too. Returns `logits` itself if nothing applies, else a tensor of its own; banned tokens hold -inf.
    """
    return process_batch(logits, [rows], eos_token_ids)


def process_batch(logits: Tensor, batch: Sequence[LogitRows], eos_token_ids: Sequence[int]) -> Tensor:
    """`process_logits` for the rows of many sequences, flat in `logits` [N, V]."""
    if all(is_plain(rows.params) and (is_greedy(rows.params) or rows.params.temperature == 1.0) for rows in batch):
        return logits
    params = [rows.params for rows in batch for _ in rows.row_nodes()]
    assert len(params) == len(logits), "every logit row belongs to one tree node"
    if any(rows.params.edits_tokens for rows in batch):
        from actors.sampling.edits import edited  # few requests ask for any

        logits = edited(logits, batch, eos_token_ids)
    return _truncate(_divide(logits, params), params)


def _truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Tempered logits [n, V] after min-p, top-k and top-p: the same tensor where no row has any."""
    truncated = [row for row, one in enumerate(params) if truncates(one)]
    if not truncated:
        return scores
    if _has_kernels(scores) or _has_host_kernels(scores):
        limits = to_device(_limits(params, scores.shape[1]), scores.device)
        return _truncation(scores).truncate(scores, *limits)
    if len(truncated) == len(scores):
        return scores.masked_fill(scores < _least_kept(scores, params), BANNED)
    where = upload(truncated, scores.device)
    asking = scores.index_select(0, where)
    asking.masked_fill_(asking < _least_kept(asking, [params[row] for row in truncated]), BANNED)
    return scores.index_copy(0, where, asking)


def _truncation(scores: Tensor) -> ModuleType:
    """The kernel for scores on a GPU or on the host."""
    if scores.is_cpu:
        from parallel.kernels import truncation
    else:
        from actors.sampling import truncation_kernels as truncation
    return truncation


_ALL = (1 << 31) - 1
"""A top-k of all tokens, however many there are."""


def _limits(params: Sequence[SamplingParams], vocab_size: int) -> list[np.ndarray]:
    """Top-k, top-p and the logarithm of min-p of every row; of greedy rows those that keep all."""
    none = vocab_size, math.inf, BANNED
    rows = [none if is_greedy(one) else (_top_k(one, none[0]), _top_p(one), _share(one)) for one in params]
    top_ks, top_ps, shares = zip(*rows, strict=True)
    return [np.array(top_ks, dtype=np.int32), np.array(top_ps), np.array(shares, dtype=np.float32)]


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k or vocab_size, vocab_size)


def _top_p(params: SamplingParams) -> float:
    return params.top_p if params.top_p < 1 else math.inf


def _share(params: SamplingParams) -> float:
    """What min-p keeps, below the largest logit."""
    return math.log(params.min_p) if params.min_p > 0 else BANNED


def _least_kept(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The least tempered logit [n, 1] that min-p, top-k and top-p keep in each row of [n, V].

    Rows are ranked no further than they ask: with a top-k its likeliest tokens, with a top-p alone the vocabulary.
    """
    least = logits.new_full((len(logits), 1), BANNED)
    if has_least := any(one.min_p > 0 for one in params):
        shares = upload([_share(one) for one in params], logits.device, np.float32)
        least = logits.amax(dim=-1, keepdim=True) + shares[:, None]
    vocab_size = logits.shape[-1]
    top_ks = [_top_k(one, vocab_size) for one in params]
    few = [row for row, top_k in enumerate(top_ks) if top_k < vocab_size]
    all_ = [row for row, one in enumerate(params) if top_ks[row] == vocab_size and one.top_p < 1]
    for rows, width in ((few, max((top_ks[row] for row in few), default=0)), (all_, vocab_size)):
        at_once = max(1, _RANKED_AT_ONCE[not logits.is_cpu] // max(1, width))
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            kept, top_ps = [top_ks[row] for row in some], [_top_p(params[row]) for row in some]
            limits = [np.array(some), np.array(kept), np.array(top_ps)]
            where, widths, masses = to_device(limits, logits.device)
            ranked = _ranked(logits if len(some) == len(logits) else logits.index_select(0, where), width)
            reached = least.index_select(0, where) if has_least else None
            last = _last_kept(ranked, widths, masses, reached, is_cut=min(kept) < width)
            least.index_copy_(0, where, last)
    return least


def _ranked(logits: Tensor, width: int) -> Tensor:
    """The `width` largest values of each row, in decreasing order."""
    if width <= _PARTLY_RANKED:
        return logits.topk(width, dim=-1).values
    if not logits.is_cpu:
        return logits.sort(dim=-1, descending=True).values[:, :width]
    negated = logits.neg().numpy()  # NumPy sorts 20 times as fast as torch on CPU, where AVX2 or better is there
    negated.sort(axis=-1)
    return torch.from_numpy(np.negative(negated, out=negated))[:, :width]


def _last_kept(ranked: Tensor, top_ks: Tensor, top_ps: Tensor, least: Tensor | None, *, is_cut: bool) -> Tensor:
    """The least kept logit [n, 1] of ranked rows [n, width], by the top-k, the top-p and the `least` [n, 1] of each;
    `is_cut` tells whether any top-k is less than the width.

    Kept are the tokens with less than `top_ps` of the mass before them, of the mass of the `top_ks` that reach `least`.
    Weights are summed in the order of the ranks, so that a row does not depend on how far others are ranked.
    """
    top_ks = top_ks[:, None]
    weights = ranked.to(torch.float64)
    weights.sub_(weights[:, :1].clone()).exp_()
    if is_cut:
        weights.masked_fill_(torch.arange(ranked.shape[-1], device=ranked.device) >= top_ks, 0.0)
    if least is not None:
        weights.masked_fill_(ranked < least, 0.0)
    sums = weights.cumsum_(dim=-1)
    num_before = torch.searchsorted(sums, sums[:, -1:] * top_ps[:, None])  # sums that are smaller; of an increasing row
    last = ranked.gather(1, torch.minimum(num_before, top_ks - 1))
    return last if least is None else torch.maximum(last, least)


def _divide(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sampled rows over their temperatures; a tensor divisor rounds alike in every batch."""
    temperatures = [1.0 if is_greedy(one) else one.temperature for one in params]
    if all(temperature == 1.0 for temperature in temperatures):
        return logits
    return logits / upload(temperatures, logits.device, np.float32)[:, None]


# --- choosing --------------------------------------------------------------------------------------------------------


def choose_batch(logits: Tensor, batch: Sequence[LogitRows], eos_token_ids: Sequence[int]) -> Tensor:
    """The target's own token at every node, int64 [N], or `NO_TOKEN` where no distribution is possible."""
    scores = process_batch(logits, batch, eos_token_ids)
    if _has_host_kernels(scores) and all(is_greedy(rows.params) for rows in batch):
        return chosen_rows(Race(), scores, none=NO_TOKEN)  # without asking where each row stands
    return _chosen(scores, *_keyed(batch), NO_TOKEN)


def choose_split(logits: Tensor, batch: Sequence[LogitRows], first: int, group: Group) -> Tensor:
    """`choose_batch` on every rank, where each has the logits [N, v] of its tokens from `first` on and `is_plain` holds
    for the whole batch: the winners of the ranks meet, not their logits."""
    params, positions = _keyed(batch)
    if logits.shape[1]:
        values, token_ids = _race(_divide(logits, params), params, positions, NO_TOKEN, first)
    else:  # a rank without tokens
        values = logits.new_full((len(logits),), BANNED)
        token_ids = logits.new_full((len(logits),), NO_TOKEN, dtype=torch.int64)
    winners = torch.stack([values.to(torch.float64), token_ids.to(torch.float64)])  # which holds both exactly
    values, token_ids = group.all_gather(winners[None], 0).unbind(1)  # [ranks, N]
    return token_ids.gather(0, values.max(0, keepdim=True).indices)[0].to(torch.int64)


def _keyed(batch: Sequence[LogitRows]) -> tuple[list[SamplingParams], list[int]]:
    """Parameters and positions of all rows."""
    params = [rows.params for rows in batch for _ in rows.row_nodes()]
    return params, [position for rows in batch for position in rows.positions()]


def choose(scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Coupled draw from processed logits [n, V], int64 [n]; `positions[i]` is the index of the token being chosen."""
    return _chosen(scores, params, positions, 0)


def _chosen(scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], of_none: int) -> Tensor:
    """The tokens of `_race`; a kernel on the host is not asked for the values."""
    if _has_host_kernels(scores):
        return chosen_rows(_race_of(params, positions), scores, none=of_none)
    return _race(scores, params, positions, of_none)[1]


def _race(
    scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], of_none: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """The largest value in every row, with the noise of the sampled ones, and its token; `of_none` where that value is
    NaN, as with any NaN in the row, or infinite. Column i is token `first + i`. Two launches on a GPU."""
    if _has_kernels(scores):
        from actors.sampling import noise_kernels

        sampled = np.array([not is_greedy(one) for one in params])
        keys = [noise_key(p.seed, NoiseStream.COUPLED, at) for p, at in zip(params, positions, strict=True)]
        spread, noisy = to_device([spread_keys(keys), sampled], scores.device)
        return noise_kernels.race(scores, spread, noisy, first, of_none)
    if _has_host_kernels(scores):
        return largest_rows(_race_of(params, positions), scores, first=first, none=of_none)
    return _winners(_with_noise(scores, params, positions, first), of_none, first)


def _race_of(params: Sequence[SamplingParams], positions: Sequence[int]) -> Race:
    """The noise of the rows that are sampled."""
    sampled = [not is_greedy(one) for one in params]
    if not any(sampled):
        return Race()
    rows = zip(params, positions, sampled, strict=True)
    keys = [noise_key(one.seed, NoiseStream.COUPLED, at) if noisy else 0 for one, at, noisy in rows]
    return Race(None, torch.from_numpy(spread_keys(keys))[None], torch.tensor(sampled))


def _winners(raced: Tensor, of_none: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The largest value of every row [n], and its token, `of_none` where that value is not finite."""
    values, places = _largest(raced)
    if _is_on_host(raced):
        token_ids = np.where(np.isfinite(values.numpy()), places.numpy() + first, of_none)
        return values, torch.from_numpy(token_ids)
    token_ids = places + first if first else places
    return values, token_ids.masked_fill(~values.isfinite(), of_none)


def _largest(raced: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of every row [n] and its first place; NaN is the largest of a row that has any."""
    if not _is_on_host(raced):
        values, places = raced.max(dim=-1)
        return values, places
    # NumPy is ten times as fast and wakes no threads beside those of the kernels; it knows no bfloat16
    rows = (raced.float() if raced.dtype == torch.bfloat16 else raced).numpy()
    columns = rows.argmax(-1)
    return torch.from_numpy(rows[np.arange(len(rows)), columns]), torch.from_numpy(columns)


def _is_on_host(scores: Tensor) -> bool:
    return scores.is_cpu


def _has_kernels(scores: Tensor) -> bool:
    return scores.is_cuda and scores.dtype == torch.float32 and has_triton()


def _has_host_kernels(scores: Tensor) -> bool:
    return scores.is_cpu and scores.dtype == torch.float32 and has_choice()


def choose_plain(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """`choose` from the logits of a model, where `is_unedited` holds for all `params`."""
    return choose(_truncate(_divide(logits, params), params), params, positions)


@dataclass(frozen=True, slots=True)
class ChoicesAhead:
    """`choose_plain` for several steps of the same rows, each step one position on: all that it needs is sent to the
    device before the first step, so that a graph can choose and feed what it chose. A power of two of rows.

    Rows that truncate are cut by a kernel from their `limits`, or without it by the host's `params`.
    """

    keys: Tensor  # int32 [steps, n, 2]
    sampled: Tensor  # bool [n]
    temperatures: Tensor  # float32 [n]
    is_noisy: bool
    params: Sequence[SamplingParams]
    limits: Sequence[Tensor]  # of truncation, [n] each; empty if no row truncates

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], num_steps: int, device: torch.device
    ) -> ChoicesAhead:
        """`positions` are those of the first step."""
        if all(map(is_greedy, params)):
            return _greedy_ahead(len(params), num_steps, device)
        return cls._of(params, positions, num_steps, device)

    @classmethod
    def _of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], num_steps: int, device: torch.device
    ) -> ChoicesAhead:
        size = max(2, 1 << (len(params) - 1).bit_length())  # two at least, so that the keys of every step are aligned
        padding = [SamplingParams()] * (size - len(params))
        padded, at = [*params, *padding], [*positions, *(0 for _ in padding)]
        sampled = np.array([not is_greedy(one) for one in padded])
        temperatures = np.array([1.0 if is_greedy(one) else one.temperature for one in padded], dtype=np.float32)
        keys = np.zeros((num_steps, size, 2), dtype=np.int32)
        for row in np.flatnonzero(sampled).tolist():
            own = [noise_key(padded[row].seed, NoiseStream.COUPLED, at[row] + step) for step in range(num_steps)]
            keys[:, row] = spread_keys(own)
        limits = _limits(padded, _ALL) if any(map(truncates, padded)) else []
        moved = to_device([keys, sampled, temperatures, *limits], device)
        return cls(moved[0], moved[1], moved[2], bool(sampled.any()), padded, moved[3:])

    @staticmethod
    def can_choose(params: SamplingParams, device: torch.device) -> bool:
        """Whether these do not depend on what is chosen, and a GPU cuts its rows itself if they truncate."""
        return is_unedited(params) and (not truncates(params) or device.type != "cuda" or has_triton())

    def __len__(self) -> int:
        return self.keys.shape[0]

    def race(self) -> Race:
        return Race(self.temperatures, self.keys, self.sampled, self.limits) if self.is_noisy else Race()

    def part(self, start: int, stop: int) -> ChoicesAhead:
        return replace(self, keys=self.keys[start:stop])

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.sampled, self.temperatures, *self.limits]

    def key(self) -> tuple[object, ...]:
        """A GPU's kernels serve greedy and sampled rows alike."""
        if self.keys.is_cuda and has_triton():
            return (bool(self.limits),)
        return self.is_noisy, *(self.params if self.limits else ())

    def like(self) -> ChoicesAhead:
        keys, sampled, temperatures, *limits = [tensor.clone() for tensor in self.tensors()]
        return ChoicesAhead(keys, sampled, temperatures, self.is_noisy, self.params, limits)

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """Tokens for the first rows, as many as there are logits; the division also casts these to float32."""
        has_kernels = _has_kernels(self.temperatures)
        if not (self.is_noisy or has_kernels):
            return _winners(logits.float(), 0)[1]
        keys, sampled, temperatures = self.keys[step, : len(logits)], self.sampled, self.temperatures[: len(logits)]
        if has_kernels:
            from actors.sampling import noise_kernels, truncation_kernels

            scores = logits / temperatures[:, None]
            if self.limits:
                scores = truncation_kernels.truncate(scores, *[limit[: len(scores)] for limit in self.limits])
            return noise_kernels.race(scores, keys, sampled, 0, 0)[1]
        logits = logits.float()
        if _has_host_kernels(logits):
            return chosen_rows(Race(temperatures, self.keys[step : step + 1], sampled, self.limits), logits)
        scores = _truncate(logits / temperatures[:, None], self.params[: len(logits)])
        noise = gumbel(keys, torch.arange(scores.shape[-1], device=scores.device))
        return _winners(torch.where(sampled[: len(logits), None], noise.add_(scores), scores), 0)[1]


@lru_cache(64)
def _greedy_ahead(count: int, num_steps: int, device: torch.device) -> ChoicesAhead:
    """They read no position."""
    return ChoicesAhead._of([SamplingParams()] * count, [0] * count, num_steps, device)


def top_children(
    scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], width: int, *, given_noise: bool = False
) -> tuple[Tensor, Tensor]:
    """The drafter's side of `choose`: the `width` likeliest winners under the target's noise, best first.

    Returns token ids [n, width] and their log-probabilities [n, width] under softmax(scores); with `given_noise`, under
    softmax(scores + noise), which is closer to the probability that the target draws them: it has the same noise and
    slightly different scores.
    """
    raced = _with_noise(scores, params, positions)
    return _best(raced, width, raced if given_noise else scores)


def _best(raced: Tensor, width: int, distribution: Tensor) -> tuple[Tensor, Tensor]:
    if _has_host_kernels(raced):
        from parallel.kernels.likeliest import likeliest  # for drafters of trees alone

        return likeliest(raced, distribution, width)
    # arg-max breaks ties as the target does; top-k promises no order among ties
    token_ids = _largest(raced)[1][:, None] if width == 1 else raced.topk(width, dim=-1).indices
    return token_ids, distribution.gather(1, token_ids) - distribution.logsumexp(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class ChildrenAhead:
    """`top_children` given the noise, from the logits of a model, for several steps of the same rows, each step one
    position on. All that it needs is sent to the device in one copy before the first step, so that the next step can be
    fed the likeliest children while the host waits for nothing; each row is cut by limits of its own.

    `is_unedited` holds for all rows; without `draws` none of them is sampled.
    """

    params: Sequence[SamplingParams]
    noise: _Noise | None
    temperatures: Tensor | None  # float32 [n], None: all 1
    limits: Sequence[Tensor]  # of truncation, [n] each; empty if no row truncates

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        num_steps: int,
        device: torch.device,
        *,
        draws: bool,
    ) -> ChildrenAhead:
        """`positions` are those of the first step."""
        if all(map(is_greedy, params)):
            return _GREEDY_CHILDREN
        noise = _noise_arrays(params, positions, num_steps) if draws else []
        temperatures = np.array([1.0 if is_greedy(one) else one.temperature for one in params], dtype=np.float32)
        tempered = [temperatures] if (temperatures != 1.0).any() else []
        limits = _limits(params, _ALL) if any(map(truncates, params)) else []
        arrays = [*noise, *tempered, *limits]
        moved = to_device(arrays, device) if arrays else []
        after = moved[len(noise) :]
        drawn = _Noise.of(noise, moved) if noise else None
        return cls(params, drawn, after[0] if tempered else None, after[len(tempered) :])

    def best(self, logits: Tensor, step: int, width: int) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [n, width]."""
        scores = logits if self.temperatures is None else logits / self.temperatures[:, None]
        if self.limits and _has_kernels(scores):
            from actors.sampling import truncation_kernels

            scores = truncation_kernels.truncate(scores, *self.limits)
        else:
            scores = _truncate(scores, self.params)
        raced = scores if self.noise is None else self.noise.added_to(scores, step)
        return _best(raced, width, raced)


_GREEDY_CHILDREN = ChildrenAhead((), None, None, ())
"""Nothing changes the logits of greedy rows, however many there are."""


@dataclass(frozen=True, slots=True)
class _Noise:
    """The coupled noise of sampled rows, for several steps; rows of one (seed, position) share one vector."""

    keys: Tensor  # int32 [steps, m or one more, 2]
    shared: Tensor  # int64 [s], the vector of every sampled row
    rows: Tensor  # int64 [s], the sampled rows
    num_vectors: int

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], moved: Sequence[Tensor]) -> _Noise:
        """The record of `_noise_arrays` and their copies, the first ones of `moved`."""
        keys, shared, rows = moved[:3]
        return cls(keys, shared, rows, int(arrays[1].max()) + 1)

    def added_to(self, scores: Tensor, step: int, first: int = 0) -> Tensor:
        """A tensor of its own: scores [n, V] of tokens from `first` on, and the noise of the sampled rows."""
        tokens = torch.arange(first, first + scores.shape[-1], device=scores.device)
        noise = gumbel(self.keys[step, : self.num_vectors], tokens)
        if self.num_vectors < len(self.rows):
            noise = noise[self.shared]
        return noise.add_(scores) if len(self.rows) == len(scores) else scores.index_add(0, self.rows, noise)


def _noise_arrays(params: Sequence[SamplingParams], positions: Sequence[int], num_steps: int) -> list[np.ndarray]:
    """What `_Noise` has on the device, nothing if no row is sampled; `positions` are those of the first step. The keys
    of a step are padded to an even number, so that those of every step are aligned."""
    rows = [row for row, one in enumerate(params) if not is_greedy(one)]
    if not rows:
        return []
    vectors: dict[tuple[int, int], int] = {}
    shared = [vectors.setdefault((params[row].seed, positions[row]), len(vectors)) for row in rows]
    keys = np.zeros((num_steps, len(vectors) + len(vectors) % 2, 2), dtype=np.int32)
    for step in range(num_steps):
        own = [noise_key(seed, NoiseStream.COUPLED, position + step) for seed, position in vectors]
        keys[step, : len(vectors)] = spread_keys(own)
    return [keys, np.array(shared), np.array(rows)]


def _with_noise(scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], first: int = 0) -> Tensor:
    """Scores, of tokens from `first` on, plus the coupled noise of every sampled row."""
    arrays = _noise_arrays(params, positions, 1)
    return _Noise.of(arrays, to_device(arrays, scores.device)).added_to(scores, 0, first) if arrays else scores


def probabilities(scores: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of processed logits [n, V], float64 [n, V]; one-hot at the arg-max when greedy."""
    if is_greedy(params):
        return torch.zeros_like(scores, dtype=torch.float64).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return scores.softmax(dim=-1, dtype=torch.float64)
