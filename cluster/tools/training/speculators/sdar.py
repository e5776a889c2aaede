"""A target that fills masks, of SDAR's layout (arXiv 2510.06303), made of a model that writes from left to right.

The model gets a norm on every query and key head and learns to fill the masks of a block over the blocks before it; a
masked row predicts its own token. It reads each text twice in one pass: whole, and with some of each block's tokens
hidden. Rows of the first see their own block and those before it, as the rows that a decoder keeps; rows of the second
see the whole blocks before their own, and of their own what is hidden and what is not. Its text is not that of the
model that it began as.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cluster.tools.training.models import save_rounded
from cluster.tools.training.parts import parts_of
from cluster.tools.training.speculators.distill import DistillOptions, start_model
from parallel.ranges import Range, require
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.losses import cross_entropy, masked_mean
from parallel.whole_files import write_text

_SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rope_parameters rms_norm_eps tie_word_embeddings bos_token_id eos_token_id pad_token_id"
)
"""Fields of config.json that both kinds of model have."""
_MEASURED_TOKENS = 256
"""Tokens of the text on which the size of queries and keys is measured."""


@dataclass(frozen=True, slots=True)
class SdarOptions(TrainingOptions):
    """Options of `job.recipe=sdar`: a model is tuned to fill masks, and `target/` of the run's folder is another
    target."""

    start: str = ""
    """Llama to begin with, of the target's vocabulary: a checkpoint, pocket or pocket-deep for the bundled draft
    models; empty = the target."""
    block: Annotated[int, Range(2, cap=64)] = 4
    """Tokens of a block, which its checkpoint names; blocks begin at the start of the text."""
    mask_token: Annotated[int, Range(0)] = 188
    """Token that stands for a mask, one that no text has: 188 is the byte FF of the bundled tokenizer."""


class SdarNet(Speculator):
    """The target in training. `accept_k` is the share of the blocks without a token of which one pass predicts token k
    where it did those before, above temperature 0 the probability that it draws it; `length` is the number of tokens
    up to the first that it does not."""

    taps = ()

    def __init__(self, model: Qwen3ForCausalLM, options: SdarOptions) -> None:
        super().__init__()
        self.model: Any = model
        self._options = options
        self.num_draft_tokens = options.block

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The cross entropy of hidden tokens that are labels; each block hides 1 to all of its tokens, equally often,
        and blocks weigh alike. The prompt is never hidden."""
        size = self._options.block
        length = batch.tokens.shape[1] // size * size
        tokens, is_label = batch.tokens[:, :length], batch.loss_mask[:, :length]
        is_hidden = torch.arange(length) >= is_label.int().argmax(1, keepdim=True).cpu()
        weights = torch.ones(is_hidden.shape)
        if self.training:
            blocks = (len(tokens), length // size, size)
            counts = torch.randint(1, size + 1, blocks[:2], generator=generator)[..., None]
            places = torch.rand(blocks, generator=generator).argsort(-1).argsort(-1)
            is_hidden &= (places < counts).flatten(1)
            weights = (1 / counts).expand(blocks).flatten(1)
        is_hidden, weights = is_hidden.to(tokens.device), weights.to(tokens.device)
        hidden = self.hidden(tokens, is_hidden)
        chosen = is_hidden & is_label
        if self.training:  # the output layer is much of the work: only rows that count
            return masked_mean(cross_entropy(self._head(hidden[chosen]), tokens[chosen]), weights[chosen]), {}
        logits = self._head(hidden)
        scaled = logits.float() / (batch.temperature or 1.0)
        drawn = scaled.softmax(-1).gather(-1, tokens[..., None])[..., 0]
        rates = drawn if batch.temperature else (logits.argmax(-1) == tokens).float()
        metrics = depth_metrics(*(one.unflatten(1, (-1, size)).flatten(0, 1) for one in (rates, chosen)))
        return masked_mean(cross_entropy(logits, tokens), chosen), metrics | {"length": metrics["length"] - 1}

    def hidden(self, tokens: Tensor, is_hidden: Tensor) -> Tensor:
        """Final hidden states [texts, length, hidden] of the rows whose tokens are hidden here and there."""
        length, masked = tokens.shape[1], tokens.masked_fill(is_hidden, self._options.mask_token)
        place = torch.arange(length, device=tokens.device)
        visible = visible_rows(length, self._options.block).to(tokens.device)
        output = self.model.model(
            input_ids=torch.cat((tokens, masked), 1),
            attention_mask=visible[None, None].expand(len(tokens), 1, -1, -1),
            position_ids=place.repeat(2).expand(len(tokens), -1),
            use_cache=False,
        )
        return output.last_hidden_state[:, length:]

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def save(self, folder: Path) -> None:
        """Write an ordinary checkpoint for `target.path=`."""
        save_rounded(self.model, folder)
        path = folder / "config.json"
        fields = {"block_size": self._options.block, "mask_token_id": self._options.mask_token}
        config = json.loads(path.read_text(encoding="utf-8")) | {"architectures": ["SDARForCausalLM"]} | fields
        write_text(path, json.dumps(config, indent=2) + "\n")


def visible_rows(length: int, block: int) -> Tensor:
    """bool [2 length, 2 length]: which row sees which, of a text and of the same with masks."""
    of_row = torch.arange(length) // block
    earlier, own = of_row[:, None] > of_row, of_row[:, None] == of_row
    return torch.cat((torch.cat((earlier | own, torch.zeros_like(own)), 1), torch.cat((earlier, own), 1)))


@torch.no_grad()
def with_norms(model: LlamaForCausalLM, tokens: Tensor) -> Qwen3ForCausalLM:
    """The model as a Qwen 3. The norms of its queries and keys give them the size that they have in this text [1, T]
    without norms."""
    config = Qwen3Config(**{name: getattr(model.config, name) for name in _SHARED.split()})
    config._attn_implementation = "sdpa"
    made = Qwen3ForCausalLM(config).float()
    made.load_state_dict(model.state_dict(), strict=False)
    made.generation_config = model.generation_config
    sizes = dict[str, Tensor]()

    def measuring(name: str) -> Any:
        def hook(_module: object, _inputs: object, output: Tensor) -> None:
            sizes[name] = output.float().unflatten(-1, (-1, config.head_dim)).square().mean(-1).sqrt().mean()

        return hook

    layers: Sequence[Any] = [*parts_of(model).layers]
    kinds = ("q", "k")
    hooks = [
        getattr(layer.self_attn, f"{kind}_proj").register_forward_hook(measuring(f"{i}{kind}"))
        for i, layer in enumerate(layers)
        for kind in kinds
    ]
    model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    blocks: Sequence[Any] = [*made.model.layers]
    for i, block in enumerate(blocks):
        for kind in kinds:
            getattr(block.self_attn, f"{kind}_norm").weight.fill_(float(sizes[f"{i}{kind}"]))
    return made.requires_grad_(True)


def build(options: SdarOptions, target: TargetShape) -> SdarNet:
    """A copy of the model to begin with. ValueError, one line, for one that cannot be converted."""
    assert target.model is not None, "the target is converted"
    model = start_model(DistillOptions(start=options.start), target) if options.start else target.model
    kind, remedy = type(model).__name__, "only a Llama is converted; name another in job.options.start"
    is_llama = isinstance(model, LlamaForCausalLM) and not model.config.attention_bias and not model.config.mlp_bias
    require(is_llama, "target.path", kind, remedy)
    vocabulary = model.config.vocab_size
    remedy = f"is none of {vocabulary} tokens; give one that no text has"
    require(options.mask_token < vocabulary, "job.options.mask_token", options.mask_token, remedy)
    usual = (target.token_counts.float().cpu() + 1e-3).multinomial(_MEASURED_TOKENS, replacement=True)
    return SdarNet(with_norms(model, usual[None].to(model.device)), options)
