"""Chimera: passes equal the training forward, rounds leave the rows of a fresh cache, ranks share the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.speculators.chimera.runner import ChimeraLayers, ChimeraRunner
from parallel.speculators.chimera.training import ChimeraNet, ChimeraOptions, build
from parallel.speculators.config import FINAL
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.training.interface import TargetBatch
from tests.parallel.backends import EVERY_BACKEND
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.learning import check_it_learns, held_out_metrics
from tests.parallel.speculators.nets import make_net, random_text, read_text
from tests.parallel.speculators.rounds import check_rounds, check_tree, draft_chain

STEPS, LENGTH = 4, 20


class Trained:
    """A net with strong random weights beside a tiny target, its checkpoint, and a text that the target has read."""

    def __init__(self, target: Checkpoint, folder: Path) -> None:
        self.target, self.path = target, folder
        self.net: ChimeraNet = make_net(build, ChimeraOptions(), target, folder)
        self.batch = read_text(target, random_text(target, LENGTH))
        self.tokens: list[int] = self.batch.tokens[0].tolist()
        self.features: Tensor = self.batch.taps[FINAL][0]

    @torch.no_grad()
    def expected(self, batch: TargetBatch | None = None) -> list[Tensor]:
        """Logits [anchors, V] of every step of the training forward."""
        batch = batch or self.batch
        return [batch.head(read[0]) for _, read in self.net.unroll(batch, STEPS)]

    def open(self, group: Group = SINGLE, backend: str | None = None) -> ChimeraRunner:
        place = SpeculatorPlace(open_tables(self.target.path, group), group, "cpu", torch.float32, 256)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, ChimeraRunner) and isinstance(runner.layers, ChimeraLayers)
        return runner if backend is None else ChimeraRunner(runner.layers, place, backend=backend)


@pytest.fixture
def one(llama: Checkpoint, tmp_path: Path) -> Trained:
    return Trained(llama, tmp_path / "speculator")


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_passes_equal_the_training_forward(one: Trained, backend: str) -> None:
    runner, expected = one.open(backend=backend), one.expected()
    for anchor in (0, 1, 2, 6, 13):  # the first trigrams repeat the first token
        trained = torch.stack([step[anchor] for step in expected])
        found = draft_chain(runner, one.tokens, one.features, anchor + 1, STEPS)
        torch.testing.assert_close(found, trained, atol=1e-4, rtol=0)


def test_a_draft_sees_no_later_state(one: Trained) -> None:
    """An anchor's steps read hidden states before it and tokens up to their own."""
    anchor, before = 8, one.expected()
    final, tokens = one.batch.taps[FINAL].clone(), one.batch.tokens.clone()
    final[:, anchor:] += 1
    tokens[:, anchor + STEPS :] = 5
    after = one.expected(replace(one.batch, taps={FINAL: final}, tokens=tokens))
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[: anchor + 1], second[: anchor + 1])
        assert not torch.equal(first[anchor + 1], second[anchor + 1])


def test_a_tree_is_its_paths(one: Trained) -> None:
    check_tree(one.open(), one.tokens, one.features, 7)


def test_rounds_leave_the_rows_of_a_fresh_cache(one: Trained) -> None:
    """The newest token's row, at least, was made of a trigram."""
    check_rounds(one.open(), one.tokens, one.features, lambda length, _: length - 1)


def test_ranks_share_the_layer(one: Trained, on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]]) -> None:
    alone = draft_chain(one.open(), one.tokens, one.features, 7, STEPS)
    for shared in on_ranks(2, lambda group: draft_chain(one.open(group), one.tokens, one.features, 7, STEPS)):
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


def test_it_learns(one: Trained) -> None:
    check_it_learns(one.net, one.batch)
    assert held_out_metrics(one.net, one.batch) == {f"accept_{depth}" for depth in range(1, 6)} | {"length"}
