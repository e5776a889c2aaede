"""The record of streams, the tensors of their checkpoints, and their layout. Loads no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.model.checkpoint import Shape
from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.speculators.config import FINAL, STREAMS, record_of
from parallel.speculators.heads.config import HeadsConfig, HeadShapes, MatrixShape, stored_shapes
from parallel.speculators.layout import CheckpointLayout, opened_by


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsConfig(HeadsConfig):
    """`num_heads` streams; `inner` is the width of the sampler that conditions a stream on the token before it, 0 for
    none."""

    layers: tuple[int, ...]
    """The target's layers that streams run through, from 0, ascending; in the verifying pass, its last ones."""
    rank: int
    """Rank of the deltas of every layer; 0 = none."""
    start_rank: int = 0
    """Rank of the map from the node's residual stream to what is added to a stream's embedding; 0: a stream begins as
    its embedding alone, as a mask does."""
    prune_rank: int = 0
    """Rank of what is added to the residual stream below the streams' layers for early logits; 0: there are none."""
    reads_root: bool = False
    """The first row is the newest token's own: the rows run in a draft pass rather than in the target's."""

    def check_target(self, target: DecoderConfig) -> None:
        super(StreamsConfig, self).check_target(target)
        target.check_adaptable()
        num_layers, layers = target.num_layers - target.stretch, self.layers
        if not num_layers:  # the target's tables alone
            return
        if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= num_layers:
            raise ValueError(
                f"streams run through layers {list(layers)}; the target has {num_layers}; use one of its own"
            )
        if not self.reads_root and layers != tuple(range(layers[0], num_layers)):
            raise ValueError("streams of a verifying pass run through the target's last layers; use one made for it")

    def shapes(self) -> HeadShapes:
        return SamplerShapes(self)

    @property
    def feature_size(self) -> int:
        return self.target_hidden if self.reads_root else self.num_heads * self.target_hidden

    @property
    def tap(self) -> int:
        return tap_of(reads_root=self.reads_root)

    @property
    def runs_target(self) -> bool:
        return self.reads_root

    @property
    def has_early_logits(self) -> bool:
        return self.prune_rank > 0

    @property
    def num_embeddings(self) -> int:
        """Learned rows."""
        return self.num_heads - self.reads_root


class SamplerShapes(HeadShapes):
    """The head that conditions a stream on the token before it; the target's output layer is the only one."""

    def _declare(self) -> None:
        hidden, inner = self.config.target_hidden, self.config.inner
        if inner:
            self.matrices["sampler.stream"] = MatrixShape(inner, hidden)
            self.matrices["sampler.token"] = MatrixShape(inner, hidden)
            self.matrices["sampler.output"] = MatrixShape(hidden, inner, begins="zero")


def tap_of(*, reads_root: bool) -> int:
    """A draft pass needs no features but counts by them which text the target has committed."""
    return FINAL if reads_root else STREAMS


def stream_shapes(config: StreamsConfig, target: DecoderConfig) -> dict[str, Shape]:
    """The tensors of streams in a checkpoint, by name, but for those of the sampler."""
    hidden, inner, rank = target.hidden_size, target.intermediate_size, config.rank
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes: dict[str, Shape] = {"streams.embed": (config.num_embeddings, hidden)}
    if config.start_rank:
        shapes |= {"streams.start.down.weight": (config.start_rank, hidden)}
        shapes |= {"streams.start.up.weight": (hidden, config.start_rank)}
    parts = ("q", queries), ("k", keys), ("v", keys)
    if config.prune_rank:
        shapes |= {"streams.prune.down.weight": (config.prune_rank, hidden)}
        shapes |= {"streams.prune.up.weight": (hidden, config.prune_rank)}
    for layer in config.layers if rank else ():
        prefix = f"streams.{layer}"
        shapes |= {f"{prefix}.qkv.down.weight": (rank, hidden)}
        shapes |= {f"{prefix}.qkv.{name}_proj.weight": (size, rank) for name, size in parts}
        shapes |= {f"{prefix}.o.down.weight": (rank, queries), f"{prefix}.o.up.weight": (hidden, rank)}
        shapes |= {f"{prefix}.mlp.down.weight": (rank, inner), f"{prefix}.mlp.up.weight": (hidden, rank)}
    return shapes


def read_own(hf: HfConfig) -> StreamsConfig:
    """The record of a checkpoint that `job=train job.recipe=streaming`, `mask_lora` or `s3d` made."""
    return record_of(StreamsConfig, hf["speculator"])


def tensor_shapes(config: StreamsConfig, target: DecoderConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint for this target."""
    return stream_shapes(config, target) | stored_shapes(config.shapes())


OWN = CheckpointLayout(
    read_own, opened_by("streams.runner"), tensors=lambda _directory, config, target: tensor_shapes(config, target)
)
