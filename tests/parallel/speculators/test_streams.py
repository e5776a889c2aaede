"""Streams: passes equal the training forward; a target's own logits do not change; streams see what they should."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kernels.attention import has_attention
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import ModelRunner, open_model
from parallel.speculators.config import FINAL, STREAMS
from parallel.speculators.heads.runner import HeadsRunner
from parallel.speculators.opening import open_speculator, open_tables, with_streams
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.streams.layers import StreamLayers
from parallel.speculators.streams.target_pass import StreamingRunner
from parallel.speculators.streams.training import StreamsNet, StreamsOptions, build
from parallel.training.interface import TargetBatch
from tests.matrices import in_turn
from tests.parallel.backends import BACKENDS
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.learning import check_it_learns, held_out_metrics
from tests.parallel.speculators.nets import make_net, random_text, read_text

COUNT, LENGTH, SLOTS = 3, 18, 160
VARIANTS: dict[str, dict[str, Any]] = {
    "streaming": {"layers": 2, "start_rank": 4},
    "plain streams": {"layers": 1, "start_rank": 4, "rank": 0},
    "sampler": {"layers": 2, "start_rank": 4, "sampler": 8},
    "mask_lora": {"method": "mask_lora"},
    "pruning": {"layers": 1, "start_rank": 4, "prune_rank": 4},
}
DRAFT_PASSES: dict[str, dict[str, Any]] = {
    "s3d": {"method": "s3d", "skip": 1},
    "s3d sampler": {"method": "s3d", "sampler": 8},
}


class Streamed:
    """A net with strong random weights beside a tiny target of three layers, its checkpoint, and a text."""

    def __init__(self, target: Checkpoint, folder: Path, name: str) -> None:
        self.target, self.path = target, folder
        options: dict[str, Any] = {"heads": COUNT, "rank": 4} | (VARIANTS | DRAFT_PASSES)[name]
        self.net: StreamsNet = make_net(build, StreamsOptions(**options), target, folder, noise=0.2)
        self.batch = self.read(random_text(target, LENGTH))
        self.tokens: list[int] = self.batch.tokens[0].tolist()

    def read(self, tokens: Tensor) -> TargetBatch:
        return read_text(self.target, tokens)

    @torch.no_grad()
    def expected(self, anchor: int, batch: TargetBatch | None = None) -> Tensor:
        """Logits [depths, V] of the training forward after the token at `anchor` and after those that follow."""
        return torch.cat(self.net.unroll(batch or self.batch, torch.tensor([0]), torch.tensor([anchor])))

    def open(self, group: Group = SINGLE, backend: str | None = None, prune_below: float = 0.0) -> ModelRunner:
        target = open_model(self.target.path, group, num_slots=SLOTS, backend=backend)
        runner = with_streams(self.path, target, prune_below)
        if self.net.config.reads_root:
            assert runner is target, "it has a pass of its own"
            return target
        assert isinstance(runner, StreamingRunner)
        return runner if backend is None else StreamingRunner(target, runner.layers, backend=backend)

    def drafter(self, target: ModelRunner) -> HeadsRunner:
        group = target.decoder.group
        place = SpeculatorPlace(target.decoder, group, "cpu", torch.float32, SLOTS, target=target)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, HeadsRunner)
        return runner


@pytest.fixture
def streamed(make_checkpoint: Callable[..., Checkpoint], tmp_path: Path) -> Callable[[str], Streamed]:
    target = make_checkpoint("Llama", num_hidden_layers=3)
    return lambda name: Streamed(target, tmp_path / "speculator", name)


def read(runner: ModelRunner, token_ids: list[int], parents: list[int] | None = None, num_logits: int = 1) -> Tensor:
    """Streams of the rows with logits, [rows, streams * H]; the rows stay pending."""
    span = Span("a", len(token_ids), parents, num_logits)
    (features,) = runner.forward([span], token_ids, (STREAMS,)).features
    return features[len(token_ids) - num_logits :]


def drafted(target: ModelRunner, one: Streamed, anchor: int) -> Tensor:
    """Logits after the token at `anchor`, then after every drafted token, which are those of the text."""
    target.open("a")
    tap = STREAMS if isinstance(target, StreamingRunner) else FINAL
    features = target.forward([Span("a", anchor)], one.tokens[:anchor], (tap,) if tap == STREAMS else ())
    target.commit("a", range(anchor))
    drafter = one.drafter(target)
    drafter.open("a")
    drafter.read_features("a", 0, features.features[0] if tap == STREAMS else features.hidden)
    logits = [drafter.forward([Span("a", anchor + 1)], one.tokens[: anchor + 1]).logits[0]]
    for token in one.tokens[anchor + 1 : anchor + COUNT]:
        logits.append(drafter.forward([Span("a", 1)], [token], fuzzy=True).logits[0])
    target.close("a")
    assert target.pool.num_free == SLOTS, "neither streams nor drafts keep rows"
    return torch.stack(logits)


@pytest.mark.parametrize(("name", "backend"), list(in_turn([*VARIANTS, *DRAFT_PASSES], BACKENDS)))
def test_passes_equal_the_training_forward(streamed: Callable[[str], Streamed], name: str, backend: str) -> None:
    """T5."""
    one = streamed(name)
    runner = one.open(backend=backend)
    for anchor in (1, 6, 13):
        torch.testing.assert_close(drafted(runner, one, anchor), one.expected(anchor), atol=1e-4, rtol=1e-4)


TREE, PARENTS = [3, 4, 5, 6, 7, 8], [-1, -1, 0, 1, 2, 2]


@pytest.mark.parametrize("name", ["streaming", "mask_lora"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_targets_own_rows_are_those_without_streams(
    streamed: Callable[[str], Streamed], name: str, backend: str
) -> None:
    """They are equal to the bit where the kernels are ours: hidden states, logits and the KV rows that stay."""
    one = streamed(name)
    runner = one.open(backend=backend)
    text, after = one.tokens[:7], [6 + parent if parent >= 0 else 6 for parent in PARENTS]
    spans = [Span("a", 13, [*range(-1, 6), *after], 7), Span("b", 3)]
    outputs = []
    for name_of, taps in (("plain", ()), ("streams", (STREAMS,))):
        ids = [f"{name_of}{i}" for i in range(2)]
        for seq_id in ids:
            runner.open(seq_id)
        own = [replace(span, seq_id=seq_id) for span, seq_id in zip(spans, ids, strict=True)]
        outputs.append(runner.forward(own, [*text, *TREE, 5, 6, 7], taps))
        runner.commit(ids[0], [*range(7), 7, 9])
        runner.commit(ids[1], range(3))
        runner.pool.check()
    plain, streams = outputs
    bound = 0.0 if backend == "ragged" else 1e-5
    torch.testing.assert_close(plain.logits, streams.logits, atol=bound, rtol=bound)
    torch.testing.assert_close(plain.hidden, streams.hidden, atol=bound, rtol=bound)
    for rows in (runner.pool.keys, runner.pool.values):
        for i in range(2):
            before, after_it = (rows[:, runner.pool.slots(f"{name_of}{i}")] for name_of in ("plain", "streams"))
            torch.testing.assert_close(before, after_it, atol=bound, rtol=bound)
    assert streams.features[0][:6].eq(0).all(), "text within a span begins no streams"
    assert streams.features[0][[6, -1]].abs().sum(1).gt(0).all()


def test_every_node_has_the_streams_of_its_path(streamed: Callable[[str], Streamed]) -> None:
    one = streamed("streaming")
    runner, paths = one.open(), []
    for node in range(len(TREE)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        runner.open("a")
        paths.append(read(runner, [*one.tokens[:5], *(TREE[step] for step in path)])[0])
        runner.close("a")
    runner.open("a")
    runner.forward([Span("a", 3)], one.tokens[:3])
    runner.commit("a", range(3))
    parents = [-1, 0, *(2 + parent if parent >= 0 else 1 for parent in PARENTS)]
    tree = read(runner, [*one.tokens[3:5], *TREE], parents, 6)
    torch.testing.assert_close(tree, torch.stack(paths), atol=1e-5, rtol=1e-5)
    assert runner.pool.pending_len("a") == 8, "streams leave no rows"


def test_a_change_of_a_stream_changes_those_behind_it_alone(streamed: Callable[[str], Streamed]) -> None:
    one = streamed("streaming")
    runner = one.open()
    assert isinstance(runner, StreamingRunner) and isinstance(runner.layers, StreamLayers)

    def streams() -> Tensor:
        runner.open("a")
        rows = read(runner, one.tokens[:9], num_logits=2).view(2, COUNT, -1)
        runner.close("a")
        return rows

    before = streams()
    for changed in range(COUNT):
        kept = runner.layers.embeddings.clone()
        runner.layers.embeddings[changed] += 1
        after = streams()
        runner.layers.embeddings.copy_(kept)
        differs = (after != before).any(-1)
        assert differs.tolist() == [[stream >= changed for stream in range(COUNT)]] * 2
    runner.layers.embeddings[[1, 2]] = runner.layers.embeddings[[2, 1]]
    assert torch.equal(streams()[:, 0], before[:, 0])


@pytest.mark.parametrize("name", ["streaming", "mask_lora", "s3d"])
def test_streams_see_no_text_behind_their_anchor(streamed: Callable[[str], Streamed], name: str) -> None:
    """T6, and that they see all before it."""
    one, anchor = streamed(name), 8
    before = one.expected(anchor)
    changed = one.batch.tokens.clone()
    changed[:, anchor + one.net.config.reads_root :] = 5
    assert torch.equal(one.expected(anchor, one.read(changed)), before)
    for place in (0, anchor - 1):
        changed = one.batch.tokens.clone()
        changed[:, place] += 1
        assert (one.expected(anchor, one.read(changed)) != before).any(-1).all()


def test_anchors_of_many_texts_are_independent(streamed: Callable[[str], Streamed]) -> None:
    one = streamed("streaming")
    texts = torch.cat((one.batch.tokens, one.batch.tokens.flip(1), one.batch.tokens.roll(3, 1)))
    rows, anchors = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([4, 9, 2, 5, 11])
    with torch.no_grad():
        together = torch.stack(one.net.unroll(one.read(texts), rows, anchors), 1)
    for i, (row, anchor) in enumerate(zip(rows.tolist(), anchors.tolist(), strict=True)):
        alone = one.expected(anchor, one.read(texts[row : row + 1]))
        torch.testing.assert_close(together[i], alone, atol=1e-4, rtol=1e-4)


def test_rounds_leave_the_rows_of_a_fresh_cache(streamed: Callable[[str], Streamed]) -> None:
    """T7: whatever is accepted, rows and streams are those of a text that was read at once."""
    one, rng, length = streamed("streaming"), random.Random(3), 4
    runner = one.open()
    runner.open("a")
    runner.forward([Span("a", length - 1)], one.tokens[: length - 1])
    runner.commit("a", range(length - 1))
    while length < LENGTH - 5:
        fed = one.tokens[runner.cached_len("a") : length]
        streams = read(runner, [*fed, *one.tokens[length : length + 4]], num_logits=5)
        accepted = rng.randrange(5)
        runner.commit("a", range(len(fed) + accepted))
        length += accepted
        runner.open("fresh")
        again = runner.forward([Span("fresh", length)], one.tokens[:length], (STREAMS,)).features[0]
        torch.testing.assert_close(streams[accepted], again[-1])
        runner.commit("fresh", range(length))
        for rows in (runner.pool.keys, runner.pool.values):
            mine, fresh = (rows[:, runner.pool.slots(name)] for name in ("a", "fresh"))
            torch.testing.assert_close(mine, fresh)
        runner.close("fresh")
        length += 1
    runner.pool.check()
    runner.close("a")
    assert runner.pool.num_free == SLOTS


def test_without_free_rows_a_sequence_has_no_streams(streamed: Callable[[str], Streamed]) -> None:
    one = streamed("streaming")
    runner = one.open()
    for seq_id, rows in (("full", SLOTS - 12), ("a", 0), ("b", 0)):
        runner.open(seq_id)
        if rows:
            runner.pool.reserve(seq_id, rows)
    (features,) = runner.forward([Span("a", 4), Span("b", 3)], [1, 2, 3, 4, 5, 6, 7], (STREAMS,)).features
    assert features[3].abs().sum() > 0 and features[6].eq(0).all()
    assert runner.pool.num_free == 5


@pytest.mark.parametrize("name", ["streaming", "mask_lora", "s3d"])
def test_ranks_share_the_streams(
    streamed: Callable[[str], Streamed],
    on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]],
    name: str,
) -> None:
    one = streamed(name)
    alone = drafted(one.open(), one, 6)
    for shared in on_ranks(2, lambda group: drafted(one.open(group), one, 6)):
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["sampler", "mask_lora", "s3d", "pruning"])
def test_it_learns_and_the_target_does_not(streamed: Callable[[str], Streamed], name: str) -> None:
    one = streamed(name)
    target = one.target.model
    weights = [parameter.clone() for parameter in target.parameters()]
    check_it_learns(one.net, one.batch, num_steps=12)
    assert all(torch.equal(*pair) for pair in zip(weights, target.parameters(), strict=True))
    expected = {f"accept_{depth}" for depth in range(1, COUNT + 1)} | {"length"}
    assert held_out_metrics(one.net, one.batch) - {"early"} == expected


def test_a_target_of_other_layers_is_refused(
    streamed: Callable[[str], Streamed], make_checkpoint: Callable[..., Checkpoint]
) -> None:
    one = streamed("streaming")
    shallow = open_model(make_checkpoint("Llama", num_hidden_layers=2).path, num_slots=8)
    with pytest.raises(ValueError, match=r"streams run through layers \[1, 2\]; the target has 2; use"):
        with_streams(one.path, shallow)


def test_a_draft_pass_needs_the_target(streamed: Callable[[str], Streamed]) -> None:
    one = streamed("s3d")
    tables = open_tables(one.target.path)
    place = SpeculatorPlace(tables, SINGLE, "cpu", torch.float32, SLOTS)
    with pytest.raises(ValueError, match=r"s3d drafts with the target's own layers.*drafter\.placement=attached"):
        open_speculator(one.path, place)


@torch.no_grad()
def test_unlikely_nodes_end_below_the_streams_with_what_hangs_on_them(
    streamed: Callable[[str], Streamed], on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]]
) -> None:
    """The early logits of training decide; the others are as they are without pruning, to the bit."""
    one, text = streamed("pruning"), 5
    parents = [-1, 0, 1, 2, 3, *(4 + parent + 1 if parent >= 0 else 4 for parent in PARENTS)]
    span, token_ids = [Span("a", text + 6, parents, 7)], [*one.tokens[:text], *TREE]
    chances = []
    for node, token in enumerate(TREE):
        path = [PARENTS[node]]
        while path[0] >= 0:
            path.insert(0, PARENTS[path[0]])
        before = [*one.tokens[:text], *(TREE[step] for step in path[1:])]
        batch = one.read(torch.tensor([before]))
        early = one.net.early(batch, torch.tensor([0]), torch.tensor([len(before) - 1]))
        chances.append(float(early.softmax(-1)[0, token]))
    bound = sorted(chances)[2] * 1.001
    expected: set[int] = set()
    for node, chance in enumerate(chances):
        if chance < bound or PARENTS[node] in expected:
            expected.add(node)
    assert 0 < len(expected) < len(TREE)
    outputs, rows = [], []
    for prune_below in (0.0, bound):
        runner = one.open(prune_below=prune_below)
        runner.open("a")
        outputs.append(runner.forward(span, token_ids, (STREAMS,)))
        kept = [0, 1, 2, 3, 4, *(text + node for node in range(len(TREE)) if node not in expected)]
        runner.pool.check()
        assert runner.pool.pending_len("a") == text + len(TREE)
        rows.append(runner.pool.keys[:, runner.pool.slots("a")[kept]])
    whole, pruned = outputs
    assert whole.pruned == frozenset() and pruned.pruned == {node + 1 for node in expected}
    left = [row for row in range(7) if row not in pruned.pruned]
    bits = 0.0 if has_attention() else 1e-5
    torch.testing.assert_close(pruned.logits[left], whole.logits[left], atol=bits, rtol=bits)
    torch.testing.assert_close(pruned.features[0][4:][left], whole.features[0][4:][left], atol=bits, rtol=bits)
    torch.testing.assert_close(rows[0], rows[1], atol=bits, rtol=bits)

    def on_rank(group: Group) -> frozenset[int]:
        runner = one.open(group, prune_below=bound)
        runner.open("a")
        with runner.decoder.lm_head.ungathered():
            return runner.forward(span, token_ids, (STREAMS,)).pruned

    assert on_ranks(2, on_rank) == [pruned.pruned] * 2
