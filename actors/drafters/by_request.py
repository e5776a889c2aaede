"""Base of drafters that run no passes: each request is drafted for by itself. Knows no method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from actors.drafters.interface import Capabilities, Context, Draft
from actors.protocol.messages import Commit


class RequestwiseDrafter(Protocol):
    """A drafter says what it keeps of a request by the functions that it replaces: as they stand, nothing."""

    capabilities: Capabilities

    def open(self, context: Context) -> None:
        """A request arrived, or came back after a preemption."""

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Read prompts and what was generated before a preemption; for a drafter that says so in `capabilities`."""
        for context in contexts:
            self._read(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        """The verdict on the last draft; without it the next proposal reads the text."""

    def truncate(self, context: Context) -> None:
        """Provisional text was taken back."""

    def release(self, request_id: int) -> None:
        """The request ended."""

    def _read(self, context: Context) -> object:
        """The text of a request, as far as it has not been read."""

    @abstractmethod
    def _propose(self, context: Context, budget: int) -> Draft:
        """One draft of at most `budget` tokens."""
