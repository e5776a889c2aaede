"""Launches small enough for a test: tiny checkpoints, threads instead of Ray, prompts in a file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from actors.drafters.config import DrafterConfig, NoDrafterConfig, Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, SamplingConfig, TargetConfig, VerifyConfig
from cluster import launch
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig, PlacementConfig, PlacementName
from cluster.engine import Engine


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `main` in this process, on Hydra state and signals of its own: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv(launch.FULL_ERROR, "0")
        monkeypatch.setattr(sys, "argv", ["launch", *arguments])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back in the end
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        GlobalHydra.instance().clear()
        try:
            with pytest.raises(SystemExit) as left:
                launch.main()
        finally:
            GlobalHydra.instance().clear()
            for number, listener in before.items():
                signal.signal(number, listener)
        return left.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def tiny_launch(tiny_checkpoint: Callable[..., Path]) -> Callable[..., LaunchConfig]:
    """A launch in this process whose drafter is its target, so that every draft token is accepted."""

    def make(job: object, **sections: object) -> LaunchConfig:
        path = str(tiny_checkpoint("Llama"))
        chosen = {
            "target": TargetConfig(path=path, device="cpu"),
            "drafter": ModelDrafterConfig(path=path, num_draft_tokens=3, device="cpu"),
            "verify": VerifyConfig(),
            "pipeline": PipelineConfig(adaptive=False),  # what adapts to the clock does not repeat
            "placement": PlacementConfig(PlacementName.colocated),
            "cluster": ClusterConfig(ClusterName.inprocess),
            "job": job,
            "sampling": SamplingConfig(max_tokens=13, ignore_eos=True),
        }
        return LaunchConfig(**(chosen | sections))

    return make


@pytest.fixture
def write_prompts(tmp_path: Path) -> Callable[..., str]:
    def write(*records: dict[str, object]) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return str(path)

    return write


@pytest.fixture(scope="session")
def half_agreeing_drafter(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with noise on its weights: some of what it drafts is accepted, and some is not."""
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("drafter")
    shutil.copytree(tiny_checkpoint("Llama"), path, dirs_exist_ok=True)
    torch.manual_seed(1)
    weights = load_file(path / "model.safetensors")
    noisy = {name: weight + 0.1 * weight.std() * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(noisy, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module", autouse=True)
def quick_ends() -> Iterator[None]:
    """Threads of engines in this process look more often whether they are to end, which else takes half a second.

    A thread that a busy machine lets wait for three such heartbeats has not missed its batch, which threads hand over
    in memory: it is given more time. A role that is gathered again for it would have no drafts meanwhile.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.worker.heartbeat.HEARTBEAT_S", 0.05)
        patch.setattr("actors.coordinator.membership.HEARTBEAT_S", 0.05)  # which takes their number for a time
        patch.setattr("actors.coordinator.membership.MISSED_BEATS", 40)
        patch.setattr("cluster.client._POLL_S", 0.02)
        yield


@pytest.fixture
def one_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks neither pin themselves nor start threads for their tensors: a busy machine would stall them for seconds."""
    import torch

    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture
def open_engine(
    tiny_launch: Callable[..., LaunchConfig], half_agreeing_drafter: Path, one_free_thread: None
) -> Iterator[Callable[..., Engine]]:
    """Engines in this process; `drafter` is "model", "ngram", "none", or a configuration. Closed with the test.

    With `pace_ms` a pass of the target takes so long: a long request still runs when a test does the next thing, late
    as that may be on a busy machine.
    """
    drafters = {
        "model": ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu"),
        "ngram": NgramDrafterConfig(min_ngram=1, placement=Placement.separate),
        "none": NoDrafterConfig(),
    }
    engines: list[Engine] = []

    def open_(
        drafter: str | DrafterConfig = "model", *, tp: int = 1, pace_ms: float | None = None, **sections: object
    ) -> Engine:
        cluster = ClusterConfig(ClusterName.inprocess, oversubscribe=True)  # two ranks fit a machine of one core, too
        drafting = drafters[drafter] if isinstance(drafter, str) else drafter
        chosen = {"cluster": cluster, "drafter": drafting} | sections
        config = tiny_launch(GenerateConfig(), **chosen)
        pace_ms = config.target.pace_ms if pace_ms is None else pace_ms
        engines.append(Engine(replace(config, target=replace(config.target, tp=tp, pace_ms=pace_ms))))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()
