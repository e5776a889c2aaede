"""The rows of texts that were read before, by their tokens: a radix tree whose nodes count their owners.

A node is a run of tokens and the slots of their rows; the path to it is the text before. A sequence owns the nodes of
the path that its leading rows are. Rows without an owner stay until slots are needed; then those go first whose path
was left longest ago, from the end of a text. Texts of different scopes have no node in common. What stays depends on
the order of calls alone, so ranks that make the same calls agree. Knows no pool and no sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

LEAST_EVICTED = 64
"""Rows that are evicted at a time, of one node, if it has so many: passes need a few slots each."""


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a sequence. `token_ids` is the caller's list, which is read again later: the caller extends it, and
    when it cuts it, it truncates the sequence's rows too. Rows are shared within a `scope` alone."""

    token_ids: list[int]
    scope: Hashable = None


@dataclass(slots=True, eq=False)
class RowRun:
    """`token_ids` and `slots`, int64 [n], follow those of `parent`; the root has none. `end` is the length of the text
    up to here, `key` the scope and the first token, `left_at` when its last owner left."""

    parent: RowRun | None
    key: tuple[Hashable, int]
    token_ids: np.ndarray
    slots: np.ndarray
    end: int
    children: dict[tuple[Hashable, int], RowRun] = field(default_factory=dict)
    num_owners: int = 0
    left_at: int = 0
    is_queued: bool = False

    @property
    def is_idle_leaf(self) -> bool:
        return self.parent is not None and not self.num_owners and not self.children

    def path(self) -> Iterator[RowRun]:
        """This node and those before it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_slots(self) -> np.ndarray:
        """Slots of the text up to here, int64 [`end`]."""
        return np.concatenate([_NOTHING, *[node.slots for node in reversed([*self.path()])]])


_NOTHING = np.empty(0, dtype=np.int64)


class PrefixTree:
    """Has `num_rows` rows, of which `num_idle` have no owner."""

    def __init__(self) -> None:
        self.root = RowRun(None, (None, -1), _NOTHING, _NOTHING, 0)
        self.num_rows = self.num_idle = 0
        self._moments = count(1)
        self._queue: list[tuple[int, int, RowRun]] = []  # a heap; an entry may be older than its node is now

    def find(self, start: RowRun, scope: Hashable, token_ids: np.ndarray) -> RowRun:
        """The node at which the longest known beginning of `token_ids`, which follow `start`, ends."""
        node, done = start, 0
        while done < len(token_ids) and (child := node.children.get((scope, int(token_ids[done])))) is not None:
            common = _num_common(child.token_ids, token_ids[done:])
            if common < len(child.token_ids):
                return self._split(child, common)
            node, done = child, done + common
        return node

    def add(self, parent: RowRun, scope: Hashable, token_ids: np.ndarray, slots: np.ndarray) -> RowRun:
        """A node after `parent`, where `find` ended; its rows are the tree's from now on."""
        key = scope, int(token_ids[0])
        node = parent.children[key] = RowRun(parent, key, token_ids, slots, parent.end + len(slots))
        self.num_rows += len(slots)
        self.num_idle += len(slots)
        return node

    def own(self, node: RowRun) -> None:
        """One owner more for the path to this node."""
        for one in node.path():
            self.num_idle -= 0 if one.num_owners else len(one.slots)
            one.num_owners += 1

    def leave(self, node: RowRun) -> None:
        """One owner less."""
        now = next(self._moments)
        for one in node.path():
            one.num_owners -= 1
            one.left_at = now
            self.num_idle += 0 if one.num_owners else len(one.slots)
        self._enqueue(node)

    def evict(self, num_rows: int) -> np.ndarray:
        """Give up at least `num_rows` rows without owner; returns their slots."""
        assert num_rows <= self.num_idle, f"{num_rows} rows to give up, {self.num_idle} without owner"
        freed = [_NOTHING]
        while num_rows > 0:
            left_at, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if node.is_idle_leaf and node.left_at == left_at:
                freed.append(self._cut(node, max(num_rows, LEAST_EVICTED)))
                num_rows -= len(freed[-1])
            self._enqueue(node)
        return np.concatenate(freed)

    def nodes(self) -> Iterator[RowRun]:
        """All nodes but the root, in no order."""
        found = [*self.root.children.values()]
        while found:
            yield (node := found.pop())
            found += node.children.values()

    def _split(self, node: RowRun, common: int) -> RowRun:
        """Part a node after so many tokens; its owners keep hold of the end. Returns the part before it."""
        parent, scope = node.parent, node.key[0]
        assert parent is not None
        head = RowRun(parent, node.key, node.token_ids[:common], node.slots[:common], parent.end + common)
        head.num_owners, head.left_at = node.num_owners, node.left_at
        parent.children[node.key] = head
        node.parent, node.token_ids, node.slots = head, node.token_ids[common:], node.slots[common:]
        node.key = scope, int(node.token_ids[0])
        head.children[node.key] = node
        return head

    def _cut(self, leaf: RowRun, num_rows: int) -> np.ndarray:
        """Take the last rows of a leaf, all if it has no more; its parent may then be a leaf."""
        kept = max(0, len(leaf.slots) - num_rows)
        cut = leaf.slots[kept:]
        leaf.token_ids, leaf.slots, leaf.end = leaf.token_ids[:kept], leaf.slots[:kept], leaf.end - len(cut)
        self.num_rows -= len(cut)
        self.num_idle -= len(cut)
        if not kept:
            parent, leaf.parent = leaf.parent, None
            assert parent is not None
            del parent.children[leaf.key]
            self._enqueue(parent)
        return cut

    def _enqueue(self, node: RowRun) -> None:
        if node.is_idle_leaf and not node.is_queued:
            heapq.heappush(self._queue, (node.left_at, next(self._moments), node))
            node.is_queued = True


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    """Leading tokens that are equal."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
