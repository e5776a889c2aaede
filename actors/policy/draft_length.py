"""How long the next drafts are: a fixed number, or what measured costs and acceptance make worth while.

Adaptive control chooses the length with the most tokens per second, E(k) / T(k): E from the measured acceptance of
every place in a draft, T from measured rounds. In a batch each request goes on drafting as long as its next token is
likelier to be kept than what the time for it brings elsewhere. A request whose drafts never pass gets none but for a
rare attempt. Whether to speculate at all is the guard's decision. Works on counts and seconds; has no clock.

Sources: goodput of SmartSpec (arXiv 2406.14066), survival-ordered allocation of TETRIS (2502.15197).
"""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from math import log2
from typing import Protocol

from actors.policy.estimators import Ewma, RequestAcceptance, RoundCosts, Survival
from actors.policy.speculation_switch import Mode, SpeculationSwitch

FIRST_LENGTH = 4
"""Draft tokens until costs are measured, if the bounds allow."""
SWAY = 6
"""Every so many rounds drafts are a token shorter or longer than seems best."""
_PLAIN_MEMORY = 0.8
FIRST_RETRY, MAX_RETRY = 16, 512
"""Rounds after which a request without drafts is tried again; doubles each time nothing is accepted."""


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Draft tokens that were ordered for a request in a round, and the nodes of its draft that were accepted.

    What was ordered and did not come, or not in time, counts as not accepted: it is the order that is chosen.
    """

    request_id: int
    num_draft_tokens: int
    path: Series[int]


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """A target pass over `num_sequences`, and all the time since the one before it.

    Of the `num_running` requests under way, `num_willing` may be speculated for.
    """

    seconds: float
    verify_s: float
    draft_s: float
    num_tokens: int
    num_sequences: int
    num_running: int
    num_willing: int
    mean_len: float
    num_prompt_rows: int
    """Rows of prompts that the pass read beside."""
    offers: Series[DraftOutcome]
    went_on: bool = False
    """Drafts had been asked for, but the pass did not wait for them."""


class Control(Protocol):
    """What the coordinator asks before it orders drafts, and tells after each pass."""

    mode: Mode
    guard: SpeculationSwitch | None
    """Who compares speculation with plain decoding under the present load, if anybody does."""
    weighs_waiting: bool
    """Whether a draft is only waited for while that costs less than it brings."""

    def length(self, request_id: int, most: int) -> int:
        """Draft tokens to order for a request, at most `most`; 0 for none."""

    def approach(self, num_running: int, mean_len: float) -> None:
        """Requests joined: the next rounds will be of so many sequences of such a length."""

    def update(self, seen: RoundObservation) -> None:
        """A round ended."""

    def caught_up(self) -> None:
        """The drafter read what it had missed."""

    def forget(self, request_id: int) -> None:
        """The request ended."""


class FixedControl:
    """Always as many as asked for."""

    mode = Mode.speculate
    guard = None
    weighs_waiting = False

    def length(self, request_id: int, most: int) -> int:
        return most

    def approach(self, num_running: int, mean_len: float) -> None:
        pass

    def update(self, seen: RoundObservation) -> None:
        pass

    def caught_up(self) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass


@dataclass(slots=True)
class _Pace:
    """What rounds cost."""

    costs: RoundCosts = field(default_factory=RoundCosts)
    plain_verify_s: Ewma = field(default_factory=lambda: Ewma(_PLAIN_MEMORY))


@dataclass(slots=True)
class _Load:
    """What is known of one kind of load: so many sequences of about such a length."""

    guard: SpeculationSwitch = field(default_factory=SpeculationSwitch)
    decoding: _Pace = field(default_factory=_Pace)
    reading: _Pace = field(default_factory=_Pace)
    """Of rounds that also read prompts: under steady traffic there may be no others."""


@dataclass(slots=True)
class _Retry:
    """When a request without drafts gets its next attempt."""

    wait: int = FIRST_RETRY
    rounds: int = 0


class AdaptiveControl:
    """Lengths within [shortest, longest]; `shortest` 0 also allows decoding plainly where that measured faster."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = min(shortest, longest)
        self._longest = longest
        self._loads: dict[tuple[int, int], _Load] = {}
        self._survivals: dict[int, Survival] = {}
        self._load = _Load()
        self._survival = Survival(longest)
        self._length = max(self._shortest, min(longest, FIRST_LENGTH))
        self._rounds = 0
        self._lengths: dict[int, int] = {}  # of the requests of a batch, where they differ from it
        self._request_acceptance: dict[int, RequestAcceptance] = {}
        self._retries: dict[int, _Retry] = {}
        self._read_prompt = False

    @property
    def weighs_waiting(self) -> bool:
        """A user who rules out plain decoding waits for drafts."""
        return self._shortest == 0

    @property
    def guard(self) -> SpeculationSwitch | None:
        return self._load.guard if self._shortest == 0 else None

    @property
    def mode(self) -> Mode:
        return self.guard.mode if self.guard is not None else Mode.speculate

    def length(self, request_id: int, most: int) -> int:
        if self.mode not in (Mode.speculate, Mode.trial):
            return 0
        retry = self._retries.get(request_id)
        if retry is not None:
            return min(most, int(retry.rounds >= retry.wait))
        return min(most, self._lengths.get(request_id, self._length))

    def approach(self, num_running: int, mean_len: float) -> None:
        self._load = self._like(_kind(num_running, mean_len))

    def update(self, seen: RoundObservation) -> None:
        self._load, self._survival = self._known(seen)
        drafted = [offer for offer in seen.offers if offer.num_draft_tokens]
        for offer in seen.offers:
            self._follow(offer)
        reads = seen.num_prompt_rows > 0
        pace = self._load.reading if reads else self._load.decoding
        # Where drafts are always waited for, the first one also reads the prompt.
        is_first, self._read_prompt = not self.weighs_waiting and (reads or self._read_prompt), reads
        if drafted and not is_first:
            longest = max(offer.num_draft_tokens for offer in drafted)
            mean = sum(offer.num_draft_tokens for offer in drafted) / seen.num_sequences
            pace.costs.update(longest, mean, seen.seconds, seen.verify_s, seen.draft_s)
        elif not drafted:
            pace.plain_verify_s.update(seen.verify_s)
        self._load.guard.update(
            seen.num_tokens,
            seen.seconds,
            speculated=bool(drafted),
            willing=seen.num_willing > 0,
            went_on=seen.went_on,
            num_prompt_rows=seen.num_prompt_rows,
        )
        self._choose(pace, seen.num_sequences)

    def caught_up(self) -> None:
        self._load.guard.caught_up()

    def forget(self, request_id: int) -> None:
        self._request_acceptance.pop(request_id, None)
        self._lengths.pop(request_id, None)
        self._retries.pop(request_id, None)

    # --- learning -----------------------------------------------------------------------------------------------------

    def _known(self, seen: RoundObservation) -> tuple[_Load, Survival]:
        """The kind of this round's load. One that was never seen starts as its nearest kin is."""
        kind = _kind(seen.num_running, seen.mean_len)
        _, context = kind
        if context not in self._survivals:
            self._survivals[context] = Survival(self._longest, like=self._survival)
        if kind not in self._loads:
            self._loads[kind] = _Load(guard=self._like(kind).guard.like())
        return self._loads[kind], self._survivals[context]

    def _like(self, kind: tuple[int, int]) -> _Load:
        """The load of this kind, or of the nearest one there is; a context of twice the length is a longer way."""
        if not self._loads:
            return self._load
        return self._loads[min(self._loads, key=lambda known: 4 * abs(known[1] - kind[1]) + abs(known[0] - kind[0]))]

    def _follow(self, offer: DraftOutcome) -> None:
        retry = self._retries.get(offer.request_id)
        if not offer.num_draft_tokens:
            if retry is not None:
                retry.rounds += 1
            return
        temper = self._request_acceptance.setdefault(offer.request_id, RequestAcceptance())
        temper.update(offer.num_draft_tokens, len(offer.path), self._survival)
        if retry is None:
            self._survival.update(offer.num_draft_tokens, offer.path)
        elif offer.path:
            del self._retries[offer.request_id]
            self._request_acceptance[offer.request_id] = RequestAcceptance()
        else:
            retry.wait, retry.rounds = min(2 * retry.wait, MAX_RETRY), 0

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _choose(self, pace: _Pace, num_sequences: int) -> None:
        costs = pace.costs
        if not costs.gap.weight:
            return
        per_token = costs.per_token_s(pace.plain_verify_s.mean)
        tokens = self._survival.expected()
        speeds = {
            length: tokens[length] / costs.seconds(length, per_token)
            for length in range(max(1, self._shortest), self._longest + 1)
        }
        self._length = max(speeds, key=lambda length: speeds[length])
        self._rounds += 1
        if self._rounds % SWAY == 0:  # else a length that never changes would never show what another one costs
            self._length += -1 if self._length > max(1, self._shortest) and self._rounds % (2 * SWAY) else 1
            self._length = min(self._length, self._longest)
        self._lengths = self._share_out(num_sequences, speeds[self._length], *per_token) if num_sequences > 1 else {}

    def _share_out(self, num_sequences: int, speed: float, draft_s: float, verify_s: float) -> dict[int, int]:
        """Lengths of the requests of a batch: place by place, as long as a place brings more than its time elsewhere.

        `speed` is tokens per second of one sequence. A drafting pass costs `draft_s` however few take part in it.
        """
        lengths = dict.fromkeys(self._request_acceptance.keys() - self._retries.keys(), self._shortest)
        ratios = {request_id: self._request_acceptance[request_id].ratio() for request_id in lengths}
        average = self._survival.chances
        for place in range(self._shortest + 1, self._longest + 1):
            chances = {
                request_id: average[place - 1] * ratios[request_id] ** place
                for request_id, length in lengths.items()
                if length == place - 1
            }
            worthy = {request_id: chance for request_id, chance in chances.items() if chance >= speed * verify_s}
            if sum(worthy.values()) < speed * (draft_s * num_sequences + verify_s * len(worthy)):
                break
            lengths.update(dict.fromkeys(worthy, place))
        if not any(lengths.values()):
            return {}  # whether nobody should be drafted for is the guard's to say, by the clock
        self._retries.update({request_id: _Retry() for request_id, length in lengths.items() if not length})
        return lengths


def _kind(num_running: int, mean_len: float) -> tuple[int, int]:
    """Loads are told apart by batch size, in steps of a half more, and by context, in steps of twice as much."""
    return round(2 * log2(num_running)), int(mean_len / 512).bit_length()


def make_control(adaptive: bool, shortest: int, longest: int) -> Control:
    """As the user chose it; where nobody drafts there is nothing to adapt."""
    return AdaptiveControl(shortest, longest) if adaptive and longest else FixedControl()
