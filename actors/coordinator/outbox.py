"""What one role still has to be told: requests that came, what was committed, requests that ended.

Pure bookkeeping of records; it neither sends them nor knows when they are due.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from actors.coordinator.sequence import Sequence
from actors.protocol.messages import Admit, Commit


class Outbox:
    """What one role still has to be told, and which requests it knows."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._admits: list[Admit] = []
        self._commits: dict[int, Commit] = {}
        self._releases: list[int] = []
        self._told: dict[int, int] = {}  # tokens that were told of those texts that are told piece by piece

    @property
    def unfinished(self) -> Collection[int]:
        """Requests that are known but whose text was not told to its end."""
        return self._told.keys()

    def knows(self, request_id: int) -> bool:
        return request_id in self._known

    def admit(self, sequence: Sequence, first: int | None = None) -> None:
        """Tell of a request; if only of its `first` tokens, `go_on` tells the rest."""
        self.release(sequence.request_id)
        if first is not None and first < sequence.prefix_len:
            self._told[sequence.request_id] = first
        self._known.add(sequence.request_id)
        self._admits.append(
            Admit(
                sequence.request_id,
                sequence.epoch,
                tuple(sequence.token_ids[:first]),
                sequence.prompt_len,
                sequence.request.sampling,
                sequence.num_admissions,
            )
        )
        sequence.num_admissions += 1

    def go_on(self, sequence: Sequence, count: int) -> None:
        """Tell the next tokens of a text that was begun."""
        start = self._told.pop(sequence.request_id)
        end = start + count
        if end < sequence.prefix_len:
            self._told[sequence.request_id] = end
        piece = tuple(sequence.token_ids[start:end])
        self._commits[sequence.request_id] = Commit(sequence.request_id, sequence.epoch, start, (), piece)

    def commit(self, record: Commit) -> None:
        if record.request_id not in self._known or record.request_id in self._told:
            return
        last = self._commits.get(record.request_id)
        if last is not None and not record.path:
            # What nobody drafted for only lengthens the text: one record per request, however long nobody is told.
            record = replace(last, token_ids=last.token_ids + record.token_ids)
        else:
            assert last is None, "a path is only known once its proposal was ordered, which told all before it"
        self._commits[record.request_id] = record

    def release(self, request_id: int) -> None:
        if request_id not in self._known:
            return
        self._known.discard(request_id)
        self._told.pop(request_id, None)
        self._commits.pop(request_id, None)
        told = all(record.request_id != request_id for record in self._admits)
        self._admits = [record for record in self._admits if record.request_id != request_id]
        if told:
            self._releases.append(request_id)

    def flush(self) -> tuple[tuple[Admit, ...], tuple[Commit, ...], tuple[int, ...]]:
        news = tuple(self._admits), tuple(self._commits.values()), tuple(self._releases)
        self._admits, self._commits, self._releases = [], {}, []
        return news

    @property
    def has_news(self) -> bool:
        return bool(self._admits or self._releases)
