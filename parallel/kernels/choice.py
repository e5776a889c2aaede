"""The tokens of rows of logits on CPU, by the kernel in `choice.cpp`: of each the place of the largest one that
truncation keeps, with noise.

The record of a race is that of the C++ source, field by field. Knows no requests and no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.library import library
from parallel.kernels.steps import Kernel, NotRecordable

_FIELDS = 12
_SIZE = array("q").itemsize


class Race(NamedTuple):
    """One token for each of some rows, in one or several steps: of the logits / temperature that truncation keeps the
    first place of the largest with noise."""

    temperatures: Tensor | None = None
    """float32 [rows]; None: all 1."""
    keys: Tensor | None = None
    """Keys of the noise (`noise.py`), int32 [steps, rows or more, 2]; None: no noise."""
    sampled: Tensor | None = None
    """Which rows have noise, bool [rows]; None: all."""
    limits: Sequence[Tensor] = ()
    """What rows keep, as in `truncation.py`, [rows] each; none: all."""


def has_choice() -> bool:
    """Whether the kernel can be had on this machine; compiles it at the first call."""
    return library() is not None


@cache
def _choose() -> Kernel:
    return Kernel("choose_rows", *[c_void_p] * 2, c_int64)


class Races:
    """Where `choose_rows` writes what each step chooses, `chosen` [steps, n], and what it reads. Of the logits of the
    first step those rows are raced over whose indices, int64 [n], are at the address `rows`, else, as in the other
    steps, the first n. Column i is the token `first` + i; `none` stands for that of a row whose largest number is not
    finite, as with any NaN."""

    def __init__(
        self,
        race: Race,
        num_steps: int,
        count: int,
        *,
        rows: int = 0,
        values: Tensor | None = None,
        first: int = 0,
        none: int = 0,
    ) -> None:
        temperatures, keys, sampled, limits = self._race = race
        self.chosen = torch.from_numpy(np.empty((num_steps, count), dtype=np.int64))
        at_chosen, at_keys, per_step = self.chosen.data_ptr(), _address(keys), 0
        if keys is not None:
            assert keys.is_contiguous()
            assert keys.dtype == torch.int32
            assert keys.shape[1] >= count
            per_step = keys.stride(0) * keys.itemsize
        self.places = [at_chosen + step * count * _SIZE for step in range(num_steps)]
        """Addresses of the tokens that each step chooses."""
        same = _address(sampled), *(map(Tensor.data_ptr, limits) if limits else (0, 0, 0))
        at_temperatures, after = _address(temperatures), (_address(values), count, first, none)
        records: list[int] = []
        for place in self.places:
            records += (rows, at_temperatures, at_keys, *same, place, *after)
            rows, at_keys = 0, at_keys + per_step
        self._records = array("q", records)
        start = self._records.buffer_info()[0]
        self.addresses = range(start, start + num_steps * _FIELDS * _SIZE, _FIELDS * _SIZE)
        """What `choose_rows` is given in each step."""


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def any_race() -> Tensor:
    """What stands for a race where the call of `choose_rows` is recorded."""
    return torch.empty(0, _FIELDS, dtype=torch.int64)


def choose_rows(race: int, logits: Tensor) -> None:
    """The tokens of one step, to where the race at this address says; `logits` float32 [rows, size]."""
    if logits.dtype != torch.float32:
        raise NotRecordable(f"logits of {logits.dtype}")
    _choose()(race, logits.data_ptr(), logits.shape[1])


def chosen_rows(race: Race, logits: Tensor, *, none: int = 0) -> Tensor:
    """The token that is chosen of each row of logits [n, size], int64 [n]."""
    logits = logits.contiguous()
    races = Races(race, 1, logits.shape[0], none=none)
    choose_rows(races.addresses[0], logits)
    return races.chosen.view(-1)


def largest_rows(race: Race, logits: Tensor, *, first: int = 0, none: int = 0) -> tuple[Tensor, Tensor]:
    """The largest number of each row of logits [n, size], float32 [n], and the token that is chosen, int64 [n]."""
    logits = logits.contiguous()
    values = torch.from_numpy(np.empty(len(logits), dtype=np.float32))
    races = Races(race, 1, len(logits), values=values, first=first, none=none)
    choose_rows(races.addresses[0], logits)
    return values, races.chosen[0]
