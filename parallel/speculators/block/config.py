"""The record of a block drafter's checkpoint: the shape of its layers, and which parts it has. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from parallel.model.checkpoint import Shape, block_tensors
from parallel.speculators.block.corrector_shapes import SHAPES, CorrectorKind, CorrectorShapes
from parallel.speculators.config import FuserShape, LayersConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayersConfig):
    """One class of drafters; the methods are choices of its fields. Vocabulary and positions of its layers are the
    target's."""

    block_size: int
    """Rows of a block, the anchor's included."""
    mask_token_id: int | None
    """None: the mask has an embedding of its own."""
    anchor_first: bool = False
    """The anchor's row predicts the next token; else the first mask's row does."""
    corrector: CorrectorKind = "none"
    corrector_rank: int = 256
    state_size: int = 1024
    """corrector=gru: of the GRU."""
    top_k: int = 16
    """corrector=selector: candidates of a position."""
    conv_taps: int = 0
    """Rows that a convolution reads, 0 for none."""
    conv_group: int = 16
    confidence: bool = False
    embedding_scale: float | None = None
    """None: as the target scales its embedding and its logits. Published DFlash reads the bare tables."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    drafts_blocks = True

    @property
    def num_drafted(self) -> int:
        """Draft tokens of a block."""
        return self.block_size - (not self.anchor_first)

    def corrector_shapes(self) -> CorrectorShapes | None:
        """The tensors of what corrects the logits of a position; None where nothing does."""
        return SHAPES[self.corrector](self) if self.corrector in SHAPES else None

    def tensor_shapes(self) -> dict[str, Shape]:
        block, hidden, corrector = self.block, self.block.hidden_size, self.corrector_shapes()
        shapes: dict[str, Shape] = self.fuser.tensor_shapes() | {"norm.weight": (hidden,)}
        if self.mask_token_id is None:
            shapes["mask_embedding"] = 1, hidden
        for i in range(block.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape, _ in block_tensors(block)}
            for conv in ("attention_conv", "mlp_conv") if self.conv_taps else ():
                shapes[f"layers.{i}.{conv}.base_kernel"] = 2, self.conv_taps, hidden
                groups = hidden // self.conv_group
                shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = 2 * self.conv_taps * groups, hidden
        for name, matrix in corrector.matrices.items() if corrector is not None else ():
            shapes[name] = matrix.outputs, matrix.inputs
            if matrix.bias:
                shapes[matrix.bias] = (matrix.outputs,)
        if self.confidence:
            inputs = hidden if corrector is None else corrector.confidence_inputs
            shapes |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
        return shapes

    def check_record(self) -> None:
        super(BlockConfig, self).check_record()
        mask, hidden = self.mask_token_id, self.block.hidden_size
        for wrong, line in (
            (self.num_drafted < 1, f"block_size={self.block_size}: drafts no token"),
            (mask is not None and mask >= self.vocab_size, f"mask_token_id={mask}: is no token of {self.vocab_size}"),
            (self.corrector not in get_args(CorrectorKind), f"corrector={self.corrector!r}: is none that is known"),
            (self.corrector != "none" and not self.corrector_rank, "corrector_rank=0: a corrector needs one"),
            (self.corrector == "gru" and not self.state_size, "state_size=0: a GRU needs one"),
            (
                self.conv_taps > 0 and hidden % self.conv_group,
                f"conv_group={self.conv_group}: must divide {hidden}",
            ),
        ):
            if wrong:
                raise ValueError(f"{line}; correct config.json, or fetch it again")

    @property
    def fuser(self) -> FuserShape:
        return FuserShape(
            num_taps=len(self.taps),
            tap_size=self.target_hidden,
            outputs=self.block.hidden_size,
            eps=self.block.norm_eps,
            projection="fc",
            result_norm="hidden_norm",
        )
