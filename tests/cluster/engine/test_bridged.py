"""A drafter on ranks of its own that is sent hidden states, in an engine in this process: the bridge forms, dies with
either side and is built again, and the tokens are those of plain decoding throughout."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.config import Placement
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import PipelineConfig, PipelineName
from actors.protocol.messages import SamplingParams
from actors.roles.bridge import FeatureReceiver, FeatureSender
from actors.roles.target import TargetRole

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
LONG = SamplingParams(max_tokens=50, ignore_eos=True)
WAIT_S = 60


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="session")
def speculator(tiny_checkpoint, tmp_path_factory):
    """EAGLE-3 layers beside the tiny target; they were not trained."""
    import torch
    from transformers import AutoModelForCausalLM

    from cluster.tools.training.speculators.recipes import RECIPES
    from parallel.training.interface import TargetShape

    target = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("Llama"))
    tables = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    recipe, path = RECIPES["eagle3"], tmp_path_factory.mktemp("speculator")
    torch.manual_seed(0)
    counts = torch.ones(target.config.vocab_size, dtype=torch.int64)
    recipe.build(recipe.options, TargetShape(target.config, *tables, counts)).save(path)
    return SpeculatorDrafterConfig(
        path=str(path), num_draft_tokens=4, device="cpu", placement=Placement.separate, calibrate_every=1
    )


@pytest.fixture(scope="module")
def plain_tokens():
    return []


@pytest.fixture
def plain(open_engine, plain_tokens):
    if not plain_tokens:
        with open_engine("none") as engine:
            plain_tokens += tokens_of(engine)
    return plain_tokens


def tokens_of(engine):
    return [one.token_ids for one in engine.generate(PROMPTS, LONG)]


def break_once(monkeypatch, owner, method, call, error):
    right, count = getattr(owner, method), 0

    def wrong(self, *arguments, **options):
        nonlocal count
        count += 1
        if count == call:
            error(self)
        return right(self, *arguments, **options)

    monkeypatch.setattr(owner, method, wrong)


def dies(end):
    raise RuntimeError("it broke")


FAULTS = {  # where it breaks, who has to be replaced for it
    "drafter": (FeatureReceiver, "receive", dies, ["draft-0"]),
    "target": (TargetRole, "_committed_features", dies, ["target-0"]),
    "target's end": (FeatureSender, "send", FeatureSender.close, []),
    "drafter's end": (FeatureReceiver, "_rows", FeatureReceiver.close, []),
}


BY_DEFAULT = ["target's end"]
"""`tests/actors/roles/test_bridge.py` has the others."""


@pytest.mark.extended
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in FAULTS]
)
def test_a_bridge_that_dies_is_built_again_and_the_tokens_are_the_same(
    open_engine, monkeypatch, speculator, plain, fault
):
    owner, method, error, replaced = FAULTS[fault]
    engine = open_engine(speculator, pipeline=PipelineConfig(PipelineName.sync, adaptive=False))
    assert tokens_of(engine) == plain
    counters = engine.report(reset=True).counters
    assert counters["num_draft_tokens"] and counters["exported_bytes"] and not counters["num_role_losses"]
    break_once(monkeypatch, owner, method, 9, error)
    assert tokens_of(engine) == plain
    deadline = time.monotonic() + WAIT_S
    # the next bridge may stand during any of them
    while not engine.report(reset=True).counters["num_role_losses"].get("draft"):
        assert tokens_of(engine) == plain
        assert time.monotonic() < deadline, "it never died"
    counters = dict[str, Any]()
    while not (counters.get("num_draft_tokens") and counters["exported_bytes"]):
        assert time.monotonic() < deadline, f"hidden states were never sent again: {counters}"
        assert tokens_of(engine) == plain
        counters = engine.report(reset=True).counters
    assert [incident.identity for incident in engine.supervisor.incidents] == replaced


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_drafts_ahead_of_hidden_states(open_engine, speculator, plain, tp):
    engine = open_engine(speculator, tp=tp, pipeline=PipelineConfig(PipelineName.branches, adaptive=False))
    assert tokens_of(engine) == plain
    report = engine.report()
    assert report.counters["exported_bytes"] >= 2 * report.counters["exported_rows"] > 0
    lanes = {(lane, name) for lane, name, *_ in report.spans}
    assert {("target", "export"), ("draft", "features")} <= lanes


@pytest.mark.extended
def test_a_policy_that_rests_still_reads(open_engine, speculator, plain):
    """Requests that begin while speculation is off have their hidden states when it is back."""
    engine = open_engine(replace(speculator, num_draft_tokens=2), pipeline=PipelineConfig(PipelineName.sync))
    for _ in range(3):
        assert tokens_of(engine) == plain
    assert engine.report().counters["exported_rows"] > 3 * 3 * LONG.max_tokens / 2
