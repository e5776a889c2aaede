"""The attention kernel over numbers that are huge, tiny, infinite or none: what a row does not see cannot reach it,
what weighs nothing changes nothing, and what is none in a row's own keys shows in its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallel.kernels.attention import READS, LayerCall, PassRows, has_attention
from parallel.kv.pass_plan import BlockCopies
from tests.parallel.attention_cases import NUM_SLOTS, TYPES, Case, Sequence, numbers_of, random_case

pytestmark = pytest.mark.skipif(not has_attention(), reason="no C++ compiler")
CHUNK = 256
"""Positions whose maximum and total the kernel finds together, before they are merged with the others'."""
NUM_ROWS = 8
KINDS = {
    "chain": (None, None),
    "one row": (None, None),
    "tree": ([-1, 0, 0, 1, 3, 2, -1, 6], None),
    "copies": (None, BlockCopies(4, [2, 2], 2)),
}
"""Parents and copies of the pending rows."""
INFINITE = torch.inf


@pytest.fixture(params=[1, 2])
def threads(request):
    """With several, chunks are tasks of their own, which are merged at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def long_case(kind: str, context: int, *, window: int = 0, softcap: float = 0.0) -> Case:
    """One sequence whose text is longer than a chunk, in two KV heads of three query heads each."""
    torch.manual_seed(len(kind) + context)
    parents, copies = KINDS[kind]
    num_rows = 1 if kind == "one row" else NUM_ROWS
    sequence = Sequence(context, [*range(context + num_rows)], parents, num_rows, copies)
    keys, values = (torch.randn(NUM_SLOTS, 2, 32) for _ in "kv")
    projected = torch.randn(num_rows, 10 * 32)
    return Case(6, 32, window, softcap, [sequence], keys, values, projected, None)


def check(case: Case, dtype: torch.dtype) -> None:
    expected = case.expected()[0]
    assert expected.isfinite().all()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-5
    result = case.attend(case.sequences, slice(None))
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=rounding)


@TYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [300, 700])
def test_a_chunk_whose_scores_are_all_minus_infinity_weighs_nothing(kind, context, dtype, threads):
    """The first chunk, or the first two; by a bias that hides distant keys, as a window would."""
    case = numbers_of(long_case(kind, context), dtype)
    case.bias = torch.cat((torch.randn(1, 6), torch.full((1, 6), -INFINITE))).to(dtype), torch.arange(41) // 40
    check(case, dtype)


@TYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("hidden", [slice(0, CHUNK), slice(CHUNK, 2 * CHUNK), slice(0, 2 * CHUNK)])
def test_scores_may_be_too_small_for_a_float(kind, softcap, hidden, dtype, threads):
    """In float32 they are minus infinity, which a bound turns into the bound."""
    case = long_case(kind, 600, softcap=softcap)
    case.keys[hidden] = -1e38
    case.projected.view(-1, 10, 32)[:, :6].abs_().mul_(3)
    check(numbers_of(case, dtype), dtype)


@TYPES
def test_rows_that_read_another_table_may_have_such_scores(dtype, threads):
    torch.manual_seed(0)
    keys, values, queries = torch.randn(600, 2, 32), torch.randn(600, 2, 32), torch.rand(9, 6 * 32) * 3
    keys[:CHUNK] = -1e38
    keys, values, queries = keys.to(dtype), values.to(dtype), queries.to(dtype)
    rows = PassRows((0, 9, 600, 0, 0, 0, READS, -1), (), (), ())
    result = LayerCall(keys, values, 6, scale=32**-0.5).read(rows, queries)
    grouped = queries.double().view(9, 2, 3, 32)
    weights = (torch.einsum("nkgd,lkd->nkgl", grouped, keys.double()) * 32**-0.5).softmax(-1)
    expected = torch.einsum("nkgl,lkd->nkgd", weights, values.double()).flatten(1)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=rounding)


@TYPES
def test_a_row_whose_scores_are_all_minus_infinity_is_zero(dtype, threads):
    """As one that sees no key."""
    case = numbers_of(long_case("chain", 300), dtype)
    case.bias = torch.full((1, 6), -INFINITE).to(dtype), torch.zeros(1, dtype=torch.int64)
    assert torch.equal(case.attend(case.sequences, slice(None)), torch.zeros(NUM_ROWS, 6 * 32, dtype=dtype))


@TYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 270])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("size", [1e15, 1e-20, 1e-38])
def test_scores_may_be_huge_or_next_to_nothing(kind, window, softcap, size, dtype):
    """Up to 1e31, where one key has all the weight; or below the smallest normal number, where all weigh the same."""
    case = long_case(kind, 600, window=window, softcap=softcap)
    case.keys *= size
    case.projected.view(-1, 10, 32)[:, :8] *= size  # not the values
    check(numbers_of(case, dtype), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_values_may_be_smaller_than_any_normal_number(kind):
    case = long_case(kind, 600)
    case.values *= 1e-39
    case.projected.view(-1, 10, 32)[:, 8:] *= 1e-39
    expected = case.expected()[0]
    result = case.attend(case.sequences, slice(None))
    assert result.count_nonzero() == result.numel()
    torch.testing.assert_close(result.double(), expected, atol=1e-42, rtol=0)


def hide(case: Case, seen: list[int], written: list[int], size: float) -> Case:
    """The case with `size` as every number that is not in the slots `seen`, of rows of the pass too."""
    hidden = torch.ones(NUM_SLOTS, dtype=torch.bool)
    hidden[seen] = False
    broken = replace(case, keys=case.keys.clone(), values=case.values.clone(), projected=case.projected.clone())
    broken.keys[hidden] = broken.values[hidden] = size
    broken.projected[hidden[written]] = size
    return broken


@TYPES
@pytest.mark.parametrize("seed", range(8))
def test_a_row_reads_nothing_that_it_does_not_see(seed, dtype):
    """Other sequences, slots that were never written, rows that are no ancestors, later ones, and those before the
    window are no numbers."""
    case = numbers_of(random_case(300 + seed), dtype)
    expected = case.attend(case.sequences, slice(None))
    written = [slot for one in case.sequences for slot in one.table[-one.num_rows :]]
    for sequence, span in zip(case.sequences, case.spans, strict=True):
        for row in {0, sequence.num_rows // 2, sequence.num_rows - 1}:
            at, seen = span.start + row, sequence.seen(row, case.window)
            for size in (torch.nan, INFINITE):
                broken = hide(case, seen, written, size)
                result = broken.attend(case.sequences, slice(None))[at]
                assert torch.equal(result, expected[at]), f"row {row} beside {size}"


@TYPES
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [torch.nan, INFINITE, 3e38])
def test_a_broken_sequence_changes_no_other(seed, size, dtype, threads):
    case = numbers_of(random_case(400 + seed), dtype)
    expected = case.attend(case.sequences, slice(None))
    for sequence, span in zip(case.sequences, case.spans, strict=True):
        broken = replace(case, keys=case.keys.clone(), values=case.values.clone(), projected=case.projected.clone())
        broken.keys[sequence.table] = broken.values[sequence.table] = size
        broken.projected[span] = size
        result = broken.attend(case.sequences, slice(None))
        others = torch.ones(len(expected), dtype=torch.bool)
        others[span] = False
        assert torch.equal(result[others], expected[others])


@TYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 2 * CHUNK - 1, 2 * CHUNK])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_key_that_is_no_number_shows(kind, place, softcap, dtype, threads):
    """Also as the only one of its chunk, in every row that sees it."""
    case = numbers_of(long_case(kind, 2 * CHUNK, softcap=softcap), dtype)
    sequence = case.sequences[0]
    if place < sequence.context:
        case.keys[place] = torch.nan
    else:
        case.projected[0].view(10, 32)[6:8] = torch.nan
    result = case.attend(case.sequences, slice(None))
    for row in range(sequence.num_rows):
        is_broken: Tensor = result[row].isnan()
        assert is_broken.all() if place in sequence.seen(row) else not is_broken.any(), f"row {row}"
