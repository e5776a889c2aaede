"""What the coordinator and each rank need before they start, from the layout and the user's options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actors.coordinator.service import CoordinatorSpec
from actors.worker.spec import RankSpec
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import RankPlacement


def coordinator_spec(
    config: LaunchConfig, places: Sequence[RankPlacement], eos_token_ids: tuple[int, ...]
) -> CoordinatorSpec:
    sizes = Counter(place.role for place in places)
    return CoordinatorSpec(
        pipeline=config.pipeline.name,
        num_draft_tokens=config.drafter.num_draft_tokens,
        target_ranks=sizes.pop("target"),
        draft_ranks=sizes.pop("draft", 0),
        eos_token_ids=eos_token_ids,
        limits=config.scheduler,
        level_ranks=tuple(sizes.values()),
        silence_s=config.cluster.silence_s,
        adaptive=config.pipeline.adaptive,
        min_draft_tokens=config.pipeline.min_draft_tokens,
    )


def rank_spec(
    config: LaunchConfig, place: RankPlacement, hub_address: str, host: str, eos_token_ids: tuple[int, ...]
) -> RankSpec:
    return RankSpec(
        role=place.role,
        rank=place.rank,
        size=place.size,
        device=place.device,
        num_threads=place.num_threads,
        cores=place.bound_to,
        hub_address=hub_address,
        host=host,
        eos_token_ids=eos_token_ids,
        target=config.target,
        drafter=config.drafter,
        verify=config.verify,
        pipeline=str(config.pipeline.name),
        scheduler=config.scheduler,
        adaptive=config.pipeline.adaptive,
    )
