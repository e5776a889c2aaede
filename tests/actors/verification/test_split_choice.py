"""Ranks that share a head choose the tokens that one rank chooses from whole rows, and exchange no logits."""

from __future__ import annotations

import pytest
import torch

from actors.protocol.messages import NO_TOKEN, Proposal, SamplingKind, SamplingParams, TokenTree
from actors.sampling.logits import LogitRows, choose_batch, choose_split
from actors.verification.verifier import Verifier, VerifyInput
from parallel.runtime.runner import open_model
from tests.parallel.conftest import make_checkpoint, on_ranks  # noqa: F401  fixtures

TEXT = [5, 9, 60, 33, 2]
TREE = TokenTree((2, 8, 71, 40), (-1, 0, 0, 1))
KINDS = (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * 3)
PLAIN = [SamplingParams(), SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.0, seed=4)]
PENALISED = [SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3), *PLAIN[:2]]


def rounds(path, group, params, *, splits: bool):
    """Results of a pass over three texts, one of which has a tree, and the widths of what the ranks gathered."""
    runner = open_model(path, num_slots=64, **({} if group is None else {"group": group}))
    verifier = Verifier(runner, "coupled", (1,), splits_choice=splits)
    inputs = []
    for i, one in enumerate(params):
        runner.open(i)
        proposal = Proposal(i, 0, 5, 0, TREE, KINDS, (None,) * 4) if i == 1 else None
        inputs.append(VerifyInput(i, TEXT, 3, one, 5, proposal))
    gathered = []
    if group is not None:
        gather = group.all_gather
        group.all_gather = lambda tensor, dim=-1: gathered.append(tensor.shape[-1]) or gather(tensor, dim)
    logits, _ = verifier.forward(inputs)
    return verifier.verify(inputs, logits), gathered


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("params", "widths"), [(PLAIN, [6]), (PENALISED, [49])])
def test_ranks_choose_what_one_rank_chooses(make_checkpoint, on_ranks, params, widths, tied):  # noqa: F811
    path = make_checkpoint("Llama", tie_word_embeddings=tied).path
    expected, _ = rounds(path, None, params, splits=True)
    assert len({result.next_token for result in expected}) > 1
    for results, gathered in on_ranks(2, lambda group: rounds(path, group, params, splits=True)):
        assert results == expected
        assert gathered == widths, "two numbers a row where nothing needs whole rows"


def test_ties_numbers_that_are_none_and_ranks_without_tokens(on_ranks):  # noqa: F811
    logits = torch.randn(4, 11)
    logits[0] = 0.0
    logits[1, [4, 9]] = 99.0
    logits[2, 8] = torch.nan
    batch = [
        LogitRows(SamplingParams(), 1, [1], TokenTree.chain(1, [2, 3])),
        LogitRows(PLAIN[2], 1, [1], TokenTree.root(1)),
    ]
    expected = choose_batch(logits, batch, ()).tolist()
    assert expected[:3] == [0, 4, NO_TOKEN]
    shares = [(0, 6), (6, 11), (11, 11)]

    def choose(group):
        first, end = shares[group.rank]
        return choose_split(logits[:, first:end], batch, first, group).tolist()

    assert on_ranks(3, choose) == [expected] * 3
