"""A launch with a draft model on ranks of its own, and every other default."""

from __future__ import annotations

from actors.drafters.config import Placement
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig, VerifyConfig
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, LaunchConfig, PlacementConfig

CONFIG = LaunchConfig(
    target=TargetConfig(),
    drafter=ModelDrafterConfig(placement=Placement.separate),
    verify=VerifyConfig(),
    pipeline=PipelineConfig(),
    placement=PlacementConfig(),
    cluster=ClusterConfig(),
    job=GenerateConfig(),
)
