"""One level of a cascade over a toy model and a scripted child: its orders, the tokens it accepts, its proposals."""

from __future__ import annotations

import numpy as np
import pytest

from actors.drafters.cascade.child import ChildLevel, LocalChild
from actors.drafters.cascade.draft_lengths import PassedLengths
from actors.drafters.cascade.level import CascadeDrafter, LevelSpec
from actors.drafters.config import ModelOptions
from actors.drafters.interface import Capabilities, Context, Draft
from actors.protocol.messages import Commit, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from tests.actors.verification.cascade_enumeration import ToyRunner

VOCAB = 5


def successor(text):
    """The law of a model that counts: 3 follows token 2."""
    return np.eye(VOCAB)[(text[-1] + 1) % VOCAB if text else 1]


class ScriptedChild:
    """Proposes the given drafts, and records budgets and accepted paths."""

    capabilities = Capabilities()

    def __init__(self, *drafts: Draft) -> None:
        self.drafts, self.budgets, self.paths = list(drafts), [], []

    def open(self, context) -> None: ...

    def release(self, request_id) -> None: ...

    def observe(self, context, commit) -> None:
        self.paths.append(commit.path)

    def propose(self, contexts, budgets) -> list[Draft]:
        self.budgets += budgets
        return [self.drafts.pop(0) if self.drafts else Draft.nothing(contexts[0])]


def chain(root, *token_ids) -> Draft:
    return Draft.chosen(TokenTree.chain(root, token_ids))


def open_level(child, lengths, *, number=1, rule="coupled", temperature=0.0, **options):
    level = CascadeDrafter(
        ToyRunner(successor, VOCAB, 0).as_runner(),
        ChildLevel(LocalChild(child), str(number - 1), max(lengths[:number])),
        LevelSpec(number, str(number), **options),
        ModelOptions(rule, VOCAB, (), 99),
        PassedLengths(lengths),
    )
    context = Context(1, 0, [0, 1], 2, SamplingParams(temperature=temperature))
    level.open(context)
    return level, context


FAMILIAR = SparseDistribution((2, 3), (0.5, 0.5))
STRANGE = SparseDistribution((2, VOCAB), (0.5, 0.5))


@pytest.mark.parametrize(
    "draft",
    [
        chain(1, 2, VOCAB),
        Draft(TokenTree.chain(1, (2,)), (SamplingKind.ROOT, SamplingKind.IID), (STRANGE, None)),
    ],
)
def test_a_draft_with_tokens_that_this_model_lacks_is_no_draft(draft):
    child = ScriptedChild(draft)
    level, context = open_level(child, (2, 3), rule="rejection", temperature=1.0)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4) and child.budgets[0] == 2
    assert not any(work.num_accepted_tokens for work in level.level_stats())


def test_a_draft_of_its_own_tokens_is_reviewed():
    level, context = open_level(
        ScriptedChild(Draft(TokenTree.chain(1, (2,)), (SamplingKind.ROOT, SamplingKind.IID), (FAMILIAR, None))),
        (2, 3),
        rule="rejection",
        temperature=1.0,
    )
    level.propose([context], [3])
    assert sum(work.num_accepted_tokens for work in level.level_stats()) == 1


def counted(level):
    """Per level: drafts, tokens and accepted tokens of all verdicts."""
    totals: dict[str, tuple[int, ...]] = {}
    for work in level.level_stats():
        found = work.num_drafts, work.num_draft_tokens, work.num_accepted_tokens
        totals[work.level] = tuple(map(sum, zip(totals.get(work.level, (0, 0, 0)), found, strict=False)))
    return totals


def give_verdict(level, context, path, *token_ids):
    """The target's verdict."""
    level.observe(context, Commit(1, 0, len(context.token_ids), path, token_ids))
    context.extend(token_ids)


@pytest.mark.parametrize("path, own, tail", [((1, 2, 3, 4), (1, 2, 2), (1, 2, 2)), ((1,), (1, 2, 1), (0, 0, 0))])
def test_a_tail_is_as_long_as_it_should_be_and_gets_its_verdict(path, own, tail):
    child = ScriptedChild(Draft.nothing(Context(1, 0, [1], 1, SamplingParams())), chain(3, 4, 0))
    level, context = open_level(child, (3, 9), tail=2)
    (offered,) = level.propose([context], [4])
    assert offered.tree.token_ids == (1, 2, 3, 4, 0) and child.budgets == [1, 2]
    assert offered.parts == (("1", 2), ("0", 2))
    give_verdict(level, context, path, *[offered.tree.token_ids[node] for node in path], 1)
    totals = counted(level)
    assert totals["1"] == own and totals.get("0", (0, 0, 0)) == tail, "tokens after a rejected one are not verified"
    level.propose([context], [4])
    assert ((1, 2) in child.paths) == (len(path) == 4)


def test_merged_tokens_are_those_of_the_level_that_drafted_them():
    child = ScriptedChild(chain(1, 2, 0))
    level, context = open_level(child, (2, 9), merge=2)
    (offered,) = level.propose([context], [5])
    assert offered.tree.token_ids == (1, 2, 3, 4, 0) and offered.tree.parents[-1] == 1
    counted(level)
    give_verdict(level, context, (1, 4), 2, 0, 3)
    assert counted(level) == {"1": (1, 3, 1), "0": (1, 1, 1)}


def test_a_level_of_length_0_forwards_the_drafts_of_its_child():
    child = ScriptedChild(chain(1, 4, 4, 4), chain(0, 1))
    level, context = open_level(child, (3, 0))
    (offered,) = level.propose([context], [5])
    assert offered.tree.token_ids == (1, 4, 4, 4) and child.budgets == [3]
    give_verdict(level, context, (1,), 4, 0)
    assert counted(level) == {"0": (1, 3, 1)}
    (offered,) = level.propose([context], [2])
    assert offered.tree.token_ids == (0, 1) and child.paths == [(1,)]


def test_each_level_is_verified_once_by_its_parent():
    child = ScriptedChild(chain(1, 2), chain(3, 4))
    middle, context = open_level(child, (1, 2), is_last=False)
    above, context = open_level(middle, (1, 2, 3), number=2)
    (offered,) = above.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4)
    assert counted(above) == {"0": (1, 1, 1), "1": (1, 2, 2), "2": (0, 0, 0)}
    give_verdict(above, context, (1, 2), 2, 3, 0)
    above.propose([context], [3])
    assert counted(above)["2"] == (1, 3, 2)


def test_a_level_that_works_ahead_rests_once_the_next_proposal_is_ready():
    """It assumes that all is accepted: its proposal, the target's token, and one more proposal behind them."""
    child = ScriptedChild()
    level, context = open_level(child, (1, 3), works_ahead=True)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (1, 2, 3, 4)
    steps = 0
    while level.wants_work:
        level.work()
        steps += 1
        assert steps < 20, "it never comes to rest"
    num_ordered = len(child.budgets)
    give_verdict(level, context, (1, 2, 3), 2, 3, 4, 0)
    (offered,) = level.propose([context], [3])
    assert offered.tree.token_ids == (0, 1, 2, 3) and len(child.budgets) == num_ordered, "it is drafted again"
