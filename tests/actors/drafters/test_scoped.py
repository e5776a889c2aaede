"""What the requests of one client left behind is in no draft for another: drafters with a memory, and fresh ones."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.drafters.adjacency.aded import AdedDrafter
from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig
from actors.drafters.adjacency.recycling import RecyclingDrafter
from actors.drafters.interface import Context
from actors.drafters.lookup.maxgram import MaxgramDrafter, MaxgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafter, SuffixDrafterConfig
from actors.drafters.scoped import MOST_SCOPES, ScopedMemory, Share
from actors.protocol.messages import HASH_SEED, Admit, Commit, Request, SamplingParams, TopTokens, extend_hash

DRAFTERS = {
    "suffix": lambda share: SuffixDrafter(SuffixDrafterConfig(share=share)),
    "maxgram": lambda share: MaxgramDrafter(MaxgramDrafterConfig(share=share)),
    "recycling": lambda share: RecyclingDrafter(RecyclingDrafterConfig(share=share)),
    "aded": lambda share: AdedDrafter(AdedDrafterConfig(share=share)),
}
SECRET = (11, 12, 13, 14, 15, 16, 17, 18)
ANN, BOB, EVE = 0, 7, 8


def admitted(drafter, number: int, scope: int, token_ids: tuple[int, ...]) -> Context:
    context = Context.admitted(Admit(number, 0, token_ids, len(token_ids), SamplingParams(), memory_scope=scope), None)
    drafter.open(context)
    return context


def rows_of(*texts: tuple[int, tuple[int, ...]]) -> TopTokens:
    """What a pass over these texts of (scope, tokens) shows: each token is followed by the next one."""
    contexts = array("i", [token for _, text in texts for pair in pairwise(text) for token in pair])
    followers = array("i", [token for _, text in texts for token in (*text[2:], 99)])
    spans = tuple((number, len(text), len(text) - 1) for number, (_, text) in enumerate(texts))
    probs = array("f", [0.9] * len(followers))
    return TopTokens(
        1, contexts.tobytes(), followers.tobytes(), probs.tobytes(), spans, tuple(scope for scope, _ in texts)
    )


def teach(drafter, scope: int) -> None:
    """A request of this client whose answer is the secret; the same pass has rows of another client."""
    context = admitted(drafter, 1, scope, SECRET[:2])
    if (reader := drafter.capabilities.reads_top_tokens) is not None:
        reader.read_top_tokens(rows_of((scope, SECRET), (EVE, (60, 61, 62))))
    drafter.propose([context], [4])
    commit = Commit(1, 0, 2, (), SECRET[2:])
    drafter.observe(context, commit)
    context.extend(commit.token_ids)
    context.settled_len = len(context.token_ids)
    drafter.release(1)


def drafted(drafter, scope: int, number: int = 2) -> tuple[int, ...]:
    """The draft for a client whose prompt is the beginning of the secret."""
    context = admitted(drafter, number, scope, (5, *SECRET[:3]))
    (draft,) = drafter.propose([context], [4])
    drafter.release(number)
    return draft.tree.token_ids


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_shows_nothing_of_another_clients_requests(name):
    drafter, fresh = DRAFTERS[name](Share.client), DRAFTERS[name](Share.client)
    teach(drafter, ANN)
    assert drafted(drafter, BOB) == drafted(fresh, BOB)
    assert SECRET[3] in drafted(drafter, ANN, 3), "the control: it is remembered for the client itself"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_memory_may_be_shared_by_all(name):
    drafter = DRAFTERS[name](Share.all)
    teach(drafter, ANN)
    assert SECRET[3] in drafted(drafter, BOB)


def test_the_memory_that_was_used_longest_ago_is_dropped():
    memories = ScopedMemory(list, Share.client)
    for scope in range(MOST_SCOPES):
        memories.of(scope).append(scope)
    memories.of(0)
    assert memories.of(MOST_SCOPES) == []
    assert [memories.of(scope) for scope in (0, 2)] == [[0], [2]] and memories.of(1) == []


@pytest.mark.parametrize("name", ["suffix", "maxgram"])
def test_many_small_memories_are_kept(name):
    """As of the prompts of rollouts, each with a salt of its own, which are drafted for in turn."""
    drafter = DRAFTERS[name](Share.client)
    scopes = range(1, 10 * MOST_SCOPES)
    for scope in scopes:
        teach(drafter, scope)
    assert all(SECRET[3] in drafted(drafter, scope) for scope in scopes)


def test_memories_have_no_more_in_all_than_so_many_full_ones():
    memories = ScopedMemory(list, Share.client, len, 10)
    for scope in range(100):
        memories.of(scope).extend("abcd")
    assert [memories.of(scope) for scope in (99, 98)] == [[*"abcd"]] * 2
    held = memories._sizes
    assert len(held) < 10 * MOST_SCOPES and sum(held.values()) <= 10 * MOST_SCOPES
    memories.of(98).extend("x" * 10 * MOST_SCOPES)
    assert len(memories.of(98)) == 4 + 10 * MOST_SCOPES, "one that is too large alone stays, until another is used"
    assert memories.of(99) == [] and memories.of(98) == []


def test_rows_of_several_clients_are_kept_apart():
    first, second, third = (ANN, (1, 2, 3)), (BOB, (4, 5, 6, 7)), (ANN, (8, 9))
    together = rows_of(first, second, third)
    together.check(100)
    apart = dict(together.by_scope())
    assert set(apart) == {ANN, BOB}
    assert apart[BOB].contexts == rows_of(second).contexts and apart[BOB].token_ids == rows_of(second).token_ids
    assert apart[ANN].contexts == rows_of(first, third).contexts and apart[ANN].probs == rows_of(first, third).probs
    assert [span for _, *span in apart[ANN].spans] == [[3, 2], [2, 1]]
    assert rows_of(second).by_scope() == [(BOB, rows_of(second))]


def test_the_scope_of_a_request_reaches_its_context():
    context = Context.admitted(Admit(1, 0, (3, 4), 2, SamplingParams(), scope=6, memory_scope=5), None)
    assert context.scope == 5 and context.prefix_hash == extend_hash(HASH_SEED, (3, 4))


def test_what_is_remembered_is_kept_apart_by_clients_and_salts():
    """As KV rows are; without a salt it is the client's, for which its fair share is counted too."""
    requests = [Request(1, (3,), scope=scope, cache_salt=salt) for scope in (0, 5) for salt in ("", "a", "b")]
    outbox = Outbox()
    for request in requests:
        outbox.admit(Sequence.start(replace(request, request_id=len(outbox.known)), 64))
    admits, _, _ = outbox.flush()
    assert [admit.scope for admit in admits] == [0, 0, 0, 5, 5, 5]
    scopes = [admit.memory_scope for admit in admits]
    assert scopes[0] == 0 and scopes[3] == 5 and len(set(scopes)) == 6
    assert all(0 <= scope < 1 << 63 for scope in scopes)
