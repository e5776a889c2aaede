"""One level of a cascade over a toy model and a scripted level beneath: what it asks, what it keeps, what goes up."""

from __future__ import annotations

import numpy as np
import pytest

from actors.drafter import Context, Draft, IdleDrafter
from actors.drafters.beneath import Beneath, LocalLevel
from actors.drafters.cascade import CascadeDrafter
from actors.drafters.enumeration import ToyRunner
from actors.messages import Draw, SamplingParams, SparseLaw, TokenTree

VOCAB = 5


def successor(text):
    """The law of a model that counts: behind token 2 stands 3."""
    return np.eye(VOCAB)[(text[-1] + 1) % VOCAB if text else 1]


class Scripted(IdleDrafter):
    """Offers what it is given, as far as it is asked for, and remembers what it was asked and told."""

    def __init__(self, *drafts: Draft) -> None:
        self.drafts, self.asked, self.paths = list(drafts), [], []

    def open(self, context) -> None: ...

    def prepare(self, contexts) -> None: ...

    def release(self, request_id) -> None: ...

    def observe(self, context, commit) -> None:
        self.paths.append(commit.path)

    def propose(self, contexts, budgets) -> list[Draft]:
        self.asked += budgets
        return [self.drafts.pop(0) if self.drafts else Draft.nothing(contexts[0])]


def chain(root, *token_ids) -> Draft:
    return Draft.chosen(TokenTree.chain(root, token_ids))


def open_level(below: IdleDrafter, longest: int, *, rule: str = "coupled", temperature: float = 0.0, **options):
    level = CascadeDrafter(
        ToyRunner(successor, VOCAB, 0),
        Beneath(LocalLevel(below), "0", longest),
        level=1,
        name="1",
        rule=rule,
        law_size=VOCAB,
        eos_token_ids=(),
        prefill_chunk=99,
        **options,
    )
    context = Context(1, 0, [0, 1], 2, SamplingParams(temperature=temperature))
    level.open(context)
    return level, context


FAMILIAR = SparseLaw((2, 3), (0.5, 0.5))
STRANGE = SparseLaw((2, VOCAB), (0.5, 0.5))


@pytest.mark.parametrize(
    "draft",
    [
        chain(1, 2, VOCAB),
        Draft(TokenTree.chain(1, (2,)), (Draw.ROOT, Draw.IID), (STRANGE, None)),
    ],
)
def test_a_draft_with_tokens_that_this_model_lacks_is_no_draft(draft):
    below = Scripted(draft)
    level, context = open_level(below, 2, rule="rejection", temperature=1.0)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4) and below.asked[0] == 2
    assert not any(work.num_accepted_tokens for work in level.account())


def test_a_draft_of_its_own_tokens_is_reviewed():
    level, context = open_level(
        Scripted(Draft(TokenTree.chain(1, (2,)), (Draw.ROOT, Draw.IID), (FAMILIAR, None))),
        2,
        rule="rejection",
        temperature=1.0,
    )
    level.propose([context], [3])
    assert sum(work.num_accepted_tokens for work in level.account()) == 1
