"""The tensors of what corrects the logits of a block's positions, by kind. Loads no PyTorch.

What is computed with them is in `correctors.py`, a class for each class here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from parallel.speculators.block.config import BlockConfig

CorrectorKind = Literal["none", "markov", "gated", "rnn", "gru", "selector"]


@dataclass(frozen=True, slots=True)
class CorrectorMatrix:
    """One matrix of a checkpoint; a bias is called as it is."""

    outputs: int
    inputs: int
    bias: str = ""


class CorrectorShapes:
    """`matrices` are by name. A corrector is `corrector_rank` wide inside."""

    state_size = 0
    """Numbers that a node hands to its children."""
    BEFORE = ""
    """The matrix of rows that stand for the tokens before; none where the target's embedding does."""
    AFTER = ""
    """The matrix without which nothing is added to logits."""

    def __init__(self, config: BlockConfig) -> None:
        self.config = config
        self.matrices: dict[str, CorrectorMatrix] = {}

    @property
    def confidence_inputs(self) -> int:
        """Numbers that a confidence head reads."""
        return self.config.block.hidden_size


class MarkovShapes(CorrectorShapes):
    """Kind markov, gated or rnn; tensors are named as DeepSpec saves them."""

    BEFORE, AFTER = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    JOINT = "markov_head.joint_proj.weight"
    GATE = "markov_head.gate_proj.weight"

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        hidden, rank = config.block.hidden_size, config.corrector_rank
        self.state_size = rank if config.corrector == "rnn" else 0
        self.matrices |= dict.fromkeys((self.BEFORE, self.AFTER), CorrectorMatrix(config.vocab_size, rank))
        if config.corrector == "gated":
            self.matrices[self.GATE] = CorrectorMatrix(rank, hidden + rank, "markov_head.gate_proj.bias")
        elif config.corrector == "rnn":
            self.matrices[self.JOINT] = CorrectorMatrix(3 * rank, hidden + 2 * rank, "markov_head.joint_proj.bias")

    @property
    def confidence_inputs(self) -> int:
        return self.config.block.hidden_size + self.config.corrector_rank


class GruShapes(CorrectorShapes):
    """A GRU without biases; tensors are named as SpecForge saves them."""

    INPUTS, RECURRENT = "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"
    INNER, AFTER = "embed_proj.0.weight", "embed_proj.2.weight"

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        hidden, rank, state = config.block.hidden_size, config.corrector_rank, config.state_size
        self.state_size = state
        self.matrices |= {
            self.INPUTS: CorrectorMatrix(3 * state, hidden),
            self.RECURRENT: CorrectorMatrix(3 * state, state),
            self.INNER: CorrectorMatrix(rank, hidden + state),
            self.AFTER: CorrectorMatrix(config.vocab_size, rank),
        }


class SelectorShapes(CorrectorShapes):
    """Two codebooks and a projection; tensors are named as z-lab publishes them."""

    BEFORE, AFTER = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
    PROJECT = "candidate_selector.hidden_projection.weight"

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        hidden, rank = config.block.hidden_size, config.corrector_rank
        self.matrices |= dict.fromkeys((self.BEFORE, self.AFTER), CorrectorMatrix(config.vocab_size, rank))
        self.matrices[self.PROJECT] = CorrectorMatrix(rank, hidden)


SHAPES: dict[str, type[CorrectorShapes]] = {
    **dict.fromkeys(("markov", "gated", "rnn"), MarkovShapes),
    "gru": GruShapes,
    "selector": SelectorShapes,
}
"""Kind -> its tensors; the kind `none` has none."""
