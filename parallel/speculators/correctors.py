"""What makes the logits of a block's positions depend on the tokens drafted before them: small heads, one step a node.

    markov     + W2 W1[token]                                     DSpark (arXiv 2607.05147), "vanilla"
    gated      + W2 (sigmoid(W [h; W1[token]]) * W1[token])       DSpark
    rnn        + W2 tanh(output of a gated state of width r)      DSpark
    gru        + W2 silu(W1 [h; state of a GRU over embeddings])  Domino (arXiv 2605.29707); the first position has none
    selector   the K likeliest alone, each + <A[token] * (P h), B[candidate]>  DFlash 2

They are replicated on every rank: a step is a few small products, less than a message. Knows no sequences and no trees.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions, Weight

CorrectorKind = Literal["none", "markov", "gated", "rnn", "gru", "selector"]

PositionRows = tuple[Tensor, ...]
"""What a corrector keeps of a block's positions, [positions, ...] each."""


class Corrector(Layer):
    """`token_ids` of a step are the tokens at the nodes, whose children the logits are of."""

    state_size = 0
    """Numbers that a node hands to its children."""

    @abstractmethod
    def prepare(self, logits: Tensor, hidden: Tensor) -> PositionRows:
        """Logits [n, V] and hidden states [n, H] of positions -> what their steps need."""

    @abstractmethod
    def step(
        self, rows: PositionRows, token_ids: Tensor, state: Tensor | None, *, at_root: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] at n nodes, and their states. `state` is their parents', None at the root."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Weight | Tensor]]:
        """Its checkpoint's tensors by name."""

    def shards(self) -> Iterator[Shard]:
        for name, tensor in self.tensors():
            if isinstance(tensor, Weight):
                yield tensor.shard(name, EVERY)
            else:
                yield Shard(name, tuple(EVERY for _ in tensor.shape), tensor)


class MarkovCorrector(Corrector):
    """`kind` markov, gated or rnn; tensors are named as DeepSpec saves them."""

    def __init__(
        self, kind: CorrectorKind, vocab_size: int, hidden: int, rank: int, **options: Unpack[TensorOptions]
    ) -> None:
        self.kind = kind
        self.state_size = rank if kind == "rnn" else 0
        self.before, self.after = Weight(vocab_size, rank, **options), Weight(vocab_size, rank, **options)
        self.joint: Weight | None = None
        self.joint_bias: Tensor | None = None
        if kind != "markov":
            inputs, outputs = (hidden + rank, rank) if kind == "gated" else (hidden + 2 * rank, 3 * rank)
            self.joint, self.joint_bias = Weight(outputs, inputs, **options), torch.empty(outputs, **options)

    def prepare(self, logits: Tensor, hidden: Tensor) -> PositionRows:
        return (logits,) if self.kind == "markov" else (logits, hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.before.look_up(token_ids)

    def step(
        self,
        rows: PositionRows,
        token_ids: Tensor,
        state: Tensor | None,
        *,
        at_root: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None]:
        logits, embedded = rows[0], self.embed(token_ids)
        if self.joint is None:
            return logits + self.after.multiply(embedded).float(), None
        if self.kind == "gated":
            gate = self.joint.multiply(torch.cat((rows[1], embedded), 1), self.joint_bias).sigmoid()
            return logits + self.after.multiply(gate * embedded).float(), None
        state = torch.zeros_like(embedded) if state is None else state
        joint = self.joint.multiply(torch.cat((state, embedded, rows[1]), 1), self.joint_bias)
        gate, candidate, output = joint.chunk(3, 1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return logits + self.after.multiply(output.tanh()).float(), state

    def tensors(self) -> Iterator[tuple[str, Weight | Tensor]]:
        yield "markov_head.markov_w1.weight", self.before
        yield "markov_head.markov_w2.weight", self.after
        if self.joint is not None and self.joint_bias is not None:
            name = "gate_proj" if self.kind == "gated" else "joint_proj"
            yield f"markov_head.{name}.weight", self.joint
            yield f"markov_head.{name}.bias", self.joint_bias


class GruCorrector(Corrector):
    """A GRU without biases over the embeddings of the block's tokens, the anchor included; tensors are named as
    SpecForge saves them."""

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        rank: int,
        state_size: int,
        embed: Callable[[Tensor], Tensor],
        **options: Unpack[TensorOptions],
    ) -> None:
        self.state_size = state_size
        self._embed = embed
        self.inputs, self.recurrent = (Weight(3 * state_size, size, **options) for size in (hidden, state_size))
        self.inner = Weight(rank, hidden + state_size, **options)
        self.after = Weight(vocab_size, rank, **options)

    def prepare(self, logits: Tensor, hidden: Tensor) -> PositionRows:
        return logits, hidden

    def step(
        self, rows: PositionRows, token_ids: Tensor, state: Tensor | None, *, at_root: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits, hidden = rows
        given = self.inputs.multiply(self._embed(token_ids))
        state = given.new_zeros(len(given), self.state_size) if state is None else state
        kept = self.recurrent.multiply(state)
        (reset, update, new), (reset_kept, update_kept, new_kept) = given.chunk(3, 1), kept.chunk(3, 1)
        update = (update + update_kept).sigmoid()
        new = (new + (reset + reset_kept).sigmoid() * new_kept).tanh()
        state = (1 - update) * new + update * state
        if at_root:
            return logits, state
        inner = F.silu(self.inner.multiply(torch.cat((hidden, state), 1)))
        return logits + self.after.multiply(inner).float(), state

    def tensors(self) -> Iterator[tuple[str, Weight | Tensor]]:
        yield "prefix_gru.weight_ih_l0", self.inputs
        yield "prefix_gru.weight_hh_l0", self.recurrent
        yield "embed_proj.0.weight", self.inner
        yield "embed_proj.2.weight", self.after


class SelectorCorrector(Corrector):
    """All other tokens have logits of minus infinity: the law over the candidates is what tokens are drawn from."""

    def __init__(self, vocab_size: int, hidden: int, rank: int, top_k: int, **options: Unpack[TensorOptions]) -> None:
        self.top_k = min(top_k, vocab_size)
        self.vocab_size = vocab_size
        self.before, self.after = Weight(vocab_size, rank, **options), Weight(vocab_size, rank, **options)
        self.project = Weight(rank, hidden, **options)

    def prepare(self, logits: Tensor, hidden: Tensor) -> PositionRows:
        values, candidates = logits.topk(self.top_k, -1)
        n, k = candidates.shape
        after = self.after.look_up(candidates.view(-1)).view(n, k, -1)
        return values, candidates, self.project.multiply(hidden)[:, None] * after

    def step(
        self,
        rows: PositionRows,
        token_ids: Tensor,
        state: Tensor | None,  # noqa: ARG002
        *,
        at_root: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None]:
        values, candidates, after = rows
        scores = values + (after @ self.before.look_up(token_ids)[:, :, None])[:, :, 0].float()
        banned = scores.new_full((len(scores), self.vocab_size), -torch.inf)
        return banned.scatter_(1, candidates, scores), None

    def tensors(self) -> Iterator[tuple[str, Weight | Tensor]]:
        yield "candidate_selector.predecessor_codebook", self.before
        yield "candidate_selector.successor_codebook", self.after
        yield "candidate_selector.hidden_projection.weight", self.project
