"""GliDe: passes equal the training forward, blocks hide the target's keys, rounds leave the rows of a fresh cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.protocol.messages import SamplingParams
from actors.verification.features import FeatureReader
from actors.verification.verifier import VerifyInput
from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model
from parallel.speculators.glide.runner import GlideLayers, GlideRunner
from parallel.speculators.glide.training import GlideNet, GlideOptions, build
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import read_speculator
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
        self.net: GlideNet = make_net(build, GlideOptions(depths=STEPS), target, folder)
        self.batch = read_text(target, random_text(target, LENGTH))
        (layer,) = self.net.kv_layers
        self.keys, self.values = self.batch.kv[layer]
        self.tokens: list[int] = self.batch.tokens[0].tolist()
        self.features: Tensor = torch.cat([rows[0].transpose(0, 1).flatten(1) for rows in (self.keys, self.values)], 1)

    @property
    def taps(self) -> tuple[int, ...]:
        return read_speculator(self.path).taps

    @torch.no_grad()
    def expected(self, anchor: int, batch: TargetBatch | None = None) -> Tensor:
        """Logits [T, V] of the training forward whose blocks begin at the anchor."""
        return self.batch.head(self.net.rows(batch or self.batch, anchor)[0])

    def open(self, group: Group = SINGLE, backend: str | None = None) -> GlideRunner:
        place = SpeculatorPlace(open_tables(self.target.path, group), group, "cpu", torch.float32, 256)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, GlideRunner) and isinstance(runner.layers, GlideLayers)
        return runner if backend is None else GlideRunner(runner.layers, place, backend=backend)


@pytest.fixture
def one(llama: Checkpoint, tmp_path: Path) -> Trained:
    return Trained(llama, tmp_path / "speculator")


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_passes_equal_the_training_forward(one: Trained, backend: str) -> None:
    runner = one.open(backend=backend)
    for anchor in (0, 1, 6, 13):
        trained = one.expected(anchor)[anchor : anchor + STEPS]
        found = draft_chain(runner, one.tokens, one.features, anchor + 1, STEPS)
        torch.testing.assert_close(found, trained, atol=1e-4, rtol=0)


def test_the_attention_to_the_target_is_over_its_own_keys(one: Trained) -> None:
    """The result is compared with one product after the other over the keys and values that transformers caches."""
    runner, anchor = one.open(), 7
    runner.open("a")
    runner.read_features("a", 0, one.features[:anchor])
    runner.forward([Span("a", anchor + 1)], one.tokens[: anchor + 1])
    torch.manual_seed(1)
    queries = torch.randn(3, one.target.model.config.num_attention_heads, one.keys.shape[-1])  # pyright: ignore
    found = runner._cross([("a", len(queries))], queries).view_as(queries)
    group = queries.shape[1] // one.keys.shape[1]
    assert group > 1, "the target groups no heads: the test shows nothing"
    for row in range(len(queries)):
        for head in range(queries.shape[1]):
            keys, values = (kv[0, head // group, :anchor] for kv in (one.keys, one.values))
            weights = torch.softmax(keys @ queries[row, head] / queries.shape[-1] ** 0.5, 0)
            torch.testing.assert_close(found[row, head], weights @ values, atol=1e-5, rtol=1e-5)


def test_a_block_sees_none_of_the_targets_keys_within_it(one: Trained) -> None:
    anchor, before = 6, one.expected(6)
    (layer,) = one.net.kv_layers
    keys, values = one.keys.clone(), one.values.clone()
    keys[:, :, anchor:] += 1
    values[:, :, anchor:] += 1
    after = one.expected(anchor, replace(one.batch, kv={layer: (keys, values)}))
    assert torch.equal(before[: anchor + STEPS], after[: anchor + STEPS])
    assert not torch.equal(before[anchor + STEPS], after[anchor + STEPS])  # the next block does
    one.batch.tokens[:, anchor + 2 :] = 5
    later = one.expected(anchor)
    assert torch.equal(before[: anchor + 2], later[: anchor + 2])


def test_a_tree_is_its_paths(one: Trained) -> None:
    check_tree(one.open(), one.tokens, one.features, 7)


def test_rounds_leave_the_rows_of_a_fresh_cache(one: Trained) -> None:
    """Every row is exact."""
    check_rounds(one.open(), one.tokens, one.features, lambda length, accepted: length + accepted)


def test_ranks_share_the_layer(one: Trained, on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]]) -> None:
    alone = draft_chain(one.open(), one.tokens, one.features, 7, STEPS)
    for shared in on_ranks(2, lambda group: draft_chain(one.open(group), one.tokens, one.features, 7, STEPS)):
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_features_are_the_keys_and_values_of_all_ranks(
    one: Trained, on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]], ranks: int
) -> None:
    """As transformers caches them, whatever the ranks' shares of the heads."""

    def read(group: Group) -> Tensor:
        runner, reader = open_model(one.target.path, group, num_slots=64), FeatureReader(one.taps)
        runner.open(3)
        text = VerifyInput(3, one.tokens, LENGTH, SamplingParams(), LENGTH)
        reader.forward(runner, [Span(3, LENGTH)], one.tokens)
        (features,) = reader.rows([text], [0], {})
        return features.rows

    for rows in on_ranks(ranks, read):
        torch.testing.assert_close(rows, one.features, atol=1e-5, rtol=1e-4)


def test_it_learns(one: Trained) -> None:
    check_it_learns(one.net, one.batch, num_steps=12)
    assert held_out_metrics(one.net, one.batch) == {f"accept_{depth}" for depth in range(1, STEPS + 1)} | {"length"}


def test_a_further_stage_begins_with_the_one_before(one: Trained, tmp_path: Path) -> None:
    options, model = GlideOptions(depths=STEPS, start=str(one.path)), one.target.model
    continued = make_net(build, options, one.target, tmp_path / "continued", noise=0.0)
    assert model is not None
    for name, parameter in one.net.named_parameters():
        assert torch.equal(continued.get_parameter(name), parameter), name
    for start, reason in ((tmp_path / "nowhere", "nowhere"), (one.target.path, "is missing")):
        with pytest.raises(ValueError, match=reason):
            make_net(build, replace(options, start=str(start)), one.target, tmp_path / "none")
