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
from parallel.kernels.choice import Race
from parallel.kernels.noise import gumbel_rows
from parallel.kernels.steps import Steps
from parallel.kv.pass_plan import Span
from parallel.runtime import recorded_passes
from parallel.speculators.block.training import build as build_block
from parallel.speculators.eagle.training import DraftLayerOptions
from parallel.speculators.eagle.training import build as build_layers
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
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


class Likeliest:
    """Steps of the likeliest token, or with `keys` of the one that wins with their noise."""

    def __init__(self, num_steps: int, keys: Tensor | None) -> None:
        self.num_steps, self.keys = num_steps, keys

    def __len__(self) -> int:
        return self.num_steps

    def part(self, start: int, stop: int) -> Likeliest:
        return Likeliest(stop - start, None if self.keys is None else self.keys[start:stop])

    def choose(self, logits: Tensor, step: int) -> Tensor:
        if self.keys is None:
            return logits.argmax(-1)
        return (logits + gumbel_rows(self.keys[step, : len(logits)], torch.arange(logits.shape[1]))).argmax(-1)

    def race(self) -> Race:
        return Race(None, self.keys)


def chains(runner: Any, tokens: list[int], features: Tensor, *, noisy: bool) -> list[Tensor]:
    """The chains of some rounds over two sequences, their state before each, and the logits of a pass behind it."""
    found, length = [], 3
    for seq_id in "ab":
        runner.open(seq_id)
        runner.read_features(seq_id, 0, features[: length - 1])
    for num_steps in (6, 1, 2, 5, 6):
        spans, fed = [], []
        for seq_id in "ab" if num_steps != 2 else "b":
            suffix = tokens[runner.cached_len(seq_id) : length]
            spans.append(Span(seq_id, len(suffix)))
            fed += suffix
        keys = torch.arange(num_steps * 6, dtype=torch.int32).view(num_steps, 3, 2) * 7919 if noisy else None
        found.append(runner.extend(spans, fed, Likeliest(num_steps, keys)))
        found.append(runner.forward([Span(span.seq_id, 1) for span in spans], found[-1][-1], fuzzy=True).logits)
        for span in spans:
            runner.commit(span.seq_id, range(span.num_tokens + min(2, num_steps - 1)))
            runner.drop_fuzzy(span.seq_id)
            runner.truncate(span.seq_id, min(runner.cached_len(span.seq_id), length + 1))
        for seq_id in "ab":
            runner.read_features(seq_id, length - 1, features[length - 1 : length + 1])
        length += 2
    return found


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1", "mtp", "eagle3, two layers"])
def test_a_chain_in_one_call_is_the_chain_of_its_passes(
    llama: Checkpoint, tmp_path, monkeypatch, name: str, dtype, noisy
) -> None:
    build, options = LAYERS[name]
    net, runs, run = make_net(build, options, llama, tmp_path), [], Steps.run
    tokens = random_text(llama, LENGTH)
    batch = read_text(llama, tokens)
    features = torch.cat([batch.taps[tap] for tap in net.taps], -1)[0].to(dtype)
    monkeypatch.setattr(Steps, "run", lambda steps, *times: runs.append(len(times)) or run(steps, *times))

    def found(worth_recording: int) -> list[Tensor]:
        monkeypatch.setattr(recorded_passes, "WORTH_RECORDING", worth_recording)
        tables = open_tables(llama.path, dtype=dtype)
        place = SpeculatorPlace(tables, SINGLE, "cpu", dtype, 256)
        return chains(open_speculator(tmp_path, place), tokens[0].tolist(), features, noisy=noisy)

    expected = found(1 << 30)
    assert not runs
    for one, other in zip(found(1), expected, strict=True):
        assert torch.equal(one, other)
    assert [times for times in runs if times > 1] == [5, 4, 5], (
        "steps behind the first ones, of which two chains have one"
    )


@pytest.mark.extended
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
