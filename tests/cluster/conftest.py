"""Launches small enough for a test: tiny checkpoints, threads instead of Ray, prompts in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.options import ModelDrafterConfig, PipelineConfig, SamplingConfig, TargetConfig, VerifyConfig
from cluster.config import ClusterConfig, ClusterName, LaunchConfig, PlacementConfig, PlacementName


@pytest.fixture
def tiny_launch(tiny_checkpoint: Callable[..., Path]) -> Callable[..., LaunchConfig]:
    """A launch in this process whose drafter is its target, so that every draft token is accepted."""

    def make(job: object, **sections: object) -> LaunchConfig:
        path = str(tiny_checkpoint("Llama"))
        chosen = {
            "target": TargetConfig(path=path, device="cpu"),
            "drafter": ModelDrafterConfig(path=path, num_draft_tokens=3, device="cpu"),
            "verify": VerifyConfig(),
            "pipeline": PipelineConfig(),
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
