"""Counter-based randomness: a number is a pure function of (seed, stream, counters, token id), never of a state.

Drafter and target draw the same noise for the same token at the same position without exchanging anything, in any
batch, after any restart, on any device: the bits come from integer arithmetic alone. Knows neither logits nor trees.

Keys are mixed on the host (SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014,
with Stafford's variant 13 of the finaliser) and spread over the vocabulary on the device by two keyed rounds of the
32-bit mixer `lowbias32` (Wellons, "Prospecting for hash functions", 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from parallel.kernels import noise as host_kernels
from parallel.kernels.triton_launch import has_triton
from parallel.transfers import to_device

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1
# Those of lowbias32; the second one as its negative residue, which int32 can hold. Products wrap around.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_BELOW_ONE = 1.0 - 2.0**-24


class NoiseStream(IntEnum):
    """The purpose of a number; numbers of different streams are independent.

    COUPLED is keyed by (seed, position), so that drafter and target share it; UNMASKING by (seed, stream, position,
    tokens filled so far in the block). The others are keyed by (seed, stream,
    step, node): a ratio test that used a number twice would be biased.
    """

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    UNMASKING = 4


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return word ^ (word >> 31)


def noise_key(seed: int, stream: NoiseStream, *counters: int) -> int:
    """64 well-mixed bits for (seed, stream, counters)."""
    key = _mix(seed & _MASK_64)
    for word in (stream, *counters):
        key = _mix(key ^ word)
    return key


def uniform(key: int) -> float:
    """The key as a number in [0, 1), to 53 bits."""
    return (key >> 11) * 2.0**-53


def _scramble_(words: Tensor) -> Tensor:
    """One round of lowbias32 on int32 words, in place; a shift to the right also brings the sign, which is masked."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _MULTIPLIERS[0]
    words ^= (words >> 15).bitwise_and_(0x1FFFF)
    words *= _MULTIPLIERS[1]
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


def spread_keys(keys: Sequence[int]) -> np.ndarray:
    """The high and the low half of every key, int32 [n, 2]: the same bits, in half the time of int64."""
    halves = np.array([(key >> 32, key & _MASK_32) for key in keys], dtype=np.uint32)
    return halves.view(np.int32).reshape(-1, 2)


def noise_bits(keys: Sequence[int] | Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits per (key, token), as int64 [n, m]; `token_ids` is [m], shared by all keys, or [n, m]. A tensor has
    the halves of the keys, on the device."""
    halves = _halves(keys, token_ids.device)
    words = _scramble_(token_ids.to(torch.int32) ^ halves[:, :1])
    words ^= halves[:, 1:]
    return _scramble_(words).to(torch.int64).bitwise_and_(_MASK_32)


def _halves(keys: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    return keys if isinstance(keys, Tensor) else to_device([spread_keys(keys)], device)[0]


def gumbel(keys: Sequence[int] | Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise per (key, token), float32 [n, m]; always finite. One launch on a GPU.

    Winners of a Gumbel race have a small exponential E, which -log1p(-u) resolves down to 2^-33; -log(u) with u near
    one would round it to zero. The clamp keeps losers finite, so that a banned token (-inf) never ties with one.
    """
    if token_ids.is_cuda and has_triton():
        from actors.sampling import noise_kernels

        return noise_kernels.gumbel(_halves(keys, token_ids.device), token_ids)
    if token_ids.is_cpu and host_kernels.has_noise():
        return host_kernels.gumbel_rows(_halves(keys, token_ids.device), token_ids.to(torch.int64))
    u = noise_bits(keys, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return u.neg_().log1p_().neg_().log_().neg_()
