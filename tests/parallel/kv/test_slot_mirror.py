"""The mirror against the pool's own tables, over random edits and many turns of its halves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from parallel.kv.pool import KVPool
from parallel.kv.slot_mirror import SlotMirror

SLOTS = 24

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


class Mirrored:
    """A pool whose sequences change at random, and its mirror, written as a plan writes it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = KVPool(num_layers=1, num_slots=SLOTS, num_kv_heads=1, head_dim=1)
        self.mirror = SlotMirror(self.pool)
        self.names: list[object] = []
        self.num_opened = 0
        self.num_sent = 0
        self.half = 0
        self.num_turns = 0

    def edit(self) -> None:
        """Open, close or cut a sequence; names are used again, and sequences borrow rows."""
        draw, pool = self.draw, self.pool
        if len(self.names) < 3 or draw.random() < 0.5:
            self.open(draw.choice([draw.randrange(3), f"new {self.num_opened}"]))
        name = draw.choice(self.names)
        if draw.random() < 0.2:
            pool.truncate(name, draw.randint(0, pool.cached_len(name)))
        elif pool.num_free < 4 or draw.random() < 0.3:
            pool.close(name)
            self.names.remove(name)

    def open(self, name: object) -> None:
        if name not in self.names:
            self.pool.open(name)
            self.names.append(name)
            self.num_opened += 1

    def plan(self) -> list[object]:
        """Give rows to some sequences that have room, mirror them in random order, and check what their rows read."""
        chosen = [name for name in self.draw.sample(self.names, len(self.names)) if self.draw.random() < 0.6]
        chosen = [name for name in chosen if self.reserve(name)]
        if chosen:
            self.write(chosen)
        return chosen

    def reserve(self, name: object) -> bool:
        size = self.draw.choice([1, 1, 2, 5])
        if fits := self.pool.can_reserve(size):
            self.pool.reserve(name, size)
        return fits or len(self.pool.slots(name)) > 0

    def write(self, chosen: Sequence[object]) -> dict[object, range]:
        starts, indices, slots = self.mirror.update([(name, None) for name in chosen])
        assert len(set(indices.tolist())) == len(indices), "an index that is written twice reads as either"
        self.mirror.tables[indices.tolist()] = self.mirror.tables.new_tensor(slots)
        regions = {
            name: range(start, start + len(self.pool.slots(name))) for name, start in zip(chosen, starts, strict=True)
        }
        for name in chosen:
            assert self.read(regions[name]) == self.pool.slots(name).tolist(), name
        self.num_sent = len(indices)
        for start in starts:
            half = int(start >= len(self.mirror.tables) // 2)
            self.num_turns, self.half = self.num_turns + (half != self.half), half
        return regions

    def read(self, region: range) -> list[int]:
        return self.mirror.tables[region.start : region.stop].tolist()

    def commit(self, name: object) -> None:
        """A random path is kept, a later one stays pending: slots move within the table."""
        order = self.draw.sample(range(rows := self.pool.pending_len(name)), rows)
        kept, retained = sorted(self.draw.randint(0, rows) for _ in range(2))
        self.pool.commit(name, sorted(order[:kept]), sorted(order[kept:retained]))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_that_a_plan_reads_is_its_sequences(seed):
    """A region that outlives its half is given to another sequence, and its own rows are not sent again."""
    mirrored = Mirrored(seed)
    for _ in range(800):
        mirrored.edit()
        for name in mirrored.plan():
            mirrored.commit(name)
    assert mirrored.num_turns >= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_made_ahead_reads_its_rows_after_the_next_plan(seed):
    """Its sequences stay as they are; the plan of others may turn the halves over."""
    mirrored = Mirrored(seed)
    pool, draw = mirrored.pool, mirrored.draw
    for name in (ahead := ["first", "second"]):
        pool.open(name)
        pool.reserve(name, 3)
    for _ in range(800):
        regions = mirrored.write(ahead)
        mirrored.edit()
        for name in mirrored.plan():
            mirrored.commit(name)
        for name, region in regions.items():
            assert mirrored.read(region) == pool.slots(name).tolist(), name
        moved = draw.choice(ahead)
        pool.commit(moved, [2, 0, 1])
        pool.truncate(moved, 0)
        pool.reserve(moved, 3)
    assert mirrored.num_turns >= 4


def test_rows_are_sent_once_in_each_half():
    mirrored = Mirrored(0)
    pool = mirrored.pool
    pool.open("stays")
    pool.reserve("stays", 5)
    sent = []
    for name in range(300):
        turns = mirrored.num_turns
        pool.open(name)
        pool.reserve(name, 3)
        mirrored.write([name, "stays"])
        sent.append((mirrored.num_turns > turns, mirrored.num_sent))
        pool.close(name)
    assert sent[0] == (False, 3 + 5) and mirrored.num_turns >= 4
    assert set(sent[1:]) == {(True, 3 + 5), (False, 3)}


def test_half_of_the_tensor_holds_all_regions_of_a_full_pool():
    """The most that there can be, wherever a half is when they come: all rows single ones, each lent to another."""
    mirrored = Mirrored(0)
    owners = [*range(SLOTS)]
    for name in owners:
        mirrored.pool.open(name)
        mirrored.pool.reserve(name, 1)
        mirrored.pool.commit(name, [0])
    for time in range(40):
        borrowers = {(time, name): name for name in owners}
        for name, owner in borrowers.items():
            mirrored.pool.borrow(name, owner)
        mirrored.write(mirrored.draw.sample([*owners, *borrowers], mirrored.draw.randint(1, 2 * SLOTS)))
        mirrored.write([*borrowers, *owners])
        for name in borrowers:
            mirrored.pool.close(name)
    assert mirrored.num_turns >= 4
