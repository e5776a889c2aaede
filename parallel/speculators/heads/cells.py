"""The arithmetic of heads on a target's last hidden state, one class a method; training and drafting both run it.

A draft begins with the state of its root, made of h, the target's hidden state before the root, and the root's token; a
child's state follows from its parent's and its own token; logits of what comes after a node are read off its state.
Depth 0 is the root. Rows may have any leading dimensions. Knows neither sequences nor how tensors are stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.speculators.config import FINAL, SpeculatorConfig

HEAD_CHOICES = ("target", "shared", "own")
TARGET_TABLE = ""
"""Name of the target's own embedding or output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig(SpeculatorConfig):
    """Heads that read the target's final hidden state; `method` is a key of `CELLS`."""

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


@dataclass(slots=True)
class HeadShapes:
    """The tensors of a method by name; tables have a row for every token."""

    matrices: dict[str, MatrixShape] = field(default_factory=dict)
    vectors: dict[str, int] = field(default_factory=dict)
    tables: dict[str, int] = field(default_factory=dict)
    """Output layers and embeddings of its own: width."""


class Tensors(Protocol):
    """The tensors of a module, and how rows are multiplied by them."""

    def linear(self, name: str, x: Tensor) -> Tensor: ...

    def vector(self, name: str) -> Tensor: ...

    def embed(self, table: str, token_ids: Tensor) -> Tensor: ...


class HeadCell(ABC):
    """A method. State and step run on rows of equal depth."""

    reads_tokens = True
    """Whether a state depends on draft tokens; otherwise all depths of a draft are known at its root."""

    def __init__(self, config: HeadsConfig) -> None:
        self.config = config
        self.shapes = HeadShapes()
        self._declare(self.shapes)
        if config.head != "target":
            for depth in range(config.num_heads or 1):
                self.shapes.tables[self.head(depth)] = self.width

    @property
    def width(self) -> int:
        """Columns that the output layer reads."""
        return self.config.target_hidden

    @abstractmethod
    def _declare(self, shapes: HeadShapes) -> None:
        """Name all tensors but the output layers."""

    @abstractmethod
    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        """The target's hidden states [..., d] -> the states that the roots' tokens are added to."""

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:  # noqa: ARG002
        """The parents' states, for a root what `start` gave, and the tokens of this depth -> states."""
        return states

    @abstractmethod
    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:
        """States -> what the output layer reads, [..., width]."""

    def head(self, depth: int) -> str:
        """The output layer of a depth."""
        match self.config.head:
            case "target":
                return TARGET_TABLE
            case "shared":
                return self._head_name(0)
        return self._head_name(depth)

    @abstractmethod
    def _head_name(self, depth: int) -> str:
        """The name of an output layer of its own."""


class _ParallelCell(HeadCell):
    """One state for all depths, which no token changes."""

    reads_tokens = False

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:  # noqa: ARG002  one state for all depths
        return states.unflatten(-1, (self.config.num_heads, -1))[..., depth, :]


class MedusaCell(_ParallelCell):
    """Residual blocks and an output layer for every depth (arXiv 2401.10774): y = h; y += silu(W y + b), per block."""

    def _declare(self, shapes: HeadShapes) -> None:
        hidden, bias = self.config.target_hidden, self.config.block_bias
        for depth in range(self.config.num_heads):
            for block in range(self.config.num_blocks):
                shapes.matrices[f"{depth}.{block}.linear"] = MatrixShape(hidden, hidden, bias, "zero")

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        config, outputs = self.config, []
        for depth in range(config.num_heads):
            names = [f"{depth}.{block}.linear" for block in range(config.num_blocks)]
            outputs.append(_residual_blocks(tensors, names, hidden))
        return torch.cat(outputs, -1)

    def _head_name(self, depth: int) -> str:
        return f"{depth}.{self.config.num_blocks}"


class BlockwiseCell(_ParallelCell):
    """One feed-forward layer with an output for every depth (arXiv 1811.03115): h + W_2 relu(W_1 h + b_1) + b_2."""

    def _declare(self, shapes: HeadShapes) -> None:
        hidden, count = self.config.target_hidden, self.config.num_heads
        shapes.matrices["hidden"] = MatrixShape(count * self.config.inner, hidden, True)
        shapes.matrices["output"] = MatrixShape(count * hidden, count * self.config.inner, True, "zero")

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        outputs = tensors.linear("output", F.relu(tensors.linear("hidden", hidden)))
        return (outputs.unflatten(-1, (self.config.num_heads, -1)) + hidden[..., None, :]).flatten(-2)

    def _head_name(self, depth: int) -> str:
        return f"head.{depth}"


class HydraCell(HeadCell):
    """Heads that see the path (arXiv 2402.05109): depth i reads [h, e(root), ..., e(node)], in that order.

    The first block maps to the target's width and adds either a projection of its input (`linear_skip`, the released
    code) or h. The state is the input of the deepest head, zero where tokens are still to come.
    """

    def _declare(self, shapes: HeadShapes) -> None:
        hidden = self.config.target_hidden
        for depth in range(self.config.num_heads):
            shapes.matrices[f"hydra_mlp.{depth}.0.linear"] = MatrixShape(hidden, (depth + 2) * hidden, True, "path")
            if self.config.linear_skip:
                shapes.matrices[f"hydra_mlp.{depth}.0.res_connection"] = MatrixShape(hidden, (depth + 2) * hidden, True)
            for block in range(1, self.config.num_blocks):
                shapes.matrices[f"hydra_mlp.{depth}.{block}.linear"] = MatrixShape(hidden, hidden, True, "zero")

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return F.pad(hidden, (0, self.config.num_heads * self.config.target_hidden))

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:
        size = self.config.target_hidden
        parts = states[..., : (depth + 1) * size], tensors.embed(TARGET_TABLE, token_ids).to(states.dtype)
        return torch.cat((*parts, states[..., (depth + 2) * size :]), -1)

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:
        size, name = self.config.target_hidden, f"hydra_mlp.{depth}"
        path = states[..., : (depth + 2) * size]
        skip = tensors.linear(f"{name}.0.res_connection", path) if self.config.linear_skip else path[..., :size]
        first = skip + F.silu(tensors.linear(f"{name}.0.linear", path))
        names = [f"{name}.{block}.linear" for block in range(1, self.config.num_blocks)]
        return _residual_blocks(tensors, names, first)

    def _head_name(self, depth: int) -> str:
        return f"hydra_lm_head.{depth}"


class RnnCell(HeadCell):
    """ReDrafter (arXiv 2403.09919): s = silu(W e(token) + U s + b), s = 0 before the root; blocks on [h, s].

    A projection brings [h, s] to `inner` columns unless it has as many. The same weights at every depth. The state is
    [h, s].
    """

    @property
    def width(self) -> int:
        return self.config.inner

    def _declare(self, shapes: HeadShapes) -> None:
        hidden, inner = self.config.target_hidden, self.config.inner
        if self.config.recurrent:
            shapes.matrices["rnn_w"] = MatrixShape(hidden, hidden, begins="token")
            shapes.matrices["rnn_u"] = MatrixShape(hidden, hidden, True)
        if inner != 2 * hidden:
            shapes.matrices["input_proj"] = MatrixShape(inner, 2 * hidden, True, "state")
        for block in range(self.config.num_blocks):
            shapes.matrices[f"lm_head.{block}.linear"] = MatrixShape(inner, inner, True, "zero")

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return F.pad(hidden, (0, self.config.target_hidden))

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:  # noqa: ARG002
        hidden, state = states.chunk(2, -1)
        token = tensors.embed(TARGET_TABLE, token_ids).to(states.dtype)
        if not self.config.recurrent:
            return torch.cat((hidden, state + token), -1)
        state = F.silu(tensors.linear("rnn_w", token) + tensors.linear("rnn_u", state))
        return torch.cat((hidden, state.to(states.dtype)), -1)

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:  # noqa: ARG002
        projected = states if self.width == states.shape[-1] else tensors.linear("input_proj", states)
        return _residual_blocks(
            tensors, [f"lm_head.{block}.linear" for block in range(self.config.num_blocks)], projected
        )

    def head(self, depth: int) -> str:  # noqa: ARG002
        return TARGET_TABLE if self.config.head == "target" else f"lm_head.{self.config.num_blocks}"

    def _head_name(self, depth: int) -> str:
        return self.head(depth)


class _TokenSumCell(HeadCell):
    """What both kinds of combined token and embedding speculators share (arXiv 2404.19124): how much a token weighs.

    The weights let the target's state make up half of the last state, in expectation.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        state_weight = 0.5 ** (0.5 / config.num_heads)
        self._token_weight = math.sqrt((1 - state_weight**2) * (config.inner / 2)) / state_weight

    @property
    def width(self) -> int:
        return self.config.inner

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return _normed(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def _declare_tokens(self, shapes: HeadShapes, table: str, index: int) -> None:
        if self.config.own_embedding:
            shapes.tables[f"{table}.{index}"] = self.config.inner
        else:
            shapes.matrices[f"emb_proj.{index}"] = MatrixShape(
                self.config.inner, self.config.target_hidden, begins="token"
            )

    def _token(self, tensors: Tensors, table: str, index: int, token_ids: Tensor, like: Tensor) -> Tensor:
        if self.config.own_embedding:
            token = tensors.embed(f"{table}.{index}", token_ids)
        else:
            token = tensors.linear(f"emb_proj.{index}", tensors.embed(TARGET_TABLE, token_ids).to(like.dtype))
        return token.to(like.dtype) * self._token_weight

    def _head_name(self, depth: int) -> str:
        return f"head.{depth}"


class MlpCell(_TokenSumCell):
    """s = gelu(norm(W s + w e(token))), with weights for every depth or, `tied`, for all."""

    def _declare(self, shapes: HeadShapes) -> None:
        inner, hidden = self.config.inner, self.config.target_hidden
        for depth in range(min(2, self.config.num_heads) if self.config.tied else self.config.num_heads):
            inputs, begins = (inner, "random") if depth else (hidden, "state")
            shapes.matrices[f"proj.{depth}"] = MatrixShape(inner, inputs, begins=begins)
        for depth in range(1 if self.config.tied else self.config.num_heads):
            self._declare_tokens(shapes, "emb", depth)
            for part in ("weight", "bias"):
                shapes.vectors[f"ln.{depth}.{part}"] = inner

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:
        index, first = (0, min(depth, 1)) if self.config.tied else (depth, depth)
        token = self._token(tensors, "emb", index, token_ids, states)
        return F.gelu(_affine(tensors, f"ln.{index}", tensors.linear(f"proj.{first}", states) + token))

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:  # noqa: ARG002
        return states


class LstmCell(_TokenSumCell):
    """The same with a memory cell; forget, input and output gate and the candidate each see W s + w e(token).

    The state is [s, cell].
    """

    def _declare(self, shapes: HeadShapes) -> None:
        inner, hidden = self.config.inner, self.config.target_hidden
        shapes.matrices |= {f"projs.{i}": MatrixShape(4 * inner, size) for i, size in enumerate((hidden, inner))}
        self._declare_tokens(shapes, "forget_emb", 0)
        shapes.vectors |= {f"{name}.0.{part}": inner for name in ("cell_ln", "state_ln") for part in ("weight", "bias")}

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:
        if depth:
            state, cell = states.chunk(2, -1)
        else:
            state, cell = states, None
        token = self._token(tensors, "forget_emb", 0, token_ids, states)
        gates = tensors.linear(f"projs.{min(depth, 1)}", state).unflatten(-1, (4, -1)) + token[..., None, :]
        forget, entering, leaving = gates[..., :3, :].sigmoid().unbind(-2)
        candidate = F.gelu(_affine(tensors, "cell_ln.0", gates[..., 3, :])) * entering
        cell = candidate if cell is None else cell * forget + candidate
        return torch.cat((F.gelu(_affine(tensors, "state_ln.0", cell)) * leaving, cell), -1)

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:  # noqa: ARG002
        return states.chunk(2, -1)[0]


CELLS: dict[str, Callable[[HeadsConfig], HeadCell]] = {
    "medusa": MedusaCell,
    "blockwise": BlockwiseCell,
    "hydra": HydraCell,
    "rnn": RnnCell,
    "mlp": MlpCell,
    "lstm": LstmCell,
}
"""Method -> its arithmetic."""


def _residual_blocks(tensors: Tensors, names: list[str], x: Tensor) -> Tensor:
    for name in names:
        x = x + F.silu(tensors.linear(name, x))
    return x


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _affine(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """The root-mean-square norm of these speculators, which has a bias."""
    return _normed(x) * tensors.vector(f"{name}.weight") + tensors.vector(f"{name}.bias")
