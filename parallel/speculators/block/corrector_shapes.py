"""The tensors of what corrects the logits of a block's positions, by kind. Loads no PyTorch.

What is computed with them is in `correctors.py`, a class for each class here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CorrectorKind = Literal["none", "markov", "gated", "rnn", "gru", "selector"]


@dataclass(frozen=True, slots=True)
class CorrectorSizes:
    """Widths that all kinds are made from: a corrector is `rank` wide inside, `state_size` is that of a GRU."""

    kind: str
    vocab_size: int
    hidden: int
    rank: int
    state_size: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CorrectorMatrix:
    """One matrix of a checkpoint; a bias is called as it is."""

    outputs: int
    inputs: int
    bias: str = ""


class CorrectorShapes:
    """`matrices` are by name."""

    state_size = 0
    """Numbers that a node hands to its children."""
    BEFORE = ""
    """The matrix of rows that stand for the tokens before; none where the target's embedding does."""
    AFTER = ""
    """The matrix without which nothing is added to logits."""

    def __init__(self, sizes: CorrectorSizes) -> None:
        self.sizes = sizes
        self.matrices: dict[str, CorrectorMatrix] = {}

    @property
    def confidence_inputs(self) -> int:
        """Numbers that a confidence head reads."""
        return self.sizes.hidden


class MarkovShapes(CorrectorShapes):
    """Kind markov, gated or rnn; tensors are named as DeepSpec saves them."""

    BEFORE, AFTER = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    JOINT = "markov_head.joint_proj.weight"
    GATE = "markov_head.gate_proj.weight"

    def __init__(self, sizes: CorrectorSizes) -> None:
        super().__init__(sizes)
        hidden, rank = sizes.hidden, sizes.rank
        self.state_size = rank if sizes.kind == "rnn" else 0
        self.matrices |= dict.fromkeys((self.BEFORE, self.AFTER), CorrectorMatrix(sizes.vocab_size, rank))
        if sizes.kind == "gated":
            self.matrices[self.GATE] = CorrectorMatrix(rank, hidden + rank, "markov_head.gate_proj.bias")
        elif sizes.kind == "rnn":
            self.matrices[self.JOINT] = CorrectorMatrix(3 * rank, hidden + 2 * rank, "markov_head.joint_proj.bias")

    @property
    def confidence_inputs(self) -> int:
        return self.sizes.hidden + self.sizes.rank


class GruShapes(CorrectorShapes):
    """A GRU without biases; tensors are named as SpecForge saves them."""

    INPUTS, RECURRENT = "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"
    INNER, AFTER = "embed_proj.0.weight", "embed_proj.2.weight"

    def __init__(self, sizes: CorrectorSizes) -> None:
        super().__init__(sizes)
        hidden, rank, state = sizes.hidden, sizes.rank, sizes.state_size
        self.state_size = state
        self.matrices |= {
            self.INPUTS: CorrectorMatrix(3 * state, hidden),
            self.RECURRENT: CorrectorMatrix(3 * state, state),
            self.INNER: CorrectorMatrix(rank, hidden + state),
            self.AFTER: CorrectorMatrix(sizes.vocab_size, rank),
        }


class SelectorShapes(CorrectorShapes):
    """Two codebooks and a projection; tensors are named as z-lab publishes them."""

    BEFORE, AFTER = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
    PROJECT = "candidate_selector.hidden_projection.weight"

    def __init__(self, sizes: CorrectorSizes) -> None:
        super().__init__(sizes)
        self.matrices |= dict.fromkeys((self.BEFORE, self.AFTER), CorrectorMatrix(sizes.vocab_size, sizes.rank))
        self.matrices[self.PROJECT] = CorrectorMatrix(sizes.rank, sizes.hidden)


SHAPES: dict[str, type[CorrectorShapes]] = {
    **dict.fromkeys(("markov", "gated", "rnn"), MarkovShapes),
    "gru": GruShapes,
    "selector": SelectorShapes,
}
"""Kind -> its tensors; the kind `none` has none."""


def shapes_of(sizes: CorrectorSizes) -> CorrectorShapes | None:
    """None for the kind `none`."""
    return SHAPES[sizes.kind](sizes) if sizes.kind in SHAPES else None
