"""From "which rows does each sequence feed" to positions, slots and masks: once per pass, on the host.

A row hangs behind another pending row or behind the committed ones; its position is its depth, what it sees is its
ancestors. A plan holds no token values, so plans can be built ahead of the passes that run them. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel.kv import KVPool, SeqId
from parallel.layers.attention import AttentionPlan, SdpaPlan, SdpaSpan


@dataclass(frozen=True, slots=True)
class Span:
    """Rows one sequence feeds in a pass; they are appended to its pending rows.

    `parents[i]` is the index of row i's parent among the sequence's pending rows since its last commit, -1 for the
    last committed row; None is a chain behind the last pending row. The last `num_logits` rows want logits.
    """

    seq_id: SeqId
    num_tokens: int
    parents: Sequence[int] | None = None
    num_logits: int = 1


@dataclass(slots=True)
class Plan:
    """One pass over T rows, N of which want logits (all of them where `logit_rows` is None)."""

    num_rows: int
    positions: Tensor  # [T]
    logit_rows: Tensor | slice | None  # [N]
    attention: AttentionPlan


class PendingRows:
    """A sequence's pending rows as a forest behind its committed ones.

    `ancestors[i]` has bit j set where row i sees row j, itself included; kept only while the rows are no plain chain.
    """

    __slots__ = ("depths", "parents", "is_chain", "_ancestors")

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.parents: list[int] = []
        self.is_chain = True
        self._ancestors: list[int] = []

    def append(self, num_rows: int, parents: Sequence[int] | None) -> None:
        first = len(self.parents)
        if parents is None:
            parents = range(first - 1, first + num_rows - 1)
        assert len(parents) == num_rows, f"{num_rows} rows, {len(parents)} parents"
        for i, parent in enumerate(parents, first):
            assert -1 <= parent < i, f"pending row {i} names parent {parent}"
            self.is_chain &= parent == i - 1
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
            self.parents.append(parent)

    def visible(self, first: int) -> np.ndarray:
        """bool [rows from `first` on, all rows]: which pending rows they see."""
        num_rows = len(self.parents)
        if self.is_chain:
            return np.tri(num_rows - first, num_rows, first, dtype=bool)
        for i in range(len(self._ancestors), num_rows):
            parent = self.parents[i]
            self._ancestors.append((self._ancestors[parent] if parent >= 0 else 0) | 1 << i)
        width = -(-num_rows // 8)
        bits = b"".join([mask.to_bytes(width, "little") for mask in self._ancestors[first:]])
        packed = np.frombuffer(bits, dtype=np.uint8).reshape(num_rows - first, width)
        return np.unpackbits(packed, axis=1, count=num_rows, bitorder="little").view(bool)

    def select(self, keep: Sequence[int], retain: Sequence[int]) -> PendingRows:
        """The forest of the rows `retain`, once the path `keep` is committed."""
        rest = PendingRows()
        renumbered = dict.fromkeys(keep[-1:], -1) | {row: i for i, row in enumerate(retain)}
        rest.append(len(retain), [renumbered[self.parents[row]] for row in retain])
        return rest


@dataclass(frozen=True, slots=True)
class SpanRows:
    """A span laid out: rows [first, first + n) of the pass, of a sequence with `context` committed rows."""

    first: int
    num_rows: int
    context: int
    num_pending: int
    slots: np.ndarray  # all rows of the sequence, the pass's own last
    run: range | None  # the same, if they are one run
    depths: list[int]  # of all pending rows
    pending: PendingRows

    @property
    def sees_all(self) -> bool:
        """One row at the end of a chain sees every row there is."""
        return self.num_rows == 1 and self.pending.is_chain


def lay_out(pool: KVPool, forests: dict[SeqId, PendingRows], spans: Sequence[Span]) -> list[SpanRows]:
    """Reserve the rows of every span and say where they stand."""
    laid_out, first = [], 0
    for span in spans:
        assert span.num_tokens > 0, "a span feeds at least one row"
        pool.reserve(span.seq_id, span.num_tokens)
        pending = forests[span.seq_id]
        pending.append(span.num_tokens, span.parents)
        laid_out.append(
            SpanRows(
                first=first,
                num_rows=span.num_tokens,
                context=pool.cached_len(span.seq_id),
                num_pending=len(pending.parents),
                slots=pool.slots(span.seq_id),
                run=pool.run(span.seq_id),
                depths=pending.depths,
                pending=pending,
            )
        )
        first += span.num_tokens
    return laid_out


def row_positions(rows: SpanRows) -> list[int]:
    context = rows.context
    return [context + depth for depth in rows.depths[rows.num_pending - rows.num_rows : rows.num_pending]]


def logit_rows(spans: Sequence[Span]) -> list[int]:
    wanted, end = [], 0
    for span in spans:
        end += span.num_tokens
        wanted.extend(range(end - span.num_logits, end))
    return wanted


# --- "sdpa" ----------------------------------------------------------------------------------------------------------


def sdpa_plan(pool: KVPool, laid_out: list[SpanRows], window: int | None, dtype: torch.dtype) -> SdpaPlan:
    spans = [_sdpa_span(pool, rows, window, dtype) for rows in laid_out]
    if len(laid_out) == 1 and laid_out[0].run is not None:
        run = laid_out[0].run
        return SdpaPlan(pool, spans, range(run.stop - laid_out[0].num_rows, run.stop), None)
    written = np.concatenate([rows.slots[len(rows.slots) - rows.num_rows :] for rows in laid_out])
    return SdpaPlan(pool, spans, None, torch.from_numpy(written).to(pool.keys.device))


def _sdpa_span(pool: KVPool, rows: SpanRows, window: int | None, dtype: torch.dtype) -> SdpaSpan:
    keys = values = slots = mask = None
    device = pool.keys.device
    if rows.run is not None:
        keys = pool.keys[:, rows.run.start : rows.run.stop].unbind(0)
        values = pool.values[:, rows.run.start : rows.run.stop].unbind(0)
    else:
        slots = torch.tensor(rows.slots, device=device)
    fresh_chain = rows.pending.is_chain and rows.context == 0 and rows.num_rows == rows.num_pending
    if not rows.sees_all and not fresh_chain:
        mask = additive_mask(rows, None, dtype).to(device)
    window_mask = mask
    if window is not None and rows.context + max(rows.depths) >= window:
        window_mask = additive_mask(rows, window, dtype).to(device)
    return SdpaSpan(
        slice(rows.first, rows.first + rows.num_rows), keys, values, slots, mask, window_mask, causal=fresh_chain
    )


def additive_mask(rows: SpanRows, window: int | None, dtype: torch.dtype) -> Tensor:
    """[rows, L]: zero where a row sees a key, minus infinity where not. Windows count positions, not rows."""
    tail = torch.from_numpy(~rows.pending.visible(rows.num_pending - rows.num_rows))
    mask = torch.zeros(rows.num_rows, rows.context + rows.num_pending, dtype=dtype)
    mask[:, rows.context :].masked_fill_(tail, float("-inf"))
    if window is not None:
        keys = torch.cat((torch.arange(rows.context), torch.tensor(rows.depths) + rows.context))
        queries = torch.tensor(row_positions(rows))
        mask.masked_fill_(keys[None, :] <= queries[:, None] - window, float("-inf"))
    return mask
