from __future__ import annotations

from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parallel.kv.pool import KVPool, SlotTable
from tests.examples import examples

SLOTS = 48


def make_pool(num_slots: int = SLOTS) -> KVPool:
    return KVPool(num_layers=1, num_slots=num_slots, num_kv_heads=1, head_dim=1)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that is two lists of row names per sequence; names live in the slots' keys."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.committed: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}
        self.names = iter(range(1, 10**6))

    @rule(seq_id=st.integers(0, 4))
    def open_or_close(self, seq_id):
        if seq_id in self.pending:
            self.pool.close(seq_id)
            del self.committed[seq_id], self.pending[seq_id]
        else:
            self.pool.open(seq_id)
            self.committed[seq_id], self.pending[seq_id] = [], []

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.committed)))

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), num_rows=st.integers(0, 12))
    def draft(self, data, num_rows):
        """A sequence that borrows another's committed rows adds rows of its own, and all it added is free again."""
        owner = self.pick(data)
        num_free, slots = self.pool.num_free, self.pool.slots(owner).copy()
        self.pool.borrow("draft", owner)
        lent = self.pool.cached_len("draft")
        assert lent == len(self.committed[owner]) and self.pool.pending_len("draft") == 0
        if num_rows and self.pool.can_reserve(num_rows):
            taken = self.pool.reserve("draft", num_rows)
            assert not set(taken.tolist()) & set(slots.tolist())
            self.pool.check()
            self.pool.commit("draft", range(num_rows // 2))
            self.pool.check()
        assert self.pool.slots("draft")[:lent].tolist() == slots[:lent].tolist()
        self.pool.truncate("draft", lent // 2)
        self.pool.check()
        self.pool.close("draft")
        assert self.pool.num_free == num_free

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), num_rows=st.integers(1, 20))
    def reserve(self, data, num_rows):
        seq_id = self.pick(data)
        owned = sum(map(len, [*self.committed.values(), *self.pending.values()]))
        assert self.pool.can_reserve(num_rows) == (num_rows <= SLOTS - owned)
        if not self.pool.can_reserve(num_rows):
            return
        slots = self.pool.reserve(seq_id, num_rows)
        assert len(slots) == num_rows
        for slot in slots.tolist():
            name = next(self.names)
            self.pool.keys[0, slot] = name
            self.pending[seq_id].append(name)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def commit(self, data):
        seq_id = self.pick(data)
        rows = self.pending[seq_id]
        order = data.draw(st.permutations(range(len(rows))))
        cut = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
        keep, retain = sorted(order[: cut[0]]), sorted(order[cut[0] : cut[1]])
        self.pool.commit(seq_id, keep, retain)
        self.committed[seq_id] += [rows[i] for i in keep]
        self.pending[seq_id] = [rows[i] for i in retain]

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def truncate(self, data):
        seq_id = self.pick(data)
        length = data.draw(st.integers(0, len(self.committed[seq_id])))
        self.pool.truncate(seq_id, length)
        del self.committed[seq_id][length:]
        self.pending[seq_id] = []

    @invariant()
    def rows_are_where_the_tables_say(self):
        self.pool.check()
        for seq_id, committed in self.committed.items():
            slots = self.pool.slots(seq_id)
            names = self.pool.keys[0, slots.tolist(), 0, 0].tolist()
            assert names == committed + self.pending[seq_id]
            assert self.pool.cached_len(seq_id) == len(committed)
            assert self.pool.pending_len(seq_id) == len(self.pending[seq_id])
            run = self.pool.run(seq_id)
            assert run is None or list(run) == slots.tolist()
            assert run is not None or list(range(slots[0], slots[0] + len(slots))) != slots.tolist()
        assert self.pool.keys[0, self.pool.scratch_slot].item() == 0


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


class RareSearches(PoolMachine):
    """The same where gaps are looked for once those that are known are used up, as in a large pool."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("parallel.kv.pool._SLOTS_PER_FREED", 0)
        self._patch.setattr("parallel.kv.pool._MOST_GAPS", 3)

    def teardown(self) -> None:
        self._patch.undo()


TestRareSearches = RareSearches.TestCase
TestRareSearches.settings = TestPool.settings


@settings(max_examples=examples(60), deadline=None)
@given(choose=st.randoms(use_true_random=False))
def test_slots_are_the_same_whenever_they_are_looked_at(choose):
    """They are written when they are asked for; one of two pools is asked behind every change, the other at the end."""
    asked, unasked = pools = [make_pool(300) for _ in range(2)]
    for pool in pools:
        for seq_id in range(3):
            pool.open(seq_id)
    for _ in range(choose.randint(1, 30)):
        seq_id, action, num_rows = choose.randrange(3), choose.random(), choose.randint(1, 60)
        cached_len, num_pending = asked.cached_len(seq_id), asked.pending_len(seq_id)
        change: Any
        values: list[Any]
        if action < 0.5 and asked.can_reserve(num_rows):
            change, values = KVPool.extend, [num_rows]
        elif action < 0.65:
            change, values = KVPool.commit, [range(choose.randint(0, num_pending))]
        elif action < 0.8:  # a path of a tree
            kept = sorted(choose.sample(range(num_pending), choose.randint(0, num_pending)))
            middle = choose.randint(0, len(kept))
            change, values = KVPool.commit, [kept[:middle], kept[middle:]]
        else:
            change, values = KVPool.truncate, [choose.randint(0, cached_len)]
        for pool in pools:
            change(pool, seq_id, *values)
        asked.check()
    for seq_id in range(3):
        assert unasked.run(seq_id) == asked.run(seq_id)
        assert unasked.slots(seq_id).tolist() == asked.slots(seq_id).tolist()
    unasked.check()


def test_a_pool_in_pieces_is_not_searched_for_every_row(monkeypatch):
    """1024 gaps of a slot each, taken one by one."""
    pool, searches = make_pool(2048), []
    find = KVPool._find_gaps
    monkeypatch.setattr(KVPool, "_find_gaps", lambda pool: searches.append(pool.num_free) or find(pool))
    for number in range(2048):
        pool.open(number)
        pool.reserve(number, 1)
    for number in range(0, 2048, 2):
        pool.close(number)
    assert pool.num_free == 1024 and len(searches) <= 1
    for number in range(0, 2048, 2):
        pool.open(number)
        pool.reserve(number, 1)
    pool.check()
    assert len(searches) <= 1 + 1024 / 256 + 1, "one for what was freed, and one for every 256 gaps"


def test_a_cut_chain_stays_one_run():
    pool = make_pool()
    pool.open("a")
    pool.reserve("a", 10)
    pool.commit("a", range(10))
    for accepted in (3, 0, 5, 1):
        pool.reserve("a", 6)
        pool.commit("a", range(accepted))
    assert pool.run("a") is not None and pool.cached_len("a") == 19


def test_neighbours_have_room_to_grow():
    pool = make_pool(400)
    for seq_id in range(4):
        pool.open(seq_id)
        pool.reserve(seq_id, 10)
    for _ in range(40):
        for seq_id in range(4):
            pool.reserve(seq_id, 1)
    assert all(pool.run(seq_id) is not None for seq_id in range(4))
    pool.check()


def test_a_run_goes_on_to_the_last_slot():
    pool = make_pool(16)
    for seq_id in "ab":
        pool.open(seq_id)
        pool.reserve(seq_id, 4)
    assert pool.run("b") == range(8, 12), "in the middle of what was free"
    pool.close("a")
    pool.reserve("b", 4)
    assert pool.run("b") == range(8, 16)


def test_a_tree_path_breaks_the_run_and_truncation_restores_it():
    pool = make_pool()
    pool.open("a")
    pool.reserve("a", 4)
    pool.commit("a", range(4))
    first = pool.reserve("a", 5)[0]
    pool.commit("a", [0, 3])
    assert pool.run("a") is None and pool.slots("a")[4:].tolist() == [first, first + 3]
    pool.truncate("a", 5)
    assert pool.run("a") == range(first - 4, first + 1)
    pool.check()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: pool._free.__setitem__(3, 1),  # free and owned
        lambda pool: setattr(pool, "num_free", pool.num_free + 1),
        lambda pool: pool._tables["a"].slots.__setitem__(1, 7),  # owned twice, and no run
        lambda pool: setattr(pool._tables["a"], "run_len", 4),
        lambda pool: setattr(pool._tables["a"], "cached_len", 99),
    ],
)
def test_check_finds_a_corrupted_pool(corrupt):
    pool = make_pool()
    pool.open("a")
    pool.reserve("a", 8)
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_misuse_is_an_assertion():
    pool = make_pool()
    pool.open("a")
    with pytest.raises(AssertionError):
        pool.open("a")
    with pytest.raises(AssertionError):
        pool.reserve("a", SLOTS + 1)
    pool.reserve("a", 3)
    with pytest.raises(AssertionError):
        pool.commit("a", [1, 1])
    with pytest.raises(AssertionError):
        pool.truncate("a", 2)


def test_rows_are_zeros_that_take_memory_once_they_are_written():
    before = psutil.Process().memory_info().rss
    pool = KVPool(num_layers=2, num_slots=2**15, num_kv_heads=8, head_dim=64)
    size = pool.keys.nbytes + pool.values.nbytes
    assert size > 2**28
    assert psutil.Process().memory_info().rss - before < size / 4
    assert not pool.keys[:, ::4096].any() and not pool.values[:, ::4096].any()
    pool.keys[1, 5] = 1.0
    assert pool.keys[:, 4:7].sum(dim=(2, 3)).tolist() == [[0.0, 0.0, 0.0], [0.0, 8.0 * 64, 0.0]]


def test_a_borrowed_row_that_nothing_owns_is_found():
    pool = make_pool()
    pool.open("owner")
    pool.reserve("owner", 3)
    pool.commit("owner", range(3))
    pool.borrow("draft", "owner")
    pool.check()
    pool.truncate("owner", 1)
    with pytest.raises(AssertionError, match="'draft': borrows rows that nothing owns"):
        pool.check()


def test_the_leading_run_ends_with_the_rows():
    """Slots behind the last row are of rows that were dropped, and may go on where it ended."""
    table = SlotTable()
    table.append(3, 6)
    table.shorten(4)
    table.run_len = 0
    table.note_rewritten(0)
    assert table.run_len == table.num_rows == 4


def test_rows_of_the_middle_are_dropped_and_their_positions_remembered():
    pool = KVPool(1, 32, 1, 2)
    pool.open("a")
    pool.reserve("a", 12)
    pool.commit("a", range(10), [10, 11])
    before = pool.slots("a").tolist()
    pool.drop("a", 2, 3, moved=False)
    assert pool.slots("a").tolist() == before[:2] + before[5:] and pool.num_free == 23
    assert (pool.cached_len("a"), pool.pending_len("a"), pool.text_len("a"), pool.skipped("a")) == (7, 2, 10, 3)
    pool.check()
    pool.drop("a", 2, 1, moved=True)
    assert (pool.cached_len("a"), pool.text_len("a"), pool.skipped("a")) == (6, 10, 3)
    pool.truncate("a", 8)
    assert pool.slots("a").tolist() == before[:2] + before[6:8] and pool.text_len("a") == 8
    pool.truncate("a", 5)
    assert pool.slots("a").tolist() == before[:2] and (pool.text_len("a"), pool.skipped("a")) == (2, 0)
    pool.check()
    for first, count in ((0, 3), (2, 0)):
        with pytest.raises(AssertionError, match="committed"):
            pool.drop("a", first, count, moved=False)
