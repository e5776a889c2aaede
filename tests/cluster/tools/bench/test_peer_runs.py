"""What peers share, without a peer: times of requests in turn, and what the ratios over their sides compare with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.observability.results import Served
from cluster.tools.bench import machine as machine_module
from cluster.tools.bench.peers import interface as module
from cluster.tools.bench.peers.interface import FilePeer, complete_in_turn
from cluster.tools.bench.peers.registry import baselines, check_peers
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
    assert all(name.startswith("speculative / ") for name in found)
    assert len(found) == 4 and found["speculative / transformers assisted"].startswith("the same with the same draft")
    assert peer_sides(["plain", "b", "speculative", "a", "b"]) == ["b", "a"]


class PaperPeer(FilePeer):
    """Opens nothing, and notes what it was asked for."""

    plain, speculative, package = "paper", "paper draft", "torch"

    def __init__(self, target: TargetConfig) -> None:
        super().__init__(target)
        self.written: list[tuple[str, int]] = []
        self.opened: list[tuple[Any, ...]] = []

    def write(self, checkpoint: str, place: Path, stretch: int) -> None:
        self.written.append((checkpoint, stretch))
        place.touch()

    def open(self, num_threads: int, target: str, drafter: str, num_draft_tokens: int) -> Any:
        files = [Path(file).name if file else "" for file in (target, drafter)]
        self.opened.append((num_threads, *files, num_draft_tokens))
        return len(self.opened)

    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, num_draft_tokens: int) -> Any:
        return (opened, num_draft_tokens), 0.1


def task_of(drafter: Any, *, batch: int = 1, temperature: float = 0.0, threads: int = 2) -> BenchTask:
    setting = Setting(drafter, PipelineConfig(), temperature, batch, 0)
    return BenchTask(setting, PROMPTS[:1], SamplingParams(max_tokens=3), threads)


def test_a_peer_writes_each_checkpoint_once_and_opens_each_pair_once(tiny_checkpoint):
    path = str(tiny_checkpoint("Llama"))
    peer = PaperPeer(TargetConfig(path=path, stretch=2))
    model, lookup = ModelDrafterConfig(path=path, num_draft_tokens=4), NgramDrafterConfig()
    assert list(peer.sides(task_of(lookup))) == ["paper"] and list(peer.sides(task_of(model))) == [
        "paper",
        "paper draft",
    ]
    assert peer.sides(task_of(model, batch=2)) == {} == peer.sides(task_of(model, temperature=0.5))
    assert peer.sides(task_of(model))["paper"] == peer.sides(task_of(lookup))["paper"], "they need one run"
    assert peer.sides(task_of(lookup, threads=3)) != peer.sides(task_of(lookup))
    answers = [
        peer.complete(side, task).requests[0].token_ids
        for side, task in (
            ("paper", task_of(model)),
            ("paper draft", task_of(model)),
            ("paper", task_of(lookup)),
            ("paper draft", task_of(model)),
            ("paper", task_of(lookup, threads=3)),
        )
    ]
    assert answers == [(1, 0), (2, 4), (1, 0), (2, 4), (3, 0)]
    assert peer.opened == [(2, "0", "", 0), (2, "0", "1", 4), (3, "0", "", 0)]
    assert peer.written == [(path, 2), (path, 0)], "the drafter is not stretched"
    assert peer.describe() == {
        "dtype": "float32",
        "device": "cpu",
        "batch": 1,
        "num_threads": "as the target role has",
        "version": torch.__version__,
    }
    assert peer.eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("peer", "changed", "refused"),
    [
        ("transformers", {}, ""),
        ("transformers", {"temperature": 0.5, "top_k": 3, "max_tokens": 9, "seed": 4, "min_tokens": 1}, ""),
        ("transformers", {"stop": ("x",)}, "sampling.stop: transformers has no counterpart; drop it or job.peers"),
        ("transformers", {"presence_penalty": 0.5}, "sampling.presence_penalty: transformers has no counterpart"),
        ("magic", {}, "job.peers=magic: is unknown; choose from transformers, openvino-genai, llama-cpp"),
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


@pytest.mark.parametrize(
    ("dtype", "device", "fits"), [("float32", "cpu", 1), ("bfloat16", "cpu", 0), ("float32", "cuda:0", 0)]
)
def test_a_peer_with_files_is_compared_in_float32_on_a_cpu_alone(dtype, device, fits):
    facts = {"dtype": dtype, "device": device}
    if fits:
        module.check_float32_on_cpu("x", facts)
        return
    with pytest.raises(ValueError, match=f"^job.peers=x: .* not with target.dtype={dtype} target.device={device}; set"):
        module.check_float32_on_cpu("x", facts)
