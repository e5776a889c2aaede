"""Drafters that are random, stubborn, always wrong or always right: in every pipeline the tokens are the target's."""

from __future__ import annotations

import random

import pytest

from actors.drafters.interface import Draft
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.options import PipelineName
from actors.protocol.messages import TokenTree
from tests.matrices import in_turn

VOCAB_SIZE = 97


class Adversary:
    """Wraps a drafter and replaces what it says; `plain` are the tokens that plain decoding gives."""

    def __init__(self, drafter, guesses, plain):
        self._drafter, self._guesses, self._plain = drafter, guesses, plain

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, contexts, budgets):
        return [Draft(self._propose(context, budget)) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context, commit):
        pass

    def _propose(self, context, budget):
        root, generated = context.token_ids[-1], len(context.token_ids) - context.prompt_len
        right = self._plain[context.request_id][generated : generated + budget]
        match self._guesses:
            case "right":
                return TokenTree.chain(root, right)
            case "wrong":
                return TokenTree.chain(root, [(token + 1) % VOCAB_SIZE for token in right])
            case "constant":
                return TokenTree.chain(root, [7] * budget)
            case "random":
                choose = random.Random(len(context.token_ids))
                size = choose.randrange(budget + 1)
                tokens = (root, *(choose.randrange(VOCAB_SIZE) for _ in range(size)))
                return TokenTree(tokens, (-1, *(choose.randrange(i) for i in range(1, size + 1))))


@pytest.mark.parametrize(
    ("pipeline", "guesses", "temperature"),
    list(
        in_turn(
            sorted(set(PipelineName) - {"plain"}),
            ["random", "constant", "wrong", "right"],
            [0.0, 0.8],
            times=dict.fromkeys(PipelineName, 2),
        )
    ),
)
def test_an_adversary_costs_speed_only(open_room, make_requests, pipeline, guesses, temperature):
    requests = make_requests(3, max_tokens=15, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(
        NgramDrafterConfig(), pipeline=pipeline, wrap=lambda drafter: Adversary(drafter, guesses, plain.tokens)
    ).serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    accepted, drafted = room.stats.num_accepted_tokens, room.stats.num_draft_tokens
    if guesses == "right":
        assert accepted == drafted > 0
    elif guesses == "wrong":
        assert accepted == 0 < drafted
