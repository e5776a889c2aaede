"""Other engines as peers: the same task by their own means; those that are not installed are skipped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers.gguf_file import check_family, write_gguf
from cluster.tools.bench.peers.hf_transformers import Transformers
from cluster.tools.bench.peers.interface import Means, PeerSetup
from cluster.tools.bench.peers.llama_cpp import LlamaCpp
from cluster.tools.bench.peers.openvino_pipeline import OpenVino
from cluster.tools.bench.peers.registry import PEERS, check_peers, open_peer
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import BenchTask

PLAIN, DRAFTED, LOOKUP = (f"transformers{means}" for means in ("", " draft model", " prompt lookup"))
PROMPTS = (Prompt("a", token_ids=(5, 6, 7, 5, 6)), Prompt("b", token_ids=(9, 8)))
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny_checkpoint) -> TargetConfig:
    return TargetConfig(path=str(tiny_checkpoint("Llama")))


def setup(target: TargetConfig, dtype: str = "float32") -> PeerSetup:
    return PeerSetup(target, dtype, "cpu", 128)


def transformers(target: TargetConfig) -> Transformers:
    return Transformers(setup(target), exact=False)


def task(drafter, *, batch: int = 1, temperature: float = 0.0, num_threads: int = 1) -> BenchTask:
    return BenchTask(Setting(drafter, PipelineConfig(), temperature, batch, 0), PROMPTS, SAMPLING, num_threads)


def tokens(run) -> list[tuple[int, ...]]:
    return [one.token_ids for one in run.requests]


@pytest.mark.extended
def test_assisted_generation_gives_the_plain_tokens(target, tiny_checkpoint):
    peer = transformers(target)
    plain = peer.complete(PLAIN, task(NoDrafterConfig()))
    assert [len(one) for one in tokens(plain)] == [12, 12]
    other = str(tiny_checkpoint("Llama", seed=1))
    drafted = peer.complete(DRAFTED, task(ModelDrafterConfig(path=other, num_draft_tokens=3)))
    looked_up = peer.complete(LOOKUP, task(NgramDrafterConfig(num_draft_tokens=3)))
    assert tokens(drafted) == tokens(looked_up) == tokens(plain)


def test_times_lie_within_the_run(target):
    run = transformers(target).complete(PLAIN, task(NoDrafterConfig()))
    assert all(0 < one.ttft_s < one.latency_s <= run.wall_s for one in run.requests)


@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_transformers_samples_by_the_same_rules(target, min_p):
    peer = transformers(target)
    config = peer._generation_config(SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=min_p, min_tokens=3))
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.7, 9, 0.8, min_p or None)
    assert config.do_sample and config.min_new_tokens == 3


@pytest.mark.extended
def test_threads_are_those_of_the_target_role(target):
    before = torch.get_num_threads()
    try:
        transformers(target).complete(PLAIN, task(NoDrafterConfig(), num_threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_stretched_target_costs_layers_and_changes_no_token(target):
    plain, stretched = (transformers(TargetConfig(path=target.path, stretch=stretch)) for stretch in (0, 3))
    assert len(stretched._model.model.layers) == len(plain._model.model.layers) + 3
    one, other = (peer.complete(PLAIN, task(NoDrafterConfig())) for peer in (plain, stretched))
    assert tokens(one) == tokens(other)


def test_sides_and_what_they_have_in_common(target):
    peer = transformers(target)
    model = peer.sides(task(ModelDrafterConfig(path=target.path)))
    ngram = peer.sides(task(NgramDrafterConfig()))
    assert set(model) == {PLAIN, DRAFTED} and set(ngram) == {PLAIN, LOOKUP}
    assert model[PLAIN] == ngram[PLAIN]
    assert set(peer.sides(task(NgramDrafterConfig(), temperature=1.0))) == {PLAIN, LOOKUP}
    assert peer.sides(task(NgramDrafterConfig(), num_threads=2))[PLAIN] != ngram[PLAIN]
    assert set(peer.sides(task(NoDrafterConfig()))) == {PLAIN}
    assert peer.sides(task(NgramDrafterConfig(), batch=2)) == {}


def test_unknown_peers_and_sampling_without_counterpart_are_refused():
    check_peers(["transformers"], SAMPLING)
    check_peers([], SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="job.peers=magic: is unknown; choose from transformers"):
        check_peers(["magic"], SAMPLING)
    with pytest.raises(ValueError, match="sampling.stop: transformers has no counterpart"):
        check_peers(["transformers"], SamplingParams(stop=("x",)))


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch):
    kind = replace(PEERS["llama-cpp"], modules=("json", "no_such_bindings"))
    monkeypatch.setitem(PEERS, "llama-cpp", kind)
    with pytest.raises(ValueError, match=r"^job.peers=llama-cpp: no_such_bindings is not installed; pip install xll"):
        check_peers(["llama-cpp"], SAMPLING)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["openvino-genai", "llama-cpp"])
def test_peers_with_files_of_their_own_compute_the_same_model(name, family, exact, tiny_checkpoint):
    """Greedy tokens, plain, with a draft model that is often wrong and by lookup: what is missing would show.

    What a peer rounds by itself may turn a tie: without `exact` only the number of tokens is certain.
    """
    for module in PEERS[name].modules:
        pytest.importorskip(module)
    target = TargetConfig(path=str(tiny_checkpoint(family)))
    expected = tokens(transformers(target).complete(PLAIN, task(NoDrafterConfig())))
    peer = {"openvino-genai": OpenVino, "llama-cpp": LlamaCpp}[name](setup(target), exact=exact)
    model = ModelDrafterConfig(path=str(tiny_checkpoint(family, seed=1)), num_draft_tokens=3)
    drafts = task(AutoDrafterConfig(drafters=[model, NgramDrafterConfig(num_draft_tokens=3)]))
    assert [side.partition(" float32")[0].partition(" ")[2] for side in peer.sides(drafts)] == list(Means)
    for side in peer.sides(drafts):
        run = peer.complete(side, drafts)
        assert tokens(run) == expected if exact else list(map(len, tokens(run))) == list(map(len, expected))
        assert all(0 < one.ttft_s < one.latency_s <= run.wall_s for one in run.requests)
    assert peer.sides(task(NoDrafterConfig(), temperature=1.0)) == peer.sides(task(NoDrafterConfig(), batch=2)) == {}


def test_a_bfloat16_checkpoint_is_run_in_bfloat16_and_beside_it_in_ours(target, tmp_path):
    config = json.loads(Path(target.path, "config.json").read_text())
    shutil.copytree(target.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    given = setup(TargetConfig(path=str(tmp_path)))
    own, exact = (Transformers(given, exact=exact) for exact in (False, True))
    assert (own._model.dtype, exact._model.dtype) == (torch.bfloat16, torch.float32)
    assert own.describe()["arithmetic"] == "bfloat16" and exact.describe()["arithmetic"] == "float32"
    assert list(exact.sides(task(NoDrafterConfig()))) == ["transformers float32"]


@pytest.mark.slow
def test_a_peer_in_a_process_of_its_own_gives_the_same_tokens(target):
    expected = tokens(transformers(target).complete(PLAIN, task(NoDrafterConfig())))
    with open_peer("transformers", setup(target))["transformers"] as peer:
        assert list(peer.sides(task(NoDrafterConfig()))) == [PLAIN]
        assert tokens(peer.complete(PLAIN, task(NoDrafterConfig()))) == expected


def test_a_gguf_file_holds_the_weights_and_numbers_for_tokens(target, tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(target.path, tmp_path / "model.gguf", stretch=2)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    weights = load_file(Path(target.path, "model.safetensors"))
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    key = weights["model.layers.1.self_attn.k_proj.weight"].float().numpy()
    num_layers = len({name.split(".")[2] for name in weights if ".layers." in name})
    assert reader.fields["llama.block_count"].contents() == num_layers + 2
    assert not found[f"blk.{num_layers}.attn_output.weight"].any()
    assert (found["blk.0.ffn_up.weight"] == weights["model.layers.0.mlp.up_proj.weight"].float().numpy()).all()
    num_heads = reader.fields["llama.attention.head_count_kv"].contents()
    halves = found["blk.1.attn_k.weight"].reshape(num_heads, -1, 2, key.shape[1]).swapaxes(1, 2)
    assert (halves.reshape(key.shape) == key).all()
    assert reader.fields["tokenizer.ggml.tokens"].contents()[:3] == ["<0>", "<1>", "<2>"]


def test_a_model_that_a_peer_cannot_be_given_is_one_line(target):
    config = SimpleNamespace(model_type="gemma3", rope_parameters={})
    with pytest.raises(ValueError, match=r"^here: model_type=gemma3 with rope_type=default; job.peers=llama-cpp takes"):
        check_family("llama-cpp", "here", config)
