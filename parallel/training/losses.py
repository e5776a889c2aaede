"""Losses of drafters against the target's distribution, weights of positions, and how they are summed. Knows no module.

All take logits `[..., vocabulary]` and give a value per row `[...]`. p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]
"""`divergence(p_logits, q_logits)`; gradients go to the second only."""


def forward_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q): covers all that the target may say."""
    log_p, log_q = _log(p_logits.detach()), _log(q_logits)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(q || p): avoids what the target does not say."""
    log_p, log_q = _log(p_logits.detach()), _log(q_logits)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(beta: float = 0.5) -> Divergence:
    """`beta KL(p || m) + (1 - beta) KL(q || m)` with `m = beta p + (1 - beta) q`."""

    def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
        log_p, log_q = _log(p_logits.detach()), _log(q_logits)
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        of_p, of_q = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
        return (beta * of_p + (1 - beta) * of_q).sum(-1)

    return divergence


def total_variation(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """`|p - q| / 2` summed: the probability that the ratio test rejects one draft token."""
    return 0.5 * (_probs(p_logits.detach()) - _probs(q_logits)).abs().sum(-1)


def overlap_log(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """`-log sum(min(p, q))`: the negative log of the probability of acceptance (LK)."""
    return -torch.minimum(_probs(p_logits.detach()), _probs(q_logits)).sum(-1).clamp(min=1e-6).log()


def lk_hybrid(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """`w KL(p || q) + (1 - w) TV` with `w = exp(-3 a)`, a the mean acceptance: KL leads while it is low."""
    variation = total_variation(p_logits, q_logits)
    weight = torch.exp(-3 * (1 - variation.detach().mean()))
    return weight * forward_kl(p_logits, q_logits) + (1 - weight) * variation


def cross_entropy(q_logits: Tensor, labels: Tensor) -> Tensor:
    """`-log q(label)` of int64 labels `[...]`."""
    return F.cross_entropy(q_logits.flatten(0, -2).float(), labels.flatten(), reduction="none").view(labels.shape)


def divergences(beta: float = 0.5) -> dict[str, Divergence]:
    """Every divergence by its name in options; `beta` is that of `jsd`."""
    return {
        "fkl": forward_kl,
        "rkl": reverse_kl,
        "jsd": jensen_shannon(beta),
        "tvd": total_variation,
        "lk": lk_hybrid,
        "lk_log": overlap_log,
    }


DIVERGENCES = tuple(divergences())
"""The names."""


def exponential_weights(depths: int, decay: float) -> Tensor:
    """`[depths]`: 1, decay, decay^2, ...; DFlash's `exp(-k / g)` is a decay of `exp(-1 / g)`."""
    return decay ** torch.arange(depths, dtype=torch.float32)


def d_pace_weights(probabilities: Tensor, valid: Tensor) -> Tensor:
    """`[anchors, depths]`, no gradient: how much depth k lengthens what is accepted (D-PACE).

    With `s = (q(label) + 1) / 2` and `c_j` its product up to depth j, depth k has the sum of all `c_j` from j = k on.
    """
    survival = torch.cumprod((0.5 * probabilities.detach().float() + 0.5) * valid, dim=-1)
    return survival.flip(-1).cumsum(-1).flip(-1) * valid


def masked_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The mean of `values` weighted by `weights` (a mask, or any weights of 0 and above); 0 where all weights are."""
    weights = weights.to(values.dtype).expand_as(values)
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def decayed_mean(losses: Sequence[Tensor], decay: float) -> Tensor:
    """The mean of the losses of depths 0, 1, ..., each of which weighs `decay` times as much as the one before."""
    total = losses[0]
    for depth, loss in enumerate(losses[1:], 1):
        total = total + decay**depth * loss
    return total / sum(decay**depth for depth in range(len(losses)))


@torch.no_grad()
def acceptance(p_logits: Tensor, q_logits: Tensor, temperature: float = 0.0) -> Tensor:
    """The probability that one draft token is accepted: 0 or 1 by equal argmax when greedy, else `sum(min(p, q))`."""
    if not temperature:
        return (p_logits.argmax(-1) == q_logits.argmax(-1)).float()
    return 1 - total_variation(p_logits / temperature, q_logits / temperature)


def _log(logits: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), dim=-1)


def _probs(logits: Tensor) -> Tensor:
    return F.softmax(logits.float(), dim=-1)
