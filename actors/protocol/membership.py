"""The words of life and death: who is there, who is gone, and how a role comes together again.

Standard library only, every record frozen. Every rank says four times a second, from a thread of its own, that it is
alive and what it works on; that tells a process that hangs from a pass that takes long, and a record that was lost
from one that is still being answered.

Glossary
    incarnation     counts the processes that have played one rank, or the coordinator; a late word of an older one
                    is nobody's word
    epoch           of a role: counts how often its ranks came together. Every epoch starts with empty contexts and,
                    where there are several ranks, with a process group of its own
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

HEARTBEAT_S = 0.25
"""Between two heartbeats."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A rank to the coordinator, or the coordinator to its client (`role` "coordinator", `waiting` until it serves).

    `epoch` is the last one the rank was told to join and `waiting` says that it is not, or no longer, part of it.
    `taken` is the round of the last batch it took, `busy` that it still works on it.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    epoch: int = 0
    waiting: bool = True
    taken: int = 0
    busy: bool = False
    at_change: bool = False
    """Sent because something changed, and not because it was time."""

    @property
    def identity(self) -> str:
        return identity_of(self.role, self.rank)


def identity_of(role: str, rank: int) -> str:
    return role if role == "coordinator" else f"{role}-{rank}"


@dataclass(frozen=True, slots=True)
class Recall:
    """Coordinator to the ranks of a role: leave every epoch before this one, and wait for `Join`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Join:
    """Coordinator to the ranks of a role, once all of them wait: meet at `store`, forget everything, be `Ready`.

    `round` is that of the last batch of the epochs before.
    """

    epoch: int
    round: int
    store: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its part and listens. `facts` are measured at start: bytes, slots, device, versions."""

    role: str
    rank: int
    facts: dict[str, Any]
    epoch: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """A client announces itself; answered by one `Ready` per rank once all ranks are there."""


@dataclass(frozen=True, slots=True)
class RankLost:
    """Who watches the processes to the coordinator: this one has ended."""

    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Silent:
    """The coordinator to who watches the processes: this one hangs.

    Without an `incarnation`: nobody who plays this rank was heard of for too long, since the coordinator began or the
    last one was lost. That is said again and again while it lasts; who watches knows who is about to start.
    """

    role: str
    rank: int
    incarnation: int | None = None
    pid: int = 0


@dataclass(frozen=True, slots=True)
class RoleLost:
    """To the state machine of the coordinator: whatever this role knew is gone, and nobody answers."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleBack:
    """To the state machine, and to the level above: this role listens again, in this epoch, and knows no request."""

    role: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Death:
    """A process or thread that ended and should not have: one line for the user, and the whole story for a log.

    Never travels; who started it notices it.
    """

    identity: str
    text: str
    trace: str = ""

    @staticmethod
    def by(identity: str, error: BaseException) -> Death:
        """A ValueError speaks for itself; anything else is named by its type too."""
        line = next(iter(str(error).strip().splitlines()), "")
        named = isinstance(error, ValueError) and line
        text = line if named else f"{type(error).__name__}: {line}".rstrip(": ")
        return Death(identity, text, "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"{self.identity}: {self.text}"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the receiving loop."""

    reason: str = "done"
