"""The level beneath a level of a cascade, as the upper one sees it: told of text, asked for drafts, kept account of.

It is spoken to in the records the coordinator uses, so a level in the same process and one on ranks of its own differ
only in the `ChildPort` that carries them. The text it is told is provisional: what the level above takes back, it
takes back too, by a `Commit` whose prefix lies below the text it knows. Knows no model and no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.drafters.interface import Context, Drafter
from actors.protocol.messages import Admit, Commit, DraftBatch, DraftOrder, LevelWork, Proposal, ProposalBatch
from actors.roles.draft import DraftRole
from actors.sampling.noise import Stream as NoiseStream
from actors.sampling.noise import noise_key


class ChildPort(Protocol):
    """Carries records to the level beneath and back."""

    life: int
    """Changes when the level has lost what it knew."""
    has_own_lane: bool
    """Whether it works elsewhere, at times of its own."""
    has_news: bool
    """Whether it has said something that was not collected yet."""

    def post(self, batch: DraftBatch) -> None:
        """Send; at most one answer is awaited at a time."""

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch] | None:
        """The answer to the batch of this round, None if it is not there (yet); empty from a level that is lost."""

    def listen(self) -> None:
        """Hear whether the level was lost, or has come back."""


class LocalChild:
    """The level lives in this process and drafts when it is asked."""

    life = 0
    has_own_lane = False
    has_news = True

    def __init__(self, drafter: Drafter) -> None:
        self._role = DraftRole(drafter)
        self._answer: list[ProposalBatch] = []

    def post(self, batch: DraftBatch) -> None:
        self._answer = list(self._role.answer(batch))

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch]:
        return self._answer

    def listen(self) -> None:
        """It is never lost."""


@dataclass(slots=True)
class _Told:
    """What the level beneath knows of one request: `length` tokens, of which the first `valid` still stand.

    `path` is what this level accepted of its last draft; `asked` says that it was asked at this very text;
    `num_admissions` counts how often it was told of the request from the start.
    """

    context: Context
    length: int = 0
    valid: int = 0
    path: tuple[int, ...] = ()
    asked: bool = False
    num_admissions: int = 0


class ChildLevel:
    """Keeps the level beneath up to date, asks it, and counts its work under its `name`."""

    def __init__(self, port: ChildPort, name: str, num_draft_tokens: int) -> None:
        self.name = name
        self.num_draft_tokens = num_draft_tokens
        self._port = port
        self._round = 0
        self._awaited: int | None = None
        self._life = port.life
        self._told: dict[int, _Told] = {}
        self._releases: list[int] = []
        self._work: list[LevelWork] = []

    def open(self, context: Context) -> None:
        self.release(context.request_id)
        self._told[context.request_id] = _Told(context)

    def release(self, request_id: int) -> None:
        told = self._told.pop(request_id, None)
        if told is not None and told.length:
            self._releases.append(request_id)

    def cut(self, request_id: int, length: int) -> None:
        """The text behind the first `length` tokens does not stand."""
        told = self._told[request_id]
        told.valid = min(told.valid, length)
        told.path = told.path[: max(0, length - told.length)]

    def accepted(self, request_id: int, path: tuple[int, ...]) -> None:
        """This level's ruling on the last draft, whose tokens now follow the text it was made for."""
        self._told[request_id].path = path

    def post(self, asked: Iterable[tuple[int, Sequence[int], int]]) -> None:
        """Tell and ask, as (request, its text, draft tokens wanted); none wanted only brings it up to date."""
        self._port.listen()
        if self._port.life != self._life:  # it came back, and knows nothing
            self._life = self._port.life
            self._releases = []
            for told in self._told.values():
                told.length = 0
        admits, commits, orders = [], [], []
        for request_id, text, budget in asked:
            record = self._news(self._told[request_id], text)
            if isinstance(record, Admit):
                admits.append(record)
            elif record is not None:
                commits.append(record)
            self._told[request_id].asked = budget > 0
            orders.append(DraftOrder(request_id, budget))
        releases, self._releases = tuple(self._releases), []
        self._round += 1
        self._awaited = self._round
        self._port.post(DraftBatch(self._round, tuple(admits), tuple(commits), releases, tuple(orders)))

    def collect(self, *, wait: bool = True) -> dict[int, Proposal] | None:
        """What it drafted, by request; empty if it fell silent, None if nothing is there yet."""
        if self._awaited is None:
            return {}
        answer = self._port.collect(self._awaited, wait=wait)
        if answer is None and not wait:
            return None
        self._awaited = None
        for batch in answer or ():
            spans = ((batch.started, batch.finished), *(span[:2] for span in batch.ahead))
            seconds = sum(finished - started for started, finished in spans)
            shown = spans if self._port.has_own_lane else ()
            if batch.levels:
                self._work += batch.levels
                if shown:
                    self._work.append(LevelWork(self.name, spans=shown))
            elif batch.proposals:
                self._work.append(LevelWork(self.name, len(spans), seconds, spans=shown))
        return {proposal.request_id: proposal for batch in answer or () for proposal in batch.proposals}

    @property
    def is_awaited(self) -> bool:
        return self._awaited is not None

    @property
    def is_silent(self) -> bool:
        """It was asked, and has not said a word."""
        return self.is_awaited and not self._port.has_news

    def account(self) -> tuple[LevelWork, ...]:
        work, self._work = tuple(self._work), []
        return work

    def _news(self, told: _Told, text: Sequence[int]) -> Admit | Commit | None:
        """The record that brings the level beneath from what it was told to `text`."""
        context = told.context
        if not told.length:
            admission = noise_key(context.admission, NoiseStream.DRAFT, told.num_admissions)
            told.num_admissions += 1
            record: Admit | Commit | None = Admit(
                context.request_id, context.epoch, tuple(text), context.prompt_len, context.sampling, admission
            )
        else:
            start, path = told.length, told.path
            if told.valid < told.length:
                start, path = told.valid, ()
            elif len(text) == told.length:
                if not told.asked:
                    return None
                start, path = told.length - 1, ()  # its root again: a draft that nobody ruled on is taken back
            record = Commit(context.request_id, context.epoch, start, path, tuple(text[start:]), context.settled_len)
        told.length = told.valid = len(text)
        told.path = ()
        return record
