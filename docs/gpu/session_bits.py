"""The step of the GPU session (`session.py`) about `target.numerics=invariant`: whether the bits of a token's logits
depend on what is computed beside it.

A text is read alone, one row a pass, and then in other company and other passes. The usual mode is the control: where
its rows do not move either, the comparison shows nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from parallel.kernels.fixed_products import multiply_fixed
from parallel.kernels.packed_products import PackedMatrix, PackedRows, can_pack
from parallel.kernels.packing import Packing
from parallel.kernels.triton_launch import INTERPRETS, runs_on
from parallel.kv.pass_plan import Span
from parallel.kv.pool import FP8

if TYPE_CHECKING:
    from docs.gpu.session import Machine

Row = dict[str, Any]
LAYERS = 4
"""Of the 8B shape: as many kernels as in all layers, in a tenth of the time."""
TEXT, OTHERS = 0, range(1, 16)
OTHER_ROWS = 40


class Reader:
    """Logits of the last tokens of one text, each behind the tokens before it, on the device: [tokens, vocabulary]."""

    def __init__(self, runner: Any, token_ids: list[int], num_prompt: int, chunk: int) -> None:
        self.runner, self.token_ids, self.num_prompt, self.chunk = runner, token_ids, num_prompt, chunk
        self.draw = random.Random(0)

    def read(self, ways: Callable[[], list[torch.Tensor]]) -> torch.Tensor:
        """What a way of reading gives; it leaves no sequence behind."""
        for seq_id in (TEXT, *OTHERS):
            self.runner.open(seq_id)
        try:
            return torch.cat(ways())
        finally:
            for seq_id in (TEXT, *OTHERS):
                self.runner.close(seq_id)

    def alone(self, *, eagerly: bool = False) -> list[torch.Tensor]:
        with self.runner.eagerly() if eagerly else nullcontext():
            return [self._feed(self._prompt()), *(self._feed([token]) for token in self._rest())]

    def in_company(self) -> list[torch.Tensor]:
        """Beside 15 other texts, of which each has another length."""
        spans = [Span(seq_id, OTHER_ROWS * seq_id) for seq_id in OTHERS]
        rows = self._random(sum(span.num_tokens for span in spans))
        self.runner.forward(spans, rows)
        for span in spans:
            self.runner.commit(span.seq_id, range(span.num_tokens))
        found = [self._feed(self._prompt())]
        for token in self._rest():
            spans = [Span(seq_id, 1) for seq_id in (*OTHERS, TEXT)]
            logits = self.runner.forward(spans, [*self._random(len(OTHERS)), token]).logits
            found.append(logits[-1:].clone())
            for span in spans:
                self.runner.commit(span.seq_id, [0])
        return found

    def in_a_chain(self) -> list[torch.Tensor]:
        return [self._feed(self._prompt()), self._feed(self._rest(), len(self._rest()))]

    def in_a_tree(self) -> list[torch.Tensor]:
        """The rest of the text is a path among other nodes."""
        found, tokens, parents, path, last = [self._feed(self._prompt())], list[int](), list[int](), list[int](), -1
        for token in self._rest():
            for _ in range(self.draw.randrange(1, 3)):
                tokens += self._random(1)
                parents.append(self.draw.randrange(-1, len(parents)))
            path.append(len(tokens))
            tokens.append(token)
            parents.append(last)
            last = path[-1]
        span = Span(TEXT, len(tokens), parents, len(tokens))
        return [*found, self.runner.forward([span], tokens).logits[path]]

    def in_a_prompt(self, size: int) -> list[torch.Tensor]:
        """All in one pass, or in passes of `size` rows, of which the last has the tokens that are compared."""
        wanted, starts = len(self._rest()) + 1, range(0, len(self.token_ids) - len(self._rest()) - 1, size)
        for start, stop in pairwise(starts):
            self._feed(self.token_ids[start:stop])
        return [self._feed(self.token_ids[starts[-1] :], wanted)]

    def ways(self) -> dict[str, Callable[[], list[torch.Tensor]]]:
        """The first is what the others are compared with."""
        graphs = {"alone, without graphs": partial(self.alone, eagerly=True)} if self.runner.captures else {}
        return {
            "alone": self.alone,
            **graphs,
            f"beside {len(OTHERS)} texts": self.in_company,
            "in a chain": self.in_a_chain,
            "in a tree": self.in_a_tree,
            "in one prompt": partial(self.in_a_prompt, len(self.token_ids)),
            f"in a prompt by {self.chunk} rows": partial(self.in_a_prompt, self.chunk),
        }

    def _prompt(self) -> list[int]:
        return self.token_ids[: self.num_prompt]

    def _rest(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def _random(self, count: int) -> list[int]:
        return [self.draw.randrange(self.runner.config.vocab_size) for _ in range(count)]

    def _feed(self, token_ids: list[int], num_logits: int = 1) -> torch.Tensor:
        logits = self.runner.forward([Span(TEXT, len(token_ids), num_logits=num_logits)], token_ids).logits.clone()
        self.runner.commit(TEXT, range(len(token_ids)))
        return logits


def same_bits(machine: Machine, shape: dict[str, Any]) -> Iterator[Row]:
    """Rows of logits whose bits move with company, chains, trees and prompts, in both modes of `target.numerics`; and
    products of one row alone and among others. It fails where an invariant one moves, or no usual one does."""
    num_prompt, num_rest, chunk = (30, 6, 16) if machine.tiny else (1100, 16, 300)
    num_slots = num_prompt + 4 * num_rest + len(OTHERS) * (OTHER_ROWS * len(OTHERS) + num_rest)
    kinds = {"invariant": dict(invariant=True), "fast": {}}
    if machine.on_cuda:
        kinds["invariant, FP8 rows"] = dict(invariant=True, pool={"stored": FP8, "scales": None})
    moved = dict.fromkeys(kinds, 0)
    for kind, options in kinds.items():
        torch.manual_seed(0)
        few = shape if machine.tiny else shape | dict(num_hidden_layers=LAYERS)
        runner = machine.runner(few, num_slots, **options)
        draw = random.Random(1)
        text = [draw.randrange(runner.config.vocab_size) for _ in range(num_prompt + num_rest)]
        reader, expected = Reader(runner, text, num_prompt, chunk), torch.empty(0)
        for way, read in reader.ways().items():
            logits = reader.read(read)
            if way == "alone":
                expected = logits
                continue
            count = int((logits != expected).any(-1).sum())
            moved[kind] += count
            largest = (logits - expected).abs().max().item()
            row = {"numerics": kind, "read": way, "rows": len(logits), "moved": count}
            yield row | {"largest": f"{largest:.1e}", "attention": runner.attention}
        del runner, reader
    wrong = [kind for kind, count in moved.items() if count and kind != "fast"]
    for row in _products(machine):
        wrong += [row["read"]] * bool(row["moved"])
        yield row
    if wrong:
        raise ArithmeticError(f"bits move with company: {', '.join(wrong)}")
    if machine.on_cuda and not moved["fast"]:
        raise ArithmeticError("the usual mode moves no bits either: the comparison shows nothing")


def _products(machine: Machine) -> Iterator[Row]:
    """Of rows alone, few at a time, and all at once."""
    if not runs_on(machine.device) or INTERPRETS:  # whose products depend on a row's place, as a GPU's do not
        return
    sizes = (64, 256) if machine.tiny else (4096, 4096)
    weight = torch.randn(sizes, device=machine.device).to(machine.dtype)
    products: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"plain": lambda x: multiply_fixed(x, weight)}
    for packing in (Packing("fp8", 128), Packing("int4", 128, has_zeros=True, scale_bytes=2), Packing("int8")):
        if can_pack(packing, machine.device):
            scale_type = torch.float32 if packing.scale_bytes == 4 else torch.float16
            matrix = PackedMatrix(*sizes, packing, scale_type, machine.device)
            PackedRows(matrix, slice(None)).normal_(std=0.02)
            matrix.is_invariant = True
            products[packing.kind] = matrix.multiply
    x = torch.randn(300, sizes[1], device=machine.device).to(machine.dtype)
    for name, multiply in products.items():
        whole = multiply(x)
        parts = [slice(row, row + 1) for row in (0, 63, 64, 299)] + [slice(40, 46), slice(100, 230)]
        count = sum(int((multiply(x[own]) != whole[own]).any(-1).sum()) for own in parts)
        yield {"numerics": "invariant", "read": f"products, {name}", "rows": 4 + 6 + 130, "moved": count}
