"""The frozen target while a speculator is trained on it: its hidden states, keys and values for rows of text.

They are computed when rows are drawn, and kept in memory up to a bound; nothing is stored on disk. It must not know any
speculator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from cluster.tools.training.continuations import TextRows
from cluster.tools.training.parts import ModelParts, parts_of
from parallel.speculators.config import FINAL
from parallel.training.interface import TargetBatch, TargetShape
from parallel.training.precision import fast_dtype, fast_passes

ROWS_PER_PASS = 16
MOST_ANCHORS = 4
"""Rows of one pass of the target: its memory does not grow with the batch."""


def load_target(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Read a checkpoint of a family that the engine knows, frozen."""
    is_capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None) is not None
    attention = "eager" if is_capped else "sdpa"  # which would leave the soft cap out
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model = cast(LlamaForCausalLM, found)
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def shape_of(model: LlamaForCausalLM, rows: TextRows) -> TargetShape:
    """What a speculator for this target may be built from, given the text it will be trained on."""
    parts = parts_of(model)
    counts = torch.bincount(rows.tokens[rows.mask()], minlength=parts.config.vocab_size)
    return TargetShape(model.config, parts.embedding.weight, parts.lm_head.weight, counts, model)


@contextmanager
def tapped(parts: ModelParts, taps: Sequence[int], into: dict[int, Tensor]) -> Iterator[None]:
    """Context in which a pass of the model leaves the residual streams of `taps` in `into`.

    Streams are taken by hooks on the blocks: the last entry of `output_hidden_states` is behind the final norm, and
    between the embedding and the first block there may be a scale or positions.
    """
    layers = parts.layers
    places = {i: layers[i - 1] for i in taps if i > 0} | {FINAL: parts.norm or layers[-1]}

    hooks = []
    for tap in taps:

        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...], tap: int = tap) -> None:
            into[tap] = output[0] if isinstance(output, tuple) else output

        def hook_before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            into[0] = inputs[0]

        is_first = tap == 0
        hooks.append(
            layers[0].register_forward_pre_hook(hook_before) if is_first else places[tap].register_forward_hook(hook)
        )
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class FrozenTarget:
    """Gives batches of rows of one text with what a module reads of the target."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        rows: TextRows,
        taps: Sequence[int],
        kv_layers: Sequence[int] = (),
        cache_bytes: int = 0,
        reach: int = 0,
    ) -> None:
        """Keep up to `cache_bytes` of what was computed; rows are the same while the object lives. `reach`: positions
        of each row are moved (`offset_positions`). Without taps and layers the target computes nothing."""
        self.rows = rows
        self._model = model
        self._taps = sorted({*taps, FINAL}) if taps or kv_layers else []
        self._kv_layers = tuple(kv_layers)
        self._parts = parts_of(model)
        self._free = cache_bytes
        self._kept: dict[int, list[Tensor]] = {}
        self._mask = rows.mask()
        self._positions: Tensor | None = None
        if reach:
            num_rows, length = rows.tokens.shape
            self._positions = offset_positions(num_rows, length, min(reach, model.config.max_position_embeddings))

    def batch(self, chosen: Tensor) -> TargetBatch:
        """The chosen rows, int64 indices, on the target's device."""
        device = self._model.device
        tokens, mask = self.rows.tokens[chosen].to(device), self._mask[chosen].to(device)
        if not self._taps:
            return TargetBatch(tokens, {}, mask, self._parts.head, self._parts.embed)
        unknown = [row for row in chosen.tolist() if row not in self._kept]
        fresh: dict[int, list[Tensor]] = {}
        for start in range(0, len(unknown), ROWS_PER_PASS):
            part = unknown[start : start + ROWS_PER_PASS]
            positions = None if self._positions is None else self._positions[part]
            computed = self._states(self.rows.tokens[part], positions)
            for row, states in zip(part, zip(*computed, strict=True), strict=True):
                fresh[row] = list(states)
                size = sum(state.numel() * state.element_size() for state in states)
                if size <= self._free:
                    self._free -= size
                    self._kept[row] = [state.clone() for state in states]
        parts = zip(*(fresh.get(row) or self._kept[row] for row in chosen.tolist()), strict=True)
        states = [torch.stack(part).to(device, fast_dtype(device.type)) for part in parts]
        taps = dict(zip(self._taps, states, strict=False))
        kv = states[len(self._taps) :]
        pairs = zip(self._kv_layers, zip(kv[::2], kv[1::2], strict=True), strict=True)
        positions = None if self._positions is None else self._positions[chosen].to(device)
        return TargetBatch(
            tokens, taps, mask, self._parts.head, self._parts.embed, dict(pairs), self._parts.normalize, positions
        )

    @torch.no_grad()
    def _states(self, tokens: Tensor, positions: Tensor | None) -> list[Tensor]:
        """The taps, then keys and values of each layer, bfloat16, `[rows, ...]` each."""
        device = self._model.device
        found: dict[int, Tensor] = {}
        cache = DynamicCache() if self._kv_layers else None  # without the config: layers with a window keep all rows
        with tapped(self._parts, self._taps, found), fast_passes(device.type):
            moved = {} if positions is None else {"position_ids": positions.to(device)}
            self._parts.trunk(input_ids=tokens.to(device), past_key_values=cache, use_cache=cache is not None, **moved)
        states = [found[tap] for tap in self._taps]
        for layer in self._kv_layers:
            assert cache is not None
            states += [getattr(cache.layers[layer], name) for name in ("keys", "values")]
        return [state.to("cpu", torch.bfloat16) for state in states]


def offset_positions(num_rows: int, length: int, reach: int) -> Tensor:
    """Positions [rows, length] below `reach`: each row's first 0 to 4 tokens stay, and those after them are moved by a
    distance that is drawn for the row (LongSpec, arXiv 2502.17421, section 3.2)."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.randint(0, MOST_ANCHORS + 1, (num_rows, 1), generator=generator)
    offsets = torch.randint(0, max(0, reach - length) + 1, (num_rows, 1), generator=generator)
    places = torch.arange(length).expand(num_rows, -1)
    return torch.where(places < kept, places, places + offsets)
