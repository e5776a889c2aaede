"""The losses: next-token cross entropy and distillation. They must not know batches' origin or optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives the mean loss per token, in nats, of `[sequences, length]` tokens and what is to be learnt at each of them."""


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[sequences, length, vocabulary]` logits of one forward pass without cache or mask tensors."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return F.linear(hidden, model.lm_head.weight)


def cross_entropy(model: LlamaForCausalLM) -> Loss:
    """Return the loss against the true successor of each token, given as `[sequences, length]` tokens."""

    def loss_of(tokens: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
        logits = logits_of(model, tokens).flatten(0, 1).float()
        return F.cross_entropy(logits, successors.flatten())

    return loss_of


def distillation(student: LlamaForCausalLM, teacher: LlamaForCausalLM) -> Loss:
    """Return the loss KL(teacher || student) over the whole vocabulary.

    What is to be learnt comes as the teacher's last hidden states, `[sequences, length, teacher's hidden size]`.
    """
    head = teacher.lm_head.weight.detach()

    def loss_of(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        taught = F.log_softmax(F.linear(hidden, head.to(hidden.dtype)).flatten(0, 1).float(), dim=-1)
        learnt = F.log_softmax(logits_of(student, tokens).flatten(0, 1).float(), dim=-1)
        return (taught.exp() * (taught - learnt)).sum(-1).mean()

    return loss_of
