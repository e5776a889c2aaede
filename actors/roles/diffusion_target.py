"""The role of a target that fills masks, block by block, instead of writing token by token.

It answers the same batches as `TargetRole` with verdicts of no token, one or several: those of the block that are
known up to the first mask, and stay. A pass reads whole blocks of text that have no rows yet and, behind them, the
states of the present block that are tested, as copies at the same positions (`BlockCopies`). The state after a block's
last one has the masks of the next block behind it: where it is accepted, the rows of the full block are kept, those of
its copy. Rows with masks among them never are.

Blocks are aligned to the start of the text: the first one to be filled has the end of the prompt in it. All requests
of a batch are in one pass. Every rank follows from the same logits, so that ranks agree without messages. A request
that comes again fills its last block anew from the prompt's tokens in it, and brings what its client lacks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actors.protocol.membership import Weights
from actors.protocol.messages import Admit, SamplingParams, Verdict, VerdictBatch, VerifyBatch, VerifyItem
from actors.roles.served_weights import ServedWeights
from actors.sampling.unmasking import MASKED, MaskedRows, State, UnmaskingStep, furthest, steps
from parallel.kv.pass_plan import BlockCopies, Span
from parallel.kv.prefix_tree import Text
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.transfers import upload

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
    keys: list[int] = field(default_factory=list)
    num_given: int = 0
    block_start: int = -1
    step: UnmaskingStep | None = None

    def extend(self, token_ids: Sequence[int], block: int) -> None:
        self.token_ids.extend(token_ids)
        for start in range(len(self.keys), len(self.token_ids) - block + 1, block):
            self.keys += [hash(tuple(self.token_ids[start : start + block]))] * block


@dataclass(frozen=True, slots=True)
class _FedRows:
    """What a pass computes for a request: rows of text, and of states of its block."""

    request_id: int
    text: Sequence[int]
    states: Sequence[State]


class DiffusionTargetRole:
    """`num_states` of a block, at most, are computed in a pass; 1 is the static decoder by itself. `threshold`: all
    masks are filled of which the model is that sure; 0: one at a time."""

    def __init__(
        self,
        runner: DecoderRunner,
        eos_token_ids: Sequence[int],
        *,
        is_lead: bool,
        num_states: int = 1,
        threshold: float = 0.0,
        weights: Weights | None = None,
    ) -> None:
        diffusion = runner.config.diffusion
        assert diffusion is not None, "this model fills no masks"
        self.runner = runner
        self.contexts: dict[int, FillingContext] = {}
        self._eos_token_ids = tuple(eos_token_ids)
        self._is_lead = is_lead
        self._mask_token, self._block = diffusion.mask_token, diffusion.block_size
        self._num_states, self._threshold = num_states, threshold
        self._weights = ServedWeights(runner, weights)

    def answer(self, batch: VerifyBatch) -> Iterator[VerdictBatch]:
        started = time.monotonic()
        hits = self._update(batch)
        committed = time.monotonic()
        refusal = ""
        if batch.weights is not None:
            self.forget()  # every row that is kept was made of the weights before
            refusal = self._weights.take(batch.weights)
        rows = [self._rows(item) for item in batch.items]
        verdicts, num_rows = self._fill([one for one in rows if one.text or one.states])
        yield VerdictBatch(
            batch.round,
            verdicts if self._is_lead else (),
            started,
            time.monotonic() if batch.items or batch.weights is not None else committed,
            num_tokens=num_rows,
            committed=committed,
            hits=hits,
            refusal=refusal,
        )

    def use_weights(self, weights: Weights) -> None:
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
        request_id, scope = admit.request_id, admit.rows_scope
        context = FillingContext(admit.epoch, [], admit.prompt_len, admit.sampling)
        context.extend(admit.token_ids, self._block)
        self.contexts[request_id] = context
        context.keys.append(_BEHIND)
        self.runner.open(request_id, None if scope is None else Text(context.keys, scope))
        context.keys.pop()
        context.num_given = self.runner.cached_len(request_id)
        return min(context.num_given, len(context.token_ids) - 1)

    def _whole(self, length: int) -> int:
        """Tokens of the whole blocks in a text of so many."""
        return length // self._block * self._block

    # --- passes -------------------------------------------------------------------------------------------------------

    def _rows(self, item: VerifyItem) -> _FedRows:
        """The text that is to be read, and, behind all of it, the states of the block."""
        context, request_id = self.contexts[item.request_id], item.request_id
        length = len(context.token_ids)
        context.num_given = min(length, max(context.num_given, self.runner.cached_len(request_id)) + item.num_tokens)
        text = context.token_ids[self.runner.cached_len(request_id) : self._whole(context.num_given)]
        if context.num_given < length:
            return _FedRows(request_id, text, ())
        start = self._whole(length)
        if context.block_start != start:
            context.block_start, context.step = start, None
        if context.step is not None:
            return _FedRows(request_id, text, context.step.guesses(self._num_states))
        given = context.token_ids[start : max(start, context.prompt_len)]
        return _FedRows(request_id, text, [(*given, *[MASKED] * (self._block - len(given)))])

    def _fill(self, rows: Sequence[_FedRows]) -> tuple[tuple[Verdict, ...], int]:
        """One pass over all these rows: what it makes certain, and how many rows it had."""
        if not rows:
            return (), 0
        token_ids, wanted = list[int](), list[int]()
        spans, masked, num_logits = list[Span](), list[MaskedRows](), 0
        for one in rows:
            copies, context = [*map(len, one.states)], self.contexts[one.request_id]
            self.runner.sequences.pending[one.request_id] = BlockCopies(len(one.text), copies, self._block)
            spans.append(Span(one.request_id, len(one.text) + sum(copies), None, sum(copies)))
            token_ids += one.text
            for state in one.states:
                token_ids += [self._mask_token if token == MASKED else token for token in state]
                masked.append(MaskedRows(self._block, state, context.block_start, context.sampling))
                wanted += [num_logits + offset for offset in masked[-1].offsets()]
                num_logits += len(state)
        logits = self.runner.forward(spans, token_ids).logits
        if len(wanted) < len(logits):
            logits = logits.index_select(0, upload(wanted, logits.device))
        found = steps(logits, masked, self._mask_token, self._threshold, self._eos_token_ids) if wanted else []
        verdicts, first = list[Verdict](), 0
        for one in rows:
            kept = range(0)
            if one.states:
                verdict, kept = self._go_on(one, found[first : first + len(one.states)])
                verdicts.append(verdict)
                first += len(one.states)
            self.runner.commit(one.request_id, [*range(len(one.text)), *kept])
        return tuple(verdicts), len(token_ids)

    def _go_on(self, rows: _FedRows, found: Sequence[UnmaskingStep | None]) -> tuple[Verdict, range]:
        """To the furthest state of the static decoder: the tokens up to the first mask of the one after it, and the
        rows of a block that is full."""
        context = self.contexts[rows.request_id]
        length, possible = len(context.token_ids), list[UnmaskingStep]()
        for step in found:
            if step is None:
                break
            possible.append(step)
        if not possible:
            return Verdict(rows.request_id, context.epoch, length, (), (), none_follows=True), range(0)
        best = furthest(possible)
        step, start = possible[best], context.block_start
        known = step.following[: step.following.index(MASKED)]
        kept = range(0)
        if (num_full := len(step.state) - self._block) > 0:
            before = len(rows.text) + sum(map(len, rows.states[:best]))
            kept = range(before, before + num_full)
        context.block_start, context.step = start + num_full, step.of_last_block()
        return Verdict(rows.request_id, context.epoch, length, (), known[length - start :]), kept


def copied_rows(block_size: int, num_states: int) -> int:
    """Rows of states of one request in a pass, at most: a block has as many as tokens, and one has the next block
    behind it."""
    return block_size * (min(num_states, block_size) + 1)
