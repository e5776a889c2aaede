"""A tenant of a pool: its long texts are read in parts, and what it gives back is read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from actors.drafters.interface import Capabilities, Context, Draft
from actors.pool.merged_passes import MergedPasses
from actors.pool.tenant_drafter import LeaseCounts, SharedDrafter
from actors.protocol.messages import Commit, SamplingParams, TokenTree


class NotingDrafter:
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []
        self.capabilities = Capabilities(prefills=self)  # pyright: ignore[reportArgumentType]

    def open(self, context: Context) -> None:
        self.calls.append(("open", [(context.request_id, len(context.token_ids))]))

    def release(self, request_id: int) -> None:
        """Nothing is kept."""

    def observe(self, context: Context, commit: Commit) -> None:
        """Nothing is kept."""

    def prefill(self, contexts: Sequence[Context]) -> None:
        self.calls.append(("prefill", [(one.request_id, len(one.token_ids)) for one in contexts]))

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        if 13 in budgets:
            raise RuntimeError("a bad pass")
        self.calls.append(("propose", [(one.request_id, len(one.token_ids)) for one in contexts]))
        return [
            Draft(TokenTree.chain(context.token_ids[-1], [1] * budget))
            for context, budget in zip(contexts, budgets, strict=True)
        ]


@pytest.fixture
def passes() -> Iterator[MergedPasses]:
    merged = MergedPasses(NotingDrafter)  # pyright: ignore[reportArgumentType]
    yield merged
    merged.close()


def context(request_id: int, length: int) -> Context:
    return Context(request_id, 1, list(range(length)), 1, SamplingParams())


def calls(passes: MergedPasses) -> list[tuple[str, list[tuple[int, int]]]]:
    drafter = passes.drafter
    assert isinstance(drafter, NotingDrafter)
    found, drafter.calls = drafter.calls, []
    return [call for call in found if call[0] != "open"]


def test_long_texts_are_read_in_parts(passes):
    tenant = SharedDrafter(passes, kv_slots=None, read_chunk=10).join()
    long, short = context(1, 25), context(2, 4)
    for one in (long, short):
        tenant.open(one)
    tenant.prefill([long, short])
    assert calls(passes) == [
        ("prefill", [(1, 10)]),
        ("prefill", [(1, 20)]),
        ("prefill", [(1, 25), (2, 4)]),
    ]
    tenant.prefill([long, short])
    assert calls(passes) == []


def test_a_draft_reads_all_but_the_last_part_first(passes):
    tenant = SharedDrafter(passes, kv_slots=None, read_chunk=10).join()
    long, short = context(1, 25), context(2, 4)
    for one in (long, short):
        tenant.open(one)
    tenant.propose([long, short], [1, 1])
    assert calls(passes) == [("prefill", [(1, 10)]), ("prefill", [(1, 20)]), ("propose", [(1, 25), (2, 4)])]
    long.extend([7, 8])
    tenant.propose([long], [1])
    assert calls(passes) == [("propose", [(1, 27)])]


def test_rows_that_were_given_back_are_read_again(passes):
    shared = SharedDrafter(passes, kv_slots=200, read_chunk=10)
    tenant, text = shared.join(), context(1, 25)
    tenant.open(text)
    tenant.prefill([text])
    assert len(calls(passes)) == 3
    other = shared.join()  # a share of 100 slots holds the text no more
    shared.kv_slots = 150
    tenant.prefill([text])
    assert calls(passes) == []
    shared.leave(other)
    tenant.prefill([text])
    assert len(calls(passes)) == 3


def test_rows_that_come_back_with_a_draft_are_given_back_again(passes, monkeypatch):
    shared = SharedDrafter(passes, kv_slots=200, read_chunk=10)
    tenant, text = shared.join(), context(1, 25)
    tenant.open(text)
    propose = passes.propose

    def propose_late(*order):
        """Another lease begins after the text was read, and before the draft is made."""
        shared.kv_slots = 80
        with passes.turn():
            tenant.drop_beyond_share()
        assert not tenant.num_rows
        return propose(*order)

    monkeypatch.setattr(passes, "propose", propose_late)
    tenant.propose([text], [1])
    assert tenant.num_rows == 25
    drafter = passes.drafter
    assert isinstance(drafter, NotingDrafter)
    drafter.calls.clear()
    tenant.prefill([text])
    assert not tenant.num_rows and drafter.calls == [("open", [(1, 25)])]


def test_drafts_and_their_verdicts_are_counted(passes):
    shared, counts = SharedDrafter(passes, kv_slots=None, read_chunk=10), LeaseCounts()
    tenant, text = shared.join(counts), context(1, 5)
    tenant.open(text)
    tenant.propose([text], [4])
    tenant.observe(text, Commit(1, 1, 5, (1, 1, 9), (1, 2)))
    tenant.propose([text], [4])
    tenant.observe(text, Commit(1, 1, 8, (9,), ()))
    assert counts == LeaseCounts(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=2, num_passes=2)
    shared.kv_slots = 10
    tenant.propose([text], [4])
    assert counts.num_beyond_share == 1 and counts.num_drafts == 2


def test_no_more_is_accepted_than_was_drafted(passes):
    """Else an engine whose grammar proposes, or one that lies, would be drafted for before all others."""
    counts = LeaseCounts()
    tenant, text = SharedDrafter(passes, kv_slots=None, read_chunk=10).join(counts), context(1, 5)
    tenant.open(text)
    for size in (4, 0):
        if size:
            tenant.propose([text], [size])
        tenant.observe(text, Commit(1, 1, 5, tuple(range(1, 41)), (1,) * 41))
    assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (4, 4)
    assert tenant._history.acceptance.mean == 1.0


class AheadNotes(NotingDrafter):
    """Has never prepared anything."""

    may_work_ahead = True

    def __init__(self) -> None:
        super().__init__()
        can: Any = self
        self.capabilities = Capabilities(prefills=can, works_ahead=can, sends_previews=can)

    def prepared(self, context: Context) -> bool:
        return False

    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None:
        self.calls.append(("prefetched", [(context.request_id, budget)]))


@pytest.mark.parametrize("streams", [True, False])
def test_a_drafter_begins_behind_what_is_verified_where_previews_stream(streams):
    passes = MergedPasses(AheadNotes)  # pyright: ignore[reportArgumentType]
    shared, counts = SharedDrafter(passes, kv_slots=250, read_chunk=10), LeaseCounts()
    tenant, text = shared.join(counts, streams=streams), context(1, 25)
    tenant.open(text)
    tenant.prefetched(text, 64, TokenTree.root(24))
    read = [("prefill", [(1, 10)]), ("prefill", [(1, 20)]), ("prefetched", [(1, 64)])]
    assert calls(passes) == read * streams, "else its rows were given back since the preview"
    tenant.prefetched(text, 64, TokenTree.root(24))
    assert calls(passes) == read[2:] * streams, "the rest is read with the next step"
    shared.kv_slots = 200  # with those of 192 nodes the text fits no more
    tenant.prefetched(text, 64, TokenTree.root(24))
    assert calls(passes) == []
    assert (counts.num_beyond_share, counts.num_drafts) == ((1, 0) if streams else (0, 3))
    passes.close()


def test_requests_of_a_pass_that_failed_are_read_again(passes):
    shared = SharedDrafter(passes, kv_slots=None, read_chunk=10)
    tenants, texts = [shared.join(), shared.join()], [context(1, 25), context(2, 25)]
    for tenant, text in zip(tenants, texts, strict=True):
        tenant.open(text)
        tenant.prefill([text])
    drafter = passes.drafter
    assert isinstance(drafter, NotingDrafter)
    drafter.calls.clear()
    with passes.turn():
        passes.restart([2])
    assert drafter.calls == [("open", [(2, 25)])]
    for tenant, text in zip(tenants, texts, strict=True):
        tenant.prefill([text])
    assert [name for name, _ in calls(passes)] == ["prefill"] * 3
    with passes.turn():
        passes.restart(None)
    assert drafter.calls == [("open", [(1, 25)]), ("open", [(2, 25)])]


def test_a_step_feeds_as_many_nodes_for_each_engine_as_its_own_drafter_would(passes):
    shared = SharedDrafter(passes, kv_slots=None, read_chunk=10, ahead_width=12)
    tenants = [shared.join() for _ in range(3)]
    widths = []
    for number, tenant in enumerate((tenants[0], tenants[1], tenants[1], tenants[1]), start=1):
        tenant.open(context(number, 5))
        widths.append(shared.step_width)
    assert widths == [12, 12, 8, 6]
    shared.ahead_width = 0
    assert shared.step_width == 0
