"""How a quantised matrix lies in memory for the kernels of `triton_products.py`: the type of its codes and the order of
them. A number is (code - zero point) * scale.

Int4 codes lie 8 to a word: word j of a stretch of 8 * `span` inputs has input j in its lowest bits, then input
span + j, and so on. So one shift of `span` words gives `span` consecutive inputs, without moving numbers between
threads. Loads no PyTorch; knows no checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PER_WORD = 8
"""Int4 codes in an int32."""
_LEAST_SPAN = 16
"""Inputs of the smallest product of tensor cores."""
_LARGEST_SPAN = {"int4": 32, "int8": 128, "fp8": 128}
"""Makes 128 bytes of every output a load, which a GPU's memory hands out at once."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`group` inputs of an output share a scale, and a zero point if there are any; 0: all of them."""

    kind: Literal["int4", "int8", "fp8"]
    group: int = 0
    has_zeros: bool = False
    """Whether int4 codes have zero points of their own; without them it is 8."""
    scale_bytes: int = 4

    @property
    def per_word(self) -> int:
        return PER_WORD if self.kind == "int4" else 1

    @property
    def span(self) -> int:
        """Inputs that are multiplied at a time; they never belong to two groups. Below 16 there is no kernel."""
        largest = _LARGEST_SPAN[self.kind]
        return math.gcd(self.group, largest) if self.group else largest

    @property
    def has_kernel(self) -> bool:
        return self.span >= _LEAST_SPAN

    def num_words(self, inputs: int) -> int:
        """Words of one output: whole stretches of inputs, filled up with zeros."""
        return -(-inputs // (self.per_word * self.span)) * self.span

    def num_groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def num_bytes(self, outputs: int, inputs: int) -> int:
        word_bytes = 4 if self.kind == "int4" else 1
        group_bytes = self.scale_bytes + (1 if self.has_zeros else 0)
        return outputs * (self.num_words(inputs) * word_bytes + self.num_groups(inputs) * group_bytes)
