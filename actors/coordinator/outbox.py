"""Records that one role has yet to be sent: requests admitted, tokens committed, requests released.

It neither sends records nor decides when.
"""

from __future__ import annotations

from dataclasses import replace

from actors.coordinator.sequence import Sequence
from actors.protocol.messages import Admit, Commit


class Outbox:
    """`known` are the requests that the role has been admitted to, or will be with the next batch; `partial` maps those
    whose text has not been sent to its end to the tokens that have."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self._admits: list[Admit] = []
        self._commits: dict[int, Commit] = {}
        self._last: list[Commit] = []
        self._releases: list[int] = []
        self.partial: dict[int, int] = {}

    def admit(self, sequence: Sequence, first: int | None = None) -> None:
        """Send a request; if only its `first` tokens, `extend` sends the rest."""
        self.release(sequence.request_id)
        if first is not None and first < sequence.prefix_len:
            self.partial[sequence.request_id] = first
        self.known.add(sequence.request_id)
        self._admits.append(
            Admit(
                sequence.request_id,
                sequence.epoch,
                tuple(sequence.token_ids[:first]),
                sequence.prompt_len,
                sequence.request.sampling,
                sequence.num_admissions,
                sequence.request.drafter,
                sequence.request.scope,
                sequence.request.reference,
                sequence.request.grammar,
                sequence.request.cache_salt if sequence.shares_rows else None,
                sequence.request.logprobs,
                sequence.logprobs.prompt_asked(sequence.num_generated),
                sequence.request.source,
                sequence.request.memory_scope,
            )
        )
        sequence.num_admissions += 1

    def extend(self, sequence: Sequence, count: int) -> None:
        """Send the next tokens of a partial text."""
        start = self.partial.pop(sequence.request_id)
        end = start + count
        if end < sequence.prefix_len:
            self.partial[sequence.request_id] = end
        chunk = tuple(sequence.token_ids[start:end])
        self._commits[sequence.request_id] = Commit(sequence.request_id, sequence.epoch, start, (), chunk)

    def commit(self, commit: Commit) -> None:
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
        unsent = [admit for admit in self._admits if admit.request_id != request_id]
        if len(unsent) == len(self._admits):
            self._releases.append(request_id)
        self._admits = unsent

    def end(self, request_id: int) -> None:
        """Release a request, but send its last commit: the rows of its text may serve another."""
        last = self._commits.get(request_id)
        self.release(request_id)
        if last is not None:
            self._last.append(last)

    def flush(self) -> tuple[tuple[Admit, ...], tuple[Commit, ...], tuple[int, ...]]:
        """Everything unsent: (admits, commits, releases)."""
        unsent = tuple(self._admits), (*self._last, *self._commits.values()), tuple(self._releases)
        self._admits, self._commits, self._last, self._releases = [], {}, [], []
        return unsent

    @property
    def is_due(self) -> bool:
        """Whether there is something to send without an order; commits alone wait for the next one."""
        return bool(self._admits or self._releases)
