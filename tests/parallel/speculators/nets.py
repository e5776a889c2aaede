"""Nets of speculators beside a tiny target, and what the target computes for a text, as the tests of their passes
start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.speculators.config import FINAL
from parallel.training.interface import TargetBatch, TargetShape
from tests.parallel.conftest import Checkpoint


def make_net(
    build: Callable[..., Any],
    options: Any,
    target: Checkpoint,
    folder: Path,
    *,
    noise: float = 0.1,
    counts: Tensor | None = None,
) -> Any:
    """A net with strong random weights, so that no initial value hides a mistake, and its checkpoint in `folder`, which
    stores these very numbers."""
    model: Any = target.model
    embedding, head = (one.weight.detach() for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    counts = torch.ones(model.config.vocab_size, dtype=torch.int64) if counts is None else counts
    torch.manual_seed(7)
    net = build(options, TargetShape(model.config, embedding, head, counts, model)).eval()
    for parameter in net.parameters():
        parameter.data = (parameter.data + noise * torch.randn_like(parameter)).bfloat16().float()
    net.save(folder)
    return net


def random_text(target: Checkpoint, length: int) -> Tensor:
    """Tokens [1, length]."""
    return torch.randint(target.model.config.vocab_size, (1, length))  # pyright: ignore


def read_text(target: Checkpoint, tokens: Tensor) -> TargetBatch:
    """What the target computes for a text [1, T]: its states as transformers numbers them (the last: behind the final
    norm), keys and values of every layer."""
    model: Any = target.model
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True, use_cache=True)
    states = output.hidden_states
    kv = {i: (layer.keys, layer.values) for i, layer in enumerate(output.past_key_values.layers)}
    tables = model.get_output_embeddings(), model.get_input_embeddings()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    norm = getattr(model.base_model, "norm", None) or model.base_model.decoder.final_layer_norm  # the latter: OPT
    return TargetBatch(tokens, dict(enumerate(states)) | {FINAL: states[-1]}, mask, *tables, kv, norm)
