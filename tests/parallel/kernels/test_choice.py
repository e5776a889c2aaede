"""Tokens chosen by the kernel: the first place of the largest number of each row."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels.choice import Race, Races, choose_rows
from parallel.kernels.library import library
from parallel.kernels.steps import NotRecordable

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")


def chosen(logits: torch.Tensor, race: Race = Race(), rows: list[int] | None = None, num_steps: int = 1):  # noqa: B008
    """What every step chooses from the same logits."""
    places = None if rows is None else torch.tensor(rows)
    races = Races(race, num_steps, len(rows or logits), None if places is None else places.data_ptr())
    for at in races.addresses:
        choose_rows(_Record(at), logits)
    return races.chosen.tolist()


class _Record:
    """A race where it lies in memory."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 97, 4096, 4099])
def test_the_largest_number_of_every_row(size):
    logits = drawn(5, size)
    assert chosen(logits) == [logits.argmax(-1).tolist()]


@pytest.mark.parametrize("size", [3, 97, 4096])
def test_noise_and_temperature_by_step_and_row(size):
    logits, noise, temperatures = drawn(3, size), drawn(2, 4, size), torch.tensor([0.5, 1.0, 3.0])
    noise[:, 1] = 0.0
    expected = [(logits / temperatures[:, None] + own[:3]).argmax(-1).tolist() for own in noise]
    assert chosen(logits, Race(temperatures, noise), num_steps=2) == expected


def test_the_first_step_reads_the_rows_that_are_asked_for():
    logits = drawn(6, 50)
    assert chosen(logits, rows=[1, 5], num_steps=2) == [logits[[1, 5]].argmax(-1).tolist(), logits[:2].argmax(-1).tolist()]


@pytest.mark.parametrize("places", [(0, 1), (15, 16), (3, 40), (40, 90), (2, 18, 34)])
def test_of_equal_numbers_the_first(places):
    logits = torch.full((1, 97), -1.0)
    logits[0, list(places)] = 2.0
    assert chosen(logits) == [[places[0]]]


@pytest.mark.parametrize("size", [5, 16, 97])
def test_a_row_without_a_finite_largest_number_chooses_the_first_token(size):
    logits = drawn(4, size)
    logits[0, size - 1] = torch.nan
    logits[1, size // 2] = torch.inf
    logits[2] = -torch.inf
    assert chosen(logits) == [[0, 0, 0, int(logits[3].argmax())]]


def test_a_banned_token_is_never_chosen():
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 37] = -1e30
    assert chosen(logits, Race(torch.ones(1), torch.full((1, 1, 40), 5.0))) == [[37]]


def test_other_types_are_refused():
    with pytest.raises(NotRecordable, match="bfloat16"):
        choose_rows(torch.empty(0), torch.zeros(1, 4, dtype=torch.bfloat16))
