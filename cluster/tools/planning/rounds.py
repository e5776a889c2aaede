"""Rounds without a partner: a role is given, record by record, what the coordinator would send it, along known text.

The texts are what the target wrote, so every verdict is known in advance: drafts are accepted where they were right.
All ranks of a role play the same script. It takes the time of passes and of everything around them, as the engine has
to.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.runtime.profiling import PassClock


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target wrote behind it."""

    token_ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Script:
    """What to play: texts, `batch` of them at a time, and for how long."""

    texts: tuple[Text, ...]
    sampling: SamplingParams
    batch: int
    lengths: tuple[int, ...]
    """Draft lengths, in turn."""
    seconds: float
    """0: once through all texts."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass with the host's work around it; `fuzzy` as its runner was asked."""

    rows: int
    fuzzy: bool
    seconds: float


@dataclass(slots=True)
class Played:
    """What came of a script on one rank."""

    passes: list[TimedPass] = field(default_factory=list)
    num_rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    """Proposals that reached each position."""
    accepted: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of all passes by kind, where a clock runs: attention, mlp, communication, and rest for all else."""
    blocks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many of each kind there were."""

    def note(self, passes: Sequence[TimedPass], clock: PassClock | None) -> None:
        """Passes that are through, and what the clock shows of them."""
        self.passes += passes
        if clock is None:
            return
        for kind, count in clock.spans.items():
            self.blocks[kind] += count
        seconds = clock.take()
        for kind, spent in seconds.items():
            self.parts[kind] += spent
        self.parts["rest"] += sum(one.seconds for one in passes) - sum(seconds.values())

    def acceptance(self) -> tuple[float, ...]:
        """By distance from the committed text, given that everything in front was accepted."""
        reached = [self.drafted[0], *self.accepted] if self.drafted else []
        pairs = zip(self.accepted, reached, strict=False)
        return tuple(kept / offered for kept, offered in pairs if offered)


class TimedRunner:
    """A model runner that notes when each pass starts, and over how many rows."""

    def __init__(self, runner: Any, now: Callable[[], float]) -> None:
        self.watched = runner
        self._now = now
        self.starts: list[tuple[float, int, bool]] = []

    def forward(self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], *taps: Any, **options: Any) -> Any:
        self.starts.append((self._now(), len(token_ids), bool(options.get("fuzzy"))))
        return self.watched.forward(spans, token_ids, *taps, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watched, name)


def clock_of(device: str) -> Callable[[], float]:
    """Seconds at which everything asked of the device is done."""
    if not device.startswith("cuda"):
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a script is played: the ranks of the role, their device, and whose turn it is where two roles alternate."""

    group: Group = SINGLE
    device: str = "cpu"
    take_turn: Callable[[float], bool] | None = None
    give_turn: Callable[[], None] | None = None
    clock: PassClock | None = None
    """Of the model that is watched, if it is."""

    def start(self, now: Callable[[], float]) -> float:
        """A moment from which on passes count."""
        if self.clock is not None:
            self.clock.take()
        return now()


class _Reader:
    """Requests along the texts: `batch` of them in flight, each as far as it has got."""

    def __init__(self, script: Script) -> None:
        self._texts = script.texts
        self._longest = max(script.lengths)
        self._seconds = script.seconds
        self._next = 0
        self.live: dict[int, tuple[Text, int]] = {}
        for _ in range(script.batch):
            self._open()

    def rounds(self, stage: Stage) -> Iterator[int]:
        """Round numbers until the lead's time, or the text, is up; all ranks take the same number."""
        until, round_number = time.monotonic() + self._seconds, 0
        goes_on = torch.ones(1, dtype=torch.int64, device=stage.device)
        while True:
            if stage.group.rank == 0:
                if stage.take_turn is not None:
                    goes_on.fill_(stage.take_turn(until))
                else:
                    goes_on.fill_(time.monotonic() < until if self._seconds else self._next <= len(self._texts))
            if not stage.group.broadcast(goes_on).item():
                return
            yield round_number
            round_number += 1
            if stage.group.rank == 0 and stage.give_turn is not None:
                stage.give_turn()

    def turn(self) -> tuple[list[int], list[int]]:
        """(ended, begun): requests too near their end for another round make room for others."""
        ended = [i for i, (text, at) in self.live.items() if at + self._longest + 2 > len(text.token_ids)]
        for request_id in ended:
            del self.live[request_id]
        return ended, [self._open() for _ in ended]

    def advance(self, request_id: int, num_tokens: int) -> None:
        text, at = self.live[request_id]
        self.live[request_id] = text, at + num_tokens

    def _open(self) -> int:
        request_id, text = self._next, self._texts[self._next % len(self._texts)]
        self._next += 1
        self.live[request_id] = text, text.prompt_len
        return request_id


def play_drafts(role: DraftRole, script: Script, stage: Stage, work_steps: int = 0) -> Played:
    """Rounds of a draft role; between order and verdict it takes up to `work_steps` steps of its own."""
    now = clock_of(stage.device)
    runner = role.drafter.runner = TimedRunner(role.drafter.runner, now)
    reader, played = _Reader(script), Played()
    admits = tuple(_admit(reader, i, script) for i in reader.live)
    orders = tuple(DraftOrder(i, 0) for i in reader.live)
    for _ in role.answer(DraftBatch(0, admits=admits, orders=orders)):
        pass
    commits = [_first(reader, i) for i in reader.live]
    for round_number in reader.rounds(stage):
        length = script.lengths[round_number % len(script.lengths)]
        runner.starts.clear()
        started = stage.start(now)
        proposals: list[Proposal] = []
        orders = tuple(DraftOrder(i, length) for i in reader.live)
        for answer in role.answer(DraftBatch(round_number, commits=tuple(commits), orders=orders)):
            proposals += answer.proposals
        played.note(_passes(runner, started, now()), stage.clock)
        for _ in range(work_steps):
            if not role.wants_work:
                break
            runner.starts.clear()
            started = stage.start(now)
            role.work()
            played.note(_passes(runner, started, now()), stage.clock)
        commits = [_judge(played, reader, proposal) for proposal in proposals]
        played.num_rounds += 1
        ended, begun = reader.turn()
        if begun:
            live = [commit for commit in commits if commit.request_id not in ended]
            admits = tuple(_admit(reader, i, script) for i in begun)
            idle = tuple(DraftOrder(i, 0) for i in begun)
            batch = DraftBatch(round_number, admits, tuple(live), tuple(ended), idle)
            for _ in role.answer(batch):
                pass
            commits = [_first(reader, i) for i in begun]
    for _ in role.answer(DraftBatch(played.num_rounds, releases=tuple(reader.live))):
        pass
    role.drafter.runner = runner.watched
    return played


def play_verdicts(role: TargetRole, script: Script, stage: Stage) -> Played:
    """Rounds of a target role: right drafts of every length, plain passes among them, a growing part accepted."""
    now, reader, played = clock_of(stage.device), _Reader(script), Played()
    lengths = (0, *script.lengths)
    begun, ended, commits = list(reader.live), [], []
    for round_number in reader.rounds(stage):
        if begun:
            admits = tuple(_admit(reader, i, script) for i in begun)
            prompts = tuple(VerifyItem(i, reader.live[i][0].prompt_len) for i in begun)
            for _ in role.answer(VerifyBatch(round_number, admits, tuple(commits), tuple(ended), prompts)):
                pass
            commits = [_first(reader, i) for i in begun]
        length = lengths[round_number % len(lengths)]
        items = tuple(VerifyItem(i, 1, _right_draft(reader, i, length)) for i in reader.live)
        started = stage.start(now)
        for answer in role.answer(VerifyBatch(round_number, commits=tuple(commits), items=items)):
            rows = answer.num_tokens
        played.note([TimedPass(rows, False, now() - started)], stage.clock)
        played.num_rounds += 1
        num_accepted = round_number % (length + 1)
        commits = [_commit(reader, i, tuple(range(1, num_accepted + 1)), num_accepted + 1) for i in reader.live]
        ended, begun = reader.turn()
        commits = [commit for commit in commits if commit.request_id not in ended]
    admitted = (*ended, *(i for i in reader.live if i not in begun))
    for _ in role.answer(VerifyBatch(played.num_rounds, releases=admitted)):
        pass
    return played


def _passes(runner: TimedRunner, started: float, ended: float) -> list[TimedPass]:
    """A pass lasts until the next one starts; the first also has what came before it."""
    starts = [started, *(at for at, _, _ in runner.starts[1:]), ended]
    spans = zip(runner.starts, starts, starts[1:], strict=False)
    return [TimedPass(rows, fuzzy, end - begin) for (_, rows, fuzzy), begin, end in spans]


def _judge(played: Played, reader: _Reader, proposal: Proposal) -> Commit:
    """What the target would say, as the text is known."""
    text, at = reader.live[proposal.request_id]
    depths = proposal.tree.depths()
    path, _ = verify_coupled(proposal.tree, [text.token_ids[at + depth] for depth in depths])
    depth = max(depths)
    for counts in (played.drafted, played.accepted):
        counts.extend([0] * (depth - len(counts)))
    for position in range(depth):
        played.drafted[position] += 1
        played.accepted[position] += position < len(path)
    return _commit(reader, proposal.request_id, path, len(path) + 1)


def _commit(reader: _Reader, request_id: int, path: tuple[int, ...], num_tokens: int) -> Commit:
    text, at = reader.live[request_id]
    reader.advance(request_id, num_tokens)
    return Commit(request_id, 0, at, path, text.token_ids[at : at + num_tokens])


def _first(reader: _Reader, request_id: int) -> Commit:
    """The token that the prompt's pass brings."""
    return _commit(reader, request_id, (), 1)


def _admit(reader: _Reader, request_id: int, script: Script) -> Admit:
    text, _ = reader.live[request_id]
    return Admit(request_id, 0, text.token_ids[: text.prompt_len], text.prompt_len, script.sampling)


def _right_draft(reader: _Reader, request_id: int, length: int) -> Proposal | None:
    text, at = reader.live[request_id]
    if not length:
        return None
    tree = TokenTree.chain(text.token_ids[at - 1], text.token_ids[at : at + length])
    return Proposal(request_id, 0, at, 0, tree)
