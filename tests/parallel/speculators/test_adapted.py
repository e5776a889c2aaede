"""Draft layers that are trained equal those that serve, adapters included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.speculators import adapted
from parallel.speculators.adapted import AdaptedDraftLayers, check_learnable, layer_weights
from parallel.speculators.eagle.config import METHODS
from parallel.speculators.eagle.runner import DraftLayerRunner, open_runner
from parallel.speculators.eagle.training import DraftLayerOptions, build
from parallel.speculators.opening import open_fuser, open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import read_speculator
from tests.families import FAMILIES
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.nets import make_net, random_text, read_text

LENGTH = 18
CASES: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS if method != "p_eagle"},
    "two layers": {"method": "eagle3", "layers": 2},
    "own head": {"method": "eagle3", "draft_vocab": 40},
}


class Served:
    """A speculator of random weights beside a tiny target of a family, and a text that the target has read."""

    def __init__(self, target: Checkpoint, folder: Path, *, reads_fused: bool = False, **options: Any) -> None:
        self.target, self.path = target, folder
        counts = torch.arange(97) % 17
        net = make_net(build, DraftLayerOptions(**options), target, folder, counts=counts)
        torch.manual_seed(8)
        self.tokens = random_text(target, LENGTH)
        batch = read_text(target, self.tokens)
        self.features = torch.cat([batch.taps[tap] for tap in net.taps], -1)[0]
        place = SpeculatorPlace(
            open_tables(target.path), SINGLE, "cpu", torch.float32, 64, reads_fused=reads_fused, target_layers=2
        )
        runner = open_speculator(folder, place)
        assert isinstance(runner, DraftLayerRunner)
        self.runner = runner
        if reads_fused:
            fuser = open_fuser(folder, 2, "cpu", torch.float32)
            assert fuser is not None
            self.features = fuser(self.features)
        self.model = AdaptedDraftLayers(str(folder), str(target.path), "cpu", 8, reads_fused=reads_fused)

    def logits(self) -> Tensor:
        """Logits of every row of the text that the engine computes, [T - 1, V]."""
        self.runner.open("a")
        self.runner.read_features("a", 0, self.features)
        logits = self.runner.forward([Span("a", LENGTH - 1, None, LENGTH - 1)], self.tokens[0, 1:]).logits
        self.runner.close("a")
        return logits

    def trained(self, adapters: Any = None, scales: Any = (), num_rows: int = LENGTH - 1) -> Tensor:
        """The same by the model that is trained; an own head's logits at the tokens that it has."""
        logits = self.model.logits(self.tokens[:, 1:], num_rows, adapters, scales, self.features[None, :-1])
        columns = self.model.columns(torch.arange(97))
        wide = torch.cat((logits, logits.new_full((len(logits), 97), -torch.inf)), 1)
        return wide[:, columns]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_that_are_served_before_and_after_folding(
    llama: Checkpoint, tmp_path: Path, case: str
) -> None:
    check_served(Served(llama, tmp_path / "speculator", **CASES[case]))


def test_features_may_come_fused(llama: Checkpoint, tmp_path: Path) -> None:
    check_served(Served(llama, tmp_path / "speculator", method="eagle3", reads_fused=True))


@pytest.mark.parametrize("family", ["OPT", "Gemma2"])
def test_the_targets_tables_are_those_of_its_family(
    make_checkpoint: Callable[..., Checkpoint], tmp_path: Path, family: str
) -> None:
    """Learned positions, scaled embeddings and a soft cap on the logits."""
    check_served(Served(make_checkpoint(family, **FAMILIES[family]), tmp_path / "speculator", method="mtp"))


@torch.no_grad()
def check_served(one: Served) -> None:
    runner, model, adapters = one.runner, one.model, one.model.zero_adapters()
    shipped = one.logits()
    torch.testing.assert_close(one.trained(adapters), shipped, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one.trained(num_rows=5), shipped[-5:], atol=1e-4, rtol=1e-4)
    for up, _ in adapters:
        up.normal_(std=0.05)
    expected = one.trained(adapters, [0.5] * len(adapters))
    for weight, matrix in zip(layer_weights(runner.layers), model.folded(adapters, 0.5), strict=True):
        weight.assign(matrix)
    known = shipped.isfinite()
    assert (expected - shipped)[known].abs().max() > 0.05, "the adapters change nothing: the test shows nothing"
    torch.testing.assert_close(one.logits(), expected, atol=1e-4, rtol=1e-4)
    for weight, matrix in zip(layer_weights(runner.layers), model.weights, strict=True):
        weight.assign(matrix)
    assert torch.equal(one.logits(), shipped), "the shipped weights are not back to the bit"


PUBLISHED: dict[str, dict[str, Any]] = {
    "mtp": {"hidden_first": True, "join_bias": True},
    "eagle3": {"norms_residual": True, "norms_features": True},
    "eagle": {"join_bias": True},
}
"""Method -> what published checkpoints have beyond our own."""


@pytest.mark.parametrize("method", PUBLISHED)
def test_layers_of_published_checkpoints_are_served_as_trained(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    one = Served(llama, tmp_path / "own", method=method)
    config = replace(one.runner.layers.config, **PUBLISHED[method])
    torch.manual_seed(5)
    shapes = config.tensor_shapes()
    (tmp_path / "published").mkdir()
    save_file(
        {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "published/model.safetensors"
    )
    place = SpeculatorPlace(open_tables(llama.path), SINGLE, "cpu", torch.float32, 64)
    one.runner = open_runner(tmp_path / "published", config, place)
    monkeypatch.setattr(adapted, "read_speculator", lambda *_: config)
    one.model = AdaptedDraftLayers(str(tmp_path / "published"), str(llama.path), "cpu", 8)
    check_served(one)


def test_every_adapter_has_a_gradient(llama: Checkpoint, tmp_path: Path) -> None:
    """Also where the features were computed without gradients, as the engine computes them."""
    one = Served(llama, tmp_path / "speculator", method="eagle3", layers=2)
    adapters = [(up.normal_(std=0.1).requires_grad_(), down.requires_grad_()) for up, down in one.model.zero_adapters()]
    with torch.inference_mode():
        features = one.features.clone()[None, :-1]
    one.model.logits(one.tokens[:, 1:], 5, adapters, (), features).logsumexp(-1).sum().backward()
    assert all(part.grad is not None and part.grad.abs().max() > 0 for pair in adapters for part in pair)


def test_a_row_reads_the_features_before_its_token_and_nothing_later(llama: Checkpoint, tmp_path: Path) -> None:
    one = Served(llama, tmp_path / "speculator", method="mtp")
    with torch.no_grad():
        before = one.trained()
        one.features[9] += 1  # before the token of row 9, the tenth of the text
        after = one.trained()
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9], after[9])


def test_speculators_of_other_families_are_refused_in_one_line(llama: Checkpoint, tmp_path: Path) -> None:
    make_net(build, DraftLayerOptions("p_eagle"), llama, tmp_path / "parallel")
    with pytest.raises(ValueError, match=r"method p_eagle cannot be adapted; EAGLE-1 to 3.1 and MTP can"):
        check_learnable(read_speculator(tmp_path / "parallel"))
    make_net(build, DraftLayerOptions("mtp"), llama, tmp_path / "chain")
    record = check_learnable(read_speculator(tmp_path / "chain"))
    with pytest.raises(ValueError, match=r"a model with activation gelu cannot be adapted; one of Llama's or Qwen's"):
        check_learnable(replace(record, block=replace(record.block, activation="gelu")))
