"""The rows that a verifying pass asks for, and that each text of a batch is judged on its own rows alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.protocol.messages import Proposal, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.verification.features import FeatureReader
from actors.verification.rules import RULES
from actors.verification.top_tokens import TopTokensReader
from actors.verification.verifier import Verifier, VerifyInput
from parallel.runtime.runner import Span
from parallel.speculators.config import FINAL
from tests.actors.verification.scripted_runner import VOCAB, ScriptedRunner

PARAMS = SamplingParams()


def verifier_of(runner: Any, rule: str = "coupled", eos: tuple[int, ...] = (), **options: Any) -> Verifier:
    """A verifier over a scripted runner, or None where logits are given."""
    return Verifier(runner, rule, eos, **options)


def with_tree(seq_id, text, num_fed, tree, **fields):
    return VerifyInput(
        seq_id, text, 1, PARAMS, num_fed, Proposal.deterministic(seq_id, 0, len(text), 0, tree), **fields
    )


BATCH = [
    VerifyInput(1, [3, 4, 5, 6], 4, PARAMS, 2),  # a part of a prompt: its root is not reached
    VerifyInput(2, [3, 4, 5, 6], 4, PARAMS, 3, drafts_follow=False),  # the rest of one: its last row is read
    with_tree(3, [8, 9], 1, TokenTree.chain(9, [63, 56]), drafts_follow=False),
    with_tree(4, [1, 2, 3], 2, TokenTree((3, 21, 22, 50), (-1, 0, 0, 1))),
    VerifyInput(5, [7], 1, PARAMS, 1, Proposal.deterministic(5, 0, 1, 0, TokenTree.root(7))),
]
CACHED = {1: 1, 2: 1, 3: 1, 4: 1, 5: 0}
SPANS = [
    Span(1, 2, None, 0, True),
    Span(2, 3, None, 1, False),
    Span(3, 3, None, 3, False),
    Span(4, 5, [-1, 0, 1, 1, 2], 4, True),
    Span(5, 1, None, 1, True),
]
FED = [4, 5, 4, 5, 6, 9, 63, 56, 2, 3, 21, 22, 50, 7]


def test_a_pass_feeds_what_is_not_cached_and_reads_the_nodes_of_trees_whose_root_it_reaches():
    runner = ScriptedRunner(CACHED)
    verifier = verifier_of(runner)
    assert [verifier.reaches_root(one) for one in BATCH] == [False, True, True, True, True]
    logits, num_rows = verifier.forward(BATCH)
    assert runner.passes == [(SPANS, FED, ())]
    assert (len(logits), num_rows) == (9, len(FED))


def test_the_results_are_of_the_texts_whose_root_was_reached_in_their_order():
    runner = ScriptedRunner(CACHED)
    verifier = verifier_of(runner)
    results = verifier.verify(BATCH[1:], verifier.forward(BATCH)[0])
    found = [(result.path, result.next_token, result.distributions) for result in results]
    # After token t comes 7 t modulo 97: 9, 63, 53 in text 3, and 3, 21, 50, 59 in text 4.
    assert found == [((), 42, ()), ((1,), 53, ()), ((1, 3), 59, ()), ((), 49, ())]
    assert verifier.verify([], torch.empty(0, VOCAB)) == []


def test_a_proposal_whose_root_is_not_reached_is_refused():
    with pytest.raises(AssertionError, match="a proposal needs the logits of the root"):
        verifier_of(ScriptedRunner({3: 0})).forward([BATCH[2]])


@pytest.mark.parametrize("pruned", [set(), {0}, {2}, {4}, {1, 4}, {5}, {7}])
def test_rows_that_the_pass_gave_up_end_the_walk_of_their_own_text_only(pruned):
    """Rows are numbered over the batch: 1 to 3 are the chain of text 3, 4 to 7 the tree of text 4."""
    batch = BATCH[1:]
    runner, reader = ScriptedRunner(CACHED, pruned=pruned), FeatureReader([FINAL])
    verifier = verifier_of(runner, features=reader)
    found = [result.path for result in verifier.verify(batch, verifier.forward(batch)[0])]
    chain = () if 2 in pruned else (1,)
    tree = () if 5 in pruned else (1,) if 7 in pruned else (1, 3)
    assert found == [(), chain, tree, ()]


@pytest.mark.parametrize(("has_reader", "keeps"), [*itertools.product([False, True], repeat=2)])
def test_top_tokens_are_kept_if_a_reader_is_there_and_they_are_asked_for(has_reader, keeps):
    runner = ScriptedRunner(CACHED)
    reader = TopTokensReader(1, reads_prompts=True) if has_reader else None
    verifier = verifier_of(runner, top_tokens=reader)
    logits, num_rows = verifier.forward(BATCH, keeps_top_tokens=keeps)
    assert (len(logits), num_rows) == (9, 14), "the rule sees the rows that it asked for"
    top = verifier.top_tokens()
    assert (top is not None) is (has_reader and keeps)
    if top is not None:
        assert [size for *_, size in top.spans] == [2, 3, 3, 5, 1]


def drawn(rng, i, rule):
    """A text with a tree of independent draws over five tokens; the numbers of its rule come from its own seed."""
    text = [rng.randrange(VOCAB) for _ in range(3)]
    parents = (-1, 0, 1, 2) if rule == "block" else (-1, 0, 0, 1)
    support = tuple(rng.sample(range(9), 5))
    law = SparseDistribution(support, (0.4, 0.3, 0.15, 0.1, 0.05))
    tree = TokenTree((text[-1], *(rng.choice(support) for _ in range(3))), parents)
    kinds = (SamplingKind.ROOT, *[SamplingKind.IID] * 3)
    params = SamplingParams(temperature=1.0, seed=rng.randrange(1 << 30))
    return VerifyInput(i, text, 1, params, 1, Proposal(i, 0, 3, 0, tree, kinds, (law,) * 4))


@pytest.mark.extended
@pytest.mark.parametrize("law_size", [None, 6, VOCAB])
@pytest.mark.parametrize("rule", RULES)
def test_a_text_in_a_batch_is_judged_as_alone(rule, law_size):
    rng = random.Random(5)
    batch = [drawn(rng, i, rule) for i in range(12)]
    parts = [torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(one.seq_id)) for one in batch]
    for part in parts:
        part[:, :9] += 4
    verifier = verifier_of(None, rule, law_size=law_size)
    together = verifier.verify(batch, torch.cat(parts))
    alone = [verifier.verify([one], part)[0] for one, part in zip(batch, parts, strict=True)]
    assert together == alone
    assert {len(result.path) for result in alone} >= {0, 1}
    if law_size is None:
        assert not any(result.distributions for result in alone)
    for one, part, result in zip(batch, parts, alone, strict=True) if law_size else ():
        nodes, tokens = (0, *result.path), [*(one.tree.token_ids[node] for node in result.path), result.next_token]
        assert {len(law.token_ids) for law in result.distributions} == {law_size}
        for node, law, token in zip(nodes, result.distributions, tokens, strict=True):
            likeliest = part[node].topk(len(law.token_ids))
            assert set(law.token_ids) == set(likeliest.indices.tolist()) and token in law.token_ids
            share = dict(zip(likeliest.indices.tolist(), likeliest.values.softmax(0).tolist(), strict=True))
            assert dict(zip(law.token_ids, law.probs, strict=True)) == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_a_level_decides_with_the_random_source_that_it_brings(rule):
    class Source:
        """Accepts nothing that may be refused and takes the last possible token."""

        def __init__(self, seq_id):
            self.seq_id = seq_id

        def accept(self, probability, node):
            return probability >= 1.0

        def sample(self, weights, node):
            return int(weights.nonzero()[0][-1])

    made = []
    rng = random.Random(2)
    batch = [drawn(rng, i, rule) for i in range(3)]
    logits = torch.zeros(12, VOCAB)
    logits[:, 80:83] = 9.0  # no draft names these
    verifier = verifier_of(None, rule, law_size=3)
    results = verifier.verify(batch, logits, lambda one: made.append(one.seq_id) or Source(one.seq_id))
    assert made == [0, 1, 2]
    assert [(result.path, result.next_token) for result in results] == [((), 82)] * 3


@pytest.mark.parametrize("rule", ["coupled", *RULES])
def test_end_tokens_and_the_prompt_count_as_the_request_says(rule):
    """`min_tokens` bans the end tokens of the verifier, and penalties spare what stands in the prompt alone."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 5] = 9.0, 8.0

    def next_token(text, prompt_len, eos, **sampling):
        one = VerifyInput(1, text, prompt_len, SamplingParams(temperature=0.0, **sampling), 1)
        return verifier_of(None, rule, eos).verify([one], logits.clone())[0].next_token

    assert next_token([1, 2], 1, ()) == 7
    assert next_token([1, 2], 1, (7,), min_tokens=2) == 5
    assert next_token([1, 2], 1, (7, 5), min_tokens=1) == 7
    assert next_token([7, 2], 1, (), presence_penalty=2.0) == 7
    assert next_token([7, 2], 0, (), presence_penalty=2.0) == 5


def test_an_input_without_a_proposal_has_the_tree_of_its_last_token():
    assert BATCH[0].tree == TokenTree.root(6) and BATCH[2].tree == TokenTree.chain(9, [63, 56])


@pytest.mark.parametrize(
    ("options", "reads_prompts", "is_kept"),
    [
        ({}, False, True),
        ({"reads_prompts": True}, True, True),
        ({"is_lead": False}, False, False),
        ({"reads_prompts": True, "is_lead": False, "is_late": True}, True, False),
    ],
)
def test_a_reader_of_top_tokens_reads_what_its_drafter_asks_for(options, reads_prompts, is_kept):
    """Every rank asks for the rows, so that all make the same pass; the lead alone keeps them."""
    runner, reader = ScriptedRunner(CACHED), TopTokensReader(2, **options)
    assert reader.is_late is options.get("is_late", False)
    logits, _ = verifier_of(runner, top_tokens=reader).forward(BATCH)
    ((spans, _, _),) = runner.passes
    assert [span.num_logits for span in spans] == ([2, 3, 3, 5, 1] if reads_prompts else [0, 1, 3, 4, 1])
    assert len(logits) == 9 and (reader.read() is not None) is is_kept


def test_top_tokens_name_the_texts_and_scopes_of_their_rows():
    reader = TopTokensReader(200)
    batch = [replace(one, scope=10 + one.seq_id) for one in BATCH]
    verifier_of(ScriptedRunner(CACHED), top_tokens=reader).forward(batch)
    top = reader.read()
    assert top is not None and top.k == VOCAB, "no more than there are"
    assert top.spans == ((2, 4, 1), (3, 2, 3), (4, 3, 4), (5, 1, 1)) and top.scopes == (12, 13, 14, 15)
    assert reader.read() is None, "once"
