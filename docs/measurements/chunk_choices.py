"""One choice of chunks for all heads against one for each: `python -m docs.measurements.chunk_choices PAIR [options]`.

The engine chooses chunks once for a sequence (`parallel/runtime/row_policies.py`), by the sums of the newest row's
attention weights over all heads and layers. Here the target of a pair drafts for itself, in transformers, over chunks
that are chosen by the same rule from the sums of `all`, of each `layer`, of each `KV head` of all layers, or of each
`KV head of a layer`; each choice has as many rows. Text is modules of the standard library, or with `--recall` the
texts and questions of `recall.py`. Chunks are chosen behind `--lengths` tokens; then, at each of `--starts` further
tokens, drafts of 5 tokens are compared with what the target would write there. Prints Markdown: tokens a pass, what
these are more than those of `all` with the standard error, and in brackets the share of the target's attention that the
chunks hold at these tokens, over all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM

from docs.measurements import lines
from docs.measurements.long_contexts import text_of
from docs.measurements.recall import recall_text
from parallel.kv.row_limits import ChunkLimits
from parallel.runtime.row_policies import ChunkRows

DRAFTED = 5
SIZE, EVERY = 8, 64
GROUPINGS = {"all": (0, 1), "layer": (1,), "KV head": (0,), "KV head of a layer": ()}
"""Which of the axes (layer, KV head) one choice sums up."""


@dataclass
class PartialAttention:
    """Attention of transformers' layers that sees a part of the rows, or records its weights.

    `seen`: indices of the rows of the text that each KV head of each layer sees, [layers, KV heads, rows]; None: all.
    `weights`: of the last row, [layers][KV heads, heads of each, rows].
    """

    seen: Tensor | None = None
    context: int = 0
    weights: list[Tensor] = field(default_factory=list)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """query [1, heads, rows, head_dim], key and value [1, KV heads, all rows, head_dim]."""
        if query.shape[2] > 1:
            causal = query.shape[2] == key.shape[2]
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
            return attended.transpose(1, 2), None
        key, value = key[0], value[0]
        if self.seen is not None:
            new = torch.arange(self.context, key.shape[1]).expand(key.shape[0], -1)
            rows = torch.cat([self.seen[module.layer_idx], new], 1)[..., None].expand(-1, -1, key.shape[2])
            key, value = key.gather(1, rows), value.gather(1, rows)
        grouped = query[0, :, 0].view(key.shape[0], -1, key.shape[2])
        weights = (grouped @ key.transpose(1, 2) * options["scaling"]).softmax(-1)
        self.weights.append(weights)
        return (weights @ value).reshape(1, 1, -1, value.shape[2]), None


class ReadText:
    """A text that the target has read, and drafts behind it."""

    def __init__(self, model: LlamaForCausalLM, attention: PartialAttention, tokens: Sequence[int]) -> None:
        self._model, self._attention = model, attention
        self._cache = DynamicCache(config=model.config)
        self._feed(tokens)

    def _feed(self, tokens: Sequence[int]) -> int:
        """The likeliest token behind these."""
        places = torch.arange(self.num_rows, self.num_rows + len(tokens))[None]
        output = self._model(torch.tensor([tokens]), position_ids=places, past_key_values=self._cache, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    @property
    def num_rows(self) -> int:
        return self._cache.get_seq_length()

    def read(self, token: int) -> Tensor:
        """Keep this token; the weights of its row on those before, [layers, KV heads, rows], summed over heads."""
        self._attention.seen, self._attention.weights = None, []
        self._feed([token])
        weights = torch.stack(self._attention.weights)[..., :-1]
        return (weights / weights.sum(-1, keepdim=True)).sum(2)

    def draft(self, token: int, seen: Tensor | None, context: int) -> list[int]:
        """The likeliest tokens one after the other, behind `token`; nothing is kept."""
        self._attention.seen, self._attention.context = seen, context
        drafted = [token]
        for _ in range(DRAFTED):
            drafted.append(self._feed(drafted[-1:]))
        self._cache.crop(-DRAFTED)
        return drafted[1:]


def chosen(weights: Tensor, grouping: tuple[int, ...], num_chunks: int) -> Tensor:
    """The rows that the engine's rule chooses by the weights of each group, [layers, KV heads, rows]."""
    policy = ChunkRows(None, None, ChunkLimits(SIZE, num_chunks, EVERY))  # type: ignore[arg-type]  # ranks alone
    context = weights.shape[2]
    of_group = weights.sum(grouping, keepdim=True).expand_as(weights) if grouping else weights
    sums = [np.add.reduceat(head.numpy(), np.arange(0, context, SIZE)) for layer in of_group for head in layer]
    rows = [torch.from_numpy(policy._best(one, context)) for one in sums]
    return torch.stack(rows).view(*weights.shape[:2], -1)


def agreed(drafted: Sequence[int], expected: Sequence[int]) -> int:
    return [*(one == other for one, other in zip(drafted, expected, strict=True)), False].index(False)


@dataclass
class Agreement:
    """Of one grouping and budget."""

    accepted: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def over(self, other: Agreement) -> str:
        """With the difference to another choice of as many chunks, and the standard error of that."""
        shown = f"{1 + np.mean(self.accepted):.2f}"
        if self is not other:
            gains = np.array(self.accepted) - np.array(other.accepted)
            shown += f", {gains.mean():+.2f} ± {gains.std() / len(gains) ** 0.5:.2f}"
        return f"{shown} ({np.mean(self.shares):.0%})"


@torch.inference_mode()
def measure(
    rows: ReadText, following: Sequence[int], budgets: Sequence[int], agreements: dict[tuple[str, int], Agreement]
) -> None:
    """Chooses at the first of the tokens `following` and drafts behind each of them."""
    context = rows.num_rows
    weights = rows.read(following[0])
    choices = {(name, num): chosen(weights, axes, num) for name, axes in GROUPINGS.items() for num in budgets}
    for token in following[1:]:
        expected = rows.draft(token, None, context)
        for key, seen in choices.items():
            agreements[key].accepted.append(agreed(rows.draft(token, seen, context), expected))
        weights = rows.read(token)
        old = weights[..., :context]
        for key, seen in choices.items():
            held = old.gather(2, seen).sum() + weights[..., context:].sum()
            agreements[key].shares.append(float(held / weights.sum()))


def library_texts(pair: Path, length: int, starts: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Parts of the library that follow each other, and the tokens behind each."""
    room = length + starts + 1
    tokens = text_of(pair / "target", room * count)
    for first in range(0, room * count, room):
        yield tokens[first : first + length], tokens[first + length : first + room]


def recall_texts(length: int, starts: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Texts and the questions at their ends, one for each of their blocks."""
    for seed in range(count):
        text, placed = recall_text(seed, length, [64, 512, 2048, 8192])
        for _, block in placed:
            yield text, block.question[: starts + 1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("pair", type=Path, help="of Llamas: what recall_pair.py or long_contexts.py --make made")
    parser.add_argument("--lengths", nargs="+", type=int, default=[448, 4096])
    parser.add_argument("--chunks", nargs="+", type=int, default=[4, 8, 16, 32, 128])
    parser.add_argument("--starts", type=int, default=48)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--recall", action="store_true")
    options = parser.parse_args(arguments)
    attention = PartialAttention()
    AttentionInterface.register("in_part", attention)
    loaded = LlamaForCausalLM.from_pretrained(options.pair / "target", dtype=torch.float32)
    loaded.set_attn_implementation("in_part")
    print(lines.head("rows of the text", "chunks", *GROUPINGS))
    for length in options.lengths:
        budgets = [num for num in options.chunks if 2 * num * SIZE <= length]
        agreements = {(name, num): Agreement() for name in GROUPINGS for num in budgets}
        if options.recall:
            texts = recall_texts(length, options.starts, options.texts)
        else:
            texts = library_texts(options.pair, length, options.starts, options.texts)
        for text, following in texts:
            attention.seen = None
            with torch.inference_mode():
                rows = ReadText(loaded.eval(), attention, text)
            measure(rows, following, budgets, agreements)
        for num in budgets:
            cells = [agreements[name, num].over(agreements["all", num]) for name in GROUPINGS]
            print(lines.row(f"{length:,}", num, *cells), flush=True)


if __name__ == "__main__":
    main()
