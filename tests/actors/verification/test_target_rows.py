"""Ratio rules on a few numbers a node against the same rules on whole rows, with the same random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from actors.protocol.messages import NO_TOKEN, Proposal, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.sampling.logits import LogitRows, probabilities, process_logits
from actors.verification import target_rows
from actors.verification.distributions import DrawnTree
from actors.verification.random_source import HashRandomSource
from actors.verification.rules import RULES
from actors.verification.verifier import Verifier, VerifyInput
from tests.actors.sampling.test_launches import Launches
from tests.matrices import in_turn
from tests.parallel.fake_accelerator import FakeAccelerator

VOCAB = 60
EOS = (7,)


def drafts(rng: random.Random, rule: str, num: int) -> list[VerifyInput]:
    """Texts with a drawn chain or tree, some greedy, some without a draft."""
    inputs = []
    for i in range(num):
        text = [rng.randrange(VOCAB) for _ in range(5)]
        temperature = rng.choice([0.0, 0.7, 1.0])
        params = SamplingParams(temperature, seed=rng.randrange(1 << 40), top_k=rng.choice([0, 9]))
        size = rng.randrange(1, 7)
        chain = rule == "block" or rng.random() < 0.5
        parents = (-1, *(node if chain else rng.randrange(node + 1) for node in range(size - 1)))
        tokens, distributions = [text[-1]], []
        for _ in range(size):
            support = tuple(rng.sample(range(8), 5))  # the likely tokens
            weights = np.array([rng.random() for _ in support])
            distributions.append(SparseDistribution(support, tuple((weights / weights.sum()).tolist())))
        for node in range(1, size):
            tokens.append(rng.choice(distributions[parents[node]].token_ids))
        kinds = (SamplingKind.ROOT, *[SamplingKind.IID] * (size - 1))
        tree = TokenTree(tuple(tokens), parents)
        proposal = Proposal(i, 0, 5, 0, tree, kinds, tuple(distributions)) if i % 4 else None
        inputs.append(VerifyInput(i, text, 3, params, 1, proposal))
    return inputs


def on_whole_rows(rule: str, one: VerifyInput, logits: torch.Tensor) -> tuple[tuple[int, ...], int]:
    rows = LogitRows(one.sampling, one.prompt_len, one.token_ids, one.tree)
    scores = process_logits(logits, rows, EOS)

    def target_row(node: int) -> np.ndarray:
        """The row, with a column for what takes the place of every token where the row is impossible."""
        if not scores[node].max().isfinite():
            return np.eye(VOCAB + 1)[VOCAB]
        return np.append(probabilities(scores[node : node + 1], one.sampling)[0].numpy(), 0.0)

    draft = DrawnTree(one.tree, (SamplingKind.ROOT,), (None,))
    if one.proposal is not None:
        draft = DrawnTree(one.tree, one.proposal.sampling_kinds, one.proposal.distributions)
    source = HashRandomSource(one.sampling.seed, len(one.token_ids))
    path, token = RULES[rule](draft, target_row, source)
    return path, token if token < VOCAB else NO_TOKEN


def spoil(rng: random.Random, row: torch.Tensor) -> None:
    """One row of six becomes impossible."""
    match rng.randrange(18):
        case 0:
            row[rng.randrange(VOCAB)] = torch.nan
        case 1:
            row[rng.randrange(VOCAB)] = torch.inf
        case 2:
            row[:] = -torch.inf


@pytest.mark.extended
@pytest.mark.parametrize(("rule", "ahead"), list(in_turn(RULES, [False, True])))
def test_a_rule_on_named_tokens_decides_as_on_whole_rows(monkeypatch, rule, ahead):
    monkeypatch.setattr(target_rows, "_reads_ahead", lambda _: ahead)
    monkeypatch.setattr(target_rows, "_ROWS_AT_ONCE", 7)  # several chunks
    lengths = set()
    for seed in range(12):
        rng = random.Random(seed)
        inputs = drafts(rng, rule, 8)
        parts = [torch.randn(len(one.tree.parents), VOCAB, generator=torch.manual_seed(seed)) for one in inputs]
        for logits in parts:
            logits[:, :8] += 3
            for row in logits:
                spoil(rng, row)
        results = Verifier(None, rule, EOS).verify(inputs, torch.cat(parts))
        for one, logits, result in zip(inputs, parts, results, strict=True):
            assert (result.path, result.next_token) == on_whole_rows(rule, one, logits)
            lengths.add((len(result.path), result.next_token == NO_TOKEN))
    assert {(0, False), (1, False), (2, False), (0, True), (1, True)} <= lengths


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_is_no_distribution_has_no_token_and_leaves_the_others(monkeypatch, ahead):
    monkeypatch.setattr(target_rows, "_reads_ahead", lambda _: ahead)
    inputs = drafts(random.Random(0), "rejection", 4)
    logits = torch.randn(sum(len(one.tree.parents) for one in inputs), VOCAB)
    right = Verifier(None, "rejection", EOS).verify(inputs, logits)
    first = len(inputs[0].tree.parents)
    logits[first, 5] = torch.nan
    results = Verifier(None, "rejection", EOS).verify(inputs, logits)
    assert (results[1].path, results[1].next_token) == ((), NO_TOKEN)
    assert [results[0], *results[2:]] == [right[0], *right[2:]]


def test_a_node_that_is_not_reached_may_be_impossible():
    """A request ends only where plain decoding would end it."""
    tree = TokenTree.chain(4, [5, 6])
    inputs = [VerifyInput(1, [3, 4], 1, SamplingParams(), 1, Proposal.deterministic(1, 0, 2, 0, tree))]
    logits = torch.zeros(3, VOCAB)
    logits[0, 9], logits[1:] = 1.0, torch.nan
    for rule in ("coupled", *RULES):
        (result,) = Verifier(None, rule, EOS).verify(inputs, logits)
        assert (result.path, result.next_token) == ((), 9), rule


def test_a_round_of_a_ratio_rule_reads_the_device_twice():
    counts = []
    for num in (2, 16):
        inputs = drafts(random.Random(1), "block", num)
        with FakeAccelerator() as accelerator:
            logits = torch.randn(sum(len(one.tree.parents) for one in inputs), VOCAB).to(accelerator.device)
            accelerator.forget()
            with Launches() as launches:
                Verifier(None, "block", EOS).verify(inputs, logits)
        assert accelerator.num_syncs == 2, accelerator.syncs
        assert not accelerator.blocking_uploads, accelerator.blocking_uploads
        counts.append(launches.count.total())
    assert counts[0] == counts[1] <= 60
