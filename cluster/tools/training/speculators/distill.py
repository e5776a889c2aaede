"""A plain draft model distilled from the target (DistillSpec): the divergence and the text it is taken on are chosen.

It reads nothing of the target when it drafts; in training it sees the target's distribution at every position of the
text. With `prefixes` its first layers, behind the shared norm and head, become draft models too (S2D, arXiv
2407.01955).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cluster import pocket
from cluster.tools.training.models import continue_text, drafter_config, initialised, save_rounded
from cluster.tools.training.parts import ModelParts, parts_of
from cluster.tools.training.speculators.frozen_target import tapped
from parallel.ranges import OneOf, Range, require
from parallel.speculators.config import FINAL
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, chain_metrics
from parallel.training.losses import DIVERGENCES, cross_entropy, divergences, masked_mean
from parallel.training.precision import fast_passes

HARD_LABELS = "ce"
BUNDLED = {"pocket": pocket.DRAFTER, "pocket-deep": pocket.DEEP_DRAFTER}


@dataclass(frozen=True, slots=True)
class DistillOptions(TrainingOptions):
    """Options of `job.recipe=distill`."""

    divergence: Annotated[str, OneOf((*DIVERGENCES, HARD_LABELS))] = "fkl"
    """fkl = KL(p || q), rkl = KL(q || p), jsd, tvd = total variation, lk = fkl while acceptance is low and tvd then,
    lk_log = the negative log of the acceptance, ce = cross entropy with the text, without the target's distribution
    p."""
    beta: Annotated[float, Range(above=0, below=1)] = 0.5
    """The target's share of the mixture of jsd."""
    start: str = "pocket"
    """Draft model to start from, with the target's vocabulary: a checkpoint, pocket or pocket-deep; empty = random
    weights of the bundled shape."""
    layers: Annotated[int, Range(1)] = 2
    """Layers of a drafter with random weights."""
    depth: Annotated[int, Range(1)] = 5
    """Draft tokens per round for which acceptance is reported."""
    prefixes: Annotated[tuple[int, ...], Range(1)] = ()
    """Numbers of first layers that are trained as draft models beside the whole one, by the sum of their losses."""

    @property
    def num_parts(self) -> int:
        """A rank can train each of the draft models by itself."""
        return len(self.prefixes) + 1


class DistilledDrafter(Speculator):
    """A causal language model of the target's vocabulary.

    With several `job.ranks` and `job.average=participants`, a rank trains one of its prefixes.
    """

    taps = (FINAL,)

    def __init__(self, model: LlamaForCausalLM, options: DistillOptions) -> None:
        super().__init__()
        self.model, self._parts = model, parts_of(model)
        self.num_draft_tokens = options.depth
        self._divergence = divergences(options.beta).get(options.divergence)
        self.depths = sorted({*options.prefixes, model.config.num_hidden_layers})
        self._trained = self.depths

    def take_part(self, rank: int) -> None:
        self._trained = [self.depths[-1 - rank % len(self.depths)]]

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        """The divergence where the next token is a label; depth k from an anchor is position anchor + k."""
        tokens, labels, mask = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.loss_mask[:, 1:]
        p_hidden = batch.taps[FINAL][:, :-1]
        if self.training:  # the output layers are most of the work: only rows that count
            read, p_logits = read_exits(self._parts, tokens, self._trained), batch.head(p_hidden[mask])
            losses = [self._loss(p_logits, self._parts.head(q[mask]), labels[mask]).mean() for q in read.values()]
            return torch.stack(losses).sum(), {}
        p_logits, total, metrics = batch.head(p_hidden), p_hidden.new_zeros((), dtype=torch.float32), {}
        for depth, q_hidden in read_exits(self._parts, tokens, self.depths).items():
            q_logits = self._parts.head(q_hidden)
            total = total + masked_mean(self._loss(p_logits, q_logits, labels), mask)
            found = chain_metrics(p_logits, q_logits, mask, self.num_draft_tokens, batch.temperature)
            metrics |= found if depth == self.depths[-1] else {f"length_of_{depth}": found["length"]}
        return total, metrics

    def _loss(self, p_logits: Tensor, q_logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(q_logits, labels) if self._divergence is None else self._divergence(p_logits, q_logits)

    @torch.no_grad()
    def write(self, prompts: Tensor, length: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Continue prompts with the weights as they are."""
        with fast_passes(self.model.device.type):
            return continue_text(self.model, prompts, length, temperature, generator)

    def save(self, folder: Path) -> None:
        """Write an ordinary checkpoint for `drafter=model drafter.path=`."""
        save_rounded(self.model, folder)


def read_exits(parts: ModelParts, tokens: Tensor, exits: Sequence[int]) -> dict[int, Tensor]:
    """What the head reads of tokens [B, T] after so many layers, [B, T, H] each; layers behind the deepest exit do not
    run."""
    deepest, layers, found = max(exits), parts.layers, {}
    parts.use_layers(layers[:deepest])
    try:
        with tapped(parts, [one for one in exits if one < deepest], found):
            final = parts.trunk(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        parts.use_layers(layers)
    return {one: parts.normalize(stream) for one, stream in found.items()} | {deepest: final}


def start_model(options: DistillOptions, target: TargetShape) -> LlamaForCausalLM:
    """The draft model to go on with. ValueError, one line, for a checkpoint that cannot be one."""
    vocabulary = target.config.vocab_size
    if not options.start:
        return initialised(drafter_config(vocabulary, options.layers), torch.initial_seed(), "cpu")
    folder = BUNDLED.get(options.start, Path(options.start).expanduser())
    try:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        model = cast(LlamaForCausalLM, found)
    except (OSError, ValueError) as error:
        raise ValueError(f"job.options.start={options.start}: is no checkpoint; give a folder or pocket") from error
    if model.config.vocab_size != vocabulary:
        reason = f"has {model.config.vocab_size} tokens, the target {vocabulary}; give one with the target's tokenizer"
        raise ValueError(f"job.options.start={options.start}: {reason}")
    return model


def build(options: DistillOptions, target: TargetShape) -> DistilledDrafter:
    """The module of that model. ValueError, one line, for prefixes that it does not have."""
    model = start_model(options, target)
    num_layers = model.config.num_hidden_layers
    remedy = f"the draft model has {num_layers} layers; name none above"
    fits = max(options.prefixes, default=0) <= num_layers
    require(fits, "job.options.prefixes", list(options.prefixes), remedy)
    return DistilledDrafter(model, options)
