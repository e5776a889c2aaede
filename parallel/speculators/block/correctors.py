"""What makes the logits of a block's positions depend on the tokens drafted before them: small heads, one step a node.

    markov     + W2 W1[token]                                     DSpark (arXiv 2607.05147), "vanilla"
    gated      + W2 (sigmoid(W [h; W1[token]]) * W1[token])       DSpark
    rnn        + W2 tanh(output of a gated state of width r)      DSpark
    gru        + W2 silu(W1 [h; state of a GRU over embeddings])  Domino (arXiv 2605.29707); the first position has none
    selector   the K likeliest alone, each + <A[token] * (P h), B[candidate]>  DFlash 2

Training and drafting both run it: rows may have any leading dimensions. Knows no sequences and no trees, nor how
tensors are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.speculators.block.corrector_shapes import CorrectorShapes, GruShapes, MarkovShapes, SelectorShapes

PositionRows = tuple[Tensor, ...]
"""What a corrector keeps of a block's positions, [..., positions, ...] each."""


class CorrectorTensors(Protocol):
    """The tensors of a corrector by their names in a checkpoint, and the embedding of tokens that the layers read."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs], with the bias if there is one."""
        ...

    def rows(self, name: str, token_ids: Tensor) -> Tensor:
        """Rows of a matrix, [..., inputs]."""
        ...

    def embed(self, token_ids: Tensor, /) -> Tensor: ...


class Corrector(ABC):
    """`token_ids` of a step are the tokens at the nodes, whose children the logits are of."""

    def __init__(self, shapes: CorrectorShapes) -> None:
        self.shapes = shapes

    def with_token(self, tensors: CorrectorTensors, hidden: Tensor, token_ids: Tensor) -> Tensor:  # noqa: ARG002
        """Hidden states of positions and the tokens at their nodes -> what a confidence head reads."""
        return hidden

    @abstractmethod
    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:
        """Logits [..., V] and hidden states [..., H] of positions -> what their steps need."""

    @abstractmethod
    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [..., V] at nodes, and their states. `state` is their parents', None at the root."""

    def along(self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor) -> Tensor:
        """Logits [..., depths, V] along chains of these tokens, [..., depths], from a root on."""
        if not self.shapes.state_size:
            return self.step(tensors, rows, token_ids, None)[0]
        state, logits = None, []
        for depth in range(token_ids.shape[-1]):
            own = tuple(row[..., depth, :] for row in rows)
            one, state = self.step(tensors, own, token_ids[..., depth], state)
            logits.append(one)
        return torch.stack(logits, -2)


class MarkovCorrector(Corrector):
    """Kind markov, gated or rnn."""

    shapes: MarkovShapes

    def with_token(self, tensors: CorrectorTensors, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return torch.cat((hidden, tensors.rows(self.shapes.BEFORE, token_ids)), -1)

    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:  # noqa: ARG002
        return (logits,) if self.shapes.config.corrector == "markov" else (logits, hidden)

    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        read = embedded = tensors.rows(self.shapes.BEFORE, token_ids)
        if self.shapes.config.corrector == "gated":
            read = tensors.linear(self.shapes.GATE, torch.cat((rows[1], embedded), -1)).sigmoid() * embedded
        elif self.shapes.config.corrector == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            joint = tensors.linear(self.shapes.JOINT, torch.cat((state, embedded, rows[1]), -1))
            gate, candidate, output = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state, read = gate * state + (1 - gate) * candidate.tanh(), output.tanh()
        return rows[0] + tensors.linear(self.shapes.AFTER, read).float(), state


class GruCorrector(Corrector):
    """A GRU over the embeddings of the block's tokens, the anchor included."""

    shapes: GruShapes

    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:  # noqa: ARG002
        return logits, hidden

    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits, hidden = rows
        given = tensors.linear(self.shapes.INPUTS, tensors.embed(token_ids).to(hidden.dtype))
        is_root = state is None
        state = given.new_zeros(*given.shape[:-1], self.shapes.state_size) if state is None else state
        kept = tensors.linear(self.shapes.RECURRENT, state)
        (reset, update, new), (reset_kept, update_kept, new_kept) = given.chunk(3, -1), kept.chunk(3, -1)
        update = (update + update_kept).sigmoid()
        new = (new + (reset + reset_kept).sigmoid() * new_kept).tanh()
        state = (1 - update) * new + update * state
        if is_root:
            return logits, state
        inner = F.silu(tensors.linear(self.shapes.INNER, torch.cat((hidden, state), -1)))
        return logits + tensors.linear(self.shapes.AFTER, inner).float(), state


class SelectorCorrector(Corrector):
    """All other tokens have logits of minus infinity: tokens are drawn from the candidates alone."""

    shapes: SelectorShapes

    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:
        values, candidates = logits.topk(min(self.shapes.config.top_k, self.shapes.config.vocab_size), -1)
        after = tensors.rows(self.shapes.AFTER, candidates)
        return values, candidates, tensors.linear(self.shapes.PROJECT, hidden)[..., None, :] * after

    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        del state
        values, candidates, after = rows
        scores = values + (after @ tensors.rows(self.shapes.BEFORE, token_ids)[..., None])[..., 0].float()
        banned = scores.new_full((*scores.shape[:-1], self.shapes.config.vocab_size), -torch.inf)
        return banned.scatter(-1, candidates, scores), None


CORRECTORS: dict[type[CorrectorShapes], Callable[[Any], Corrector]] = {
    MarkovShapes: MarkovCorrector,
    GruShapes: GruCorrector,
    SelectorShapes: SelectorCorrector,
}
"""Tensors -> the arithmetic with them."""
