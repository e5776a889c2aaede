"""Rows of texts in one pool: whatever is opened, closed, cut and evicted, each row is that of its own text."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import parallel.kv.prefix_tree as tree_module
from parallel.kv.pool import KVPool
from parallel.kv.prefix_tree import LEAST_EVICTED, PrefixTree, Text

SLOTS = 96


class Written:
    """Sequences over a pool whose rows hold a number of the text before them, and of its scope."""

    def __init__(self, num_slots: int = SLOTS) -> None:
        self.pool = KVPool(1, num_slots, 1, 1, dtype=torch.float64)
        self.texts: dict[int, Text] = {}
        self.num_hits = 0

    def open(self, seq_id: int, token_ids, scope=None) -> int:
        self.texts[seq_id] = Text(list(token_ids), scope)
        self.pool.open(seq_id, self.texts[seq_id])
        self.check()
        self.num_hits += self.pool.cached_len(seq_id)
        assert self.pool.cached_len(seq_id) < max(1, len(token_ids))
        return self.pool.cached_len(seq_id)

    def read(self, seq_id: int, num_rows: int) -> None:
        """Feed the next tokens of the text."""
        cached = self.pool.cached_len(seq_id)
        slots = self.pool.reserve(seq_id, num_rows).copy()
        for place, slot in enumerate(slots.tolist(), start=cached):
            self.pool.keys[0, slot] = self.name(seq_id, place)
        self.pool.commit(seq_id, range(num_rows))
        self.check()

    def close(self, seq_id: int) -> None:
        self.pool.close(seq_id)
        del self.texts[seq_id]
        self.check()

    def name(self, seq_id: int, place: int) -> float:
        text = self.texts[seq_id]
        return float(hash((text.scope, *text.token_ids[: place + 1])) % (1 << 50))

    def check(self) -> None:
        self.pool.check()
        for seq_id in self.texts:
            slots = self.pool.slots(seq_id).tolist()
            names = [self.name(seq_id, place) for place in range(len(slots))]
            assert self.pool.keys[0, slots, 0, 0].tolist() == names, "a row is that of another text"


def storm(seed: int) -> Written:
    """Texts of few words, so that many begin alike, in a pool that is too small for all."""
    choose, written = random.Random(seed), Written()
    known = [[]]
    for seq_id in range(150):
        start = choose.choice(known)
        text = start[: choose.randint(0, len(start))] + choose.choices([1, 2], k=choose.randint(1, 12))
        written.open(seq_id, text, choose.choice(["one", "one", "other"]))
        for other in [seq_id] if choose.random() < 0.3 else sorted(written.texts):
            token_ids, cached = written.texts[other].token_ids, written.pool.cached_len(other)
            if choose.random() < 0.1:
                length = choose.randint(0, cached)
                written.pool.truncate(other, length)
                del token_ids[max(1, length) :]
            elif missing := len(token_ids) - cached:
                num_rows = choose.randint(1, missing)
                if written.pool.can_reserve(num_rows):
                    written.read(other, num_rows)
            elif choose.random() < 0.5:
                token_ids.append(choose.choice([1, 2]))
            else:
                known.append(list(token_ids))
                written.close(other)
    for seq_id in [*written.texts]:
        written.close(seq_id)
    assert written.pool.can_reserve(SLOTS), "slots are lost"
    return written


def storms(count: int) -> None:
    for seed in range(count):
        storm(seed)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_rows_are_those_of_their_text(seed):
    assert storm(seed).num_hits > 50


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("_num_common", lambda one, other: min(len(one), len(other))), id="tokens-unread"),
        pytest.param(("_num_common", lambda one, other: min(_common(one, other) + 1, len(one))), id="one-too-many"),
    ],
)
def test_a_wrong_match_is_found(fault, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(tree_module, *fault)
    with pytest.raises((AssertionError, IndexError)):
        storms(8)


_common = tree_module._num_common


def test_an_ignored_scope_is_found(monkeypatch):
    """Likewise: rows of a text of another scope would be lent."""
    find, add = PrefixTree.find, PrefixTree.add
    monkeypatch.setattr(PrefixTree, "find", lambda self, start, _, token_ids: find(self, start, None, token_ids))
    monkeypatch.setattr(PrefixTree, "add", lambda self, parent, _, *rows: add(self, parent, None, *rows))
    with pytest.raises(AssertionError, match="a row is that of another text"):
        storms(8)


def test_a_text_is_found_short_of_its_last_token_and_while_it_is_read():
    written = Written()
    assert written.open(0, range(20)) == 0
    written.read(0, 12)
    assert written.open(1, range(20)) == 12 and written.pool.slots(1).tolist() == written.pool.slots(0)[:12].tolist()
    written.read(0, 8)
    assert written.open(2, range(20)) == 19
    assert written.open(3, [*range(15), 7, 7]) == 15 and written.open(4, range(20), "salt") == 0
    written.close(0)
    assert written.open(5, range(40)) == 20


def test_rows_that_were_read_twice_are_kept_once():
    written = Written(num_slots=40)
    for seq_id in range(2):
        written.open(seq_id, range(20))
        assert written.pool.cached_len(seq_id) == 0
    for seq_id in range(2):
        written.read(seq_id, 20)
    assert not written.pool.can_reserve(1)
    written.close(0)
    assert not written.pool.can_reserve(21) and written.pool.can_reserve(20)
    written.close(1)
    assert written.pool.num_free == 20 and written.pool.can_reserve(40)


def test_the_text_left_longest_ago_goes_first_from_its_end():
    size = 2 * LEAST_EVICTED
    written = Written(num_slots=4 * size)
    texts = [[first, *range(10, 9 + size)] for first in range(3)]
    for seq_id, text in enumerate(texts):
        written.open(seq_id, text)
        written.read(seq_id, size)
    for seq_id in (1, 0, 2):
        written.close(seq_id)
    written.open(3, [*texts[1], 9])  # text 0 is left longest ago from now on
    written.close(3)
    written.open(4, range(100, 100 + size + 1))
    written.read(4, size + 1)
    kept = [len(written.pool._tree.find(written.pool._tree.root, None, np.array(text)).path_slots()) for text in texts]
    assert kept == [size - LEAST_EVICTED, size, size]


def test_rows_of_open_sequences_stay():
    written = Written(num_slots=100)
    written.open(0, range(60))
    written.read(0, 60)
    written.open(1, range(60))
    written.close(0)
    assert not written.pool.can_reserve(42) and written.pool.can_reserve(41)
    written.open(2, range(200, 241))
    written.read(2, 41)
    with pytest.raises(AssertionError, match="1 rows requested, 0 slots free"):
        written.pool.reserve(2, 1)
    written.close(1)
    written.pool.reserve(2, 1)


def test_forgotten_texts_are_not_found():
    written = Written()
    written.open(0, range(20))
    written.read(0, 20)
    with pytest.raises(AssertionError, match="sequences are open"):
        written.pool.forget_texts()
    written.close(0)
    written.pool.forget_texts()
    assert written.pool.num_free == SLOTS and written.open(1, range(20)) == 0


def test_the_queue_of_leaves_does_not_grow_with_use():
    written = Written()
    for seq_id in range(50):
        written.open(seq_id, [seq_id % 2, 5, 6, 7])
        written.read(seq_id, len(written.texts[seq_id].token_ids) - written.pool.cached_len(seq_id))
        written.close(seq_id)
    assert len(written.pool._tree._queue) == 2
