"""The role of a target that fills masks, block by block, instead of writing token by token.

It answers the same batches as `TargetRole` with verdicts of no token, one or several: those of the block that are
known up to the first mask, and stay. A pass has the states of the present block that are tested, as copies at the same
positions (`BlockCopies`). All requests of a batch are in one pass, if it has room for them. Every rank follows from the
same logits, so that ranks agree without messages. A request that comes again fills its last block anew, and brings what
its client lacks.

A pass has at most `max_rows` rows. Guessed states are dropped first, of all requests alike: without them a pass fills
fewer masks and no other ones. Where one state of each request is too much, the round has several passes, so that no
request waits for another.

`BlockwiseTargetRole` is for models whose blocks see themselves and the blocks before. Where rows see the whole text it
is `WholeTextTargetRole` (`whole_text_target.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from actors.protocol.membership import Weights
from actors.protocol.messages import Admit, SamplingParams, Verdict, VerdictBatch, VerifyBatch, VerifyItem
from actors.roles.served_weights import ServedWeights
from actors.sampling.unmasking import MASKED, MaskedRows, State, UnmaskingStep, accepted, steps
from parallel.kv.pass_plan import BlockCopies, Span
from parallel.kv.prefix_tree import Text
from parallel.runtime.decoder_runner import DecoderRunner

_BEHIND = -1
"""Key of what follows the whole blocks, so that rows of all of them may be known; no hash is -1."""


@dataclass(slots=True, eq=False)
class FillingContext:
    """A request: its committed text, of which passes may read the first `num_given` tokens. `step` is what the last
    pass said of the block at `block_start`; None before the block's first pass.

    `keys` are what the text's rows are known by, instead of its tokens: a number of its whole block for each, since a
    row depends on all of that, and none for the last block while it is not whole."""

    epoch: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    num_states: int
    """States of a block in a pass, at most; 1 for a request that does not speculate."""
    keys: list[int] = field(default_factory=list)
    num_given: int = 0
    block_start: int = -1
    step: UnmaskingStep | None = None

    def extend(self, token_ids: Sequence[int], block: int) -> None:
        self.token_ids.extend(token_ids)
        for start in range(len(self.keys), len(self.token_ids) - block + 1, block):
            self.keys += [hash(tuple(self.token_ids[start : start + block]))] * block


@dataclass(frozen=True, slots=True)
class FedRows:
    """What a pass computes for a request: rows of text, then a copy for each state of its block."""

    request_id: int
    block: int
    """Rows see each other within so many, and what is before these."""
    text: Sequence[int]
    states: Sequence[State]
    before: Sequence[int] = ()
    """Tokens with which every copy begins; its state follows, and masks up to the position `end`."""
    end: int = 0
    behind: int = 0
    """Committed rows that are not before the copies: the last ones."""
    kept: Sequence[int] | None = None
    """The rows that are kept; None: those of the text, and of a block that is full in the state that is accepted."""
    in_order: bool = False
    """The first mask is the one to be filled."""

    def num_rows(self, num_states: int) -> int:
        """Rows of the pass with so many of the states, at most."""
        return len(self.text) + sum([max(self.block, len(state)) for state in self.states[:num_states]])


class DiffusionTargetRole(ABC):
    """A pass has at most `max_rows` rows, which is no less than one request may need, and `num_states` of a block, at
    most; 1 is the decoder by itself. `threshold`: all masks are filled of which the model is that sure; 0: one at a
    time."""

    def __init__(
        self,
        runner: DecoderRunner,
        eos_token_ids: Sequence[int],
        *,
        is_lead: bool,
        max_rows: int,
        num_states: int = 1,
        threshold: float = 0.0,
        weights: Weights | None = None,
    ) -> None:
        diffusion = runner.config.diffusion
        assert diffusion is not None, "this model fills no masks"
        self.runner = runner
        self.contexts: dict[int, FillingContext] = {}
        self._eos_token_ids = tuple(eos_token_ids)
        self._is_lead, self._max_rows = is_lead, max_rows
        self._mask_token, self._block, self._shift = diffusion.mask_token, diffusion.block_size, diffusion.is_shifted
        self._num_states, self._threshold = num_states, threshold
        self._weights = ServedWeights(runner, weights)
        self._num_guessed = self._num_accepted = 0

    def answer(self, batch: VerifyBatch) -> Iterator[VerdictBatch]:
        started = time.monotonic()
        hits = self._update(batch)
        committed = time.monotonic()
        refusal = ""
        if batch.weights is not None:
            self.forget()  # every row that is kept was made of the weights before
            refusal = self._weights.take(batch.weights)
        rows = [self._rows(item) for item in batch.items]
        self._num_guessed = self._num_accepted = 0
        verdicts, num_rows = list[Verdict](), 0
        for part in self._passes([one for one in rows if one.text or one.states]):
            found, count = self._fill(part)
            verdicts += found
            num_rows += count
        yield VerdictBatch(
            batch.round,
            tuple(verdicts) if self._is_lead else (),
            started,
            time.monotonic() if batch.items or batch.weights is not None else committed,
            num_tokens=num_rows,
            committed=committed,
            hits=hits,
            refusal=refusal,
            guesses=(self._num_guessed, self._num_accepted),
        )

    def rejoin(self, weights: Weights | None) -> None:
        if weights is not None:
            self._weights.use(weights)

    def forget(self) -> None:
        """Drop every request and its rows."""
        for request_id in self.contexts:
            self.runner.close(request_id)
        self.contexts.clear()
        self.runner.forget_texts()

    # --- texts --------------------------------------------------------------------------------------------------------

    def _update(self, batch: VerifyBatch) -> tuple[tuple[int, int], ...]:
        """Bring requests up to the batch: (request, rows it had) of those that are admitted with some."""
        for commit in batch.commits:
            context = self.contexts[commit.request_id]
            assert (commit.epoch, commit.prefix_len) == (context.epoch, len(context.token_ids))
            context.extend(commit.token_ids, self._block)
        for request_id in batch.releases:
            del self.contexts[request_id]
            self.runner.close(request_id)
        found = [(admit.request_id, self._admit(admit)) for admit in batch.admits]
        return tuple([hit for hit in found if hit[1]])

    def _admit(self, admit: Admit) -> int:
        """Returns how many rows of the text there are already, short of its last token."""
        num_states = self._num_states if admit.speculates else 1
        context = FillingContext(admit.epoch, [], admit.prompt_len, admit.sampling, num_states)
        context.extend(admit.token_ids, self._block)
        self.contexts[admit.request_id] = context
        self._open(admit, context)
        context.num_given = self.runner.cached_len(admit.request_id)
        return min(context.num_given, len(context.token_ids) - 1)

    @abstractmethod
    def _open(self, admit: Admit, context: FillingContext) -> None:
        """Open the request at the runner."""
        ...

    @abstractmethod
    def _size_at(self, context: FillingContext, start: int) -> int:
        """Tokens of the block that starts at this position."""
        ...

    # --- passes -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _rows(self, item: VerifyItem) -> FedRows:
        """The text that is to be read, and, behind all of it, the states of the block."""
        ...

    def _passes(self, rows: Sequence[FedRows]) -> Iterator[Sequence[FedRows]]:
        """The rows of each pass: one state of each request, and guesses as far as there is room. Text and state of a
        request are in two passes where one is too small for them."""
        part, num_rows = list[FedRows](), 0
        for whole in rows:
            fits = whole.num_rows(1) <= self._max_rows
            for one in [whole] if fits else [replace(whole, states=()), replace(whole, text=())]:
                if part and num_rows + one.num_rows(1) > self._max_rows:
                    yield self._with_guesses(part)
                    part, num_rows = [], 0
                part.append(one)
                num_rows += one.num_rows(1)
        if part:
            yield self._with_guesses(part)

    def _with_guesses(self, part: Sequence[FedRows]) -> Sequence[FedRows]:
        """The states that a pass has room for, as many of each request."""
        most = max([len(one.states) for one in part])
        while most > 1 and sum([one.num_rows(most) for one in part]) > self._max_rows:
            most -= 1
        return [replace(one, states=one.states[:most]) for one in part]

    def _fill(self, rows: Sequence[FedRows]) -> tuple[list[Verdict], int]:
        """One pass over all these rows: what it makes certain, and how many rows it had."""
        spans, masked, token_ids = list[Span](), list[MaskedRows](), list[int]()
        for one in rows:
            fed, wanted, copies, start = [*one.text], list[int](), list[int](), len(masked)
            masked += [self._masked(one, state) for state in one.states]
            for own in masked[start:]:
                copy = [*one.before, *[self._mask_token if token == MASKED else token for token in own.state]]
                copy += [self._mask_token] * (one.end - own.first - len(own.state))
                wanted += [len(fed) + len(one.before) + offset - self._shift for offset in own.offsets()]
                fed += copy
                copies.append(len(copy))
            self.runner.sequences.pending[one.request_id] = BlockCopies(len(one.text), copies, one.block, one.behind)
            spans.append(Span(one.request_id, len(fed), wanted=wanted))
            token_ids += fed
        logits = self.runner.forward(spans, token_ids).logits
        found = steps(logits, masked, self._mask_token, self._threshold, self._eos_token_ids) if masked else []
        verdicts, first = list[Verdict](), 0
        for one in rows:
            kept: Sequence[int] = range(0)
            if one.states:
                verdict, kept = self._go_on(one, found[first : first + len(one.states)])
                verdicts.append(verdict)
                first += len(one.states)
            self.runner.commit(one.request_id, [*range(len(one.text)), *kept] if one.kept is None else one.kept)
        return verdicts, len(token_ids)

    def _masked(self, rows: FedRows, state: State) -> MaskedRows:
        context, start = self.contexts[rows.request_id], self.contexts[rows.request_id].block_start
        size = self._size_at(context, start)
        num_full = size if len(state) > size else 0
        num_next = self._num_next(context, start + num_full)
        return MaskedRows(num_full, num_next, state, start, context.sampling, rows.in_order)

    def _num_next(self, context: FillingContext, start: int) -> int:
        """Masks that a pass has behind the block at `start` once it is full: those of the block after it, of which it
        is the first pass."""
        return self._size_at(context, start + self._size_at(context, start))

    def _go_on(self, rows: FedRows, found: Sequence[UnmaskingStep | None]) -> tuple[Verdict, range]:
        """Advances to the furthest state that the decoder would have reached; returns the tokens up to the first mask
        of the state after it, and the rows of a block that is full."""
        context = self.contexts[rows.request_id]
        length, possible = len(context.token_ids), list[UnmaskingStep]()
        for step in found:
            if step is None:
                break
            possible.append(step)
        if not possible:
            return Verdict(rows.request_id, context.epoch, length, (), (), none_follows=True), range(0)
        path = accepted(possible)
        best = path[-1]
        self._num_guessed += len(found) - 1
        self._num_accepted += len(path) - 1
        step, start = possible[best], context.block_start
        known = tuple(takewhile(lambda token: token != MASKED, step.following))
        before = len(rows.text) + sum(map(len, rows.states[:best]))
        context.block_start, context.step = start + step.num_full, step.of_last_block()
        kept = range(before, before + step.num_full)
        return Verdict(rows.request_id, context.epoch, length, (), known[length - start :]), kept


class BlockwiseTargetRole(DiffusionTargetRole):
    """Rows see their own block and those before: kept rows are exact, and shared by texts that begin alike.

    A pass reads whole blocks of text that have no rows yet. The state after a block's last one has the masks of the
    next block behind it: where it is accepted, the rows of the full block are kept, those of its copy. Rows with masks
    among them never are. Blocks are aligned to the start of the text: the first one to be filled has the end of the
    prompt in it.
    """

    def _open(self, admit: Admit, context: FillingContext) -> None:
        scope = admit.rows_scope
        context.keys.append(_BEHIND)
        self.runner.open(admit.request_id, None if scope is None else Text(context.keys, scope))
        context.keys.pop()

    def _size_at(self, context: FillingContext, start: int) -> int:  # noqa: ARG002  all blocks are alike
        return self._block

    def _whole(self, length: int) -> int:
        """Tokens of the whole blocks in a text of so many."""
        return length // self._block * self._block

    def _rows(self, item: VerifyItem) -> FedRows:
        context, request_id = self.contexts[item.request_id], item.request_id
        length = len(context.token_ids)
        context.num_given = min(length, max(context.num_given, self.runner.cached_len(request_id)) + item.num_tokens)
        text = context.token_ids[self.runner.cached_len(request_id) : self._whole(context.num_given)]
        if context.num_given < length:
            return FedRows(request_id, self._block, text, ())
        start = self._whole(length)
        if context.block_start != start:
            context.block_start, context.step = start, None
        if context.step is not None:
            return FedRows(request_id, self._block, text, context.step.guesses(context.num_states))
        given = context.token_ids[start : max(start, context.prompt_len)]
        return FedRows(request_id, self._block, text, [(*given, *[MASKED] * (self._block - len(given)))])


def copied_rows(block_size: int, num_states: int) -> int:
    """Rows of states of one request in a pass, at most: a block has as many as tokens, and one has the next block
    behind it."""
    return block_size * (min(num_states, block_size) + 1)
