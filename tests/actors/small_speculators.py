"""Speculators of the tests' random target, by the name of their recipe, trained for a moment on what it writes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from cluster.tools.training.speculators.distill import DistillOptions
from cluster.tools.training.speculators.recipes import RECIPES
from parallel.speculators.block.training import BlockOptions
from parallel.speculators.config import FINAL
from parallel.speculators.exits.training import ExitOptions
from parallel.speculators.glide.training import GlideOptions
from parallel.speculators.streams.training import StreamsOptions
from parallel.training.interface import TargetBatch, TargetShape

TRAINED = [name for name, recipe in RECIPES.items() if recipe.module.startswith("parallel.speculators.")]
"""Recipes of modules that read a target."""
_STEPS = 15
_LATE_STEPS = 40
"""A block, and a head with the state of an LSTM, are right about a token of random text late; with fewer steps some
never are. A selector has two losses: after as many steps it is so sure of the greedy text that at temperature 1 its
distribution and the target's, whose likeliest token has 2 %, have 6 % in common."""
_ROWS, _LENGTH = 12, 32


@cache
def written_by(target):
    """Tokens [rows, length] that the target continues greedily from single tokens, its hidden states, by tap,
    and its keys and values, by layer."""
    starts = torch.arange(2, 2 + _ROWS)[:, None]
    tokens = target.generate(starts, max_new_tokens=_LENGTH - 1, min_new_tokens=_LENGTH - 1, do_sample=False)
    before_norm = []
    hook = target.model.layers[-1].register_forward_hook(lambda *of: before_norm.append(of[-1]))
    with torch.no_grad():
        output = target(tokens, output_hidden_states=True, use_cache=True)
    hook.remove()
    *streams, final = output.hidden_states
    taps = {**dict(enumerate(streams)), len(streams): before_norm[0], FINAL: final}
    return tokens, taps, {i: (layer.keys, layer.values) for i, layer in enumerate(output.past_key_values.layers)}


def train_speculator(recipe, target, drafter: Path, folder: Path, steps: int | None = None) -> Path:
    """Train the recipe's module beside `target`, a transformers model, and write it to `folder`; one that is a whole
    model begins as `drafter`."""
    row = RECIPES[recipe]
    tokens, streams, kv = written_by(target)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    counts = torch.bincount(tokens.flatten(), minlength=target.config.vocab_size)
    torch.manual_seed(0)
    options = row.options
    if isinstance(options, BlockOptions):
        options = replace(options, anchors=3, intermediate_size=64, base_steps=min(options.base_steps, _STEPS // 4))
        # of 16 candidates in 97 hardly one is what a flat target draws
        options = replace(options, top_k=target.config.vocab_size // 2)
    if isinstance(options, StreamsOptions):
        options = replace(options, layers=min(options.layers, 1), skip=0, prune_rank=4 * (options.layers > 0))
    if isinstance(options, GlideOptions):
        options = replace(options, window=9)  # below the length of texts: rows leave it
    if isinstance(options, ExitOptions):
        options = replace(options, exit=1)
    if isinstance(options, DistillOptions):
        options = replace(options, start=str(drafter))
    shape = TargetShape(target.config, embed.weight.detach(), head.weight.detach(), counts, target)
    net = row.build(options, shape)
    batch = TargetBatch(
        tokens,
        {tap: streams[tap] for tap in {*net.taps, FINAL}},
        torch.ones_like(tokens, dtype=torch.bool),
        lambda hidden: head(hidden.float()),
        embed,
        kv,
        target.base_model.norm,
    )
    generator = torch.Generator().manual_seed(0)
    stepper = torch.optim.Adam(net.parameters(), lr=1e-2)
    if steps is None:
        learns_late = isinstance(options, BlockOptions) and options.corrector != "selector"
        steps = _LATE_STEPS if learns_late or recipe == "lstm" else _STEPS
    for _ in range(steps):
        loss, _ = net.loss(batch, generator)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    net.save(folder)
    return folder
