"""Rounds of one role without the other: it receives the records that the coordinator would send, along known text.

The target wrote the texts, so every verdict is known in advance: drafts are accepted as far as they equal the text.
All ranks of a role replay the same rounds. The time of a pass includes the host's work around it, as in the engine.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actors.protocol.messages import (
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    Proposal,
    SamplingParams,
    TokenTree,
    VerifyBatch,
    VerifyItem,
)
from actors.roles.draft import DraftRole
from actors.roles.target import TargetRole
from actors.verification.coupled import verify_coupled
from cluster.tools.planning.ranks import AlternatingTurns
from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import StepChoice
from parallel.runtime.profiling import PassClock


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt and what the target wrote after it."""

    token_ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class ReplayScript:
    """Texts to replay, `batch` requests at a time, draft `lengths` in turn, for `seconds` (0: all texts once)."""

    texts: tuple[KnownText, ...]
    sampling: SamplingParams
    batch: int
    lengths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplayRank:
    """The rank that replays: its group and device, and the turns where two roles alternate."""

    group: Group = SINGLE
    device: str = "cpu"
    role: str = ""
    turns: AlternatingTurns | None = None
    clock: PassClock = field(default_factory=PassClock)
    """The clock of a decoder under `watch`; another counts nothing."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass with the host's work around it; `fuzzy` as its runner was called."""

    rows: int
    fuzzy: bool
    seconds: float


@dataclass(slots=True)
class ReplayResult:
    """What one rank measured."""

    passes: list[TimedPass] = field(default_factory=list)
    num_rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    """Proposals that reached each position."""
    accepted: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of all passes under `watch`, by kind: attention, mlp, communication and rest."""
    blocks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of blocks of each kind under `watch`."""

    def add(self, passes: Sequence[TimedPass], clock: PassClock) -> None:
        self.passes += passes
        for kind, count in clock.spans.items():
            self.blocks[kind] += count
        seconds = clock.pop_seconds()
        for kind, spent in seconds.items():
            self.parts[kind] += spent
        self.parts["rest"] += sum(each.seconds for each in passes) - sum(seconds.values())

    def acceptance(self) -> tuple[float, ...]:
        """Acceptance by distance from the committed text, given that all draft tokens before were accepted."""
        reached = [*self.drafted[:1], *self.accepted]
        return tuple(kept / offered for kept, offered in zip(self.accepted, reached, strict=False) if offered)


class TimedRunner:
    """Forwards the passes of a model runner and records when each starts, over how many rows."""

    def __init__(self, runner: Any, rank: ReplayRank) -> None:
        self.timed = runner
        self._now, self._clock = device_clock(rank.device), rank.clock
        self._starts: list[tuple[float, int, bool]] = []

    def forward(self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], *taps: Any, **options: Any) -> Any:
        self._starts.append((self._now(), len(token_ids), bool(options.get("fuzzy"))))
        return self.timed.forward(spans, token_ids, *taps, **options)

    def extend(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice, *, fuzzy: bool = False
    ) -> Tensor:
        """A chain may be one call, so that each of its passes counts as an equal share of its time."""
        begin = self._now()
        chosen = self.timed.extend(spans, token_ids, choice, fuzzy=fuzzy)
        step_s = (self._now() - begin) / len(choice)
        self._starts.append((begin, len(token_ids), fuzzy))
        self._starts += [(begin + step * step_s, len(spans), True) for step in range(1, len(choice))]
        return chosen

    @contextmanager
    def timing(self, result: ReplayResult) -> Iterator[None]:
        """Add the passes of the block. Each lasts until the next starts; the first includes what came before it."""
        self._clock.pop_seconds()
        self._starts.clear()
        edges = [self._now()]
        yield
        edges += [*(at for at, _, _ in self._starts[1:]), self._now()]
        spans = zip(self._starts, edges, edges[1:], strict=False)
        passes = [TimedPass(rows, fuzzy, end - begin) for (_, rows, fuzzy), begin, end in spans]
        result.add(passes, self._clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timed, name)


def device_clock(device: str) -> Callable[[], float]:
    """Seconds, read once all work queued on the device is done."""
    if not device.startswith("cuda"):
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


class _Requests:
    """The requests in flight: `live` maps each to its text and its committed length.

    The next batch admits those in `begun`, releases those in `ended` and carries `commits`.
    """

    def __init__(self, script: ReplayScript) -> None:
        self._script = script
        self._next = 0
        self.live: dict[int, tuple[KnownText, int]] = {}
        self.begun = [self._open() for _ in range(script.batch)]
        self.ended: list[int] = []
        self.commits: tuple[Commit, ...] = ()

    def rounds(self, rank: ReplayRank) -> Iterator[int]:
        """Round numbers until the lead's time, or the text, is over; all ranks get the same number of rounds."""
        seconds, turns = self._script.seconds, rank.turns if rank.group.rank == 0 else None
        until = time.monotonic() + seconds
        goes_on = torch.ones(1, dtype=torch.int64, device=rank.device)
        for round_number in itertools.count():
            if turns is not None:
                goes_on.fill_(turns.acquire(rank.role, until))
            elif rank.group.rank == 0:
                goes_on.fill_(time.monotonic() < until if seconds else self._next <= len(self._script.texts))
            if not rank.group.broadcast(goes_on).item():
                return
            yield round_number
            if turns is not None:
                turns.release(rank.role)

    def begin(self) -> None:
        """The batch that admits new requests was answered: commit the token that the pass over each prompt yields."""
        self.commits = tuple(self.commit(i) for i in self.begun)
        self.begun, self.ended = [], []

    def finish_round(self, commits: Sequence[Commit]) -> None:
        """Replace the requests too near the end of their text for another round."""
        longest = max(self._script.lengths)
        self.ended = [i for i, (text, at) in self.live.items() if at + longest + 2 > len(text.token_ids)]
        for request_id in self.ended:
            del self.live[request_id]
        self.begun = [self._open() for _ in self.ended]
        self.commits = tuple(commit for commit in commits if commit.request_id not in self.ended)

    def admitted(self) -> tuple[int, ...]:
        """The requests that the role still holds."""
        return (*self.ended, *(i for i in self.live if i not in self.begun))

    def admits(self) -> tuple[Admit, ...]:
        texts = {i: self.live[i][0] for i in self.begun}
        sampling = self._script.sampling
        return tuple(Admit(i, 0, t.token_ids[: t.prompt_len], t.prompt_len, sampling) for i, t in texts.items())

    def commit(self, request_id: int, path: tuple[int, ...] = ()) -> Commit:
        """The path and the target's next token; an empty path also for the token that the prompt's pass yields."""
        text, at = self.live[request_id]
        end = at + len(path) + 1
        self.live[request_id] = text, end
        return Commit(request_id, 0, at, path, text.token_ids[at:end])

    def verify(self, proposal: Proposal, result: ReplayResult) -> Commit:
        """The commit of the target's verdict, which the known text decides."""
        text, at = self.live[proposal.request_id]
        depths = proposal.tree.depths()
        path, _ = verify_coupled(proposal.tree, [text.token_ids[at + depth] for depth in depths])
        depth = max(depths)
        for counts in (result.drafted, result.accepted):
            counts.extend([0] * (depth - len(counts)))
        for position in range(depth):
            result.drafted[position] += 1
            result.accepted[position] += position < len(path)
        return self.commit(proposal.request_id, path)

    def right_draft(self, request_id: int, length: int) -> Proposal | None:
        """The text's own next tokens."""
        text, at = self.live[request_id]
        tree = TokenTree.chain(text.token_ids[at - 1], text.token_ids[at : at + length])
        return Proposal(request_id, 0, at, 0, tree) if length else None

    def _open(self) -> int:
        request_id, text = self._next, self._script.texts[self._next % len(self._script.texts)]
        self._next += 1
        self.live[request_id] = text, text.prompt_len
        return request_id


def replay_drafts(role: DraftRole, script: ReplayScript, rank: ReplayRank, work_steps: int = 0) -> ReplayResult:
    """Rounds of a draft role, with up to `work_steps` steps of draft-ahead between order and verdict."""
    drafter: Any = role.drafter
    runner = drafter.runner = TimedRunner(drafter.runner, rank)
    requests, result = _Requests(script), ReplayResult()

    def admit(round_number: int) -> None:
        idle = tuple(DraftOrder(i, 0) for i in requests.begun)
        list(role.answer(DraftBatch(round_number, requests.admits(), requests.commits, tuple(requests.ended), idle)))
        requests.begin()

    admit(0)
    for round_number in requests.rounds(rank):
        length = script.lengths[round_number % len(script.lengths)]
        orders = tuple(DraftOrder(i, length) for i in requests.live)
        with runner.timing(result):
            answers = list(role.answer(DraftBatch(round_number, commits=requests.commits, orders=orders)))
        for _ in range(work_steps):
            if role.wants_work:
                with runner.timing(result):
                    role.work()
        result.num_rounds += 1
        requests.finish_round([requests.verify(each, result) for answer in answers for each in answer.proposals])
        if requests.begun:
            admit(round_number)
    list(role.answer(DraftBatch(result.num_rounds, releases=requests.admitted())))
    drafter.runner = runner.timed
    return result


def replay_verdicts(role: TargetRole, script: ReplayScript, rank: ReplayRank) -> ReplayResult:
    """Rounds of a target role: right drafts of every length, plain passes among them, a growing part accepted."""
    now, requests, result = device_clock(rank.device), _Requests(script), ReplayResult()
    lengths = (0, *script.lengths)
    for round_number in requests.rounds(rank):
        if requests.begun:
            prompts = tuple(VerifyItem(i, requests.live[i][0].prompt_len) for i in requests.begun)
            batch = VerifyBatch(round_number, requests.admits(), requests.commits, tuple(requests.ended), prompts)
            list(role.answer(batch))
            requests.begin()
        length = lengths[round_number % len(lengths)]
        items = tuple(VerifyItem(i, 1, requests.right_draft(i, length)) for i in requests.live)
        rank.clock.pop_seconds()
        started = now()
        (verdicts,) = role.answer(VerifyBatch(round_number, commits=requests.commits, items=items))
        result.add([TimedPass(verdicts.num_tokens, False, now() - started)], rank.clock)
        result.num_rounds += 1
        path = tuple(range(1, round_number % (length + 1) + 1))
        requests.finish_round([requests.commit(i, path) for i in requests.live])
    list(role.answer(VerifyBatch(result.num_rounds, releases=requests.admitted())))
    return result
