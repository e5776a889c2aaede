"""transformers as a peer: the same task by its own means."""

from __future__ import annotations

import pytest
import torch

from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers import Transformers, check_peers
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import ASSISTED, TRANSFORMERS, BenchTask

PROMPTS = (Prompt("a", token_ids=(5, 6, 7, 5, 6)), Prompt("b", token_ids=(9, 8)))
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny_checkpoint) -> TargetConfig:
    return TargetConfig(path=str(tiny_checkpoint("Llama")))


def task(drafter, *, batch: int = 1, temperature: float = 0.0, num_threads: int = 1) -> BenchTask:
    return BenchTask(Setting(drafter, PipelineConfig(), temperature, batch, 0), PROMPTS, SAMPLING, num_threads)


def tokens(run) -> list[tuple[int, ...]]:
    return [one.token_ids for one in run.requests]


def test_assisted_generation_gives_the_plain_tokens(target, tiny_checkpoint):
    peer = Transformers(target, "float32", "cpu")
    plain = peer.complete(TRANSFORMERS, task(NoDrafterConfig()))
    assert [len(one) for one in tokens(plain)] == [12, 12]
    other = str(tiny_checkpoint("Llama", seed=1))
    for drafter in (ModelDrafterConfig(path=other, num_draft_tokens=3), NgramDrafterConfig(num_draft_tokens=3)):
        assert tokens(peer.complete(ASSISTED, task(drafter))) == tokens(plain)


def test_times_lie_within_the_run(target):
    run = Transformers(target, "float32", "cpu").complete(TRANSFORMERS, task(NoDrafterConfig()))
    assert all(0 < one.ttft_s < one.latency_s <= run.wall_s for one in run.requests)


def test_threads_are_those_of_the_target_role(target):
    before = torch.get_num_threads()
    try:
        Transformers(target, "float32", "cpu").complete(TRANSFORMERS, task(NoDrafterConfig(), num_threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_stretched_target_costs_layers_and_changes_no_token(target):
    plain, stretched = (
        Transformers(TargetConfig(path=target.path, stretch=stretch), "float32", "cpu") for stretch in (0, 3)
    )
    assert len(stretched._model.model.layers) == len(plain._model.model.layers) + 3
    one, other = (peer.complete(TRANSFORMERS, task(NoDrafterConfig())) for peer in (plain, stretched))
    assert tokens(one) == tokens(other)


def test_sides_and_what_they_have_in_common(target):
    peer = Transformers(target, "float32", "cpu")
    model = peer.sides(task(ModelDrafterConfig(path=target.path)))
    ngram = peer.sides(task(NgramDrafterConfig()))
    assert set(model) == set(ngram) == {TRANSFORMERS, ASSISTED}
    assert model[TRANSFORMERS] == ngram[TRANSFORMERS] and model[ASSISTED] != ngram[ASSISTED]
    assert peer.sides(task(NgramDrafterConfig(), num_threads=2))[TRANSFORMERS] != ngram[TRANSFORMERS]
    assert set(peer.sides(task(NoDrafterConfig()))) == {TRANSFORMERS}
    assert peer.sides(task(NgramDrafterConfig(), batch=2)) == {}


def test_unknown_peers_and_sampling_without_counterpart_are_refused():
    check_peers(["transformers"], SAMPLING)
    check_peers([], SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="job.peers=vllm: is unknown; choose from transformers"):
        check_peers(["vllm"], SAMPLING)
    with pytest.raises(ValueError, match="sampling.stop: transformers has no counterpart"):
        check_peers(["transformers"], SamplingParams(stop=("x",)))
