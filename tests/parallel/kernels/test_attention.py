"""The attention kernel against attention row by row in float64, over random batches of chains, trees and copies of
blocks; and that a row's result is the same to the bit wherever it stands."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from parallel.kernels.attention import has_attention
from parallel.kv.pass_plan import BlockCopies
from tests.parallel.attention_cases import NUM_SLOTS, TYPES, Case, Sequence, numbers_of, random_case

pytestmark = pytest.mark.skipif(not has_attention(), reason="no C++ compiler")


@TYPES
@pytest.mark.parametrize("seed", range(12))
def test_every_row_attends_to_what_it_sees(seed, dtype):
    case = numbers_of(random_case(seed), dtype)
    expected, keys, values = case.expected()
    result = case.attend(case.sequences, slice(None))
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=rounding)
    torch.testing.assert_close(case.keys, keys, atol=0 if rounding else 1e-5, rtol=0)
    torch.testing.assert_close(case.values, values, atol=0, rtol=0)


@TYPES
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("kind", ["chain", "tree", "copies"])
def test_a_span_may_have_more_rows_than_a_task(kind, window, dtype):
    """Three tasks of 128 rows at most; a window leaves out chunks of the keys before each."""
    torch.manual_seed(window)
    context, num_rows, draw = 300, 272, random.Random(window)
    parents = [draw.randrange(max(-1, i - 3), i) for i in range(num_rows)] if kind == "tree" else None
    copies = BlockCopies(144, [64, 64], 16) if kind == "copies" else None
    sequence = Sequence(context, [*range(5, 5 + context + num_rows)], parents, num_rows, copies)
    keys, values = torch.randn(NUM_SLOTS, 1, 16), torch.randn(NUM_SLOTS, 1, 16)
    case = numbers_of(Case(2, 16, window, 0.0, [sequence], keys, values, torch.randn(num_rows, 4 * 16), None), dtype)
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    result = case.attend(case.sequences, slice(None))
    torch.testing.assert_close(result.double(), case.expected()[0], atol=2e-5, rtol=rounding)


@TYPES
@pytest.mark.parametrize("seed", range(12))
def test_a_row_is_the_same_to_the_bit_alone_and_in_company(seed, dtype):
    """The company is a batch, its sequence's pass, and the last row of a chain whose other rows are committed."""
    case = numbers_of(random_case(100 + seed), dtype)
    together = case.attend(case.sequences, slice(None))
    for sequence, span in zip(case.sequences, case.spans, strict=True):
        assert torch.equal(case.attend([sequence], span), together[span])
        for row in range(sequence.num_rows):
            seen, at = sequence.seen(row), span.start + row
            if sequence.place(row) < len(seen) - 1:  # it sees later rows, which write what `together` read
                continue
            alone = Sequence(len(seen) - 1, seen, None, 1)
            assert torch.equal(case.attend([alone], slice(at, at + 1))[0], together[at]), f"row {row}"


@TYPES
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("is_run", [True, False])
def test_a_head_is_the_same_to_the_bit_alone_and_beside_others(num_rows, is_run, dtype):
    """Also where the heads of a layer are too many to be taken together, and where a chunk ends within a block."""
    torch.manual_seed(num_rows)
    num_heads, head_dim, contexts = 40, 20, [333, 0, 64, 250]
    sequences, first = [], 0
    for context in contexts:
        table = list(range(first, first + context + num_rows))
        sequences.append(Sequence(context, table if is_run else table[::-1], None, num_rows))
        first += len(table)
    keys, values = (torch.randn(NUM_SLOTS, num_heads, head_dim).to(dtype) for _ in "kv")
    projected = torch.randn(num_rows * len(contexts), 3, num_heads, head_dim).to(dtype)
    case = Case(num_heads, head_dim, 0, 0.0, sequences, keys, values, projected.flatten(1), None)
    together = case.attend(sequences, slice(None)).view(-1, num_heads, head_dim)
    for head in (0, 7, 8, 35, 36, 39):
        one = slice(head, head + 1)
        own = [part[:, one].contiguous() for part in (keys, values)]
        alone = replace(case, num_heads=1, keys=own[0], values=own[1], projected=projected[:, :, one].flatten(1))
        assert torch.equal(alone.attend(sequences, slice(None)), together[:, head])


@TYPES
@pytest.mark.parametrize("seed", range(4))
def test_threads_change_no_bit(seed, dtype):
    case = numbers_of(random_case(200 + seed), dtype)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(case.attend(case.sequences, slice(None)))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@TYPES
def test_other_rows_of_the_pool_do_not_matter(dtype):
    """Not even where they are no numbers: slots of other sequences, and tree rows that are no ancestors."""
    case = numbers_of(random_case(7), dtype)
    expected = case.attend(case.sequences, slice(None))
    seen = {slot for one in case.sequences for row in range(one.num_rows) for slot in one.seen(row)}
    unseen = sorted(set(range(NUM_SLOTS)) - seen)
    case.keys[unseen] = torch.nan
    case.values[unseen] = torch.nan
    assert torch.equal(case.attend(case.sequences, slice(None)), expected)


@TYPES
@pytest.mark.parametrize("seed", range(4))
def test_a_copy_is_the_same_to_the_bit_alone_and_beside_other_copies(seed, dtype):
    """Rows see later ones of their block, whatever text is read before it in the same pass."""
    torch.manual_seed(seed)
    context, num_text, size, num_copies, block = [0, 250, 13, 300][seed], [8, 0, 16, 4][seed], [4, 4, 16, 8][seed], 3, 4
    num_rows = num_text + num_copies * size
    copies = BlockCopies(num_text, [size] * num_copies, block)
    whole = Sequence(context, list(range(context + num_rows)), None, num_rows, copies)
    keys, values = torch.randn(NUM_SLOTS, 2, 32), torch.randn(NUM_SLOTS, 2, 32)
    case = Case(4, 32, 0, 0.0, [whole], keys, values, torch.randn(num_rows, 8 * 32), None)
    case = numbers_of(case, dtype)
    together = case.attend([whole], slice(None))
    for copy in range(num_copies):
        rows = [*range(num_text), *range(num_text + copy * size, num_text + (copy + 1) * size)]
        table = [*range(context), *(context + row for row in rows)]
        one = replace(case, projected=case.projected[rows])
        alone = Sequence(context, table, None, len(rows), BlockCopies(num_text, [size], block))
        assert torch.equal(one.attend([alone], slice(None)), together[rows]), f"copy {copy}"
