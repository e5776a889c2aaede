"""The record of heads on a target's last hidden state, and the tensors of each method by name. Loads no PyTorch.

What is computed with them is in `cells.py`, a class for each class here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from parallel.model.checkpoint import Shape
from parallel.speculators.config import FINAL, SpeculatorConfig

HEAD_CHOICES = ("target", "shared", "own")
TARGET_TABLE = ""
"""Name of the target's own embedding or output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig(SpeculatorConfig):
    """Heads that read the target's final hidden state; `method` is a key of `SHAPES`."""

    num_heads: int
    """Depths that they were made for: tokens of a path, at most; 0 = any (rnn)."""
    inner: int
    """Width of a state: blockwise, of one head's hidden layer; rnn, of what the output layer reads."""
    num_blocks: int = 1
    """Residual blocks before the output layer: medusa, hydra, rnn."""
    head: str = "target"
    """Output layer: the target's, one of the module's own that all depths share, or its own for every depth."""
    own_embedding: bool = False
    """mlp, lstm: embeddings of their own rather than projections of the target's."""
    tied: bool = False
    """mlp: all depths share their weights, but the projection of the first reads the target's state."""
    scale_input: bool = False
    """mlp, lstm: the target's state is normalised before it is read."""
    linear_skip: bool = False
    """hydra: the first block adds a projection of all its input rather than the target's state."""
    block_bias: bool = True
    """medusa: the residual blocks have biases."""
    recurrent: bool = True
    """rnn: the state is a recurrent network's rather than the sum of embeddings."""

    def check_record(self) -> None:
        super(HeadsConfig, self).check_record()
        if not self.num_heads and self.method != "rnn":
            raise ValueError(f"num_heads=0: {self.method} has one for every depth; correct config.json")
        if self.taps != (self.tap,):
            raise ValueError(f"taps={list(self.taps)}: {self.method} reads tap {self.tap} alone; correct config.json")

    @property
    def tap(self) -> int:
        """The only one."""
        return FINAL

    def shapes(self) -> HeadShapes:
        """The tensors of its checkpoint, by name."""
        return SHAPES[self.method](self)

    @property
    def longest(self) -> int:
        """Tokens of a path after the text, at most."""
        return self.num_heads or self.max_positions


class MatrixShape(NamedTuple):
    """The matrix of one linear layer, and whether a bias is added.

    `begins` is how training starts it. zero: its product is added to the target's state, so the head begins with what
    the target's own would say. token: it reads embeddings, which are small beside that state. path: the same, but that
    state comes first in what it reads, and adds nothing yet. state: it passes the state on that comes first, if the
    output layer reads as many columns. Else random.
    """

    outputs: int
    inputs: int
    bias: bool = False
    begins: Literal["random", "zero", "token", "path", "state"] = "random"


class HeadShapes(ABC):
    """The tensors of a method by name; a table, an output layer or an embedding of its own, has a row for every token
    and these columns."""

    def __init__(self, config: HeadsConfig) -> None:
        self.config = config
        self.matrices: dict[str, MatrixShape] = {}
        self.vectors: dict[str, int] = {}
        self.tables: dict[str, int] = {}
        self._declare()
        if config.head != "target":
            for depth in range(config.num_heads or 1):
                self.tables[self.head(depth)] = self.width

    @property
    def width(self) -> int:
        """Columns that the output layer reads."""
        return self.config.target_hidden

    @abstractmethod
    def _declare(self) -> None:
        """Name all tensors but the output layers."""

    def head(self, depth: int) -> str:
        """The output layer of a depth."""
        match self.config.head:
            case "target":
                return TARGET_TABLE
            case "shared":
                return self._head_name(0)
        return self._head_name(depth)

    def _head_name(self, depth: int) -> str:
        """The name of an output layer of its own."""
        return f"head.{depth}"


class MedusaShapes(HeadShapes):
    """Blocks of every depth."""

    def _declare(self) -> None:
        hidden, bias = self.config.target_hidden, self.config.block_bias
        for depth in range(self.config.num_heads):
            for block in range(self.config.num_blocks):
                self.matrices[f"{depth}.{block}.linear"] = MatrixShape(hidden, hidden, bias, "zero")

    def _head_name(self, depth: int) -> str:
        return f"{depth}.{self.config.num_blocks}"


class BlockwiseShapes(HeadShapes):
    """All depths side by side."""

    def _declare(self) -> None:
        hidden, count = self.config.target_hidden, self.config.num_heads
        self.matrices["hidden"] = MatrixShape(count * self.config.inner, hidden, True)
        self.matrices["output"] = MatrixShape(count * hidden, count * self.config.inner, True, "zero")


class HydraShapes(HeadShapes):
    """The first block of a depth reads the target's state and the embeddings of the path."""

    def _declare(self) -> None:
        hidden = self.config.target_hidden
        for depth in range(self.config.num_heads):
            self.matrices[f"hydra_mlp.{depth}.0.linear"] = MatrixShape(hidden, (depth + 2) * hidden, True, "path")
            if self.config.linear_skip:
                self.matrices[f"hydra_mlp.{depth}.0.res_connection"] = MatrixShape(hidden, (depth + 2) * hidden, True)
            for block in range(1, self.config.num_blocks):
                self.matrices[f"hydra_mlp.{depth}.{block}.linear"] = MatrixShape(hidden, hidden, True, "zero")

    def _head_name(self, depth: int) -> str:
        return f"hydra_lm_head.{depth}"


class RnnShapes(HeadShapes):
    """The same matrices for every depth."""

    @property
    def width(self) -> int:
        return self.config.inner

    def _declare(self) -> None:
        hidden, inner = self.config.target_hidden, self.config.inner
        if self.config.recurrent:
            self.matrices["rnn_w"] = MatrixShape(hidden, hidden, begins="token")
            self.matrices["rnn_u"] = MatrixShape(hidden, hidden, True)
        if inner != 2 * hidden:
            self.matrices["input_proj"] = MatrixShape(inner, 2 * hidden, True, "state")
        for block in range(self.config.num_blocks):
            self.matrices[f"lm_head.{block}.linear"] = MatrixShape(inner, inner, True, "zero")

    def head(self, depth: int) -> str:  # noqa: ARG002
        return TARGET_TABLE if self.config.head == "target" else f"lm_head.{self.config.num_blocks}"


class _TokenSumShapes(HeadShapes):
    """What both kinds of combined token and embedding speculators share: what reads tokens."""

    @property
    def width(self) -> int:
        return self.config.inner

    def _declare_tokens(self, table: str, index: int) -> None:
        inner, hidden = self.config.inner, self.config.target_hidden
        if self.config.own_embedding:
            self.tables[f"{table}.{index}"] = inner
        else:
            self.matrices[f"emb_proj.{index}"] = MatrixShape(inner, hidden, begins="token")


class MlpShapes(_TokenSumShapes):
    """Matrices for every depth or, `tied`, for all but the first, whose projection reads the target's state."""

    def _declare(self) -> None:
        inner, hidden = self.config.inner, self.config.target_hidden
        for depth in range(min(2, self.config.num_heads) if self.config.tied else self.config.num_heads):
            inputs, begins = (inner, "random") if depth else (hidden, "state")
            self.matrices[f"proj.{depth}"] = MatrixShape(inner, inputs, begins=begins)
        for depth in range(1 if self.config.tied else self.config.num_heads):
            self._declare_tokens("emb", depth)
            for part in ("weight", "bias"):
                self.vectors[f"ln.{depth}.{part}"] = inner


class LstmShapes(_TokenSumShapes):
    """Three gates and a candidate in one matrix."""

    def _declare(self) -> None:
        inner, hidden = self.config.inner, self.config.target_hidden
        self.matrices |= {f"projs.{i}": MatrixShape(4 * inner, size) for i, size in enumerate((hidden, inner))}
        self._declare_tokens("forget_emb", 0)
        self.vectors |= {f"{name}.0.{part}": inner for name in ("cell_ln", "state_ln") for part in ("weight", "bias")}


SHAPES: dict[str, Callable[[HeadsConfig], HeadShapes]] = {
    "medusa": MedusaShapes,
    "blockwise": BlockwiseShapes,
    "hydra": HydraShapes,
    "rnn": RnnShapes,
    "mlp": MlpShapes,
    "lstm": LstmShapes,
}
"""Method -> its tensors."""


Sources = Callable[[str], Sequence[str]]
"""Name of a matrix, table or vector -> the names that its rows have in a checkpoint, in order."""


def as_named(name: str) -> list[str]:
    """Tensors are stored under the names that the method has for them."""
    return [name]


def stored_shapes(parts: HeadShapes, sources: Sources = as_named) -> dict[str, Shape]:
    """Every tensor of a checkpoint."""
    shapes = dict[str, Shape]()
    for name, size in parts.matrices.items():
        share = size.outputs // len(sources(name))
        for source in sources(name):
            shapes[f"{source}.weight"] = share, size.inputs
            if size.bias:
                shapes[f"{source}.bias"] = (share,)
    for name, size in parts.vectors.items():
        owner, part = name.rsplit(".", 1)
        shapes[f"{sources(owner)[0]}.{part}"] = (size,)
    return shapes | {
        f"{sources(name)[0]}.weight": (parts.config.vocab_size, width) for name, width in parts.tables.items()
    }
