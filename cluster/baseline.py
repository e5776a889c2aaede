"""Plain decoding as it runs by itself: what the speed of speculation is compared with.

Beside a drafter on the same CPU the target has some of the cores, or shares them with threads that must give them up as
soon as they wait. Without a drafter it has all of them, so the comparison is with an engine that has no drafter, in a
process of its own. Where the target has its devices for itself (GPUs, a drafter on other nodes, attached or without
passes), the measured engine decodes plainly as fast, and no second one starts. It knows neither prompts' sources nor
what becomes of the figures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from actors.drafters.config import NoDrafterConfig
from actors.options import PipelineName
from actors.protocol.messages import SamplingParams
from cluster.apart import Apart
from cluster.config.schema import ClusterName, LaunchConfig, PlacementConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.observability.results import Run
from cluster.placement.ranks import RankPlacement
from cluster.run_prompts import serve_prompts


def needs_own_engine(config: LaunchConfig, places: Sequence[RankPlacement]) -> bool:
    """Whether the target would have more of this machine's CPU without the drafter.

    Not on nodes of a cluster: an engine of its own would run on this machine, not on theirs.
    """
    is_here = config.cluster.name in (ClusterName.inprocess, ClusterName.local)
    computing = {place.role for place in places if place.kind == "cpu" and place.share}
    return is_here and "target" in computing and len(computing) > 1


def alone(config: LaunchConfig) -> LaunchConfig:
    """The same target without a drafter, in one process with all cores that the configuration offers."""
    return replace(
        config,
        drafter=NoDrafterConfig(),
        pipeline=replace(config.pipeline, name=PipelineName.plain),
        placement=PlacementConfig(),
        cluster=replace(config.cluster, name=ClusterName.inprocess),
    )


def describe(places: Sequence[RankPlacement], *, own_engine: bool) -> str:
    """What plain decoding ran on, for the report."""
    ranks = [place for place in places if place.role == "target"]
    num_threads = sum(place.num_threads for place in ranks)
    on = f"{num_threads} thread{'s' * (num_threads != 1)}" if ranks[0].kind == "cpu" else "the same devices"
    return f"an engine of its own, {on}" if own_engine else f"the same engine, {on}"


class PlainEngine(Apart):
    """An engine without a drafter in a process of its own."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__("plain decoding", _PlainDecoder, alone(config))

    @functools.cached_property
    def places(self) -> list[RankPlacement]:
        """Where its ranks are; waits until it has started. Raises what its start raises."""
        return self.call("list_places")

    def serve(self, prompts: Sequence[Prompt], sampling: SamplingParams, concurrency: int, salt: str = "") -> Run:
        """Calls `serve_prompts` in the other process; nothing is reported of single requests until all have ended."""
        return self.call("serve", prompts, sampling, concurrency, salt)


class _PlainDecoder(Engine):
    """What runs over there."""

    def list_places(self) -> list[RankPlacement]:
        return self.places

    def serve(self, prompts: Sequence[Prompt], sampling: SamplingParams, concurrency: int, salt: str) -> Run:
        return serve_prompts(self, prompts, sampling, speculate=False, concurrency=concurrency, cache_salt=salt)
