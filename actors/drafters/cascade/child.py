"""The child level of a cascade level, as its parent sees it: its text, the orders sent to it, and its work.

Parent and child exchange the records that the coordinator exchanges with a drafter, so a child in the same process and
one on ranks of its own differ only in the `ChildPort` that carries them. The text of the child is provisional: the
parent takes text back by a `Commit` whose prefix is shorter than the child's text. Knows no model and no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.drafters.interface import Context, Drafter
from actors.protocol.messages import (
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    LevelWork,
    Proposal,
    ProposalBatch,
    TopTokens,
)
from actors.roles.draft import DraftRole
from actors.sampling.noise import NoiseStream, noise_key


class ChildPort(Protocol):
    """Carries records to the child level and back."""

    @property
    def epoch(self) -> int:
        """Changes when the child has lost its state."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether the child runs on ranks of its own, at times of its own."""
        ...

    @property
    def has_records(self) -> bool:
        """Whether a record from the child has arrived that was not read yet."""
        ...

    def post(self, batch: DraftBatch) -> None:
        """Send; at most one answer is awaited at a time."""

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch] | None:
        """The answer to the batch of this round; None if it is not complete yet, empty if the child is lost."""
        ...

    def poll(self) -> None:
        """Read records that report the loss or the return of the child."""

    def forget(self) -> None:
        """Every request ended; the next ones come in another epoch of the parent."""


class LocalChild:
    """The child level runs in this process and drafts on demand."""

    epoch = 0
    is_remote = False
    has_records = True

    def __init__(self, drafter: Drafter) -> None:
        self._role = DraftRole(drafter)
        self._answer: list[ProposalBatch] = []

    def post(self, batch: DraftBatch) -> None:
        self._answer = list(self._role.answer(batch))

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch]:
        return self._answer

    def poll(self) -> None:
        """Nothing to do: a child in the same process cannot be lost alone."""

    def forget(self) -> None:
        self._role.forget()


@dataclass(slots=True)
class _ChildText:
    """The child's text of one request: `length` tokens, of which the first `valid` still stand."""

    context: Context
    length: int = 0
    valid: int = 0
    path: tuple[int, ...] = ()  # accepted nodes of its last draft
    ordered: bool = False  # a draft was ordered at exactly this text
    num_admissions: int = 0


class ChildLevel:
    """Keeps the child level up to date, orders its drafts, and counts its work under `name`.

    `num_draft_tokens` bounds the tokens of one of its drafts.
    """

    def __init__(self, port: ChildPort, name: str, num_draft_tokens: int) -> None:
        self.name = name
        self.num_draft_tokens = num_draft_tokens
        self._port = port
        self._round = 0
        self._awaited: int | None = None
        self._epoch = port.epoch
        self._texts: dict[int, _ChildText] = {}
        self._releases: list[int] = []
        self._top_tokens: list[TopTokens] = []
        self._work: list[LevelWork] = []

    @property
    def is_awaited(self) -> bool:
        """Whether an answer of the child is outstanding."""
        return self._awaited is not None

    @property
    def is_silent(self) -> bool:
        """Whether an answer is outstanding and no record of it has arrived."""
        return self.is_awaited and not self._port.has_records

    def open(self, context: Context) -> None:
        """A request arrived."""
        self.release(context.request_id)
        self._texts[context.request_id] = _ChildText(context)

    def cut(self, request_id: int, length: int) -> None:
        """The parent took back all but the first `length` tokens."""
        text = self._texts[request_id]
        text.valid = min(text.valid, length)
        text.path = text.path[: max(0, length - text.length)]

    def accept(self, request_id: int, path: tuple[int, ...]) -> None:
        """The parent accepted this path of the child's last draft; its tokens follow the text of that draft."""
        self._texts[request_id].path = path

    def add_top_tokens(self, top_tokens: TopTokens | None) -> None:
        """The child learns them with the next record."""
        if top_tokens is not None:
            self._top_tokens.append(top_tokens)

    def release(self, request_id: int) -> None:
        """The request ended."""
        text = self._texts.pop(request_id, None)
        if text is not None and text.length:
            self._releases.append(request_id)

    def forget(self) -> None:
        """Every request ended; a child elsewhere begins another epoch too, without any."""
        self._releases = []
        self._port.forget()

    def post(self, orders: Iterable[tuple[int, Sequence[int], int]]) -> None:
        """Send text and orders as (request, its text, draft tokens); 0 tokens only bring the child up to date."""
        self._port.poll()
        if self._port.epoch != self._epoch:  # the child came back without state
            self._epoch = self._port.epoch
            self._releases = []
            for text in self._texts.values():
                text.length = 0
        admits, commits, sent = [], [], []
        for request_id, token_ids, num_tokens in orders:
            record = self._update(self._texts[request_id], token_ids)
            if isinstance(record, Admit):
                admits.append(record)
            elif record is not None:
                commits.append(record)
            self._texts[request_id].ordered = num_tokens > 0
            sent.append(DraftOrder(request_id, num_tokens))
        releases, self._releases = tuple(self._releases), []
        self._round += 1
        self._awaited = self._round
        top_tokens, self._top_tokens = tuple(self._top_tokens), []
        batch = DraftBatch(self._round, tuple(admits), tuple(commits), releases, tuple(sent), top_tokens=top_tokens)
        self._port.post(batch)

    def collect(self, *, wait: bool = True) -> dict[int, Proposal] | None:
        """The child's drafts by request; empty if it is lost, None without `wait` if they are not there yet."""
        if self._awaited is None:
            return {}
        answer = self._port.collect(self._awaited, wait=wait)
        if answer is None and not wait:
            return None
        self._awaited = None
        for batch in answer or ():
            self._count(batch)
        return {proposal.request_id: proposal for batch in answer or () for proposal in batch.proposals}

    def level_stats(self) -> tuple[LevelWork, ...]:
        """Work of the child, and of the levels below it, since the last call."""
        work, self._work = tuple(self._work), []
        return work

    def _count(self, batch: ProposalBatch) -> None:
        spans = ((batch.started, batch.finished), *(span[:2] for span in batch.ahead))
        seconds = sum(finished - started for started, finished in spans)
        shown = spans if self._port.is_remote else ()
        if batch.levels:
            self._work += batch.levels
            if shown:
                self._work.append(LevelWork(self.name, spans=shown))
        elif batch.proposals:
            self._work.append(LevelWork(self.name, len(spans), seconds, spans=shown))

    def _update(self, text: _ChildText, token_ids: Sequence[int]) -> Admit | Commit | None:
        """The record that brings the child's text to `token_ids`; None if it is there."""
        context, record = text.context, None
        if not text.length:
            admission = noise_key(context.admission, NoiseStream.DRAFT, text.num_admissions)
            text.num_admissions += 1
            record = Admit(
                context.request_id,
                context.epoch,
                tuple(token_ids),
                context.prompt_len,
                context.sampling,
                admission,
                memory_scope=context.scope,
                reference=context.reference,
                source=context.source,
            )
        elif text.valid < text.length:
            record = _commit(context, text.valid, (), token_ids)
        elif len(token_ids) > text.length:
            # The last token is the root of the next draft: its row is not kept, though a cut may have made it one of
            # the path's.
            path = text.path[: len(token_ids) - text.length - 1]
            record = _commit(context, text.length, path, token_ids)
        elif text.ordered:  # the root again: a draft without a verdict is taken back
            record = _commit(context, text.length - 1, (), token_ids)
        if record is not None:
            text.length = text.valid = len(token_ids)
            text.path = ()
        return record


def _commit(context: Context, start: int, path: tuple[int, ...], token_ids: Sequence[int]) -> Commit:
    """`token_ids` from `start` on replace what the child has there."""
    return Commit(context.request_id, context.epoch, start, path, tuple(token_ids[start:]), context.settled_len)
