"""The CUDA graphs that a rank captures at its start, and the memory that they take. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.model.config import DecoderConfig

GraphShape = tuple[int, int]
"""Sequences, and rows of each."""

_RESULTS = 4
"""Of a pass, in hidden states: the last ones and three residual streams that a drafter reads."""
LAYER_BYTES = 256 << 10
"""Of device memory for a layer of a graph: estimated, not measured."""


def graph_shapes(max_num_seqs: int, most_rows: int, max_num_batched_tokens: int) -> list[GraphShape]:
    """Powers of two up to those that hold these sequences and rows, within the limit of a pass, the largest first: the
    buckets that passes are rounded up to. The smaller ones then fit into the memory of the largest."""
    sizes = [(batch, rows) for batch in _powers(max_num_seqs) for rows in _powers(most_rows)]
    largest = bucket(max_num_batched_tokens)
    return sorted((size for size in sizes if size[0] * size[1] <= largest), key=lambda size: (-size[0] * size[1], size))


def graph_bytes(config: DecoderConfig, item_bytes: int, shapes: Sequence[GraphShape]) -> int:
    """An upper estimate. All graphs share one pool of memory, so that activations count once, for the largest pass;
    each has nodes and results of its own."""
    if not shapes:
        return 0
    rows = [batch * per_sequence for batch, per_sequence in shapes]
    activations = max(rows) * (6 * config.hidden_size + 3 * config.intermediate_size)
    results = sum(rows) * _RESULTS * config.hidden_size
    return (activations + results) * item_bytes + len(shapes) * config.num_layers * LAYER_BYTES


def describe(shapes: Sequence[GraphShape]) -> str:
    """`64x8 64x4 ...`: sequences times rows."""
    return " ".join(f"{batch}x{rows}" for batch, rows in shapes)


def bucket(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(bucket(most).bit_length())]
