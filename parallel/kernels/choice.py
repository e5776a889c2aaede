"""The tokens of rows of logits on CPU, by the kernel in `choice.cpp`: of each the place of the largest one.

The record of a race is that of the C++ source, field by field. Knows no requests and no text.
"""

from __future__ import annotations

from array import array
from ctypes import c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.steps import Kernel, NotRecordable


class Race(NamedTuple):
    """Chains of several steps, of which each chooses one token for some rows: the first place of the largest of logits
    / temperature + noise, and 0 where that is not finite."""

    temperatures: Tensor | None = None
    """float32 [rows]; None: all 1."""
    noise: Tensor | None = None
    """float32 [steps, rows or more, size of the vocabulary]; None: none."""


@cache
def _choose() -> Kernel:
    return Kernel("choose_rows", *[c_void_p] * 2, c_int64)


_FIELDS = 5


class Races:
    """Where `choose_rows` writes what each step of a chain chooses, `chosen` [steps, n], and what it reads. Of the
    logits of the first step those rows are raced over whose indices, int64 [n], are at the address `rows`, else, as in
    the other steps, the first n."""

    def __init__(self, race: Race, num_steps: int, count: int, rows: int | None = None) -> None:
        temperatures, noise = self._race = race
        self.chosen = torch.from_numpy(np.empty((num_steps, count), dtype=np.int64))
        at_temperatures = 0 if temperatures is None else temperatures.data_ptr()
        at_noise, per_step = (0, 0) if noise is None else (noise.data_ptr(), noise.stride(0) * noise.itemsize)
        at, size = self.chosen.data_ptr(), self.chosen.itemsize
        self.places = [at + step * count * size for step in range(num_steps)]
        """Addresses of the tokens that each step chooses."""
        self._numbers = array("q", [rows or 0])
        for step, place in enumerate(self.places):
            self._numbers.extend((at_temperatures, at_noise + step * per_step, place, count, 0))
        start, size = self._numbers.buffer_info()[0], _FIELDS * size
        self.addresses = [start + step * size for step in range(num_steps)]
        """What `choose_rows` is given in each step."""


def any_race() -> Tensor:
    """In place of a race where the call of `choose_rows` is recorded."""
    return torch.empty(0, _FIELDS, dtype=torch.int64)


def choose_rows(race: Tensor, logits: Tensor) -> None:
    """The tokens of one step, to where its race says; `logits` float32 [rows, size]."""
    if logits.dtype != torch.float32:
        raise NotRecordable(f"logits of {logits.dtype}")
    _choose()(race.data_ptr(), logits.data_ptr(), logits.shape[1])
