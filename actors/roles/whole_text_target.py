"""The role of a target that fills masks and whose rows see the whole text, also what follows it: LLaDA, Dream.

The text of a request has its full length from the start, `sampling.max_tokens` masks behind the prompt. Blocks begin at
the end of the prompt and are filled in turn; a shorter one may be the last. Since every row depends on all of the text,
no kept row is exact, and there are three decoders, which write different texts:

    static   keeps none: each pass is over the whole text
    prefix   keeps the rows before the block as they are in its first pass, and computes it and what follows anew
    dual     keeps those behind the block too, and computes the block anew

The first pass of a block is over the whole text in all of them. With kept rows a shifted model (Dream) has no row that
predicts the block's first token but in that pass, which therefore fills that one.

What follows a full block is a pass over the whole text. It is the next one of the static decoder, so that the full
block, with masks behind it, is one more state there; with kept rows it is not, and a pass ends at the block's end.
"""

from __future__ import annotations

from typing import Any

from actors.protocol.messages import Admit, VerifyItem
from actors.roles.diffusion_target import DiffusionTargetRole, FedRows, FillingContext
from actors.sampling.unmasking import MASKED


class WholeTextTargetRole(DiffusionTargetRole):
    """`decoder`: static, prefix or dual. A pass has room for the longest text."""

    def __init__(self, *args: Any, decoder: str, max_model_len: int, **options: Any) -> None:
        super().__init__(*args, **options)
        assert max_model_len <= self._max_rows, "a pass has room for the longest text"
        self._decoder, self._max_model_len = decoder, max_model_len

    def _open(self, admit: Admit, context: FillingContext) -> None:  # noqa: ARG002  rows are not shared
        self.runner.open(admit.request_id)

    def _end(self, context: FillingContext) -> int:
        """Length of the text, masks included."""
        return min(context.prompt_len + context.sampling.max_tokens, self._max_model_len)

    def _size_at(self, context: FillingContext, start: int) -> int:
        return min(self._block, self._end(context) - start)

    def _num_next(self, context: FillingContext, start: int) -> int:
        return super()._num_next(context, start) if self._decoder == "static" else 0

    def _rows(self, item: VerifyItem) -> FedRows:
        context, request_id = self.contexts[item.request_id], item.request_id
        length = len(context.token_ids)
        context.num_given = min(length, context.num_given + item.num_tokens)
        if context.num_given < length:
            return FedRows(request_id, 1, (), ())
        start, end = length - (length - context.prompt_len) % self._block, self._end(context)
        if context.block_start != start:
            context.block_start, context.step = start, None
            self.runner.truncate(request_id, 0)
        before, behind = context.token_ids[:start], end - start - self._size_at(context, start)
        if context.step is None:
            kept = {"static": (), "prefix": range(start), "dual": [*range(start), *range(end - behind, end)]}
            states = [(MASKED,) * self._size_at(context, start)]
            in_order = self._shift and self._decoder != "static"
            return FedRows(request_id, end, (), states, before, end, kept=kept[self._decoder], in_order=in_order)
        size = {"static": end, "prefix": end - start, "dual": end - start - behind}[self._decoder]
        states = context.step.guesses(context.num_states)
        if self._decoder == "static":
            return FedRows(request_id, size, (), states, before, end, kept=())
        behind = 0 if self._decoder == "prefix" else behind
        return FedRows(request_id, size, (), states, end=start + size, behind=behind, kept=())
