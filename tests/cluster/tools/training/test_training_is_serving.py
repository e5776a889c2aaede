"""Every recipe of a drafter: the pass that is trained and the runner that serves give the same logits for the same
weights. (A target that fills masks: test_sdar.py.)

A net with random weights is saved and opened as the engine opens it, beside the engine's own target, whose pass gives
the features. What it drafts step by step is then what the forward pass of training gives by teacher forcing.
"""

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
from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.distill import DistillOptions, read_exits
from cluster.tools.training.speculators.layerskip import LayerSkipOptions
from cluster.tools.training.speculators.pard import PardOptions
from cluster.tools.training.speculators.recipes import RECIPES
from cluster.tools.training.speculators.sdar import SdarOptions
from cluster.tools.training.speculators.specdiff import SpecdiffOptions
from docs.measurements.pocket.models import save_model
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.config_fields import MASK_FIELD, read_config_file
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from parallel.self_speculation.runner import SelfDraftRunner
from parallel.speculators.block.training import BlockOptions
from parallel.speculators.chimera.training import ChimeraOptions
from parallel.speculators.eagle.training import DraftLayerOptions
from parallel.speculators.exits.training import ExitOptions
from parallel.speculators.glide.training import GlideOptions
from parallel.speculators.gloeckle.training import GloeckleOptions
from parallel.speculators.heads.training import HeadsOptions
from parallel.speculators.opening import open_speculator, with_streams
from parallel.speculators.pard import filling_masks
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import read_speculator
from parallel.speculators.streams.training import StreamsOptions
from parallel.training.interface import TargetBatch
from tests.cluster.tools.training.test_recipe_losses import (
    DEPTHS,
    LENGTH,
    of_blocks,
    of_chain,
    of_chimera,
    of_draft_layers,
    of_heads,
    of_later_heads,
    of_masks,
)
from tests.parallel.conftest import Checkpoint, make_checkpoint  # noqa: F401  a fixture
from tests.parallel.speculators.nets import make_net, random_text, read_text
from tests.parallel.speculators.rounds import draft_chain

ANCHORS = (1, 4, 7)
SLOTS = 128


def of_glide(net: Any, batch: TargetBatch) -> Tensor:
    """A block of rows begins at every anchor in turn."""
    rows = [batch.head(net.rows(batch, anchor))[:, anchor : anchor + DEPTHS] for anchor in range(LENGTH - DEPTHS)]
    return torch.stack(rows, 1)


def of_exit(net: Any, batch: TargetBatch) -> Tensor:
    (read,) = read_exits(net._parts, batch.tokens, [net.options.exit]).values()
    return of_chain(net._parts.head(read), batch)


class Beside:
    """A speculator beside the target whose hidden states it reads, or a part of that target itself."""

    def __init__(self, target: Path, speculator: Path) -> None:
        own = open_model(target, num_slots=SLOTS)
        self.target: Any = with_streams(speculator, own)
        place = SpeculatorPlace(own.decoder, SINGLE, "cpu", torch.float32, SLOTS, target=own)
        self.drafter: Any = open_speculator(speculator, place)
        self.reader = FeatureReader(read_speculator(speculator).taps)

    def draft(self, tokens: list[int], length: int, steps: int) -> Tensor:
        self.target.open("a")
        self.reader.forward(self.target, [Span("a", length - 1)], tokens[: length - 1])
        text = VerifyInput("a", tokens[: length - 1], length - 1, SamplingParams(), length - 1)  # pyright: ignore
        (features,) = self.reader.rows([text], [0], {})
        self.target.commit("a", range(length - 1))
        logits = draft_chain(self.drafter, tokens, features.rows, length, steps)
        self.target.close("a")
        return logits


class FirstLayers:
    """The early exit of a target that was tuned for it."""

    def __init__(self, target: Path, speculator: Path) -> None:
        self.target = open_model(speculator, num_slots=SLOTS)
        self.drafter = SelfDraftRunner(self.target, LayerPlan.prefix(LayerSkipOptions().exit))

    def draft(self, tokens: list[int], length: int, steps: int) -> Tensor:
        self.target.open("a")
        self.target.forward([Span("a", length - 1)], tokens[: length - 1])
        self.target.commit("a", range(length - 1))
        logits = draft_chain(self.drafter, tokens, None, length, steps)
        self.target.close("a")
        return logits


class Alone:
    """A draft model, which reads nothing of the target."""

    def __init__(self, target: Path, speculator: Path) -> None:
        runner = open_model(speculator, num_slots=SLOTS)
        self.drafter = filling_masks(runner, speculator) if MASK_FIELD in read_config_file(speculator) else runner

    def draft(self, tokens: list[int], length: int, steps: int) -> Tensor:
        return draft_chain(self.drafter, tokens, None, length, steps)


Served = Callable[[Path, Path], Any]
METHODS: dict[type, tuple[Callable[[Any, TargetBatch], Tensor], Served, dict[str, Any]]] = {
    DraftLayerOptions: (of_draft_layers, Beside, {"depths": DEPTHS}),
    ChimeraOptions: (of_chimera, Beside, {"depths": DEPTHS}),
    GlideOptions: (of_glide, Beside, {"depths": DEPTHS}),
    GloeckleOptions: (of_later_heads, Beside, {"heads": DEPTHS}),
    ExitOptions: (lambda net, batch: of_chain(batch.head(net.read(batch)), batch), Beside, {}),
    BlockOptions: (of_blocks, Beside, {"block_size": DEPTHS + 1, "intermediate_size": 40, "rank": 8, "state_size": 12}),
    HeadsOptions: (of_heads, Beside, {"heads": DEPTHS}),
    StreamsOptions: (of_heads, Beside, {"heads": DEPTHS, "rank": 4}),
    LayerSkipOptions: (of_exit, FirstLayers, {}),
    DistillOptions: (lambda net, batch: of_chain(net.model(batch.tokens).logits, batch), Alone, {}),
    PardOptions: (of_masks, Alone, {"depth": DEPTHS, "mask_token": 7}),
    SpecdiffOptions: (of_masks, Alone, {"depth": DEPTHS, "mask_token": 7, "steps": 1}),
}
"""Record of options -> what the net drafts after every anchor of a text, [texts, anchors, depths, V], what serves it,
and options of a small one. A new method joins by a row."""


def small(recipe: str, folder: Path) -> Any:
    """The recipe's options, but for sizes; a draft model begins with random weights of the target's vocabulary."""
    options: Any = RECIPES[recipe].options
    options = replace(options, **METHODS[type(options)][2])
    if METHODS[type(options)][1] is not Alone:
        return options
    config = drafter_config(97, 4)
    config.hidden_size, config.intermediate_size, config.initializer_range = 32, 48, 0.3
    save_model(initialised(config, 1, "cpu"), folder)
    return replace(options, start=str(folder))


@pytest.fixture
def target(make_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:  # noqa: F811
    return make_checkpoint("Llama", num_hidden_layers=4)


@pytest.mark.parametrize("recipe", [name for name, row in RECIPES.items() if not isinstance(row.options, SdarOptions)])
def test_what_is_trained_is_what_drafts(recipe: str, target: Checkpoint, tmp_path: Path) -> None:
    options = small(recipe, tmp_path / "start")
    drafted, served, _ = METHODS[type(options)]
    net = make_net(RECIPES[recipe].build, options, target, tmp_path / "net")
    torch.manual_seed(5)
    batch = read_text(target, random_text(target, LENGTH))
    with torch.no_grad():
        expected = drafted(net, batch)[0]
    runner, tokens = served(target.path, tmp_path / "net"), batch.tokens[0].tolist()
    for anchor in ANCHORS:
        some = expected[anchor, 0][expected[anchor, 0].isfinite()]  # a selector gives candidates alone
        assert not expected[anchor, :DEPTHS].isnan().any() and some.std() > 0.1, "all are alike: nothing is shown"
        logits = runner.draft(tokens, anchor + 1, DEPTHS)
        torch.testing.assert_close(logits, expected[anchor, :DEPTHS], atol=1e-3, rtol=0)
