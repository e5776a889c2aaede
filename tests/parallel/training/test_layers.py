"""Served layers in training: gradients are those of the loss, and a pass reads the parameters as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.speculators.block import training as block
from parallel.speculators.chimera import training as chimera
from parallel.speculators.eagle import training as eagle
from parallel.speculators.exits import training as exits
from parallel.speculators.glide import training as glide
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.nets import make_net, random_text, read_text

NETS: dict[str, tuple[Any, Any]] = {
    "draft layers": (eagle.build, eagle.DraftLayerOptions("eagle3.1", layers=2, draft_vocab=60, steps=3, anchors=0)),
    "masks": (eagle.build, eagle.DraftLayerOptions("p_eagle", depths=3, keep=1.0)),
    "chimera": (chimera.build, chimera.ChimeraOptions(depths=2)),
    "glide": (glide.build, glide.GlideOptions(depths=1)),
    "longspec": (glide.build, glide.GlideOptions(method="longspec", window=5, shift=2)),
    "exits": (exits.build, exits.ExitOptions("eesd", exit=1)),
    "blocks": (
        block.build,
        block.BlockOptions(
            "dflash2", layers=1, taps=2, intermediate_size=40, anchors=99, conv_taps=2, corrector="gru", rank=8
        ),
    ),
}
STEP = 2e-3


def loss_of(net: Any, batch: Any) -> torch.Tensor:
    return net.loss(batch, torch.Generator().manual_seed(3))[0]


@pytest.mark.extended
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_the_slopes_of_the_loss(name: str, llama: Checkpoint, tmp_path: Path) -> None:
    """They are compared for every parameter, along a random direction of its own."""
    net = make_net(*NETS[name], llama, tmp_path).train()
    torch.manual_seed(4)
    batch = read_text(llama, random_text(llama, 14))
    loss_of(net, batch).backward()
    for path, parameter in net.named_parameters():
        assert parameter.grad is not None, path
        size = parameter.norm() / parameter.numel() ** 0.5
        direction = parameter.grad.sign() * size
        expected = float((parameter.grad * direction).sum().detach())
        at: list[float] = []
        with torch.no_grad():
            for side in (STEP, -STEP):
                kept = parameter.clone()
                parameter.add_(side * direction)
                at.append(float(loss_of(net, batch)))
                parameter.copy_(kept)
        assert (at[0] - at[1]) / (2 * STEP) == pytest.approx(expected, rel=0.05, abs=2e-3), path


def test_a_pass_reads_the_parameters_of_its_time(llama: Checkpoint, tmp_path: Path) -> None:
    """The layers hold copies: one more pass after a change differs, and after the change is taken back does not."""
    net = make_net(*NETS["exits"], llama, tmp_path)
    batch = read_text(llama, random_text(llama, 14))
    first = float(loss_of(net, batch).detach())
    net.get_parameter("norm.weight").data *= 2
    changed = float(loss_of(net, batch).detach())
    net.get_parameter("norm.weight").data /= 2
    assert changed != first == float(loss_of(net, batch).detach())
