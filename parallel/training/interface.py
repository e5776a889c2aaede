"""What the training loop and the modules that it trains know of each other: batch, module, options, and the target.

It must not know any method, and no method imports the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel.ranges import Section
from parallel.speculators.config import FINAL
from parallel.training.losses import acceptance


@dataclass(frozen=True)
class TargetShape:
    """What a speculator may be built from: the target's dimensions, its tables and the text it will be trained on."""

    config: Any
    """The target's own `config.json` as transformers reads it, a `PretrainedConfig`."""
    embedding: Tensor
    """Its embedding, float32 `[vocabulary, hidden]`, frozen; to initialise from, not to keep as a parameter."""
    head: Tensor
    """Its output layer, of the same shape; the same tensor where they are tied."""
    token_counts: Tensor
    """How often each token occurs in the training rows, int64 `[vocabulary]`: for draft vocabularies."""
    model: Any = None
    """The target itself, a frozen model of transformers, for rows that run through its layers; None if not at hand."""


@dataclass(frozen=True)
class TargetBatch:
    """Rows of text with what the frozen target computed for them. Row i of every tensor belongs to token i."""

    tokens: Tensor
    """int64 `[rows, length]`."""
    taps: dict[int, Tensor]
    """`[rows, length, hidden]` of each tap the module asked for, and of `FINAL` if it reads anything of the target; no
    gradient."""
    loss_mask: Tensor
    """bool `[rows, length]`: token i may be a label. False where text is padding."""
    head: Callable[[Tensor], Tensor]
    """The target's output layer: hidden states after its final norm -> logits. Frozen, but lets gradients through."""
    embed: Callable[[Tensor], Tensor]
    """The target's embedding: tokens -> `[..., hidden]`. Frozen."""
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys after RoPE and values of each of the module's `kv_layers`, `[rows, KV heads, length, head size]` each."""
    normalize: Callable[[Tensor], Tensor] = field(default_factory=nn.Identity)
    """The target's final norm: the residual stream after a last layer -> what `head` reads. Frozen."""
    positions: Tensor | None = None
    """int64 `[rows, length]`, of all that was computed; None: 0, 1, and so on in each row."""
    temperature: float = 0.0
    """Temperature at which held-out acceptance is measured: 0 = greedy, the rows then are the target's greedy text."""

    def target_logits(self) -> Tensor:
        """`[rows, length, vocabulary]`; row i is the target's distribution of token i + 1."""
        return self.head(self.taps[FINAL])


class TrainingOptions(Section):
    """Settings of one method: fields of `job.options`."""

    __slots__ = ()

    @property
    def num_parts(self) -> int:
        """The parts of the module that ranks can train by themselves."""
        return 1


class Speculator(nn.Module, ABC):
    """A speculator in training. Its parameters, float32, are all that is trained and saved."""

    taps: tuple[int, ...] = (FINAL,)
    """Taps of the target that it reads; see `parallel.speculators.config`."""
    kv_layers: tuple[int, ...] = ()
    """Layers of the target, from 0, whose keys and values it reads."""
    num_draft_tokens: int = 1
    """Depths it is trained for."""
    reach: int = 0
    """Positions that offsets of the later tokens of a row reach, at most; 0: none is moved."""

    @abstractmethod
    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a scalar, and metrics by name, detached scalars; random choices come from `generator` (CPU).

        Metrics hold those of `depth_metrics`. It runs under autocast if that is on, and without gradients when held-out
        text is evaluated: `self.training` tells which.
        """

    def take_part(self, rank: int) -> None:
        """Train this rank's part alone from now on, where the recipe has several (`TrainingOptions.num_parts`)."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write `config.json` and bfloat16 `model.safetensors` that `drafter.path` reads."""


def depth_metrics(rates: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """`accept_1`.. by depth, and `length`, the expected tokens per round.

    `rates[n, k]` is the probability that the token drafted at depth k + 1 from anchor n is accepted when those before
    it were (0 or 1 for a greedy draft), `valid[n, k]` whether the text has a label there; depths behind one
    without do not count. `accept_k` is that of the drafts whose earlier tokens were accepted. The length counts anchors
    whose depths are all valid.
    """
    valid = valid.cummin(1).values
    survival = rates.detach().float().cumprod(1)
    before = torch.cat((torch.ones_like(survival[:, :1]), survival[:, :-1]), dim=1)
    means = (survival * valid).sum(0) / (before * valid).sum(0).clamp(min=1e-6)
    whole = valid.all(1)
    length = 1 + (survival.sum(1) * whole).sum() / whole.sum().clamp(min=1)
    return {f"accept_{k + 1}": mean for k, mean in enumerate(means)} | {"length": length}


def chain_metrics(
    p_logits: Tensor, q_logits: Tensor, mask: Tensor, depths: int, temperature: float
) -> dict[str, Tensor]:
    """`depth_metrics` where depth k + 1 from an anchor is position anchor + k: `[rows, length, vocabulary]` of target
    and drafter, `mask` of the positions that have a label."""
    rates = acceptance(p_logits, q_logits, temperature)
    return depth_metrics(*(each.unfold(1, depths, 1).flatten(0, 1) for each in (rates, mask)))
