"""What peers share, without a peer: times of requests in turn, and what the ratios over their sides compare with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.observability.results import Served
from cluster.tools.bench import machine as machine_module
from cluster.tools.bench.peers import interface as module
from cluster.tools.bench.peers import registry
from cluster.tools.bench.peers.interface import (
    FilePeer,
    Means,
    PeerSetup,
    Speculation,
    complete_in_turn,
    speculations,
)
from cluster.tools.bench.peers.registry import baselines, check_peers, open_peer
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import BenchTask, peer_sides

PROMPTS = (Prompt("a"), Prompt("b"))


def test_requests_are_timed_one_after_the_other(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    setting: Any = None
    task = BenchTask(setting, PROMPTS, SamplingParams(max_tokens=3), 2)

    def complete(prompt: Prompt) -> tuple[tuple[int, ...], float]:
        now[0] += 2.0 if prompt.text == "a" else 0.5
        return ((1, 2, 3), 1.5) if prompt.text == "a" else ((4, 5), 0.25)

    run = complete_in_turn(task, complete)
    assert run.requests == [
        Served(0, PROMPTS[0], (1, 2, 3), finish_reason="length", ttft_s=1.5, latency_s=2.0),
        Served(1, PROMPTS[1], (4, 5), finish_reason="stop", ttft_s=0.25, latency_s=0.5),
    ]
    assert run.wall_s == 2.5


def test_ratios_say_what_they_compare_with():
    assert baselines([]) == {}
    found = baselines(["llama-cpp", "transformers"])
    assert list(found) == ["speculative / llama-cpp", "speculative / transformers"]
    assert found["speculative / llama-cpp"].startswith("llama.cpp with its default KV type and flash attention")
    assert "on the same checkpoint, prompts and cores" in found["speculative / transformers"]
    assert peer_sides(["plain", "b", "speculative", "a", "b"]) == ["b", "a"]


class PaperPeer(FilePeer):
    """Opens nothing, and notes what it was asked for."""

    name, package, arithmetic = "paper", "torch", "ink"

    def __init__(self, setup: PeerSetup, *, exact: bool = False) -> None:
        super().__init__(setup, exact=exact)
        self.written: list[tuple[str, int]] = []
        self.opened: list[tuple[Any, ...]] = []

    def write(self, checkpoint: str, place: Path, stretch: int) -> None:
        self.written.append((checkpoint, stretch))
        place.touch()

    def open(self, num_threads: int, target: str, drafter: str, speculation: Speculation) -> Any:
        files = [Path(file).name if file else "" for file in (target, drafter)]
        self.opened.append((num_threads, *files, speculation.num_draft_tokens))
        return len(self.opened)

    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, speculation: Speculation) -> Any:
        return (opened, speculation.num_draft_tokens), 0.1


def setup_of(path: str, dtype: str = "float32", device: str = "cpu", stretch: int = 0) -> PeerSetup:
    return PeerSetup(TargetConfig(path=path, stretch=stretch), dtype, device, 128)


def task_of(drafter: Any, *, batch: int = 1, temperature: float = 0.0, threads: int = 2) -> BenchTask:
    setting = Setting(drafter, PipelineConfig(), temperature, batch, 0)
    return BenchTask(setting, PROMPTS[:1], SamplingParams(max_tokens=3), threads)


def test_a_peer_writes_each_checkpoint_once_and_opens_each_pair_once(tiny_checkpoint):
    path = str(tiny_checkpoint("Llama"))
    peer = PaperPeer(setup_of(path, stretch=2))
    model, lookup = ModelDrafterConfig(path=path, num_draft_tokens=4), NgramDrafterConfig(num_draft_tokens=6)
    assert list(peer.sides(task_of(lookup))) == ["paper", "paper prompt lookup"]
    assert list(peer.sides(task_of(model))) == ["paper", "paper draft model"]
    assert list(PaperPeer(setup_of(path), exact=True).sides(task_of(model)))[1] == "paper draft model float32"
    assert peer.sides(task_of(model, batch=2)) == {} == peer.sides(task_of(model, temperature=0.5))
    assert peer.sides(task_of(model))["paper"] == peer.sides(task_of(lookup))["paper"], "they need one run"
    assert peer.sides(task_of(lookup, threads=3)) != peer.sides(task_of(lookup))
    answers = [
        peer.complete(side, task).requests[0].token_ids
        for side, task in (
            ("paper", task_of(model)),
            ("paper draft model", task_of(model)),
            ("paper", task_of(lookup)),
            ("paper prompt lookup", task_of(lookup)),
            ("paper draft model", task_of(model)),
            ("paper", task_of(lookup, threads=3)),
        )
    ]
    assert answers == [(1, 0), (2, 4), (1, 0), (3, 6), (2, 4), (4, 0)]
    assert peer.opened == [(2, "0", "", 0), (2, "0", "1", 4), (2, "0", "", 6), (3, "0", "", 0)]
    assert peer.written == [(path, 2), (path, 0)], "the drafter is not stretched"
    assert peer.describe() == {"arithmetic": "ink", "device": "cpu", "version": torch.__version__}
    assert peer.eos_token_ids == (0,)
    peer.close()
    assert not Path(peer._folder.name).exists()


def test_every_member_of_a_drafter_has_its_counterpart_once():
    model, other = ModelDrafterConfig(path="a", num_draft_tokens=4), ModelDrafterConfig(path="b")
    ngram, suffix = NgramDrafterConfig(num_draft_tokens=2, max_ngram=5), SuffixDrafterConfig(num_draft_tokens=9)
    plain = {Means.plain: Speculation()}
    drafted = {Means.model: Speculation(Means.model, 4, "a")}
    looked_up = {Means.lookup: Speculation(Means.lookup, 2, max_ngram=5)}
    assert speculations(NoDrafterConfig()) == plain
    assert speculations(AutoDrafterConfig(drafters=[model, ngram, other, suffix])) == plain | drafted | looked_up
    assert speculations(CascadeDrafterConfig(levels=[ngram, model])) == plain | drafted | looked_up
    assert speculations(suffix)[Means.lookup].num_draft_tokens == 9


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "names"),
    [
        ("bfloat16", "float32", ["transformers", "transformers float32"]),
        ("float32", "float32", ["transformers"]),
        ("float32", "bfloat16", ["transformers", "transformers bfloat16"]),
    ],
)
def test_a_peer_with_other_arithmetic_runs_in_ours_too(monkeypatch, tmp_path, checkpoint, dtype, names):
    opened = []

    class Noted:
        def __init__(self, title, make, where, setup, exact) -> None:
            opened.append((title, setup.dtype if exact else ""))

        def describe(self) -> None:
            """It has started."""

    monkeypatch.setattr(registry, "PeerApart", Noted)
    (tmp_path / "config.json").write_text(f'{{"torch_dtype": "{checkpoint}"}}')
    assert list(open_peer("transformers", setup_of(str(tmp_path), dtype))) == names
    assert opened == [(names[0], ""), *((name, dtype) for name in names[1:])]


@pytest.mark.parametrize(
    ("peer", "changed", "refused"),
    [
        ("transformers", {}, ""),
        ("transformers", {"temperature": 0.5, "top_k": 3, "max_tokens": 9, "seed": 4, "min_tokens": 1}, ""),
        ("transformers", {"stop": ("x",)}, "sampling.stop: transformers has no counterpart; drop it or job.peers"),
        ("transformers", {"presence_penalty": 0.5}, "sampling.presence_penalty: transformers has no counterpart"),
        ("magic", {}, "job.peers=magic: is unknown; choose from transformers, openvino-genai, llama-cpp, vllm"),
    ],
)
def test_a_peer_has_the_sampling_that_is_asked_for_or_is_refused(peer, changed, refused):
    sampling = SamplingParams(**changed)
    if not refused:
        check_peers([peer], sampling)
        return
    with pytest.raises(ValueError) as caught:
        check_peers([peer], sampling)
    assert str(caught.value).startswith(refused)


def test_a_machine_is_its_processor_cores_memory_and_devices(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Fast CPU: 3 GHz\nmodel name\t: Other\n")
    path = machine_module.Path
    monkeypatch.setattr(machine_module, "Path", lambda name: cpuinfo if name == "/proc/cpuinfo" else path(name))
    monkeypatch.setattr(machine_module.os, "sched_getaffinity", lambda pid: {0, 1, 2} if pid == 0 else set())
    monkeypatch.setattr(machine_module.psutil, "virtual_memory", lambda: SimpleNamespace(total=7))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(machine_module.platform, "platform", lambda: "Linux")
    assert machine_module.machine() == {
        "processor": "Fast CPU: 3 GHz",
        "num_cores": 3,
        "memory_bytes": 7,
        "gpus": ["GPU 0", "GPU 1"],
        "system": "Linux",
    }
    cpuinfo.unlink()
    monkeypatch.setattr(machine_module.platform, "processor", lambda: "")
    monkeypatch.setattr(machine_module.platform, "machine", lambda: "riscv")
    assert machine_module.machine()["processor"] == "riscv"


@pytest.mark.parametrize("name", ["llama-cpp", "openvino-genai"])
def test_a_peer_of_cpus_is_not_given_a_target_on_a_gpu(name):
    with pytest.raises(ValueError, match=f"^job.peers={name}: runs on a CPU, not with target.device=cuda:0; set it"):
        open_peer(name, setup_of("x", device="cuda:0"))
