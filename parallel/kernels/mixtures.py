"""The kernels of `triton_experts.py` as functions of tensors. Knows no layers and no ranks but where a rank's experts
begin among all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels.triton_launch import block_size, gated, launch

BLOCK_N, BLOCK_K = 16, 256
"""Outputs and inputs of a tile of the products of few rows."""
_BLOCK, _SORTED_AT_ONCE = 1024, 64
MOST_SORTED = 4096
"""Entries up to which `by_expert` is taken; the work of its kernel grows with their square."""


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The experts of every row: `chosen` int32 [T, K], and their `weights` [T, K]."""

    chosen: Tensor
    weights: Tensor


def choose(scores: Tensor, per_token: int, *, normalize: bool) -> ChosenExperts:
    """The most probable experts of rows of `scores` [T, experts]; of equal ones the first."""
    from parallel.kernels.triton_experts import route_rows

    num_rows, num_experts = scores.shape
    chosen = torch.empty(num_rows, per_token, dtype=torch.int32, device=scores.device)
    weights = scores.new_empty(num_rows, per_token)
    sizes = dict(K=per_token, BLOCK_K=block_size(per_token, 1), BLOCK=block_size(num_experts))
    launch(route_rows, (num_rows,), scores.contiguous(), chosen, weights, num_experts, NORMALIZE=normalize, **sizes)
    return ChosenExperts(chosen, weights)


def mix_few(x: Tensor, choice: ChosenExperts, gate_up: Tensor, down: Tensor, first: int) -> Tensor:
    """What the experts [experts, 2 * size, H], [experts, H, size], of which this rank's are those from `first` on, give
    rows x [T, H]. Reads an expert's matrices once for each of its rows."""
    from parallel.kernels.triton_experts import feed_entries, give_entries

    num_experts, hidden, size = down.shape
    num_entries = choice.chosen.numel()
    made, given = x.new_empty(num_entries, size), x.new_empty(num_entries, hidden)
    sizes = dict(BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)
    common = hidden, size, first, num_experts
    grid = partial(_grid, num_entries, BLOCK_N)
    per_token = choice.chosen.shape[1]
    launch(feed_entries, grid(size), x.contiguous(), choice.chosen, gate_up, made, *common, K=per_token, **sizes)
    launch(give_entries, grid(hidden), made, choice.chosen, down, given, *common, **sizes)
    return _sum(given, choice, None, first, num_experts)


def mix_sorted(x: Tensor, choice: ChosenExperts, gate_up: Tensor, down: Tensor, first: int) -> Tensor:
    """The same by products of all rows of an expert at once."""
    places, rows, ends = by_expert(choice.chosen, first, len(down))
    made = gated(F.grouped_mm(x.index_select(0, rows), gate_up.transpose(1, 2), offs=ends))
    given = F.grouped_mm(made, down.transpose(1, 2), offs=ends)
    return _sum(given, choice, places, first, len(down))


def by_expert(chosen: Tensor, first: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The place of every entry of `chosen` [T, K] in the order of this rank's experts, those of others last; the row of
    each place; and where the places of each expert end. All int32."""
    from parallel.kernels.triton_experts import sort_entries

    num_entries = chosen.numel()
    places, rows = chosen.new_empty(num_entries), chosen.new_empty(num_entries)
    ends = chosen.new_empty(num_experts)
    blocks = [-(-count // _SORTED_AT_ONCE) for count in (num_entries, num_experts)]
    counts = num_entries, blocks[0], first, num_experts
    sizes = dict(K=chosen.shape[1], BLOCK=_SORTED_AT_ONCE, CHUNK=128)
    launch(sort_entries, (sum(blocks),), chosen, places, rows, ends, *counts, **sizes)
    return places, rows, ends


def _sum(given: Tensor, choice: ChosenExperts, places: Tensor | None, first: int, num_experts: int) -> Tensor:
    from parallel.kernels.triton_experts import sum_entries

    num_rows, per_token = choice.chosen.shape
    hidden = given.shape[1]
    out = given.new_empty(num_rows, hidden)
    tensors = given, choice.chosen, choice.weights, choice.chosen if places is None else places, out
    sizes = dict(K=per_token, BLOCK=min(_BLOCK, block_size(hidden)), SORTED=places is not None)
    launch(sum_entries, _grid(num_rows, sizes["BLOCK"], hidden), *tensors, hidden, first, num_experts, **sizes)
    return out


def _grid(count: int, block: int, size: int) -> tuple[int, int]:
    return count, -(-size // block)
