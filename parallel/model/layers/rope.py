"""Rotary position embedding (arXiv 2104.09864) and the frequency scalings that checkpoints ask for.

Frequencies are fixed at construction. "dynamic" (NTK by length) is therefore the plain base, which is exact up to the
checkpoint's `max_position_embeddings`; the engine stops there. Knows positions, not sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel.model.config import RopeScaling

Rotation = tuple[Tensor, Tensor]
"""cos and sin [T, 1, head_dim] of the positions of a pass; the sign of the rotation is in sin."""


class Rope:
    """cos and sin of every rotated dimension, for the positions of one pass.

    On CPU they are looked up: the table grows to the largest position that occurred, rounded up to a power of two.
    """

    def __init__(self, scaling: RopeScaling, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        frequencies, self.amplitude = _FREQUENCIES[scaling.rope_type](scaling, head_dim)
        # the first half is negated: sin then carries the signs of the rotation
        self.frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self.dtype = dtype
        self._table: Rotation | None = None
        self._num_known = 0  # positions that the table has
        self._addresses = 0, 0
        if self.frequencies.device.type == "cpu":
            self._fill(0)

    def __call__(self, positions: Tensor) -> Rotation:
        """positions [T] -> cos, sin [T, 1, head_dim]."""
        if self._table is None:
            return self._rotation(positions)
        cos, sin = self.table(int(positions.max()))
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def table(self, last: int) -> Rotation:
        """The table of a CPU, cos and sin [P, 1, head_dim] of the positions below P, which is more than `last`."""
        if last >= self._num_known:
            self._fill(1 << last.bit_length())
        assert self._table is not None, "there is a table on CPU alone"
        return self._table

    def table_addresses(self, last: int) -> tuple[int, int]:
        """Where the two parts of the table are, until it grows."""
        if last >= self._num_known:
            self._fill(1 << last.bit_length())
        return self._addresses

    def _fill(self, count: int) -> None:
        """Make the table of so many positions."""
        cos, sin = self._table = self._rotation(torch.arange(count))
        self._num_known, self._addresses = count, (cos.data_ptr(), sin.data_ptr())

    def turned_back(self, distance: int) -> Rotation:
        """What turns a rotated row to a position that is so much smaller: cos, sin [1, 1, head_dim]."""
        angles = -distance * self.frequencies.view(1, 1, -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _rotation(self, positions: Tensor) -> Rotation:
        angles = positions.view(-1, 1, 1) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.amplitude != 1:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return cos.to(self.dtype), sin.to(self.dtype)


def rotate(x: Tensor, rope: Rotation) -> Tensor:
    """x [T, heads, head_dim] rotated: the halves of a head are the two coordinates."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _default(scaling: RopeScaling, head_dim: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / scaling.rope_theta**exponents, 1.0


def _linear(scaling: RopeScaling, head_dim: int) -> tuple[Tensor, float]:
    return _default(scaling, head_dim)[0] / scaling.factor, 1.0


def _llama3(scaling: RopeScaling, head_dim: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    frequencies, _ = _default(scaling, head_dim)
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    turns = length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies, 1.0


def _yarn(scaling: RopeScaling, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate slow dimensions, extrapolate fast ones, and sharpen."""
    frequencies, _ = _default(scaling, head_dim)

    def dimension(num_turns: float) -> float:
        span = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(scaling.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    blended = stretched * frequencies / scaling.factor + (1 - stretched) * frequencies

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return blended, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return blended, mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return blended, mscale(1.0)


_FREQUENCIES = {"default": _default, "linear": _linear, "dynamic": _default, "llama3": _llama3, "yarn": _yarn}
