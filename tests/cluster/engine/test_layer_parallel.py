"""Layer-parallel draft ranks beside or on the target's: the same tokens in every placement, pipeline, calibration."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.drafters.model.config import (
    Calibration,
    CalibrationPolicy,
    MlpParallel,
    ModelDrafterConfig,
    Strategy,
)
from actors.options import Parallel, PipelineConfig, PipelineName
from actors.protocol.messages import SamplingParams
from cluster.config.schema import PlacementConfig, PlacementName
from parallel.runtime.layer_parallel_runner import LayerParallelRunner

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
SAMPLING = SamplingParams(max_tokens=20, temperature=0.7, seed=5)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
WAIT_S = 60

LAYOUTS = {  # pipeline, target ranks, placement, choices of the drafter
    "sync-colocated": ("sync", 2, "colocated", dict(ranks=2)),
    "sync-owner": (
        "sync",
        1,
        "separate",
        dict(ranks=2, calibration=Calibration.owner, mlp_parallel=MlpParallel.tensor),
    ),
    "sync-broadcast": ("sync", 2, "separate", dict(ranks=3, layer_group=2, calibration=Calibration.broadcast)),
    "sync-tree-every-2": ("sync", 1, "colocated", dict(ranks=2, strategy=Strategy.tree, calibrate_every=2)),
    "branches": ("branches", 2, "separate", dict(ranks=2)),
    "branches-owner": ("branches", 1, "colocated", dict(ranks=2, calibration=Calibration.owner)),
    "tree-broadcast": (
        "tree",
        1,
        "separate",
        dict(ranks=2, strategy=Strategy.tree, calibration=Calibration.broadcast),
    ),
    "tree-never": ("tree", 1, "separate", dict(ranks=2, calibration_policy=CalibrationPolicy.never)),
    "pearl-owner-mismatch": (
        "pearl",
        1,
        "colocated",
        dict(ranks=2, calibration=Calibration.owner, calibration_policy=CalibrationPolicy.mismatch),
    ),
    "pingpong": ("pingpong", 1, "separate", dict(ranks=2, mlp_parallel=MlpParallel.tensor)),
}
MARKS = dict.fromkeys(("sync-colocated", "sync-owner", "branches-owner", "tree-broadcast"), "slow")
MARKS["pingpong"] = "extended"
"""Not by default: each of their choices is in another layout too."""


@pytest.fixture(scope="session")
def deep_drafter(tiny_checkpoint, tmp_path_factory) -> Path:
    """The tiny target with four layers put in its middle: of what it drafts some is accepted, and some is not."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("deep")
    shutil.copytree(tiny_checkpoint("Llama"), path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    deep = {name.replace("layers.1.", "layers.5."): weight for name, weight in weights.items()}
    torch.manual_seed(1)
    for name, weight in weights.items():
        if "layers.0." in name:
            scale = (0.1 if "o_proj" in name or "down_proj" in name else 1.0) * weight.std()
            for layer in range(1, 5):
                noise = torch.ones_like(weight) if weight.dim() == 1 else torch.randn_like(weight) * scale
                deep[name.replace("layers.0.", f"layers.{layer}.")] = noise
    save_file(deep, path / "model.safetensors", metadata={"format": "pt"})
    shape = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 6}
    shape.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(shape))
    return path


@pytest.fixture
def complete(open_engine, deep_drafter):
    """Tokens of every prompt under a layout, and the engine's report and ranks."""

    def complete_(layout, sampling=SAMPLING):
        pipeline, tp, placement, choices = LAYOUTS[layout]
        config = ModelDrafterConfig(
            path=str(deep_drafter), num_draft_tokens=5, device="cpu", parallel=Parallel.layer, **choices
        )
        engine = open_engine(
            config,
            tp=tp,
            pipeline=PipelineConfig(PipelineName(pipeline), adaptive=False),
            placement=PlacementConfig(PlacementName(placement)),
        )
        return [completion.token_ids for completion in engine.generate(PROMPTS, sampling)], engine

    return complete_


@pytest.fixture(scope="module")
def plain_tokens():
    """Filled by the first test; plain decoding gives the same tokens to all."""
    return {}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=getattr(pytest.mark, MARKS[name]) if name in MARKS else []) for name in LAYOUTS]
)
def test_tokens_are_those_of_plain_decoding_in_any_layout(complete, open_engine, plain_tokens, layout):
    if not plain_tokens:
        plain = open_engine("none", pipeline=PipelineConfig(PipelineName.plain))
        plain_tokens["all"] = [completion.token_ids for completion in plain.generate(PROMPTS, SAMPLING)]
    tokens, engine = complete(layout)
    assert tokens == plain_tokens["all"]
    deadline = time.monotonic() + WAIT_S
    while engine.report().counters["num_accepted_tokens"] == 0:  # one that works ahead may be late for whole texts
        assert time.monotonic() < deadline, "nothing was ever accepted: the test shows nothing"
        assert [one.token_ids for one in engine.generate(PROMPTS, SAMPLING)] == plain_tokens["all"]
    names = {(lane, name) for lane, name, *_ in engine.report().spans}
    assert ("target", "commit") in names
    choices = LAYOUTS[layout][3]
    facts = [engine.ready[f"draft-{rank}"].facts for rank in range(choices["ranks"])]
    calibration = str(choices.get("calibration", Calibration.recompute))
    for fact in facts:
        assert max(fact["layer_groups"]) == 2 and fact["calibration"] == calibration
        per_slot = fact["kv_bytes"] / fact["kv_slots"]
        held = {"recompute": 6, "owner": 3}.get(calibration)
        assert held is None or per_slot == held * 2 * 2 * 8 * 4, "layers, keys and values, heads, head_dim, float32"


@pytest.mark.extended
def test_a_rank_that_is_replaced_is_given_its_rows(complete, open_engine, monkeypatch):
    """Rank 0 alone reads the text again under `broadcast`: its successor's rows are those of rank 0, to the bit."""
    longer = replace(LONG, max_tokens=100)
    with open_engine("none", pipeline=PipelineConfig(PipelineName.plain)) as engine:
        expected = [completion.token_ids for completion in engine.generate(PROMPTS, longer)]
    forward, drop_fuzzy = LayerParallelRunner.forward, LayerParallelRunner.drop_fuzzy
    rows: dict[LayerParallelRunner, dict[tuple[int, int], dict[int, torch.Tensor]]] = {}
    calls = Counter()

    def break_on_rank_1(runner, *arguments, **options):
        rank = runner.decoder.group.rank
        calls[rank] += 1
        if rank == 1 and calls[rank] == 8:
            raise RuntimeError("the 8th pass broke")
        return forward(runner, *arguments, **options)

    def remember(runner, seq_id):
        dropped, length = drop_fuzzy(runner, seq_id), runner.cached_len(seq_id)
        slots = runner.pool.slots(seq_id)[:length]
        held = {layer: runner.pool.keys[place, slots] for place, layer in enumerate(runner.decoder.held)}
        rows.setdefault(runner, {})[seq_id, length] = held
        return dropped

    monkeypatch.setattr(LayerParallelRunner, "forward", break_on_rank_1)
    monkeypatch.setattr(LayerParallelRunner, "drop_fuzzy", remember)
    tokens, engine = complete("sync-broadcast", longer)
    assert tokens == expected
    assert [incident.identity for incident in engine.supervisor.incidents] == ["draft-1"]

    def by_rank():
        return sorted([*rows], key=lambda runner: runner.decoder.group.rank)  # those of a rank as they appeared

    deadline = time.monotonic() + WAIT_S
    while len(rows) < 4 or len(rows[by_rank()[2]]) < 3:  # the successor may come after the end
        assert time.monotonic() < deadline
        assert [one.token_ids for one in engine.generate(PROMPTS, longer)] == expected
    engine.close()
    lead, _, successor, _ = by_rank()
    assert 0 < len(successor.decoder.held) < len(lead.decoder.held) == 6 and len(rows[successor]) > 2
    for at, held in rows[successor].items():
        for layer, keys in held.items():
            assert torch.equal(keys, rows[lead][at][layer]), (at, layer)
