"""The CUDA graphs that a rank captures at its start, and the memory that they take. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.model.config import DecoderConfig

GraphShape = tuple[int, int, int]
"""Sequences, rows of the one with the most, and rows in all: the least powers of two that hold those of a pass."""

_RESULTS = 4
"""Of a pass, in hidden states: the last ones and three residual streams that a drafter reads."""
LAYER_BYTES = 256 << 10
"""Of device memory for a layer of a graph: estimated, not measured."""


def graph_shapes(max_num_seqs: int, most_rows: int, max_num_batched_tokens: int) -> list[GraphShape]:
    """All up to those that hold these sequences and rows, within the limit of a pass, the largest first. The smaller
    ones then fit into the memory of the largest."""
    largest = bucket(max_num_batched_tokens)
    sizes = [
        (batch, rows, total)
        for batch in _powers(max_num_seqs)
        for rows in _powers(most_rows)
        for total in _powers(batch * rows)
        if batch * rows <= largest and total > batch // 2 + rows // 2  # which the fewest sequences and rows have
    ]
    return sorted(sizes, key=lambda size: (-size[2], size))


def example_rows(shape: GraphShape) -> list[int]:
    """The rows of each sequence in some pass of this shape."""
    batch, rows, total = shape
    if total < batch + rows - 1:
        batch, rows = batch // 2 + 1, rows // 2 + 1
    left = total - rows
    numbers = [rows]
    for others in range(batch - 1, 0, -1):
        numbers.append(min(rows, left - others + 1))
        left -= numbers[-1]
    return numbers


def graph_bytes(config: DecoderConfig, item_bytes: int, shapes: Sequence[GraphShape]) -> int:
    """An upper estimate. All graphs share one pool of memory, so that activations count once, for the largest pass;
    each has nodes and results of its own."""
    if not shapes:
        return 0
    rows = [total for _, _, total in shapes]
    activations = max(rows) * (6 * config.hidden_size + 3 * config.intermediate_size)
    results = sum(rows) * _RESULTS * config.hidden_size
    return (activations + results) * item_bytes + len(shapes) * config.num_layers * LAYER_BYTES


def describe(shapes: Sequence[GraphShape]) -> str:
    """`64x8 64x8/256 ...`: sequences times rows, behind / rows in all where they are fewer."""
    return " ".join(f"{batch}x{rows}" + f"/{total}" * (total < batch * rows) for batch, rows, total in shapes)


def bucket(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(bucket(most).bit_length())]
