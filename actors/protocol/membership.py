"""Records of membership: heartbeats, lost processes, and how the ranks of a role form an epoch.

Standard library only, every record frozen. Every rank sends a heartbeat four times a second, from a thread of its own,
with the batch that it works on: that tells a process that hangs from a pass that takes long, and a record that was lost
from one that is still being answered.

Glossary
    incarnation     counts the processes that have been one rank, or the coordinator; records of an older incarnation
                    are ignored
    epoch           of a role: counts how often its ranks joined. Every epoch starts with empty contexts and, where
                    there are several ranks, with a process group of its own
    bridge          a process group of rank 0 of the target and rank 0 of a drafter on ranks of its own that reads the
                    target's hidden states, which are sent over it; its number is the epoch of the drafter, with which
                    it ends
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

HEARTBEAT_S = 0.25
"""Interval of heartbeats."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A rank to the coordinator, or the coordinator to its client (`role` "coordinator", `waiting` until it serves).

    `epoch` is the last one that the rank was ordered to join; `waiting`: it is not, or no longer, part of it. `round`
    is that of the last batch the rank received, `busy`: it still works on it. `bridge` is the number of the one at
    whose end it is, 0 for none.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    epoch: int = 0
    waiting: bool = True
    round: int = 0
    busy: bool = False
    off_schedule: bool = False
    """Sent at a change of state, between two regular heartbeats; not counted where heartbeats measure time."""
    bridge: int = 0

    @property
    def identity(self) -> str:
        return identity_of(self.role, self.rank)


def identity_of(role: str, rank: int) -> str:
    return role if role == "coordinator" else f"{role}-{rank}"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the target: those of the checkpoint `path`. Tokens made with them carry their `version`; 0 are those
    that the engine was started with."""

    path: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class Recall:
    """Coordinator to the ranks of a role: leave every epoch before this one, and wait for `Join`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Join:
    """Coordinator to the ranks of a role, once all of them wait: drop all requests, join at `store`, answer `Ready`.

    `round` is that of the last batch of the epochs before. Ranks of the target serve `weights`, if they are named.
    """

    epoch: int
    round: int
    store: tuple[str, int] | None = None
    """The place of a store: what `connect_store` takes."""
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class Bridge:
    """Coordinator to rank 0 of the target and of the drafter, once both roles serve: meet at `store`.

    Heartbeats show when they have met. `by_nccl`: each of the two has a GPU of its own; else tensors pass through
    main memory.
    """

    number: int
    store: tuple[str, int]
    by_nccl: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its part and joined. `facts` are measured at start: bytes, slots, device, versions."""

    role: str
    rank: int
    facts: dict[str, Any]
    epoch: int = 0
    incarnation: int = 0

    @property
    def identity(self) -> str:
        return identity_of(self.role, self.rank)


@dataclass(frozen=True, slots=True)
class Hello:
    """A client connects; answered by one `Ready` per rank once all ranks have joined."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The owner of the engine to the coordinator, about once a second: admit these clients, and no other ones.

    `keys` are (public half of the key, name).
    """

    keys: tuple[tuple[bytes, str], ...]


@dataclass(frozen=True, slots=True)
class RankLost:
    """Supervisor to coordinator: this process has ended."""

    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Silent:
    """Coordinator to supervisor: this process hangs, or does otherwise what its rank must not (`why`).

    Without an `incarnation`: no process of this rank has sent a heartbeat since the coordinator started, or since the
    last one was lost. Repeated while that lasts; the supervisor knows which processes are still starting.
    """

    role: str
    rank: int
    incarnation: int | None = None
    pid: int = 0
    why: str = "hung"


@dataclass(frozen=True, slots=True)
class PassFailed:
    """A rank to the coordinator, right before it ends: its work on the batch of this round raised `error`, one line.

    A process that is killed sends none: what ended it was not a request.
    """

    role: str
    rank: int
    incarnation: int
    round: int
    error: str

    @property
    def identity(self) -> str:
        return identity_of(self.role, self.rank)


@dataclass(frozen=True, slots=True)
class RoleLost:
    """Says to the state machine, and to the level above, that this role and its state are lost, and that it answers
    nothing."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleBack:
    """Says to the state machine, and to the level above, that this role serves again, in this epoch, without any
    request."""

    role: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Death:
    """A process or thread that failed: `text` is one line for the user, `trace` the traceback for a log.

    Not sent; made by the process that started it.
    """

    identity: str
    text: str
    trace: str = ""

    @staticmethod
    def by(identity: str, error: BaseException) -> Death:
        """The line of a ValueError is its message; other errors are named by their type too."""
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
