"""The CUDA graphs that a rank captures at its start, and the memory that they take. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.kv.rounded_rows import rounded_rows
from parallel.model.config import DecoderConfig

GraphShape = tuple[int, int, int]
"""Sequences and rows of the one with the most, the least powers of two that hold those of a pass, and rows in all, as
`rounded_rows` gives them."""
ChainShape = tuple[int, int]
"""Sequences, a power of two, and steps of one row of each."""


@dataclass(frozen=True, slots=True)
class GraphList:
    """What a rank captures at its start. `of_every_row`: with the logits of all rows of a pass, which verifying and the
    levels of trees need; `of_last_rows`: of one row of every sequence, as behind a text."""

    passes: Sequence[GraphShape] = ()
    chains: Sequence[ChainShape] = ()
    of_every_row: bool = True
    of_last_rows: bool = False

    def largest_head(self) -> int:
        """Rows of logits at most."""
        rows = [total if self.of_every_row else batch for batch, _, total in self.passes]
        return max([*rows, *(batch for batch, _ in self.chains)], default=0)

    def __str__(self) -> str:
        """`64x8 64x8/256 ...`: sequences times rows, behind / rows in all where they are fewer; chains as `64x1*7`, 7
        steps."""
        passes = (f"{batch}x{rows}" + f"/{total}" * (total < batch * rows) for batch, rows, total in self.passes)
        return " ".join([*passes, *(f"{batch}x1*{steps}" for batch, steps in self.chains)])


_RESULTS = 4
"""Results of a pass in rows of hidden states: the last ones and three residual streams that a drafter reads."""
LAYER_BYTES = 256 << 10
"""Device memory that a graph takes for each layer: estimated, not measured."""


def graph_shapes(max_num_seqs: int, most_rows: int, max_num_batched_tokens: int) -> list[GraphShape]:
    """All up to those that hold these sequences and rows, within the limit of a pass, the largest first. The smaller
    ones then fit into the memory of the largest."""
    largest = bucket(max_num_batched_tokens)
    sizes = [
        (batch, rows, total)
        for batch in _powers(max_num_seqs)
        for rows in _powers(most_rows)
        for total in _totals(batch * rows)
        if batch * rows <= largest and total > batch // 2 + rows // 2  # which the fewest sequences and rows have
    ]
    return sorted(sizes, key=lambda size: (-size[2], size))


def chain_lengths(most: int) -> list[int]:
    """Steps of the chains that are captured, the longest first: `most` and the powers of two below, so that few of them
    make up any number of steps."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return [most, *reversed(powers)] if most > 0 else []


def chain_shapes(max_num_seqs: int, most_steps: int) -> list[ChainShape]:
    """Chains of all lengths, for all numbers of sequences up to the first that holds `max_num_seqs`."""
    return [(batch, steps) for batch in reversed(_powers(max_num_seqs)) for steps in chain_lengths(most_steps)]


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


def graph_bytes(config: DecoderConfig, item_bytes: int, graphs: GraphList) -> int:
    """An upper estimate. All graphs share one pool of memory, so that activations count once, for the largest pass, and
    so do logits, as the head gives them and as they are read; each has nodes and hidden states of its own."""
    if not graphs.passes:
        return 0
    copies = graphs.of_every_row + graphs.of_last_rows
    rows = [total for _, _, total in graphs.passes]
    copies_of_rows = max(1, config.experts_per_token)
    activations = max(rows) * (6 * config.hidden_size + 3 * copies_of_rows * config.intermediate_size)
    if config.num_experts:
        activations += max(rows) * 3 * copies_of_rows * config.hidden_size
    results = copies * sum(rows) * _RESULTS * config.hidden_size
    logits = 2 * graphs.largest_head() * config.num_logits
    scores = 4 * max((batch for batch, _ in graphs.chains), default=0) * config.num_logits  # in float32
    num_passes = copies * len(rows) + sum(steps for _, steps in graphs.chains)
    return (activations + results + logits) * item_bytes + scores + num_passes * config.num_layers * LAYER_BYTES


def bucket(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _totals(most: int) -> list[int]:
    """What `rounded_rows` gives up to that of `most`."""
    return sorted({rounded_rows(size) for power in _powers(most) for size in (power, max(1, power * 3 // 4))})


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(bucket(most).bit_length())]
