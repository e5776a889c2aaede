"""How many KV slots fit a rank, from shapes and free memory, before a weight is read.

All ranks of a group use the smallest of their numbers. Knows bytes, no sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from parallel.comm.group import Group
from parallel.kernels.products import has_products
from parallel.kernels.triton_launch import runs_on
from parallel.kv.pool import FP8
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.config import HeadRows
from parallel.model.families.registry import read_config
from parallel.model.layers.weight import Stored
from parallel.model.partition import LayerLayout
from parallel.runtime.graph_list import GraphList, graph_bytes
from parallel.runtime.model_bytes import dtype_name, kv_bytes_per_slot, weight_bytes, weights_name

_POOL_SHARE = {"cuda": 0.85, "cpu": 0.25}
"""Fraction of the memory left after the weights that the pool may take; other processes share a CPU's memory."""


_NO_GRAPHS = GraphList()


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a rank will allocate for a model."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    """The type in which KV rows are stored."""
    max_model_len: int
    num_slots: int
    weight_bytes: int
    kv_bytes: int
    weights: Stored
    """Form in which matrices are stored."""

    def facts(self) -> dict[str, object]:
        return {
            "dtype": _name(self.dtype),
            "weights": _name(self.weights),
            "kv_dtype": _name(self.kv_dtype),
            "max_model_len": self.max_model_len,
            "kv_slots": self.num_slots,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
        }


def choose_dtype(name: str, device: str) -> torch.dtype:
    return getattr(torch, dtype_name(name, device))


def choose_kv_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The type of KV rows, `auto` or `fp8`, of a model of this type."""
    return FP8 if kv_dtype == "fp8" else dtype


def choose_weights(weights: str, dtype: str, device: str, path: str = "", *, rounds: bool = False) -> Stored:
    """How the matrices of the checkpoint are stored (`weights_name`)."""
    is_packing = weights == "packed" or device.startswith("cuda")
    has_kernels = runs_on(torch.device(device)) if is_packing else has_products()
    name = weights_name(weights, dtype_name(dtype, device), device, path, has_kernels=has_kernels, rounds=rounds)
    return name if name in ("packed", "w8a8") else getattr(torch, name)


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device with several ranks on it: bytes of the other ranks' weights, and this rank's part of what all of their
    weights leave."""

    neighbour_bytes: int
    part: float


def total_bytes(device: str) -> int:
    """Memory of the whole device."""
    return torch.cuda.mem_get_info(torch.device(device))[1]


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return psutil.virtual_memory().available


def fit_slots(
    path: str,
    group: Group,
    device: str,
    dtype: str,
    *,
    max_num_seqs: int,
    max_model_len: int = 0,
    num_slots: int = 0,
    stretch: int = 0,
    layout: LayerLayout | None = None,
    weights: str = "auto",
    rounds: bool = False,
    kv_dtype: str = "auto",
    head: HeadRows | None = None,
    num_logit_rows: int = 0,
    max_num_batched_tokens: int = 0,
    invariant: bool = False,
    graphs: GraphList = _NO_GRAPHS,
    sharing: DeviceShare | None = None,
    beside: tuple[int, int] = (0, 0),
    agreed_slots: int = 0,
) -> ModelMemory:
    """Size the pool for `max_num_seqs` sequences of `max_model_len` tokens, or for as many as fit beside the logits of
    `num_logit_rows` rows, twice in float32: as computed, and while their likeliest tokens are read; on CUDA beside
    `graphs`, tables of slots and parts of the attention of `max_num_batched_tokens` rows, `invariant` or not. With
    others on the same device (`sharing`) a rank keeps to its part, in whatever order they allocate. `beside`: bytes
    that a drafter on the same ranks takes, and those that it takes for every slot. `agreed_slots`: that drafter's slots
    at most, those of the pool whose size counted it.

    The ranks share the model tensor-parallel, or layer-parallel by `layout`. `rounds`: whether `weights=auto` may round
    the weights. ValueError if the weights or the given `num_slots`, which must be the same on all ranks, do not fit.
    """
    config = replace(read_config(resolve_checkpoint(path)).stretched(stretch), head=head)
    chosen, stored = choose_dtype(dtype, device), choose_weights(weights, dtype, device, path, rounds=rounds)
    max_model_len = min(max_model_len or config.max_positions, config.max_positions)
    row_type = choose_kv_dtype(kv_dtype, chosen)
    held = weight_bytes(config, group.size, chosen.itemsize, layout, group.rank, weights=_name(stored), path=path)
    per_slot = kv_bytes_per_slot(config, group.size, row_type.itemsize, layout, group.rank)
    reserved, tables = num_logit_rows * config.vocab_size * 8, 0
    if device.startswith("cuda"):
        from parallel.kv.slot_mirror import BYTES_PER_SLOT
        from parallel.model.layers.split_kv import most_partial_bytes

        tables, ranks = BYTES_PER_SLOT, group.size if layout is None else 1
        shape = config.num_heads // ranks, config.local_kv_heads(ranks), config.head_dim
        sizes, longest = (max_num_batched_tokens, max_num_seqs), max_model_len if invariant else 0
        trees = max((total for _, _, total in graphs.passes), default=0)
        partial_bytes = most_partial_bytes(*shape, *sizes, torch.device(device), longest=longest, tree_rows=trees)
        reserved += graph_bytes(config, chosen.itemsize, graphs) + partial_bytes
    sizes, limits = (held + beside[0], per_slot + tables + beside[1]), {"reserved": reserved, "sharing": sharing}
    max_source_len = 0 if config.encoder is None else config.encoder.max_positions
    most = max_num_seqs * (max_model_len + max_source_len)
    num_slots = num_slots or min(most, agreed_slots)
    beside_it = " and a drafter on its ranks, which drafter.placement=separate would give its own" * any(beside)
    num_slots = affordable_slots(path + beside_it, group, device, *sizes, most=most, num_slots=num_slots, **limits)
    return ModelMemory(chosen, row_type, max_model_len, num_slots, held, num_slots * per_slot, stored)


def affordable_slots(
    path: str,
    group: Group,
    device: str,
    weight_bytes: int,
    bytes_per_slot: int,
    *,
    most: int,
    num_slots: int = 0,
    reserved: int = 0,
    sharing: DeviceShare | None = None,
) -> int:
    """`num_slots`, or as many as fit beside weights still to be loaded and `reserved` bytes, `most` at most; ValueError
    if they do not fit. All ranks agree."""
    left = free_bytes(device) - weight_bytes - reserved
    if sharing is not None:
        shared = total_bytes(device) - weight_bytes - sharing.neighbour_bytes
        left = min(left, int(shared * sharing.part) - reserved)
    if left < bytes_per_slot * (num_slots or 1):
        raise ValueError(
            f"{path}: {_gib(weight_bytes)} of weights and {_gib(bytes_per_slot * num_slots)} of KV do not fit the "
            f"{_gib(left + weight_bytes)} free on {device}; use more ranks, a smaller dtype or fewer KV slots"
        )
    if num_slots:
        return num_slots
    affordable = int(left * _POOL_SHARE[device.partition(":")[0]]) // max(1, bytes_per_slot)
    num_slots = min(most, affordable)
    if group.size > 1:
        agreed = group.all_gather(torch.tensor([float(num_slots)], dtype=torch.float64, device=device))
        num_slots = int(agreed.min())
    return num_slots


def _name(dtype: Stored) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
