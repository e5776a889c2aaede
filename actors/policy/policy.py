"""The coordinator's policy: in which order to draft and verify, draft lengths, waiting, and whether to speculate.

A `Policy` sees lengths, counts and seconds; never a tensor, a socket or a clock. What a drafter prepares while the
target verifies is decided on its side (`actors/drafters/draft_ahead`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import log2

from actors.policy.draft_ahead_choice import DraftAheadChoice
from actors.policy.draft_length import DraftLengths, DraftOutcome
from actors.policy.draft_wait import DraftWait
from actors.policy.estimators import Ewma, LinearFit, Rate, RoundCosts
from actors.policy.speculation_switch import Mode, SpeculationSwitch


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The order of drafting and verifying.

    `alternates`: two halves of the batch in turn; while the target verifies one, the drafter drafts for the other. No
    outcome has to be guessed; it takes at least two requests (MineDraft, arXiv 2603.18016). `works_ahead`: the drafter
    prepares for the outcomes of a verdict while the target computes it.
    """

    drafts: bool = True
    alternates: bool = False
    works_ahead: bool = False


PIPELINES = {
    "plain": Pipeline(drafts=False),  # every pass verifies empty proposals: the baseline and the fallback
    "sync": Pipeline(),  # the whole batch is drafted for, then the whole batch is verified
    "pearl": Pipeline(works_ahead=True),  # the three differ in what the drafter prepares; here they are one
    "branches": Pipeline(works_ahead=True),
    "tree": Pipeline(works_ahead=True),
    "pingpong": Pipeline(alternates=True),
}


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """A target pass and the time since the one before it.

    `outcomes` has one entry for each request that got a verdict. Of the `num_running` requests of the batch, whose mean
    length is `mean_len`, `num_may_speculate` allow speculation. The pass read `num_prompt_rows` of prompts besides.
    `skipped_drafts`: drafts had been ordered, but the pass did not wait for them. `samples`: most requests of the batch
    are sampled, not greedy. `unused_s`, which is not in `seconds`: the target's ranks read text for a drafter on them,
    or drafted what was not verified. `serves_drafts`: the pass also computed what such a drafter drafts from.
    """

    seconds: float
    verify_s: float
    draft_s: float
    num_tokens: int
    num_running: int
    mean_len: float
    num_may_speculate: int
    num_prompt_rows: int
    outcomes: Sequence[DraftOutcome]
    skipped_drafts: bool = False
    samples: bool = False
    unused_s: float = 0.0
    serves_drafts: bool = False


class Policy:
    """Fixed draft lengths; the first part of an answer is always waited for."""

    weighs_waiting = False
    """Whether drafts are waited for only while that costs less than they bring."""

    def __init__(self, pipeline: str, num_draft_tokens: int) -> None:
        order = PIPELINES[pipeline]
        self.longest_draft = num_draft_tokens if order.drafts else 0
        self.alternates = order.alternates
        """Whether drafts are also ordered while the target is busy, and a pass leaves out requests without one."""
        self.wait = DraftWait(self.weighs_waiting, num_draft_tokens)
        self._may_work_ahead = order.works_ahead

    @property
    def works_ahead(self) -> bool:
        """Whether the drafter should work while the target verifies the drafts that are ordered now."""
        return self._may_work_ahead

    @property
    def mode(self) -> Mode:
        return Mode.speculate

    @property
    def may_end(self) -> bool:
        """Whether the next round with drafts may be the last one for now."""
        return self.switch is not None and self.switch.may_end

    @property
    def switch(self) -> SpeculationSwitch | None:
        """The comparison of speculation with plain decoding under the present load, if there is one."""
        return None

    def draft_length(self, request_id: int, remaining: int) -> int:  # noqa: ARG002 (a policy may tell requests apart)
        """Draft tokens to order for a request that may get `remaining` more tokens; 0 for none."""
        # The target adds one token of its own after the path, so the last one is never worth drafting.
        return max(0, min(self.longest_draft, remaining - 1))

    def num_orders(self, num_running: int) -> int:
        """Requests to order drafts for at a time."""
        return (num_running + 1) // 2 if self.alternates else num_running

    def num_followed(self, num_requests: int) -> int:
        """Of so many running requests those whose text the drafter should have read."""
        return num_requests

    def wait_s(self, num_expecting: int, num_ready: int, num_plain: int, *, has_first_part: bool) -> float:
        """Seconds that the target should wait for the next part of an answer; 0: start the pass now.

        Of the requests of the pass `num_expecting` await a draft, `num_ready` have one, `num_plain` need none.
        """
        if not num_expecting or (self.alternates and num_ready):
            return 0.0
        return self.wait.wait_s(num_expecting, num_ready, num_plain, has_first_part=has_first_part)

    def update(self, seen: RoundObservation) -> None:
        """A round ended."""
        self.wait.update_pass(seen.verify_s, reads_prompt=seen.num_prompt_rows > 0)
        for outcome in seen.outcomes:
            if outcome.num_tokens:
                self.wait.update_acceptance(outcome.num_tokens)

    def expect_load(self, num_running: int, mean_len: float, samples: bool) -> None:
        """Requests joined: the next rounds are of so many sequences of such a mean length, sampled or greedy."""

    def caught_up(self) -> None:
        """The drafter has read the committed text that it missed."""

    def release(self, request_id: int) -> None:
        """The request ended."""


_PLAIN_MEMORY = 0.8


@dataclass(slots=True)
class _PassCosts:
    """What rounds cost, with drafts and without."""

    with_drafts: RoundCosts = field(default_factory=RoundCosts)
    in_turn: RoundCosts = field(default_factory=RoundCosts)
    """The same where the drafter does not work ahead: no pass of the target hides drafting or is slowed by it."""
    plain_verify_s: Ewma = field(default_factory=lambda: Ewma(_PLAIN_MEMORY))

    @property
    def slowdown(self) -> float:
        """A pass over drafts beside a working drafter, in plain passes; 1 until both were measured."""
        plain_s, verify_s = self.plain_verify_s.mean, self.with_drafts.verify.mean_y
        return verify_s / plain_s if plain_s and verify_s else 1.0


@dataclass(slots=True)
class LoadEstimate:
    """What was measured under one kind of load: so many sequences of about such a length."""

    switch: SpeculationSwitch = field(default_factory=SpeculationSwitch)
    decoding: _PassCosts = field(default_factory=_PassCosts)
    reading: _PassCosts = field(default_factory=_PassCosts)
    """Of rounds that also read prompts: under steady traffic there may be no others."""
    ahead: DraftAheadChoice = field(default_factory=DraftAheadChoice)


_BATCH_STIFFNESS = 1.0
"""Variance of batch sizes at which the measured time of one more request and the expected one weigh the same."""
_LEAST_PASS = 0.25
"""Least plain round that is extrapolated to, in mean plain rounds."""
SIMILAR = 2
"""Steps of the batch size by which two loads may differ for one to begin with the conclusion of the other."""
_Kind = tuple[int, int, bool]


class AdaptivePolicy(Policy):
    """Lengths within [`shortest`, `longest`]; `shortest` 0 also allows plain decoding where that measures faster.

    Where plain decoding is ruled out, drafts are always waited for. With `longest_only` a request is ordered the
    longest draft or none, for a drafter that chooses lengths itself.
    """

    def __init__(self, pipeline: str, shortest: int, longest: int, *, longest_only: bool = False) -> None:
        shortest = min(shortest, longest)
        self.weighs_waiting = shortest == 0
        super().__init__(pipeline, longest)
        self._lengths = DraftLengths(shortest, longest)
        self._longest_only = longest_only
        self._loads: dict[_Kind, LoadEstimate] = {}
        self._load = LoadEstimate()
        self._plain_rounds: dict[Hashable, LinearFit] = {}  # seconds against requests, by context and sampling
        self._last_read_prompt = False

    @property
    def works_ahead(self) -> bool:
        return self._may_work_ahead and self._load.ahead.works_ahead

    @property
    def mode(self) -> Mode:
        return self._load.switch.mode if self.weighs_waiting else Mode.speculate

    @property
    def switch(self) -> SpeculationSwitch | None:
        return self._load.switch if self.weighs_waiting else None

    def draft_length(self, request_id: int, remaining: int) -> int:
        length = self._lengths.of(request_id)
        if self.weighs_waiting:
            if not self._load.switch.speculates:
                return 0
            if self._load.switch.mode is Mode.trial:
                length = self._load.switch.trial_length
        if self._longest_only and length:
            length = self.longest_draft
        return max(0, min(self.longest_draft, remaining - 1, length))

    def num_followed(self, num_requests: int) -> int:
        return self._load.switch.num_followed(num_requests) if self.weighs_waiting else num_requests

    def expect_load(self, num_running: int, mean_len: float, samples: bool) -> None:
        self._load = self._estimate_of(_kind_of_load(num_running, mean_len, samples))

    def update(self, seen: RoundObservation) -> None:
        super().update(seen)
        if not seen.outcomes:
            return
        kind = _kind_of_load(seen.num_running, seen.mean_len, seen.samples)
        self._load = load = self._estimate_of(kind)
        reads = seen.num_prompt_rows > 0
        costs = load.reading if reads else load.decoding
        drafting = costs.with_drafts if load.ahead.works_ahead else costs.in_turn
        lengths = [outcome.num_ordered for outcome in seen.outcomes]
        longest = max(lengths)
        # Where drafts are always waited for, the first one also reads the prompt.
        is_first, self._last_read_prompt = not self.weighs_waiting and (reads or self._last_read_prompt), reads
        if not longest and not (seen.serves_drafts and self.weighs_waiting):
            costs.plain_verify_s.update(seen.verify_s)
            if not reads:
                self._plain_rounds.setdefault(kind[1:], LinearFit()).update(seen.num_running, seen.seconds)
        elif longest and not is_first:
            mean = sum(lengths) / len(lengths)
            drafting.update(longest, mean, seen.seconds, seen.verify_s, seen.draft_s)
        self._lengths.update(seen.outcomes, kind[1:])
        speed = self._lengths.choose(drafting, costs.plain_verify_s.mean, len(lengths))
        mode = load.switch.mode
        if self._may_work_ahead and longest and not reads and self.mode is Mode.speculate:
            load.ahead.update(seen.num_tokens, seen.seconds, costs.slowdown)
        load.switch.update(
            seen.num_tokens,
            seen.seconds,
            speculated=longest > 0,
            willing=seen.num_may_speculate > 0,
            skipped_drafts=seen.skipped_drafts,
            num_prompt_rows=seen.num_prompt_rows,
            whole_tokens=_whole_tokens(seen.outcomes) if mode is Mode.trial else None,
            prospect=speed,
            draft_s=seen.draft_s,
            unused_s=seen.unused_s,
            serves_drafts=seen.serves_drafts,
        )
        if mode is Mode.catch_up and load.switch.mode is Mode.trial:
            self.wait.clear_delays()

    def caught_up(self) -> None:
        if self._load.switch.caught_up():
            self.wait.clear_delays()

    def release(self, request_id: int) -> None:
        self._lengths.release(request_id)

    def _estimate_of(self, kind: _Kind) -> LoadEstimate:
        """A load that was never seen begins with the conclusion of a similar one; its context may be any."""
        if kind not in self._loads:
            similar = [known for known in self._loads if known[2] == kind[2] and abs(known[0] - kind[0]) <= SIMILAR]
            nearest = min(
                similar, key=lambda known: 4 * abs(known[1] - kind[1]) + abs(known[0] - kind[0]), default=None
            )
            switch = SpeculationSwitch()
            if nearest is not None:
                switch = self._loads[nearest].switch.for_similar_load(self._expected_plain(kind, nearest))
            self._loads[kind] = LoadEstimate(switch)
        return self._loads[kind]

    def _expected_plain(self, kind: _Kind, nearest: _Kind) -> Rate | None:
        """One plain round of a load that was never seen, on the line through those of other batch sizes.

        Where batch sizes hardly varied, a row of a plain pass is taken to cost what a row of a draft costs.
        """
        rounds = self._plain_rounds.get(kind[1:])
        if rounds is None:
            return None
        costs = self._loads[nearest].decoding
        per_token_s = costs.with_drafts.per_token_s(costs.plain_verify_s.mean)[1]
        num_running = _num_running(kind)
        seconds = rounds.at(num_running, rounds.slope(per_token_s / _num_running(nearest), _BATCH_STIFFNESS))
        rate = Rate()
        rate.update(num_running, max(seconds, _LEAST_PASS * rounds.mean_y))
        return rate


def _whole_tokens(outcomes: Sequence[DraftOutcome]) -> float | None:
    """What a round would have brought if each request had had a draft as the requests of a trial had."""
    drafted = [max(1, outcome.num_tokens) for outcome in outcomes if outcome.num_ordered]
    return len(outcomes) * sum(drafted) / len(drafted) if drafted else None


def _num_running(kind: _Kind) -> float:
    """Batch size in the middle of the class."""
    return 2 ** (kind[0] / 2)


def _kind_of_load(num_running: int, mean_len: float, samples: bool) -> _Kind:
    """Class of batch sizes, in steps of a half more, of context lengths, in steps of twice as much, and of sampling."""
    return round(2 * log2(num_running)), int(mean_len / 512).bit_length(), samples


def make_policy(pipeline: str, shortest: int, longest: int, *, adaptive: bool, longest_only: bool = False) -> Policy:
    """The policy of a pipeline; without draft tokens it is not adaptive, because nothing can be adapted."""
    if adaptive and longest:
        return AdaptivePolicy(pipeline, shortest, longest, longest_only=longest_only)
    return Policy(pipeline, longest)
