"""Records that one role has yet to be sent: requests admitted, tokens committed, requests released.

It neither sends records nor decides when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.protocol.messages import Admit, Commit
from actors.protocol.records import replace

if TYPE_CHECKING:
    from actors.coordinator.sequence import Sequence


def admission_of(sequence: Sequence, first: int | None = None) -> Admit:
    """What opens a request at a role with its text, or the `first` tokens of that."""
    request, logprobs = sequence.request, sequence.logprobs
    return Admit(
        request_id=sequence.request_id,
        epoch=sequence.epoch,
        token_ids=tuple(sequence.token_ids[:first]),
        prompt_len=sequence.prompt_len,
        sampling=request.sampling,
        admission=sequence.num_admissions,
        drafter=request.drafter,
        scope=request.scope,
        reference=request.reference,
        grammar=request.grammar,
        cache_salt=request.cache_salt if sequence.shares_rows else None,
        logprobs=request.logprobs,
        prompt_logprobs=logprobs.prompt_asked(sequence.num_generated) if logprobs is not None else None,
        source=request.source,
        memory_scope=request.memory_scope,
    )


class Outbox:
    """What has happened since the last batch to the role."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        """The requests that were admitted at the role, or will be with the next batch."""
        self.partial: dict[int, int] = {}
        """Those of them whose text has not been sent to its end, and the tokens that have."""
        self.admits: dict[int, Admit] = {}
        """Those that the next batch admits."""
        self._commits: dict[int, Commit] = {}
        self._last: list[Commit] = []  # of requests that ended
        self._releases: list[int] = []

    def admit(self, sequence: Sequence, first: int | None = None) -> None:
        """Send a request; if only its `first` tokens, `extend` sends the rest."""
        self.open(admission_of(sequence, first))
        sequence.num_admissions += 1
        if first is not None and first < sequence.prefix_len:
            self.partial[sequence.request_id] = first

    def open(self, admit: Admit) -> None:
        """Send this record; what the role knows of the request is released."""
        self.release(admit.request_id)
        self.known.add(admit.request_id)
        self.admits[admit.request_id] = admit

    def extend(self, sequence: Sequence, count: int) -> None:
        """Send the next tokens of a partial text."""
        start = self.partial.pop(sequence.request_id)
        end = start + count
        if end < sequence.prefix_len:
            self.partial[sequence.request_id] = end
        chunk = tuple(sequence.token_ids[start:end])
        self._commits[sequence.request_id] = Commit(sequence.request_id, sequence.epoch, start, (), chunk)

    def add_commit(self, commit: Commit) -> None:
        """The text of a request grew."""
        request_id = commit.request_id
        if request_id not in self.known or request_id in self.partial:
            return
        last = self._commits.get(request_id)
        if last is not None:
            assert not commit.path, "a path follows an order, and an order flushes what was committed before"
            commit = replace(last, token_ids=last.token_ids + commit.token_ids)  # one record, however long unsent
        self._commits[request_id] = commit

    def release(self, request_id: int) -> None:
        if request_id not in self.known:
            return
        self.known.discard(request_id)
        self.partial.pop(request_id, None)
        self._commits.pop(request_id, None)
        if self.admits.pop(request_id, None) is None:
            self._releases.append(request_id)

    def end(self, request_id: int) -> None:
        """Release a request, but send its last commit: the rows of its text may serve another."""
        last = self._commits.get(request_id)
        self.release(request_id)
        if last is not None:
            self._last.append(last)

    def flush(self) -> tuple[tuple[Admit, ...], tuple[Commit, ...], tuple[int, ...]]:
        """Everything unsent: (admits, commits, releases)."""
        unsent = tuple(self.admits.values()), (*self._last, *self._commits.values()), tuple(self._releases)
        self.admits, self._commits, self._last, self._releases = {}, {}, [], []
        return unsent

    @property
    def is_due(self) -> bool:
        """Whether there is something to send without an order; commits alone wait for the next one."""
        return bool(self.admits or self._releases)
