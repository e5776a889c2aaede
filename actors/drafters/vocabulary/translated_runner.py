"""A draft model with a tokenizer of its own, as a model that reads and writes the target's tokens.

Token-level intersection (TLI, arXiv 2502.05202): the head has the rows of the tokens that both tokenizers have, and
their logits stand in the target's columns. So a drafted token is one row in both; text that the target wrote is encoded
again in the draft model's tokens, and its rows are those of the whole piece. Where that changes tokens which were read
before, their KV rows are dropped and read again. Drafters, rules and pipelines see a model of the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import Tensor

from actors.drafters.vocabulary.retokenized import RetokenizedText
from actors.drafters.vocabulary.token_pieces import TokenPieces
from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.runtime.interface import PassOutput, Runner, RunnerAround, RunnerSizes

_NO_ROWS = range(0)


@dataclass(slots=True)
class _PendingRow:
    """A row of a target token: the rows of the draft model that it stands for. Of a piece of text these are the rows of
    its last token, and `draft_id` is None."""

    target_id: int
    draft_id: int | None
    rows: range


@dataclass(slots=True)
class _TranslatedText:
    text: RetokenizedText
    num_cached: int = 0  # target tokens whose text the model has read and committed
    pending: list[_PendingRow] = field(default_factory=list)
    num_rows: int = 0  # pending rows of the draft model


@dataclass(frozen=True, slots=True)
class _TranslatedSizes:
    vocab_size: int
    num_logits: int
    max_positions: int


class TranslatedRunner(RunnerAround):
    """`runner` has a head of the shared tokens, whose target ids `draft_ids` maps to their own, and `width` columns.

    A pass of a sequence without pending rows begins with text: all rows up to the first whose logits are wanted, which
    are committed together. All other rows are draft tokens.
    """

    def __init__(
        self, runner: Runner, target: TokenPieces, draft: TokenPieces, draft_ids: Mapping[int, int], width: int
    ) -> None:
        super().__init__(runner)
        self._target = target
        self._draft = draft
        self._config = _TranslatedSizes(width, width, runner.config.max_positions)
        self._draft_ids = draft_ids
        self._sequences: dict[SeqId, _TranslatedText] = {}
        self._promised = 0

    @property
    def config(self) -> RunnerSizes:
        return self._config

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        """Opens without known rows: how its tokens begin depends on the text after them."""
        self.runner.open(seq_id)
        self._sequences[seq_id] = _TranslatedText(RetokenizedText(self._target, self._draft))

    def close(self, seq_id: SeqId) -> None:
        self.runner.close(seq_id)
        del self._sequences[seq_id]

    def cached_len(self, seq_id: SeqId) -> int:
        return self._sequences[seq_id].num_cached

    def can_reserve(self, num_rows: int) -> bool:
        """Text may take more rows than it has target tokens: `forward` then feeds its last tokens only, if need be."""
        fits = self.runner.can_reserve(num_rows)
        self._promised = max(self._promised, num_rows if fits else 0)
        return fits

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        sequence = self._sequences[seq_id]
        pending = sequence.pending
        rows = [row for i in keep for row in pending[i].rows]
        for i in keep:
            if (draft_id := pending[i].draft_id) is not None:
                sequence.text.append(pending[i].target_id, draft_id)
        self.runner.commit(seq_id, rows, [row for i in retain for row in pending[i].rows])
        sequence.num_cached += len(keep)
        sequence.pending = [replace(pending[i], rows=range(n, n + 1)) for n, i in enumerate(retain)]
        sequence.num_rows = len(retain)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        sequence = self._sequences[seq_id]
        kept = sequence.text.cut(length)
        self.runner.truncate(seq_id, min(kept, self.runner.cached_len(seq_id)))
        self._sequences[seq_id] = _TranslatedText(sequence.text, length)

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        sequence = self._sequences[seq_id]
        if not self.runner.drop_fuzzy(seq_id):
            return False
        exact = sequence.text.num_target_within(self.runner.cached_len(seq_id))
        self.truncate(seq_id, min(exact, sequence.num_cached))
        return True

    def forward(
        self,
        spans: Sequence[Span],
        token_ids: Tensor | Sequence[int],
        taps: Sequence[int] = (),
        *,
        fuzzy: bool = False,
    ) -> PassOutput:
        tokens = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        starts = list(accumulate([span.num_tokens for span in spans], initial=0))[:-1]
        pieces = [self._read(span, tokens, start) for span, start in zip(spans, starts, strict=True)]
        more = sum(len(piece) for piece in pieces) - sum(self._num_text_rows(span) for span in spans)
        if more > 0 and not self.runner.can_reserve(self._promised + more):
            pieces = [self._shorten(span, piece) for span, piece in zip(spans, pieces, strict=True)]
        fed, draft_spans = [], []
        for span, start, piece in zip(spans, starts, pieces, strict=True):
            nodes = tokens[start + self._num_text_rows(span) : start + span.num_tokens]
            draft_spans.append(self._lay_out(span, tokens, start, len(piece)))
            fed += [*piece, *(self._draft_ids.get(token, 0) for token in nodes)]
        return self.runner.forward(draft_spans, fed, taps, fuzzy=fuzzy)

    def _num_text_rows(self, span: Span) -> int:
        if self._sequences[span.seq_id].pending:
            return 0
        return span.num_text

    def _read(self, span: Span, tokens: Sequence[int], start: int) -> list[int]:
        """The draft tokens to feed for the text of a span; cached rows of tokens that changed are dropped."""
        num_text = self._num_text_rows(span)
        if not num_text:
            return []
        text, cached = self._sequences[span.seq_id].text, self.runner.cached_len(span.seq_id)
        if text.num_target > self._sequences[span.seq_id].num_cached:
            text.cut(self._sequences[span.seq_id].num_cached)
        kept = min(text.extend(tokens[start : start + num_text]), cached, len(text.token_ids) - 1)
        if kept < cached:
            self.runner.truncate(span.seq_id, kept)
        return text.token_ids[kept:]

    def _shorten(self, span: Span, piece: list[int]) -> list[int]:
        """The last draft tokens of a text, as many as it has target tokens."""
        over = len(piece) - self._num_text_rows(span)
        if over <= 0:
            return piece
        text = self._sequences[span.seq_id].text
        text.skip(len(text.token_ids) - len(piece), over)
        return piece[over:]

    def _lay_out(self, span: Span, tokens: Sequence[int], start: int, num_draft: int) -> Span:
        """The span of the draft model; notes which of its rows each row of `span` stands for."""
        sequence, num_text = self._sequences[span.seq_id], self._num_text_rows(span)
        pending, first = sequence.pending, sequence.num_rows
        parents = None if span.parents is None else list(range(-1, num_draft - 1))
        for i in range(span.num_tokens):
            token = tokens[start + i]
            if i < num_text:
                rows = range(num_draft) if i == num_text - 1 else _NO_ROWS
                pending.append(_PendingRow(token, None, rows))
                continue
            row = first + num_draft + i - num_text
            pending.append(_PendingRow(token, self._draft_ids.get(token, 0), range(row, row + 1)))
            if parents is not None and span.parents is not None:
                parent = span.parents[i]
                parents.append(pending[parent].rows[-1] if parent >= 0 else -1)
        num_rows = num_draft + span.num_tokens - num_text
        sequence.num_rows += num_rows
        return Span(span.seq_id, num_rows, parents, span.num_logits)
