"""Which layers of a draft model run side by side, from its record: a launch refuses an impossible choice before it
starts. Loads no PyTorch."""

from __future__ import annotations

from actors.drafters.model.config import MlpParallel, ModelDrafterConfig
from parallel.model.config import DecoderConfig
from parallel.model.partition import Partition, default_partition, partition_of
from parallel.ranges import errors_of

_WIDEST_BY_DEFAULT = 4
"""Beyond this the layers' inputs differ too much (EasySpec, section 5)."""


def layer_partition(config: ModelDrafterConfig, model: DecoderConfig) -> Partition:
    """The groups of layers of `model` that run side by side; ValueError, one line, for an impossible choice."""
    num_layers, ranks = model.num_layers, config.ranks
    otherwise = "use drafter.parallel=single or tensor"
    if num_layers == 1:
        raise ValueError(f"drafter.parallel=layer: the draft model has one layer and nothing beside it; {otherwise}")
    if ranks > num_layers:
        raise ValueError(f"drafter.ranks={ranks}: the draft model has {num_layers} layers to share; lower it")
    if config.mlp_parallel is MlpParallel.tensor and model.mlp_units % ranks:
        raise ValueError(
            f"drafter.mlp_parallel=tensor: {ranks} ranks cannot split MLPs of {model.mlp_units}; use replicated"
        )
    if config.layer_partition:
        field = f"drafter.layer_partition={config.layer_partition}"
        with errors_of(field):
            partition = partition_of(config.layer_partition, num_layers)
        if config.layer_group not in (0, max(map(len, partition))):
            raise ValueError(f"{field}: drafter.layer_group={config.layer_group} contradicts it; drop one of them")
    else:
        width = config.layer_group or min(ranks, _WIDEST_BY_DEFAULT)
        field, partition = f"drafter.layer_group={width}", default_partition(num_layers, width)
        if width > 1 and num_layers <= 3:
            raise ValueError(
                f"{field}: the first and the last of the draft model's {num_layers} layers run alone, so none run side "
                f"by side; {otherwise}, or give drafter.layer_partition"
            )
    widest = max(map(len, partition))
    if 1 < ranks < widest:
        raise ValueError(
            f"{field}: {widest} layers side by side need {widest} ranks, or 1 to compute them alone, not {ranks}; "
            f"make it at most {ranks} or set drafter.ranks={widest}"
        )
    return partition
