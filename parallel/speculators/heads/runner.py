"""Passes of heads on the target's last hidden state (`cells.py`): no attention, so no KV rows, only states.

The state of a text row needs the target's hidden state at the position before and the row's token, nothing earlier; it
is computed for the last row of a text, and where logits are asked for. The state of a draft row follows from its
parent's. Knows no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, takewhile
from pathlib import Path

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.decoder import Decoder
from parallel.runtime.interface import PassOutput
from parallel.speculators.heads.cells import CELLS, HeadCell
from parallel.speculators.heads.config import TARGET_TABLE, HeadsConfig, Sources, stored_shapes
from parallel.speculators.heads.tensors import LoadedTensors
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import SpeculatorRunner
from parallel.transfers import upload

KEPT_FEATURES = 64
"""Newest positions whose features are kept: a draft may begin some tokens before, while a verdict is on its way."""


@dataclass(slots=True, eq=False)
class FedRow:
    """A row that was fed, at `place` among the tokens of its pass. After a silent one there are no logits: it is too
    deep, nothing is known of what is before it, or it is text within a text."""

    seq_id: SeqId
    place: int
    position: int
    depth: int = 0  # from the last row that had features
    parent: FedRow | None = None  # of a draft row
    is_text: bool = False
    is_silent: bool = False
    state: Tensor | None = None
    root: FedRow | None = None  # that last row with features
    logits: Tensor | None = None  # those of all depths after a root, where tokens make no difference


@dataclass(slots=True)
class _SequenceRows:
    """The rows of one sequence, of whose committed ones the first `exact_len` were text rows."""

    cached_len: int = 0
    exact_len: int = 0
    last: FedRow | None = None  # of the committed ones
    last_exact: FedRow | None = None  # at exact_len - 1
    pending: list[FedRow] = field(default_factory=list)


class HeadsRunner(SpeculatorRunner):
    """`tensors` are those of the cell; what they do not have is the target's, of `tables`."""

    def __init__(self, cell: HeadCell, tensors: LoadedTensors, tables: Decoder) -> None:
        super().__init__(cell.config, tables)
        self.cell = cell
        self._tensors = tensors
        self._rows: dict[SeqId, _SequenceRows] = {}

    @property
    def longest_draft(self) -> int:
        return self.cell.config.longest

    # --- sequences ---------------------------------------------------------------------------------------------------

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self._rows[seq_id] = _SequenceRows()

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        del self._rows[seq_id]

    def read_features(self, seq_id: SeqId, start: int, rows: Tensor) -> None:
        super().read_features(seq_id, start, rows)
        self._features[seq_id].forget(self.num_known(seq_id) - KEPT_FEATURES)

    def cached_len(self, seq_id: SeqId) -> int:
        return self._rows[seq_id].cached_len

    def can_reserve(self, num_rows: int) -> bool:  # noqa: ARG002  a row is one vector
        return True

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        rows = self._rows[seq_id]
        for i in keep:
            row = rows.last = rows.pending[i]
            if row.is_text and rows.exact_len == rows.cached_len:
                rows.exact_len, rows.last_exact = rows.exact_len + 1, row
            rows.cached_len += 1
        rows.pending = [rows.pending[i] for i in retain]

    def truncate(self, seq_id: SeqId, length: int) -> None:
        rows = self._rows[seq_id]
        if length < rows.cached_len:
            rows.last = rows.last_exact if length == rows.exact_len else None
        if length < rows.exact_len:
            rows.exact_len, rows.last_exact = length, None
        rows.cached_len, rows.pending = length, []

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        rows = self._rows[seq_id]
        if rows.exact_len == rows.cached_len:
            return False
        self.truncate(seq_id, rows.exact_len)
        return True

    # --- passes ------------------------------------------------------------------------------------------------------

    def _forward(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> PassOutput:
        """Logits of the rows asked for, -inf after silent ones."""
        text, drafted, asked, first = list[FedRow](), list[FedRow](), list[FedRow](), 0
        for span in spans:
            fed = self._append(span, first, fuzzy=fuzzy)
            text += [row for row in fed if row.is_text and not row.is_silent]
            drafted += [row for row in fed if not row.is_text and not row.is_silent]
            asked += fed[len(fed) - span.num_logits :]
            first += span.num_tokens
        if text:
            features = torch.cat([self._features[row.seq_id].rows([row.position - 1]) for row in text])
            hidden = self._read_target(text, features, token_ids)
            self._step(text, self.cell.start(self._tensors, hidden.to(self.decoder.dtype)), token_ids)
        if self.cell.reads_tokens:
            for chosen in _by_depth(drafted).values():  # the states of their parents are there, which are less deep
                rows = [drafted[i] for i in chosen]
                self._step(rows, torch.stack([_state_of(row.parent) for row in rows]), token_ids)
        logits = self._logits(asked)
        return PassOutput(logits, logits.new_empty(first, 0), ())

    def _read_target(self, text: Sequence[FedRow], features: Tensor, token_ids: Tensor) -> Tensor:  # noqa: ARG002
        """What the states of text rows are made of, [n, F]: the features before them, unless a family runs the
        target."""
        return features

    def _append(self, span: Span, first: int, *, fuzzy: bool) -> list[FedRow]:
        """Make the rows of a span pending, whose tokens begin at `first`."""
        rows, known = self._rows[span.seq_id], self._features[span.seq_id]
        num_before, num_rows = len(rows.pending), span.num_tokens
        parents = range(num_before - 1, num_before + num_rows - 1) if span.parents is None else span.parents
        num_text = 0 if fuzzy else self._num_text(rows, known.end, parents)
        for i, parent in enumerate(parents):
            above = rows.pending[parent] if parent >= 0 else rows.last
            row = FedRow(span.seq_id, first + i, rows.cached_len)
            if i < num_text:
                row.position, row.is_text, row.root = rows.cached_len + num_before + i, True, row
                is_wanted = i == num_text - 1 or i >= num_rows - span.num_logits
                row.is_silent = not (is_wanted and row.position > known.start)
            elif above is None:
                row.is_silent = True
            else:
                row.position, row.depth, row.root, row.parent = above.position + 1, above.depth + 1, above.root, above
                row.is_silent = above.is_silent or row.depth >= self.longest_draft
            rows.pending.append(row)
        return rows.pending[num_before:]

    def _num_text(self, rows: _SequenceRows, num_known: int, parents: Sequence[int]) -> int:
        """Leading rows of a span that continue the text and whose predecessors' features are known."""
        start = len(rows.pending)
        if any(not row.is_text for row in rows.pending):
            return 0
        chain = takewhile(lambda pair: pair[0] == pair[1], zip(parents, count(start - 1), strict=False))
        return max(0, min(len(list(chain)), num_known + 1 - rows.cached_len - start))

    def _step(self, rows: Sequence[FedRow], states: Tensor, token_ids: Tensor) -> None:
        """States of rows, equally deep, from those before them."""
        if self.cell.reads_tokens:
            places = upload([row.place for row in rows], token_ids.device)
            states = self.cell.step(self._tensors, rows[0].depth, states, token_ids[places])
        for row, state in zip(rows, states.unbind(0), strict=True):
            row.state = state

    # --- logits ------------------------------------------------------------------------------------------------------

    def _logits(self, asked: Sequence[FedRow]) -> Tensor:
        """[rows, V] float32."""
        speaking = [i for i, row in enumerate(asked) if not row.is_silent]
        if not speaking:
            return self._silence(len(asked))
        if self.cell.reads_tokens:
            by_depth = _by_depth([asked[i] for i in speaking])
            parts = {
                depth: torch.stack([_state_of(asked[speaking[i]]) for i in chosen])
                for depth, chosen in by_depth.items()
            }
            logits = torch.cat(self._read(parts))
            order = [speaking[i] for chosen in by_depth.values() for i in chosen]
        else:
            logits = torch.stack(
                [rows[asked[i].depth] for i, rows in zip(speaking, self._root_logits(asked), strict=True)]
            )
            order = speaking
        if order == list(range(len(asked))):
            return logits
        placed = self._silence(len(asked))
        placed[upload(order, placed.device)] = logits
        return placed

    def _root_logits(self, asked: Sequence[FedRow]) -> list[Tensor]:
        """The logits [depths, V] of the roots of all rows that are not silent: all heads run at once, when the root is
        fed, and later levels look them up."""
        roots = [row.root for row in asked if row.root is not None and not row.is_silent]
        fresh = list({id(root): root for root in roots if root.logits is None}.values())
        if fresh:
            states = torch.stack([_state_of(root) for root in fresh])
            logits = torch.stack(self._read(dict.fromkeys(range(self.longest_draft), states)), 1)
            for root, own in zip(fresh, logits.unbind(0), strict=True):
                root.logits = own
        return [root.logits for root in roots if root.logits is not None]

    def _read(self, states: Mapping[int, Tensor]) -> list[Tensor]:
        """The states at each depth -> their logits; depths of one output layer are multiplied at once."""
        read = {depth: self.cell.read(self._tensors, depth, rows) for depth, rows in states.items()}
        logits: list[Tensor] = []
        for name, depths in groupby(read, self.cell.shapes.head):
            parts = [read[depth] for depth in depths]
            rows = torch.cat(parts)
            projected = self.decoder.head(rows) if name == TARGET_TABLE else self._tensors.project(name, rows)
            logits += projected.float().split([len(part) for part in parts])
        return logits

    def _silence(self, num_rows: int) -> Tensor:
        shape = num_rows, self.speculator.num_logits
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=self.decoder.device)


def _by_depth(rows: Sequence[FedRow]) -> dict[int, list[int]]:
    """Depth -> indices of the rows there, in increasing order of depth."""
    chosen: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        chosen.setdefault(row.depth, []).append(i)
    return dict(sorted(chosen.items()))


def _state_of(row: FedRow | None) -> Tensor:
    assert row is not None
    assert row.state is not None, "a silent row has no state"
    return row.state


def open_runner(
    directory: Path, config: HeadsConfig, place: SpeculatorPlace, names: Callable[[Path], Sources]
) -> HeadsRunner:
    """Load a checkpoint whose tensors have these names."""
    cell, sources = CELLS[config.method](config), names(directory)
    tensors = LoadedTensors(cell.shapes, place, sources)
    place.load(tensors, stored_shapes(cell.shapes, sources), directory)
    return HeadsRunner(cell, tensors, place.tables)
