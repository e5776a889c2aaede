"""The contract of every drafter where prompts begin as earlier ones did: the tokens are those of plain decoding without
a prefix tree, and as much is found as without a drafter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from actors.drafters.config import OpenedModels
from actors.drafters.interface import Context
from actors.options import SchedulerConfig
from actors.policy.policy import Policy
from actors.protocol.messages import Admit, SamplingParams
from actors.verification.features import FeatureReader
from parallel.kv.pool import KVPool
from parallel.kv.prefix_tree import PrefixTree, Text
from tests import matrices
from tests.actors.test_contract import DRAFTERS, FEW_ON_TARGET, ON_ITS_LAYERS, ON_TARGET, OTHERS, ROWS, SPECULATORS
from tests.matrices import in_turn

LIMITS = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=60, prefill_chunk=24)
COLD = replace(LIMITS, prefix_cache=False)


@pytest.fixture(scope="module")
def plain_rooms():
    return {}


@pytest.fixture
def waves(make_requests):
    """Five prompts; then again as they were, and with other ends."""
    first = make_requests(5, max_tokens=16 if matrices.is_whole else 8, temperature=1.0, longest=60)
    again = [replace(one, request_id=5 + i) for i, one in enumerate(first)]
    other = [replace(one, request_id=10 + i, prompt=(*one.prompt[:-2], 50 + i, 60)) for i, one in enumerate(first)]
    return [*first, *again, *other]


@pytest.fixture
def plain(open_room, waves, plain_rooms):
    """Cold, and with a prefix tree."""
    if not plain_rooms:
        for limits in (COLD, LIMITS):
            plain_rooms[limits] = open_room(pipeline="plain", limits=limits).serve(waves)
    cold, warm = plain_rooms[COLD], plain_rooms[LIMITS]
    assert (warm.tokens, warm.ends) == (cold.tokens, cold.ends)
    assert sum(warm.cached.values()) > sum(cold.cached.values()) == 0
    return warm


def is_place(name, attached):
    """Drafters of their own are separate here, those on the target's layers attached, speculators either."""
    return attached == (name not in DRAFTERS) or (not attached and name in SPECULATORS.keys() - {*ON_ITS_LAYERS})


LIKE_OTHERS = "newest-rows-tree", "own-chosen", "every-kind", "medusa"
"""Rows of which others run the code that keeps rows, or that keep none."""
TIMES = FEW_ON_TARGET | OTHERS | dict.fromkeys(ROWS, 1) | dict.fromkeys(LIKE_OTHERS, 0)
"""By default; `test_equality_table.py` has a request that comes again for some."""


@pytest.mark.parametrize(
    ("name", "attached"), list(in_turn([*DRAFTERS, *ON_TARGET], [True, False], times=TIMES, exists=is_place))
)
def test_hits_change_no_token_and_no_drafter_loses_one(open_room, waves, plain, name, attached):
    room = open_room((DRAFTERS | ON_TARGET)[name], limits=LIMITS, attached=attached).serve(waves)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    assert {i: room.cached[i] for i in range(5, 10)} == {i: len(waves[i].prompt) - 1 for i in range(5, 10)}
    assert sum(room.cached.values()) == sum(plain.cached.values())


def drafted(room) -> tuple[int, int]:
    return room.stats.num_draft_tokens, room.stats.num_accepted_tokens


PLACED = [("kangaroo", True), ("eagle3", True), ("dflash", False)]
PLACED += [
    pytest.param(*place, marks=pytest.mark.slow) for place in (("glide", False), ("glide", True), ("medusa", False))
]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "attached"), PLACED)
def test_a_speculator_is_given_the_features_of_rows_that_were_there(open_room, waves, name, attached):
    """Its drafts are those that it makes where the target reads every prompt."""
    rooms = [
        open_room(SPECULATORS[name], limits=limits, attached=attached).serve(waves, policy=Policy("sync", 5))
        for limits in (COLD, LIMITS)
    ]
    assert drafted(rooms[0]) == drafted(rooms[1])
    assert rooms[1].stats.num_rounds < rooms[0].stats.num_rounds


@pytest.mark.extended
def test_wrong_features_show(open_room, waves, monkeypatch):
    """The control: those of no row."""
    right = drafted(open_room(SPECULATORS["eagle3"], limits=LIMITS, attached=True).serve(waves))
    known = FeatureReader.known

    def zeroed(*arguments):
        found = known(*arguments)
        return replace(found, rows=torch.zeros_like(found.rows))

    monkeypatch.setattr(FeatureReader, "known", zeroed)
    assert drafted(open_room(SPECULATORS["eagle3"], limits=LIMITS, attached=True).serve(waves)) != right


def lend_any_rows(monkeypatch):
    """Plant a mistake: texts are lent rows of any text that is known, whatever its tokens."""

    def any_text(tree, node, scope, token_ids):
        while node.children and node.end < len(token_ids):
            child = next(iter(node.children.values()))
            node = child if child.end <= len(token_ids) else tree._split(child, len(token_ids) - node.end)
        return node

    table_of = KVPool._table_of

    def lent(pool, text):
        with monkeypatch.context() as patch:
            patch.setattr(PrefixTree, "find", any_text)
            return table_of(pool, Text(text.token_ids, text.scope))

    monkeypatch.setattr(KVPool, "_table_of", lent)


def test_rows_of_another_text_show(open_room, waves, plain, monkeypatch):
    """The control of the contract; one row too many shows in the logits (`tests/parallel/runtime/test_prefix_rows.py`),
    seldom in a token."""
    lend_any_rows(monkeypatch)
    assert open_room(DRAFTERS["ngram"], limits=LIMITS).serve(waves).tokens != plain.tokens


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "expected", "attached"),
    list(
        in_turn(
            [("chain", True), ("tree", True), ("layer", True), ("online", False)],
            [False, True],
            times={("tree", True): 0},
        )
    ),
)
def test_a_draft_model_finds_rows_of_its_own(open_room, waves, plain, name, expected, attached):
    """Its own pool is searched, whatever the target has: as many drafts are accepted, and fewer rows are read."""
    limits, rooms, fed = (COLD, LIMITS), [], []
    for each in limits:
        fed.append([0])
        room = open_room(DRAFTERS[name], limits=each, attached=attached, wrap=partial(counting, fed[-1]))
        rooms.append(room.serve(waves, policy=Policy("sync", 5)))
    assert (rooms[1].tokens, rooms[1].ends) == (plain.tokens, plain.ends)
    saved = fed[0][0] - fed[1][0]
    assert saved > 300 if expected else abs(saved) < 150
    if name == "chain":
        assert drafted(rooms[0]) == drafted(rooms[1])


def counting(fed: list[int], drafter):
    """The drafter with the rows that its model is fed counted."""
    runner = getattr(drafter, "runner", None) or drafter.members[0].drafter.runner
    forward = runner.forward

    def counted(spans, *arguments, **options):
        fed[0] += sum(span.num_tokens for span in spans)
        return forward(spans, *arguments, **options)

    runner.forward = counted
    return drafter


def test_a_role_that_comes_together_anew_finds_no_rows(open_room, waves):
    """Ranks of a role must agree on what they have, and one of them may be new."""
    room = open_room(DRAFTERS["chain"], limits=LIMITS).serve(waves)
    role = room.draft
    pool = role.drafter.runner.pool
    role.forget()
    text = Context.admitted(Admit(99, 0, waves[0].prompt, 9, SamplingParams(), cache_salt=""), None)
    role.drafter.open(text)
    assert pool.cached_len(99) > 0, "a rank alone may"
    role.drafter.release(99)
    opened = OpenedModels()
    opened.next(lambda: (role.drafter.runner,))
    opened.begin_again()
    role.drafter.open(text)
    assert pool.cached_len(99) == 0
