"""Trees of pending rows against the plainest oracle: one causal pass over the prefix and the path to the node."""

from __future__ import annotations

import random

import pytest
import torch

from parallel.kv.pass_plan import PendingRows, Span
from parallel.runtime.runner import open_model
from tests.families import FAMILIES
from tests.matrices import in_turn
from tests.parallel.backends import EVERY_BACKEND


class Tree:
    """A random tree, its tokens, and the plain pass to each of its nodes."""

    def __init__(self, seed: int, num_nodes: int = 12, prefix_len: int = 9) -> None:
        rng = random.Random(seed)
        self.prefix = [rng.randrange(97) for _ in range(prefix_len)]
        self.parents = [-1] + [rng.randrange(-1 if seed % 2 else 0, i) for i in range(1, num_nodes)]
        self.token_ids = [rng.randrange(97) for _ in range(num_nodes)]

    def path(self, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def expected(self, checkpoint, node: int) -> torch.Tensor:
        return checkpoint.logits(self.prefix + [self.token_ids[i] for i in self.path(node)])[-1]


def check_tree(checkpoint, model, tree: Tree, sizes: list[int]) -> None:
    """Feed the tree in passes of `sizes` nodes behind its prefix and compare every node."""
    model.open("t")
    if tree.prefix:
        model.forward([Span("t", len(tree.prefix), num_logits=0)], tree.prefix)
        model.commit("t", range(len(tree.prefix)))
    start = 0
    for size in sizes:
        stop = start + size
        span = Span("t", size, tree.parents[start:stop], num_logits=size)
        logits = model.forward([span], tree.token_ids[start:stop]).logits
        for node in range(start, stop):
            torch.testing.assert_close(logits[node - start], tree.expected(checkpoint, node), atol=1e-4, rtol=0)
        start = stop


@pytest.fixture(params=EVERY_BACKEND)
def backend(request):
    return request.param


def seeds(count):
    """So many random trees; by default the first and the last."""
    return [pytest.param(n, marks=[] if n in (0, count - 1) else pytest.mark.slow) for n in range(count)]


@pytest.mark.parametrize("seed", seeds(4))
def test_every_node_is_a_plain_pass_over_its_path(llama, backend, seed):
    model = open_model(llama.path, num_slots=64, backend=backend)
    check_tree(llama, model, Tree(seed, prefix_len=9 * (seed != 2)), [[12], [1] * 12, [5, 7], [1, 4, 4, 3]][seed])


@pytest.mark.extended
@pytest.mark.parametrize(("family", "backend"), list(in_turn(FAMILIES, EVERY_BACKEND)))
def test_every_family_verifies_trees(make_checkpoint, family, backend):
    """The trees reach further than the sliding windows, which count positions, not rows."""
    checkpoint = make_checkpoint(family, **FAMILIES[family])
    check_tree(checkpoint, open_model(checkpoint.path, num_slots=64, backend=backend), Tree(1), [4, 8])


@pytest.mark.extended
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=[] if one in ("Llama", "Gemma3", "OPT", "Qwen3Moe") else pytest.mark.slow)
        for one in FAMILIES
    ],
)
def test_ranks_verify_a_tree_together(make_checkpoint, on_ranks, family):
    checkpoint = make_checkpoint(family, **FAMILIES[family])
    on_ranks(2, lambda group: check_tree(checkpoint, open_model(checkpoint.path, group, num_slots=64), Tree(4), [6, 6]))


@pytest.mark.parametrize("seed", seeds(3))
def test_after_a_commit_all_is_as_after_a_fresh_prefill(llama, backend, seed):
    tree, model = Tree(seed), open_model(llama.path, num_slots=64, backend=backend)
    check_tree(llama, model, tree, [12])
    deepest = max(range(12), key=lambda node: len(tree.path(node)))
    path = tree.path(deepest)
    model.commit("t", path)
    model.pool.check()
    committed = tree.prefix + [tree.token_ids[i] for i in path]
    model.open("fresh")
    model.forward([Span("fresh", len(committed))], committed)
    for rows in (model.pool.keys, model.pool.values):
        moved, fresh = (rows[:, model.pool.slots(name).tolist()] for name in ("t", "fresh"))
        torch.testing.assert_close(moved, fresh, atol=1e-5, rtol=0)
    logits = model.forward([Span("t", 3, num_logits=3)], [1, 2, 3]).logits
    torch.testing.assert_close(logits, llama.logits([*committed, 1, 2, 3])[-3:], atol=1e-4, rtol=0)


def test_what_a_commit_retains_stays_a_tree(llama, backend):
    model = open_model(llama.path, num_slots=64, backend=backend)
    tree = Tree(0)
    tree.parents = [-1, 0, 0, 2, 3, 3, 1, 2, 7, 7, 0, 5]
    check_tree(llama, model, tree, [12])
    model.commit("t", [0, 2], retain=[3, 4, 5, 7, 11])
    model.pool.check()
    logits = model.forward([Span("t", 2, [4, 3], num_logits=2)], [50, 51]).logits
    for row, path in zip(logits, ([0, 2, 3, 5, 11], [0, 2, 7]), strict=True):
        token = 50 if len(path) == 5 else 51
        expected = llama.logits(tree.prefix + [tree.token_ids[i] for i in path] + [token])[-1]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_a_dropped_tree_leaves_no_trace(llama, backend):
    model = open_model(llama.path, num_slots=64, backend=backend)
    tree = Tree(3)
    check_tree(llama, model, tree, [12])
    model.drop_pending("t")
    logits = model.forward([Span("t", 1)], [7]).logits
    torch.testing.assert_close(logits, llama.logits([*tree.prefix, 7])[-1:], atol=1e-4, rtol=0)
    model.truncate("t", 4)
    logits = model.forward([Span("t", 1)], [7]).logits
    torch.testing.assert_close(logits, llama.logits([*tree.prefix[:4], 7])[-1:], atol=1e-4, rtol=0)


def slot_positions(rows, num_rows, parents):
    PLAIN_APPEND(rows, num_rows, parents)
    rows._depths = list(range(len(rows.parents)))


def grandparents(rows, num_rows, parents):
    PLAIN_APPEND(rows, num_rows, parents)
    rows._parents = [rows.parents[parent] if parent >= 0 else -1 for parent in rows.parents]


def visible_siblings(rows, first):
    seen = PLAIN_VISIBLE(rows, first).copy()
    for i in range(first, len(rows.parents)):
        seen[i - first, [j for j in range(i) if rows.parents[j] == rows.parents[i]]] = True
    return seen


def blind_to_itself(rows, first):
    seen = PLAIN_VISIBLE(rows, first).copy()
    for i in range(first, len(rows.parents)):
        seen[i - first, i] = rows.parents[i] < 0
    return seen


PLAIN_APPEND, PLAIN_VISIBLE = PendingRows.append, PendingRows.visible


def check_is_caught(llama, backend, monkeypatch, method, mutant):
    monkeypatch.setattr(PendingRows, method, mutant)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_tree(llama, open_model(llama.path, num_slots=64, backend=backend), Tree(0), [12])


@pytest.mark.parametrize("mutant", [slot_positions, grandparents])
def test_the_oracle_catches_wrong_positions_and_parents(llama, backend, mutant, monkeypatch):
    check_is_caught(llama, backend, monkeypatch, "append", mutant)


@pytest.mark.parametrize("mutant", [visible_siblings, blind_to_itself])
@pytest.mark.parametrize("masked", ["sdpa", "padded"])  # the kernels take parents or bits
def test_the_oracle_catches_wrong_masks(llama, masked, mutant, monkeypatch):
    check_is_caught(llama, masked, monkeypatch, "visible", mutant)


def test_a_tree_of_hundreds_of_rows(llama, backend):
    model = open_model(llama.path, num_slots=400, backend=backend)
    tree = Tree(0, num_nodes=300)
    model.open("t")
    logits = model.forward([Span("t", 300, tree.parents, num_logits=300)], tree.token_ids).logits
    tree.prefix = []
    for node in (0, 1, 77, 298, 299):
        torch.testing.assert_close(logits[node], tree.expected(llama, node), atol=1e-4, rtol=0)


@pytest.mark.extended
def test_a_node_with_two_parents_would_need_two_rows(make_checkpoint):
    """Why nodes of a draft graph (GSD) are not merged in the target: after a and after b the same token has other rows,
    other logits and, for some tokens, another likeliest successor, so one row for both would change the text."""
    checkpoint = make_checkpoint("Llama")
    model, different = open_model(checkpoint.path, num_slots=256), 0
    prefix, a, b = [5, 17, 40], 8, 61
    model.open("t")
    model.forward([Span("t", len(prefix), num_logits=0)], prefix)
    model.commit("t", range(len(prefix)))
    for token in range(97):
        logits = model.forward([Span("t", 4, [-1, -1, 0, 1], num_logits=4)], [a, b, token, token]).logits
        after = [checkpoint.logits([*prefix, parent, token])[-1] for parent in (a, b)]
        torch.testing.assert_close(logits[2:], torch.stack(after), atol=1e-4, rtol=0)
        assert (logits[2] - logits[3]).abs().max() > 1e-3
        different += int(logits[2].argmax() != logits[3].argmax())
        model.commit("t", [])
    assert different > 0
