"""Which rows of a pass a drafter reads: those of the fed text and of the accepted path, at the taps it asked for."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.protocol.messages import Proposal, SamplingParams, TokenTree
from actors.verification.features import FeatureReader
from actors.verification.verifier import Verifier, VerifyInput
from parallel.speculators.config import FINAL, kv_tap
from tests.actors.verification.scripted_runner import ScriptedRunner

TREE = TokenTree((9, 20, 21, 22), (-1, 0, 0, 1))


def two_texts():
    """Text 1 feeds three tokens and a tree of three nodes (rows 0 to 5), text 2 two tokens alone (rows 6 and 7)."""
    proposal = Proposal.deterministic(1, 0, 5, 0, TREE)
    return [
        VerifyInput(1, [5, 6, 7, 8, 9], 2, SamplingParams(), 3, proposal),
        VerifyInput(2, [40, 41, 42], 3, SamplingParams(), 2),
    ]


def read(taps, paths, runner: Any = None):
    runner = runner or ScriptedRunner({1: 2, 2: 0})
    reader = FeatureReader(taps)
    Verifier(runner, "coupled", (), features=reader).forward(two_texts())
    return runner, reader.rows(two_texts(), [2, 0], paths)


@pytest.mark.parametrize("path", [(), (1,), (2,), (1, 3)])
def test_rows_are_those_of_the_fed_text_and_of_the_accepted_path(path):
    _, (first, second) = read([FINAL], {1: path} if path else {})
    assert (first.request_id, first.start, second.request_id, second.start) == (1, 2, 2, 0)
    assert first.rows[:, 0].tolist() == [0, 1, 2, *(2 + node for node in path)]
    assert second.rows[:, 0].tolist() == [6, 7]


@pytest.mark.parametrize("taps", [*itertools.permutations([FINAL, 3, 1]), (3,), (1, 3), (3, 3)])
def test_taps_stand_side_by_side_in_the_order_they_were_asked_for(taps):
    runner, (first, _) = read(taps, {1: (2,)})
    expected = [[row + (0 if tap == FINAL else 1000 * tap) for tap in taps] for row in (0, 1, 2, 4)]
    assert first.rows.tolist() == expected
    ((_, _, streams),) = runner.passes
    assert streams == tuple(sorted({tap for tap in taps if tap > FINAL})), "each stream is computed once"


def test_rows_of_a_pass_without_drafts_are_a_copy_the_next_pass_does_not_change():
    """The runner may write its next hidden states into the same memory."""
    runner: Any = ScriptedRunner({2: 1})
    reader = FeatureReader([FINAL])
    hidden = torch.arange(2.0)[:, None]
    runner.forward = lambda *_: SimpleNamespace(logits=None, hidden=hidden, features=(), pruned=frozenset())
    inputs = [VerifyInput(2, [40, 41, 42], 3, SamplingParams(), 2)]
    Verifier(runner, "coupled", (), features=reader).forward(inputs)
    (found,) = reader.rows(inputs, [1], {})
    hidden += 5
    assert found.rows[:, 0].tolist() == [0.0, 1.0]


def test_keys_and_values_are_those_that_the_pass_wrote_in_the_layer_of_each_tap():
    _, (first, second) = read([kv_tap(4), FINAL, kv_tap(0)], {1: (1, 3)})

    def row(slot, hidden):
        heads = [10 * slot, 10 * slot + 1]
        fourth = [40000 + number for number in heads]
        return [*fourth, *(-n for n in fourth), hidden, *heads, *(-n for n in heads)]

    # Text 1 had rows in two slots, and wrote those from 102 on: three of the text, then the nodes 1, 2 and 3.
    assert first.rows.tolist() == [row(102, 0), row(103, 1), row(104, 2), row(105, 3), row(107, 5)]
    assert second.rows.tolist() == [row(200, 6), row(201, 7)]


@pytest.mark.parametrize(("size", "heads"), [(2, 4), (2, 2), (4, 2)])
def test_ranks_that_hold_the_same_head_give_it_once(size, heads):
    """`size` ranks share `heads` heads; where there are fewer heads than ranks, neighbours hold the same one."""
    runner: Any = ScriptedRunner({1: 2, 2: 0}, num_heads=heads)
    own = max(1, heads // size)

    def gather(pair, dim):
        first, copies = pair[:, :, :own], max(1, size // heads)
        assert dim == 2 and pair.is_contiguous()
        step = torch.tensor([[[1.0]], [[-1.0]]]).view(1, 2, 1, 1)
        return torch.cat([first + step * (rank // copies * own) for rank in range(size)], dim)

    read_all = runner.pool.read
    runner.pool.read = lambda layer, slots: tuple(part[:, :own] for part in read_all(layer, slots))
    alone = read([kv_tap(1)], {})[1][0].rows
    runner.decoder.group = SimpleNamespace(size=size, all_gather=gather)
    split = read([kv_tap(1)], {}, runner)[1][0].rows
    assert split.shape[1] == 2 * heads
    numbers = [10000 + 1020 + head for head in range(heads)]
    assert split[0].tolist() == [*numbers, *(-n for n in numbers)]
    if heads == 2:
        assert torch.equal(split, alone)


def test_a_pass_is_read_once_and_its_pruned_rows_are_those_of_the_runner():
    runner: Any = ScriptedRunner({1: 2, 2: 0}, pruned={1, 3})
    reader = FeatureReader([FINAL])
    assert reader.pruned == frozenset()
    Verifier(runner, "coupled", (), features=reader).forward(two_texts())
    assert reader.pruned == {1, 3}
    reader.rows(two_texts(), [2, 0], {})
    with pytest.raises(AssertionError, match="one pass, one reading"):
        reader.rows(two_texts(), [2, 0], {})
