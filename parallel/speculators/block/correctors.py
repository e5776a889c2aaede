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
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CorrectorKind = Literal["none", "markov", "gated", "rnn", "gru", "selector"]

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


class Corrector(ABC):
    """`token_ids` of a step are the tokens at the nodes, whose children the logits are of. `matrices` are by name."""

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
        if not self.state_size:
            return self.step(tensors, rows, token_ids, None)[0]
        state, logits = None, []
        for depth in range(token_ids.shape[-1]):
            own = tuple(row[..., depth, :] for row in rows)
            one, state = self.step(tensors, own, token_ids[..., depth], state)
            logits.append(one)
        return torch.stack(logits, -2)


class MarkovCorrector(Corrector):
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

    def with_token(self, tensors: CorrectorTensors, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return torch.cat((hidden, tensors.rows(self.BEFORE, token_ids)), -1)

    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:  # noqa: ARG002
        return (logits,) if self.sizes.kind == "markov" else (logits, hidden)

    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        read = embedded = tensors.rows(self.BEFORE, token_ids)
        if self.sizes.kind == "gated":
            read = tensors.linear(self.GATE, torch.cat((rows[1], embedded), -1)).sigmoid() * embedded
        elif self.sizes.kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            joint = tensors.linear(self.JOINT, torch.cat((state, embedded, rows[1]), -1))
            gate, candidate, output = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state, read = gate * state + (1 - gate) * candidate.tanh(), output.tanh()
        return rows[0] + tensors.linear(self.AFTER, read).float(), state


class GruCorrector(Corrector):
    """A GRU without biases over the embeddings of the block's tokens, the anchor included; tensors are named as
    SpecForge saves them."""

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

    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:  # noqa: ARG002
        return logits, hidden

    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits, hidden = rows
        given = tensors.linear(self.INPUTS, tensors.embed(token_ids).to(hidden.dtype))
        is_root = state is None
        state = given.new_zeros(*given.shape[:-1], self.state_size) if state is None else state
        kept = tensors.linear(self.RECURRENT, state)
        (reset, update, new), (reset_kept, update_kept, new_kept) = given.chunk(3, -1), kept.chunk(3, -1)
        update = (update + update_kept).sigmoid()
        new = (new + (reset + reset_kept).sigmoid() * new_kept).tanh()
        state = (1 - update) * new + update * state
        if is_root:
            return logits, state
        inner = F.silu(tensors.linear(self.INNER, torch.cat((hidden, state), -1)))
        return logits + tensors.linear(self.AFTER, inner).float(), state


class SelectorCorrector(Corrector):
    """All other tokens have logits of minus infinity: tokens are drawn from the candidates alone."""

    BEFORE, AFTER = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
    PROJECT = "candidate_selector.hidden_projection.weight"

    def __init__(self, sizes: CorrectorSizes) -> None:
        super().__init__(sizes)
        self.matrices |= dict.fromkeys((self.BEFORE, self.AFTER), CorrectorMatrix(sizes.vocab_size, sizes.rank))
        self.matrices[self.PROJECT] = CorrectorMatrix(sizes.rank, sizes.hidden)

    def prepare(self, tensors: CorrectorTensors, logits: Tensor, hidden: Tensor) -> PositionRows:
        values, candidates = logits.topk(min(self.sizes.top_k, self.sizes.vocab_size), -1)
        after = tensors.rows(self.AFTER, candidates)
        return values, candidates, tensors.linear(self.PROJECT, hidden)[..., None, :] * after

    def step(
        self, tensors: CorrectorTensors, rows: PositionRows, token_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        del state
        values, candidates, after = rows
        scores = values + (after @ tensors.rows(self.BEFORE, token_ids)[..., None])[..., 0].float()
        banned = scores.new_full((*scores.shape[:-1], self.sizes.vocab_size), -torch.inf)
        return banned.scatter(-1, candidates, scores), None


CORRECTORS: dict[str, type[Corrector]] = {
    **dict.fromkeys(("markov", "gated", "rnn"), MarkovCorrector),
    "gru": GruCorrector,
    "selector": SelectorCorrector,
}
"""Kind -> its arithmetic; the kind `none` has none."""


def make_corrector(sizes: CorrectorSizes) -> Corrector | None:
    """None for the kind `none`."""
    return CORRECTORS[sizes.kind](sizes) if sizes.kind in CORRECTORS else None
