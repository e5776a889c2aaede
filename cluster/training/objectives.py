"""The losses: next-token cross entropy and distillation. They must not know batches' origin or optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[sequences, length, vocabulary]` logits of one forward pass without cache or mask tensors."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return F.linear(hidden, model.lm_head.weight)


def cross_entropy(model: LlamaForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the loss that predicts each token of a batch from those before it, in nats per token."""

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = logits_of(model, batch[:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[:, 1:].flatten())

    return loss_of


def distillation(student: LlamaForCausalLM, teacher: LlamaForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the loss KL(teacher || student) over the whole vocabulary, in nats per token.

    The teacher is run on every batch, so its distribution is never stored. A batch's last token goes unused.
    """

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        tokens = batch[:, :-1]
        with torch.no_grad():
            taught = F.log_softmax(logits_of(teacher, tokens).flatten(0, 1).float(), dim=-1)
        learnt = F.log_softmax(logits_of(student, tokens).flatten(0, 1).float(), dim=-1)
        return (taught.exp() * (taught - learnt)).sum(-1).mean()

    return loss_of
