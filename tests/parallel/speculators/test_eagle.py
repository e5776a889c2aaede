"""Draft layers: passes equal the training forward, text and trees leave the rows that a fresh cache has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.speculators.eagle.parallel import ParallelEagleRunner
from parallel.speculators.eagle.runner import DraftLayerRunner
from parallel.speculators.eagle.training import DraftLayerNet, DraftLayerOptions, ParallelNet, build
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.training.interface import TargetShape
from parallel.training.losses import forward_kl
from tests.matrices import in_turn
from tests.parallel.backends import EVERY_BACKEND
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.learning import check_it_learns, held_out_metrics
from tests.parallel.speculators.nets import make_net, random_text, read_text
from tests.parallel.speculators.rounds import check_rounds, check_tree, draft_chain

METHODS = ["eagle", "eagle3", "eagle3.1", "mtp"]
STEPS, LENGTH = 4, 20


class Trained:
    """A net with strong random weights beside a tiny target, its checkpoint, and a text that the target has read."""

    def __init__(self, target: Checkpoint, folder: Path, method: str, **options: Any) -> None:
        self.target, self.path = target, folder
        counts = torch.arange(target.model.config.vocab_size).flip(0) % 17  # pyright: ignore
        chosen = DraftLayerOptions(method=method, **options)
        self.net: DraftLayerNet = make_net(build, chosen, target, folder, counts=counts)
        torch.manual_seed(8)
        self.tokens = random_text(target, LENGTH)
        self.batch = read_text(target, self.tokens)

    @property
    def features(self) -> Tensor:
        """[T, F]"""
        return torch.cat([self.batch.taps[tap] for tap in self.net.taps], -1)[0]

    @torch.no_grad()
    def expected(self) -> list[Tensor]:
        """Logits [T, V] of every step of the training forward."""
        steps = self.net.unroll(self.batch, self.features[None], STEPS)
        logits = [self.net.logits(normed[0], self.batch) for normed in steps]
        if not len(self.net.tokens):
            return logits
        empty = torch.full((LENGTH, self.net.config.vocab_size), -torch.inf)
        return [empty.index_copy(1, self.net.tokens, one) for one in logits]

    def open(self, group: Group = SINGLE, backend: str | None = None) -> DraftLayerRunner:
        place = SpeculatorPlace(open_tables(self.target.path, group), group, "cpu", torch.float32, 256)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, DraftLayerRunner)
        return runner if backend is None else DraftLayerRunner(runner.layers, place, backend=backend)

    def open_parallel(self, backend: str) -> ParallelEagleRunner:
        place = SpeculatorPlace(open_tables(self.target.path), SINGLE, "cpu", torch.float32, 256)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, ParallelEagleRunner)
        return ParallelEagleRunner(runner.layers, place, backend=backend)


@pytest.fixture
def trained(llama: Checkpoint, tmp_path: Path) -> Callable[..., Trained]:
    return lambda method, **options: Trained(llama, tmp_path / "speculator", method, **options)


def drafted(runner: DraftLayerRunner, one: Trained, anchor: int) -> Tensor:
    """Logits [steps, V] after the text up to `anchor`, then after every drafted token."""
    return draft_chain(runner, one.tokens[0].tolist(), one.features, anchor + 1, STEPS)


@pytest.mark.parametrize(("method", "backend"), list(in_turn(METHODS, EVERY_BACKEND, times=dict.fromkeys(METHODS, 2))))
def test_passes_equal_the_training_forward(trained: Callable[..., Trained], method: str, backend: str) -> None:
    one = trained(method)
    runner, expected = one.open(backend=backend), one.expected()
    for anchor in (1, 6, 13):  # newest token of the text; the row of training is that of the features before it
        trained_rows = torch.stack([step[anchor - 1] for step in expected])
        torch.testing.assert_close(drafted(runner, one, anchor), trained_rows, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_several_layers_are_all_in_the_checkpoint(trained: Callable[..., Trained], method: str) -> None:
    one = trained(method, layers=3)
    runner, expected = one.open(), one.expected()
    trained_rows = torch.stack([step[5] for step in expected])
    torch.testing.assert_close(drafted(runner, one, 6), trained_rows, atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_rows", [40, 97])
def test_own_head_proposes_only_its_tokens(trained: Callable[..., Trained], head_rows: int) -> None:
    one = trained("eagle3", draft_vocab=head_rows)
    logits = drafted(one.open(), one, 6)
    for step, expected in enumerate(one.expected()):
        torch.testing.assert_close(logits[step], expected[5], atol=1e-4, rtol=0)
    assert logits[0].isfinite().nonzero().flatten().tolist() == one.net.tokens.tolist()


def test_the_draft_vocabulary_is_that_of_the_most_frequent_tokens(trained: Callable[..., Trained]) -> None:
    one = trained("eagle3", draft_vocab=11)
    counts = torch.arange(97).flip(0) % 17  # as `Trained` counts them: 16 is the most, and five tokens occur so often
    kept = counts[one.net.tokens]
    left_out = counts[[token for token in range(97) if token not in one.net.tokens.tolist()]]
    assert kept.min() >= left_out.max() and kept.max() == 16
    head = one.target.model.get_output_embeddings().weight.detach()  # pyright: ignore
    net = build(DraftLayerOptions("eagle3", draft_vocab=11), TargetShape(one.target.model.config, head, head, counts))  # pyright: ignore
    assert torch.equal(net.get_parameter("lm_head.weight"), head[net.tokens])


def test_only_anchors_whose_likeliest_token_is_in_the_draft_vocabulary_count(trained: Callable[..., Trained]) -> None:
    """One step over a text: the divergence within the draft vocabulary, at rows whose goal it has."""
    one = trained("eagle3", draft_vocab=40, depths=1)
    with torch.no_grad():
        loss, _ = one.net.eval().loss(one.batch, torch.Generator())
        goals, drafts = one.batch.target_logits()[0, 1:-1], one.expected()[0][:-2]
        known = torch.isin(goals.argmax(-1), one.net.tokens)
        assert 0 < known.sum() < len(known), "all rows count: the test shows nothing"
        each = forward_kl(goals[:, one.net.tokens], drafts[:, one.net.tokens])
    assert float(loss) == pytest.approx(float(each[known].mean()), rel=1e-4)


def test_noise_is_of_training_alone(trained: Callable[..., Trained]) -> None:
    one = trained("eagle", noise=3.0, steps=1, depths=1, anchors=0)
    losses = [float(one.net.train(mode).loss(one.batch, torch.Generator())[0]) for mode in (True, False)]
    one.net.options = replace(one.net.options, noise=0.0)
    without = [float(one.net.train(mode).loss(one.batch, torch.Generator())[0]) for mode in (True, False)]
    assert losses[1] == without[0] == without[1] != losses[0]


def test_rows_of_training_do_not_see_later_text(trained: Callable[..., Trained]) -> None:
    one = trained("eagle3.1")
    before = one.expected()
    anchor = 8
    for tap in one.batch.taps.values():
        tap[0, anchor + 1 :] += torch.randn_like(tap[0, anchor + 1 :])
    one.batch.tokens[0, anchor + 1 + STEPS :] = 5
    for step, logits in enumerate(one.expected()):
        assert torch.equal(logits[: anchor + 1], before[step][: anchor + 1])
        assert not torch.equal(logits[anchor + 2 :], before[step][anchor + 2 :])


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_tree_is_its_paths(trained: Callable[..., Trained], method: str) -> None:
    one = trained(method)
    check_tree(one.open(), one.tokens[0].tolist(), one.features, 7)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_leave_the_rows_of_a_fresh_cache(trained: Callable[..., Trained], method: str) -> None:
    """The newest token's row was computed from features; those of accepted draft tokens were not."""
    one = trained(method)
    check_rounds(one.open(), one.tokens[0].tolist(), one.features, lambda length, _: length)


@pytest.mark.parametrize("method", ["eagle", "eagle3.1"])
def test_ranks_share_the_layers(
    trained: Callable[..., Trained], on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]], method: str
) -> None:
    one = trained(method, draft_vocab=41)
    alone = drafted(one.open(), one, 6)
    for shared in on_ranks(2, lambda group: drafted(one.open(group), one, 6)):
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_depths_of_one_pass_equal_those_of_the_training_forward(trained: Callable[..., Trained], backend: str) -> None:
    one = trained("p_eagle", layers=2, depths=STEPS)
    net, tokens = one.net, one.tokens[0].tolist()
    assert isinstance(net, ParallelNet)
    anchors = [torch.arange(LENGTH - 1), *(torch.tensor([0, 5, 9]) for _ in range(1, STEPS))]
    with torch.no_grad():
        rows = [net.logits(rows[0], one.batch) for rows in net.rows(one.batch, one.features[None], anchors)]
    runner = one.open_parallel(backend=backend)
    runner.open("a")
    for place, anchor in enumerate((0, 5, 9)):
        runner.read_features("a", runner.num_known("a"), one.features[runner.num_known("a") : anchor + 1])
        text = tokens[runner.cached_len("a") : anchor + 2]
        logits = [runner.forward([Span("a", len(text))], text).logits[0]]
        for step in range(1, STEPS):  # whatever is drafted, one branch of a tree like the other
            parent = len(text) - 1 if step == 1 else len(text) + 2 * (step - 2)
            pair = runner.forward([Span("a", 2, [parent] * 2, 2)], [3, 4], fuzzy=True)
            assert torch.equal(*pair.logits)
            logits.append(pair.logits[0])
        torch.testing.assert_close(logits[0], rows[0][anchor], atol=1e-4, rtol=0)
        for depth in range(1, STEPS):
            torch.testing.assert_close(logits[depth], rows[depth][place], atol=1e-4, rtol=0)
        runner.commit("a", range(len(text) + 1))
        assert runner.drop_fuzzy("a")
        assert runner.cached_len("a") == anchor + 2
    runner.close("a")
    runner.pool.check()


def test_masks_do_not_see_later_text(trained: Callable[..., Trained]) -> None:
    net = trained("p_eagle", depths=STEPS)
    rows = [torch.arange(LENGTH - 1), *(torch.tensor([3, 8]) for _ in range(1, STEPS))]
    assert isinstance(net.net, ParallelNet)
    before = net.net.rows(net.batch, net.features[None], rows)
    net.batch.tokens[0, 10:] = 5
    for tap in net.batch.taps.values():
        tap[0, 9:] += 1
    for depth, after in enumerate(net.net.rows(net.batch, net.features[None], rows)):
        own = rows[depth] < 9
        assert torch.equal(after[0, own], before[depth][0, own])
    assert not torch.equal(after[0], net.net.rows(net.batch, net.features[None] + 1, rows)[-1][0])


@pytest.mark.parametrize("method", [pytest.param("eagle3", marks=pytest.mark.slow), "p_eagle"])
def test_several_rows_learn(trained: Callable[..., Trained], method: str) -> None:
    one = trained(method, layers=2)
    check_it_learns(one.net, one.batch, num_steps=12)
    assert held_out_metrics(one.net, one.batch) == {f"accept_{depth}" for depth in range(1, 6)} | {"length"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (DraftLayerOptions("eagle", taps=(1, 2)), r"x\.taps=\[1, 2\]: eagle reads one tap"),
        (DraftLayerOptions(divergence="nothing"), r"x\.divergence=nothing"),
        (DraftLayerOptions(steps=0), r"x\.steps=0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: DraftLayerOptions, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        options.check("x")


def test_taps_above_the_target_are_refused(trained: Callable[..., Trained]) -> None:
    with pytest.raises(ValueError, match="the target has 2 layers"):
        trained("eagle3", taps=(1, 2, 3))


def test_a_head_of_foreign_tokens_is_refused(trained: Callable[..., Trained]) -> None:
    from safetensors.torch import load_file, save_file

    one = trained("eagle3", draft_vocab=40)
    tensors = load_file(one.path / "model.safetensors")
    tensors["d2t"][-1] = 97
    save_file(tensors, one.path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t names tokens outside"):
        one.open()
