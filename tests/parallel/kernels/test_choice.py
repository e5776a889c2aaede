"""Tokens chosen by the kernel: the first place of the largest number of each row."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels.choice import Race, Races, choose_rows, largest_rows
from parallel.kernels.library import library
from parallel.kernels.noise import gumbel_rows
from parallel.kernels.steps import NotRecordable
from parallel.kernels.truncation import truncate

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")


def chosen(logits: torch.Tensor, race: Race = Race(), rows: list[int] | None = None, num_steps: int = 1):  # noqa: B008
    """What every step chooses from the same logits."""
    places = None if rows is None else torch.tensor(rows)
    races = Races(race, num_steps, len(rows or logits), rows=0 if places is None else places.data_ptr())
    for at in races.addresses:
        choose_rows(at, logits)
    return races.chosen.tolist()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 97, 4096, 4099])
def test_the_largest_number_of_every_row(size):
    logits = drawn(5, size)
    assert chosen(logits) == [logits.argmax(-1).tolist()]


@pytest.mark.parametrize("size", [3, 97, 4096])
@pytest.mark.parametrize("sampled", [None, [True, False, True]])
def test_noise_and_temperature_by_step_and_row(size, sampled):
    logits, temperatures = drawn(3, size), torch.tensor([0.5, 1.0, 3.0])
    keys = torch.arange(16, dtype=torch.int32).view(2, 4, 2) * 77777
    race = Race(temperatures, keys, None if sampled is None else torch.tensor(sampled))
    noise = torch.stack([gumbel_rows(own[:3], torch.arange(size)) for own in keys])
    noise[:, torch.tensor([one is False for one in sampled or [None] * 3])] = 0.0
    assert chosen(logits, race, num_steps=2) == (logits / temperatures[:, None] + noise).argmax(-1).tolist()


def test_a_part_of_the_columns_has_the_noise_of_its_tokens():
    logits, keys = drawn(4, 90), torch.arange(8, dtype=torch.int32).view(1, 4, 2) * 999
    values, tokens = largest_rows(Race(None, keys), logits)
    parts = [
        largest_rows(Race(None, keys), logits[:, part], first=part.start) for part in (slice(0, 40), slice(40, 90))
    ]
    best = torch.stack([part for part, _ in parts]).argmax(0)
    assert torch.equal(torch.stack([part for part, _ in parts]).amax(0), values)
    assert [parts[which][1][row].item() for row, which in enumerate(best.tolist())] == tokens.tolist()


def test_truncation_and_temperature_come_before_the_noise():
    logits, temperatures = 4 * drawn(5, 300), torch.tensor([0.3, 1.0, 2.0, 0.7, 1.0])
    keys = torch.arange(20, dtype=torch.int32).view(2, 5, 2) * 31337
    top_ks, shares = torch.tensor([3, 300, 1 << 30, 40, 7], dtype=torch.int32), torch.tensor([0.01] * 5).log()
    limits = top_ks, torch.tensor([0.5, 0.9, 0.99, torch.inf, 0.2], dtype=torch.float64), shares
    scores = truncate(logits / temperatures[:, None], *limits)
    expected = [(scores + gumbel_rows(own, torch.arange(300))).argmax(-1).tolist() for own in keys]
    assert chosen(logits, Race(temperatures, keys, None, limits), num_steps=2) == expected
    assert chosen(logits, Race(temperatures, keys), num_steps=2) != expected


def test_the_first_step_reads_the_rows_that_are_asked_for():
    logits = drawn(6, 50)
    assert chosen(logits, rows=[1, 5], num_steps=2) == [
        logits[[1, 5]].argmax(-1).tolist(),
        logits[:2].argmax(-1).tolist(),
    ]


@pytest.mark.parametrize("places", [(0, 1), (15, 16), (3, 40), (40, 90), (2, 18, 34)])
def test_of_equal_numbers_the_first(places):
    logits = torch.full((1, 97), -1.0)
    logits[0, list(places)] = 2.0
    assert chosen(logits) == [[places[0]]]


@pytest.mark.parametrize("none", [0, -1])
@pytest.mark.parametrize("size", [5, 16, 97])
def test_a_row_without_a_finite_largest_number_chooses_none(size, none):
    logits = drawn(4, size)
    logits[0, size - 1] = torch.nan
    logits[1, size // 2] = torch.inf
    logits[2] = -torch.inf
    values, tokens = largest_rows(Race(), logits, none=none, first=1000)
    assert tokens.tolist() == [none, none, none, 1000 + int(logits[3].argmax())]
    assert values[0].isnan() and values[1:].tolist() == [torch.inf, -torch.inf, logits[3].max().item()]


def test_a_banned_token_is_never_chosen():
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 37] = -1e30
    assert chosen(logits, Race(None, torch.zeros(1, 1, 2, dtype=torch.int32))) == [[37]]


@pytest.mark.parametrize("threads", [1, 3])
def test_large_rows_do_not_depend_on_threads(threads):
    logits, keys, before = drawn(7, 30_000), torch.arange(14, dtype=torch.int32).view(1, 7, 2), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = chosen(logits, Race(None, keys))
    finally:
        torch.set_num_threads(before)
    assert found == [(logits + gumbel_rows(keys[0], torch.arange(30_000))).argmax(-1).tolist()]


def test_other_types_are_refused():
    with pytest.raises(NotRecordable, match="bfloat16"):
        choose_rows(0, torch.zeros(1, 4, dtype=torch.bfloat16))
