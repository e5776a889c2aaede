"""Heads beside the target's last layer: passes equal the training forward, rounds leave the rows of a fresh cache,
ranks share the layers, and a head that is that last layer drafts what the target does."""

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
from parallel.speculators.config import FINAL
from parallel.speculators.gloeckle.runner import GloeckleLayers, GloeckleRunner
from parallel.speculators.gloeckle.training import GloeckleNet, GloeckleOptions, build
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import check_speculator
from parallel.training.interface import TargetBatch
from tests.parallel.backends import EVERY_BACKEND
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.learning import check_it_learns, held_out_metrics
from tests.parallel.speculators.nets import make_net, random_text, read_text
from tests.parallel.speculators.rounds import draft_chain

HEADS, LENGTH = 4, 20


class Trained:
    """A net with strong random weights beside a tiny target, its checkpoint, and a text that the target has read."""

    def __init__(self, target: Checkpoint, folder: Path) -> None:
        self.target, self.path = target, folder
        self.net: GloeckleNet = make_net(build, GloeckleOptions(heads=HEADS), target, folder)
        self.batch = read_text(target, random_text(target, LENGTH))
        self.tokens: list[int] = self.batch.tokens[0].tolist()
        (self.tap,) = self.net.taps
        self.features: Tensor = self.batch.taps[self.tap][0]

    @torch.no_grad()
    def expected(self, batch: TargetBatch | None = None) -> Tensor:
        """Logits [heads, rows, V] of the training forward."""
        batch = batch or self.batch
        return torch.stack([batch.head(read[0]) for read in self.net.read(batch)])

    def open(self, group: Group = SINGLE, backend: str | None = None) -> GloeckleRunner:
        place = SpeculatorPlace(open_tables(self.target.path, group), group, "cpu", torch.float32, 256)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, GloeckleRunner) and isinstance(runner.layers, GloeckleLayers)
        return runner if backend is None else GloeckleRunner(runner.layers, place, backend=backend)


@pytest.fixture
def one(llama: Checkpoint, tmp_path: Path) -> Trained:
    return Trained(llama, tmp_path / "speculator")


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_passes_equal_the_training_forward(one: Trained, backend: str) -> None:
    """The row before a text's newest token gives the logits of all depths."""
    runner, expected = one.open(backend=backend), one.expected()
    for length in (2, 3, 7, 14):
        found = draft_chain(runner, one.tokens, one.features, length, HEADS)
        torch.testing.assert_close(found, expected[:, length - 2], atol=1e-4, rtol=0)


def test_nothing_is_drafted_deeper_than_there_are_heads(one: Trained) -> None:
    found = draft_chain(one.open(), one.tokens, one.features, 7, HEADS + 1)
    assert found[:HEADS].isfinite().all() and (found[HEADS] == -torch.inf).all()


def test_a_head_reads_no_later_row(one: Trained) -> None:
    before, trunk = one.expected(), one.features.clone()
    trunk[8:] += 1
    after = one.expected(replace(one.batch, taps=one.batch.taps | {one.tap: trunk[None]}))
    assert torch.equal(before[:, :8], after[:, :8]) and not torch.equal(before[:, 8], after[:, 8])


def test_a_copy_of_the_targets_last_layer_gives_its_logits(one: Trained) -> None:
    """The trunk, the final norm and the head are the target's own."""
    model: Any = one.target.model
    for name, value in model.model.layers[-1].state_dict().items():
        one.net.get_parameter(f"heads.1.{name}").data.copy_(value)
    torch.testing.assert_close(one.expected()[1], one.batch.head(one.batch.taps[FINAL][0]), atol=1e-4, rtol=0)


def test_rounds_and_trees_have_the_logits_of_the_text_alone(one: Trained) -> None:
    """Whatever was drafted and accepted, one branch of a tree like the other; accepted tokens are fed as text."""
    runner, expected = one.open(), one.expected()
    runner.open("a")
    for length, accepted in ((2, 2), (5, 0), (6, 3), (10, 1)):
        known = runner.num_known("a")
        runner.read_features("a", known, one.features[known : length - 1])
        text = one.tokens[runner.cached_len("a") : length]
        logits = [runner.forward([Span("a", len(text))], text).logits[0]]
        for depth in range(1, HEADS):
            parent = len(text) - 1 if depth == 1 else len(text) + 2 * (depth - 2)
            pair = runner.forward([Span("a", 2, [parent] * 2, 2)], [3, 4], fuzzy=True)
            assert torch.equal(*pair.logits)
            logits.append(pair.logits[0])
        torch.testing.assert_close(torch.stack(logits), expected[:, length - 2], atol=1e-4, rtol=0)
        runner.commit("a", [*range(len(text)), *(len(text) + 2 * depth for depth in range(accepted))])
        assert runner.drop_fuzzy("a") == (accepted > 0) and runner.cached_len("a") == length
    runner.pool.check()
    runner.close("a")
    assert runner.pool.num_free == runner.pool.num_slots


def test_ranks_share_the_layers(one: Trained, on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]]) -> None:
    alone = draft_chain(one.open(), one.tokens, one.features, 7, HEADS)
    for shared in on_ranks(2, lambda group: draft_chain(one.open(group), one.tokens, one.features, 7, HEADS)):
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


def test_a_target_of_another_depth_is_refused(one: Trained, make_checkpoint: Callable[..., Checkpoint]) -> None:
    from parallel.model.families.registry import read_config

    check_speculator(one.path, read_config(one.target.path))
    deeper = replace(read_config(one.target.path), num_layers=one.tap + 2)
    with pytest.raises(ValueError, match=f"stands behind layer {one.tap}, the target's trunk ends with {one.tap + 1}"):
        check_speculator(one.path, deeper)


@pytest.mark.extended
def test_it_learns(one: Trained) -> None:
    check_it_learns(one.net, one.batch, num_steps=30)
    assert held_out_metrics(one.net, one.batch) == {f"accept_{depth}" for depth in range(1, HEADS + 1)} | {"length"}
