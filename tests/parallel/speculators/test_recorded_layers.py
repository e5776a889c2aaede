"""Draft layers whose passes are recorded give the bits of those that are run layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.tools.training.speculators.recipes import RECIPES
from parallel.comm.group import SINGLE
from parallel.kernels.attention import has_attention
from parallel.kernels.steps import Steps
from parallel.kv.pass_plan import Span
from parallel.runtime import recorded_passes
from parallel.speculators.block.training import build as build_block
from parallel.speculators.eagle.training import DraftLayerOptions
from parallel.speculators.eagle.training import build as build_layers
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import open_speculator, open_tables
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.nets import make_net, random_text, read_text

pytestmark = pytest.mark.skipif(not has_attention(), reason="no compiler")

LENGTH, ROUNDS = 26, 6
LAYERS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{one: (build_layers, DraftLayerOptions(method=one)) for one in ("eagle", "eagle3", "eagle3.1", "mtp")},
    "eagle3, two layers": (build_layers, DraftLayerOptions(method="eagle3", layers=2)),
    "p_eagle": (build_layers, DraftLayerOptions(method="p_eagle", depths=4)),
    **{one: (build_block, RECIPES[one].options) for one in ("dflash", "dspark")},
}


def drafts(runner: Any, tokens: list[int], features: Tensor) -> list[Tensor]:
    """Logits of every pass of some rounds: the text since the last one, three draft tokens one by one, and two more
    rows below the second."""
    found, length = [], 3
    runner.open("a")
    runner.read_features("a", 0, features[: length - 1])
    for _ in range(ROUNDS):
        suffix = tokens[runner.cached_len("a") : length]
        found.append(runner.forward([Span("a", len(suffix))], suffix).logits)
        for token in tokens[length : length + 3]:
            found.append(runner.forward([Span("a", 1)], [token], fuzzy=True).logits)
        below = len(suffix) + 1
        found.append(runner.forward([Span("a", 2, [below, below], 2)], [3, 4], fuzzy=True).logits)
        runner.commit("a", range(len(suffix) + 2))
        runner.drop_fuzzy("a")
        runner.truncate("a", min(runner.cached_len("a"), length + 2))
        runner.read_features("a", length - 1, features[length - 1 : length + 2])
        length += 3
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_rounds_have_the_bits_of_the_layers(llama: Checkpoint, tmp_path, monkeypatch, name: str, dtype) -> None:
    build, options = LAYERS[name]
    net, runs, run = make_net(build, options, llama, tmp_path), [], Steps.run
    tokens = random_text(llama, LENGTH)
    batch = read_text(llama, tokens)
    features = torch.cat([batch.taps[tap] for tap in net.taps], -1)[0].to(dtype)
    monkeypatch.setattr(Steps, "run", lambda steps, given: runs.append(given[0]) or run(steps, given))

    def found(worth_recording: int) -> list[Tensor]:
        monkeypatch.setattr(recorded_passes, "WORTH_RECORDING", worth_recording)
        tables = open_tables(llama.path, dtype=dtype)
        place = SpeculatorPlace(tables, SINGLE, "cpu", dtype, 256)
        return drafts(open_speculator(tmp_path, place), tokens[0].tolist(), features)

    expected = found(1 << 30)
    assert not runs
    for one, other in zip(found(2), expected, strict=True):
        assert torch.equal(one, other)
    drafts_in_passes = name in ("eagle", "eagle3", "eagle3.1", "eagle3, two layers", "mtp")
    assert len(runs) == (5 * ROUNDS if drafts_in_passes else ROUNDS) - 1
