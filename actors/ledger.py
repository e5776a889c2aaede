"""What one role still has to be told: requests that came, what was committed, requests that ended.

Pure bookkeeping of records; it neither sends them nor knows when they are due.
"""

from __future__ import annotations

from dataclasses import replace

from actors.messages import Admit, Commit
from actors.sequence import Sequence


class Ledger:
    """What one role still has to be told, and which requests it knows."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._admits: list[Admit] = []
        self._commits: dict[int, Commit] = {}
        self._releases: list[int] = []

    def knows(self, request_id: int) -> bool:
        return request_id in self._known

    def admit(self, sequence: Sequence) -> None:
        self.release(sequence.request_id)
        self._known.add(sequence.request_id)
        self._admits.append(
            Admit(
                sequence.request_id,
                sequence.epoch,
                tuple(sequence.token_ids),
                sequence.prompt_len,
                sequence.request.sampling,
                sequence.num_admissions,
            )
        )
        sequence.num_admissions += 1

    def commit(self, record: Commit) -> None:
        if record.request_id not in self._known:
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
