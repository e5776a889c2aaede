"""The arithmetic of heads on a target's last hidden state, one class a method; training and drafting both run it.

A draft begins with the state of its root, made of h, the target's hidden state before the root, and the root's token; a
child's state follows from its parent's and its own token; logits of what comes after a node are read off its state.
Depth 0 is the root. Rows may have any leading dimensions. Knows neither sequences nor how tensors are stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.speculators.heads.config import TARGET_TABLE, HeadsConfig


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
        self.config, self.shapes = config, config.shapes()

    @abstractmethod
    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        """The target's hidden states [..., d] -> the states that the roots' tokens are added to."""

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:  # noqa: ARG002
        """The parents' states, for a root what `start` gave, and the tokens of this depth -> states."""
        return states

    @abstractmethod
    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:
        """States -> what the output layer reads, [..., width]."""


class _ParallelCell(HeadCell):
    """One state for all depths, which no token changes."""

    reads_tokens = False

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:  # noqa: ARG002  one state for all depths
        return states.unflatten(-1, (self.config.num_heads, -1))[..., depth, :]


class MedusaCell(_ParallelCell):
    """Residual blocks and an output layer for every depth (arXiv 2401.10774): y = h; y += silu(W y + b), per block."""

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        config, outputs = self.config, []
        for depth in range(config.num_heads):
            names = [f"{depth}.{block}.linear" for block in range(config.num_blocks)]
            outputs.append(_residual_blocks(tensors, names, hidden))
        return torch.cat(outputs, -1)


class BlockwiseCell(_ParallelCell):
    """One feed-forward layer with an output for every depth (arXiv 1811.03115): h + W_2 relu(W_1 h + b_1) + b_2."""

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        outputs = tensors.linear("output", F.relu(tensors.linear("hidden", hidden)))
        return (outputs.unflatten(-1, (self.config.num_heads, -1)) + hidden[..., None, :]).flatten(-2)


class HydraCell(HeadCell):
    """Heads that see the path (arXiv 2402.05109): depth i reads [h, e(root), ..., e(node)], in that order.

    The first block maps to the target's width and adds either a projection of its input (`linear_skip`, the released
    code) or h. The state is the input of the deepest head, zero where tokens are still to come.
    """

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


class RnnCell(HeadCell):
    """ReDrafter (arXiv 2403.09919): s = silu(W e(token) + U s + b), s = 0 before the root; blocks on [h, s].

    A projection brings [h, s] to `inner` columns unless it has as many. The same weights at every depth. The state is
    [h, s].
    """

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
        projected = states if self.shapes.width == states.shape[-1] else tensors.linear("input_proj", states)
        return _residual_blocks(
            tensors, [f"lm_head.{block}.linear" for block in range(self.config.num_blocks)], projected
        )


class _TokenSumCell(HeadCell):
    """What both kinds of combined token and embedding speculators share (arXiv 2404.19124): how much a token weighs.

    The weights let the target's state make up half of the last state, in expectation.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        state_weight = 0.5 ** (0.5 / config.num_heads)
        self._token_weight = math.sqrt((1 - state_weight**2) * (config.inner / 2)) / state_weight

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return _normed(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def _token(self, tensors: Tensors, table: str, index: int, token_ids: Tensor, like: Tensor) -> Tensor:
        if self.config.own_embedding:
            token = tensors.embed(f"{table}.{index}", token_ids)
        else:
            token = tensors.linear(f"emb_proj.{index}", tensors.embed(TARGET_TABLE, token_ids).to(like.dtype))
        return token.to(like.dtype) * self._token_weight


class MlpCell(_TokenSumCell):
    """s = gelu(norm(W s + w e(token))), with weights for every depth or, `tied`, for all."""

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
