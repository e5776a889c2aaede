"""The coordinator's policy: whether to draft, ahead of the verdict or in turn with it, how long, and how long to wait.

After every round `AdaptivePolicy.update`

1. learns how many draft tokens were accepted (`acceptance.py`) and what a round of its choice costs (`costs.py`);
2. estimates for each choice, plain decoding or a way to draft, the expected tokens and seconds of a round at its best
   draft length;
3. takes the choice with the most tokens per second, or explores another one within a budget (`decision.py`);
4. sets the length of each request's next draft (`draft_length.py`).

Before a pass `Policy.wait` says how long drafts that are not there yet are waited for (`draft_wait.py`), and
`most_text` how much of prompts it reads (`text_pace.py`). A `Policy` sees lengths, counts and seconds; never a tensor,
a socket or a clock. What a drafter prepares while the target verifies is decided on its side
(`actors/drafters/draft_ahead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.options import PipelineName
from actors.policy.acceptance import ACCEPTANCE_MEMORY, AcceptanceModel, DraftOutcome
from actors.policy.costs import IDLE_DECAY, LoadCosts, LoadTable, MachineSpeed, MeasuredRound
from actors.policy.decision import (
    PLAIN_ROUNDS,
    Decision,
    Decoding,
    Estimate,
    Estimates,
    Mode,
)
from actors.policy.draft_length import DraftLengths, Tradeoff
from actors.policy.draft_wait import DraftWait
from actors.policy.estimators import Ewma, batch_class
from actors.policy.text_pace import TextPace
from actors.protocol.messages import UNKNOWN_COSTS, MeasuredCosts


@dataclass(slots=True)
class RoundObservation:
    """A target pass and the time since the one before it."""

    seconds: float = 0.0
    """Time since the verdict before; `verify_s` of it is the target's pass."""
    verify_s: float = 0.0
    draft_s: float = 0.0
    """The time in which the target idled while the drafter worked."""
    num_running: int = 1
    """Requests of the batch."""
    mean_len: float = 0.0
    """Their mean length."""
    num_may_speculate: int = 0
    """Those of them that allow speculation."""
    num_prompt_rows: int = 0
    """Rows of prompts that the pass read besides."""
    outcomes: list[DraftOutcome] = field(default_factory=list)
    """One for each request that got a verdict."""
    skipped_drafts: bool = False
    """Drafts had been ordered, but the pass did not wait for them: they were late, or not worth waiting for."""
    samples: bool = False
    """Most requests of the batch are sampled, not greedy."""
    read_s: float = 0.0
    """Part of `draft_s` in which the drafter read text that it had missed: the price of a beginning, of no draft."""
    unused_s: float = 0.0
    """Time beside `seconds` in which the target's ranks read text for a drafter on them, or drafted what was not
    verified, since the policy decodes plainly by now."""
    serves_drafts: bool = False
    """The pass also computed what a drafter on the target's ranks drafts from."""
    scored: Collection[DraftOutcome] = ()
    """Drafts that no pass verified, as far as the tokens that followed them decide by now."""
    scored_s: float = 0.0
    """What the drafter took for such drafts."""


MOST_UNLEARNED = 16
"""Rounds that fixed lengths learn from at once: what a pass takes is all that they need to know, and to wake the thread
that learns takes longer than to learn."""


class Policy:
    """Fixed draft lengths; the first part of an answer is always waited for.

    What a round reads are attributes: they change where rounds are learned from, beside a pass, or requests join.
    """

    weighs_waiting = False
    """Whether drafts are waited for only while that costs less than they bring."""
    may_score = False
    """Whether drafts that no pass verifies should be made now, to see what drafts would bring."""
    mode = Mode.speculate
    may_end = False
    """Whether the next round with drafts may be the last one for now."""
    most_unlearned = 0
    """Rounds that end before `update` learns from all of them at once, beside a pass; 0: what the next round is waits
    for what this one teaches, as while prompts are read."""
    expected_gap_s = 0.0
    """Seconds in which the target is expected not to work in a round with drafts; 0: not known."""
    costs = UNKNOWN_COSTS
    """What a drafter may weigh its drafts against."""

    def __init__(self, pipeline: str, num_draft_tokens: int) -> None:
        order = PipelineName(pipeline)
        self.longest_draft = num_draft_tokens if order.drafts else 0
        self.alternates = order.alternates
        """Whether drafts are also ordered while the target is busy, and a pass leaves out requests without one."""
        self.works_ahead = order.works_ahead
        """Whether the drafter should work while the target verifies the drafts that are ordered now."""
        self.wait = DraftWait(self.weighs_waiting, num_draft_tokens)
        self._text_pace = TextPace()

    def begin_scoring(self) -> None:
        """Such drafts are ordered."""

    def findings(self) -> dict[str, str | float | None] | None:
        """The mode and the speeds that it follows from, under the present load; None where nothing is compared."""
        return None

    def draft_length(self, request_id: int, most: int) -> int:  # noqa: ARG002 (a policy may tell requests apart)
        """Draft tokens to order for a request to which at most so many are of use; 0 for none."""
        return min(self.longest_draft, most)

    def num_orders(self, num_running: int) -> int:
        """Requests to order drafts for at a time."""
        return (num_running + 1) // 2 if self.alternates else num_running

    def num_followed(self, num_requests: int) -> int:
        """The number of running requests, of so many, whose text the drafter should have read."""
        return num_requests

    def most_text(self, pass_s: float) -> int | None:
        """Rows of prompts that the next pass may read while requests decode, so that it takes about `pass_s` seconds,
        or eight passes without prompts where those are longer; None: no bound."""
        return self._text_pace.most_rows(pass_s, self.wait.verify_s)

    def saw_exchange(self, seconds: float, busy_s: float, longest: int) -> None:
        """The drafter answered so long after an order, beside plain decoding, and worked for `busy_s` of that: it
        drafted `longest` tokens at most, or read text."""

    def update(self, *rounds: RoundObservation) -> None:
        """Rounds ended, in this order; what follows from all of them is decided once."""
        for seen in rounds:
            self.wait.update_pass(seen.verify_s, reads_prompt=seen.num_prompt_rows > 0)
            if seen.num_prompt_rows:
                self._text_pace.saw_pass(seen.verify_s, seen.num_prompt_rows, self.wait.verify_s)
            for outcome in seen.outcomes:
                if outcome.num_tokens:
                    self.wait.update_acceptance(outcome.num_tokens)
        self.costs = MeasuredCosts(self.wait.verify_s)
        reads_prompts = rounds[-1].num_prompt_rows > 0
        self.most_unlearned = 0 if reads_prompts or self.weighs_waiting else MOST_UNLEARNED

    def expect_load(self, num_running: int, samples: bool) -> None:  # noqa: ARG002 (fixed lengths are those of any load)
        """Requests joined: the next rounds are of so many sequences, most of them sampled or greedy."""
        self.most_unlearned = 0

    def caught_up(self) -> None:
        """The drafter has read the committed text that it missed."""

    def release(self, request_id: int) -> None:
        """The request ended."""

    def forget_acceptance(self) -> None:
        """The target has other weights: what was seen of acceptance does not hold, what passes cost does."""


TRIAL_SHARE = 8
"""One of so many requests takes part in a trial, at least two."""
LEAST_SAVED = 0.5
"""Rounds that a trial of all requests must save over one of a few."""
NEW_ROUNDS = 3
"""Rounds after requests joined from each of which is learned before the next: one over prompts, one that drafts what
their texts may be unlike, and one for what it showed."""
LATE_ROUNDS = 8
"""Rounds in a row without their drafts, which came late, that end speculation."""
SCORE_EVERY = 8
"""Rounds between drafts that are only compared with the text, at least."""
SCORED_SHARE = 0.01
"""Share of the time that they may take."""
FAR = 1.0
"""Target passes that an exchange with a far drafter takes at least."""
SPARED = 0.65
"""Share of an exchange that a round takes where a far drafter works ahead, until it is measured."""
LEAST_ROUND = 0.5
"""Share of a plain round that any round is expected to take, whatever prompts take of it."""
_PROMPT_MEMORY = 0.97
_STEADY = 0.4
"""Share of rounds that read prompts from which on such rounds, and those after them, count as others do: there may be
hardly any others."""


class AdaptivePolicy(Policy):
    """Lengths within [`shortest`, `longest`]; `shortest` 0 also allows plain decoding where that is faster.

    Where plain decoding is ruled out, drafts are always waited for. With `longest_only` a request is ordered the
    longest draft or none, for a drafter that chooses lengths itself. Where it never `waits` for drafts, there is no
    drafting in turn. With `scores` the drafter can draft without a pass: while decoding is plain, such drafts are
    compared with the text, which is all that its drafts bring, or the least where it `runs_passes` too. While one
    choice goes on it learns from `rounds_at_once`.
    """

    def __init__(
        self,
        pipeline: str,
        shortest: int,
        longest: int,
        *,
        longest_only: bool = False,
        waits: bool = True,
        scores: bool = False,
        runs_passes: bool = True,
        rounds_at_once: int = 1,
    ) -> None:
        shortest = min(shortest, longest)
        self.weighs_waiting = shortest == 0
        super().__init__(pipeline, longest)
        self._shortest = shortest
        self._longest_only = longest_only
        self._rounds_at_once = rounds_at_once
        self._may_work_ahead = self.works_ahead
        self._drafting = Decoding.ahead if self._may_work_ahead else Decoding.in_turn
        self._decision = Decision(self._drafting, best=self._drafting)
        if self.weighs_waiting:
            self._decision = Decision(Decoding.plain, awaited=self._drafting)
        self._lengths = DraftLengths(shortest, longest)
        self._acceptance = AcceptanceModel(longest)
        self._speed = MachineSpeed()
        self._loads = LoadTable()
        self._ways = (self._drafting, Decoding.in_turn) if self._may_work_ahead and waits else (self._drafting,)
        self._load = LoadCosts()
        self._given_s = 0.0  # of a round under this load, whatever is chosen
        self._reads = Ewma(_PROMPT_MEMORY, weight=33.0)  # share of rounds that read prompts
        self._last_read_prompt = False
        self._num_late = 0
        self._least_chance = 0.0  # how often a draft token must be accepted to be worth a row; 0: not known
        self._may_end = False  # found where rounds are learned from, beside a pass, since it takes a while
        self._num_running = 1
        self._since_joined = 0  # rounds since requests did
        self._tries_all = False
        self._text_class: Hashable = None
        self._scores, self._runs_passes = scores, runs_passes
        self._exchanges_s: deque[float] = deque(maxlen=4)  # beside the drafter's work
        self._until_scoring = 0.0  # rounds of rest
        self._scored = Ewma(ACCEPTANCE_MEMORY)  # tokens that agreed of a draft without a pass, in this rest
        self._follow()

    @property
    def _mode(self) -> Mode:
        return self._decision.mode if self.weighs_waiting else Mode.speculate

    def _follow(self) -> None:
        """Set what rounds read, as it follows from the decision and from what is known of costs.

        Rounds are learned from later while a choice goes on that may go on for long. Of a trial or a probe each counts,
        and of drafts where requests have joined.
        """
        decision, mode, factor = self._decision, self._mode, self._speed.factor
        self.mode, self._drafts = mode, decision.choice.drafts or not self.weighs_waiting
        self.works_ahead = decision.choice is Decoding.ahead or (self._may_work_ahead and not decision.choice.drafts)
        self.may_end = self.weighs_waiting and (mode is Mode.trial or self._may_end)
        goes_on = mode is Mode.rest or (mode is Mode.speculate and self._since_joined >= NEW_ROUNDS)
        self.most_unlearned = 0
        if goes_on and decision.is_settled:
            self.most_unlearned = 1 if self.may_end else self._rounds_at_once
        lines, plain = self._load.by_length(self._way), self._load.plain
        way = self._load.by_choice[self._way]
        is_known = bool(way.weight)
        self.expected_gap_s = factor * lines.gap_of(self._lengths.longest_ordered) if is_known else 0.0
        round_s = 0.0  # of one with drafts, without them: plain rounds themselves are hardly measured while drafts pay
        if plain.weight or is_known:
            round_s = self._without_prompts(lines.pass_of(0.0) + way.beside_s if is_known else plain.mean_s)
        row_s = lines.verify_s / self._num_running
        self.costs = MeasuredCosts(factor * round_s, factor * row_s, self._least_chance)

    def begin_scoring(self) -> None:
        self._until_scoring, self.may_score = SCORE_EVERY, False

    def findings(self) -> dict[str, str | float | None] | None:
        if not self.weighs_waiting:
            return None
        plain_s = self._speed.factor * self._load.plain.mean_s
        return {
            "mode": self._mode.value,
            "plain_tokens_per_s": self._num_running / plain_s if plain_s else None,
            "gain": self._decision.gain,
        }

    def draft_length(self, request_id: int, most: int) -> int:
        if not self._drafts:
            return 0
        length = self._lengths.of(request_id)
        return min(most, self.longest_draft if self._longest_only and length else length)

    def num_followed(self, num_requests: int) -> int:
        """Requests whose texts the drafter should have read: all, those of a trial, or none."""
        match self.mode:
            case Mode.rest:
                return 0
            case Mode.catch_up | Mode.trial:
                return num_requests if self._tries_all else min(num_requests, _num_tried(num_requests))
        return num_requests

    def expect_load(self, num_running: int, samples: bool) -> None:
        self._num_running = num_running
        self._since_joined = 0
        before, self._load = self._load, self._loads.of((batch_class(num_running), samples, 0), self._ways)
        if self._load is not before and self._load.by_choice[self._way].weight:
            self._lengths.choose_for_all(self._tradeoff(self._way, ()).best)  # drafts for few may cost much for many
        self._follow()

    @property
    def _is_far(self) -> bool:
        return bool(self._exchanges_s) and not self._scores and min(self._exchanges_s) > FAR * self.wait.pass_s > 0

    def saw_exchange(self, seconds: float, busy_s: float, longest: int) -> None:
        self._exchanges_s.append(max(0.0, seconds - busy_s))
        self._decision.is_far = self._is_far
        most_s = self.longest_draft * self.wait.pass_s
        self._decision.is_too_far = self._is_far and min(self._exchanges_s) > most_s
        if longest and self._is_far:
            for way in self._ways:
                spared = SPARED if way is Decoding.ahead else 1.0
                factor = self._speed.factor
                self._load.assume(way, spared * seconds / factor, spared * busy_s / factor, longest)
        self._follow()

    def caught_up(self) -> None:
        if self._decision.caught_up():
            self.wait.clear_delays()
        self._follow()

    def release(self, request_id: int) -> None:
        self._lengths.release(request_id)
        self._acceptance.release(request_id)

    def forget_acceptance(self) -> None:
        self._acceptance = AcceptanceModel(self.longest_draft)

    def update(self, *rounds: RoundObservation) -> None:
        super().update(*rounds)
        verified = [seen for seen in rounds if seen.outcomes]
        for seen in verified:
            before, is_last = self._load, seen is verified[-1]
            drafted = any(outcome.num_ordered for outcome in seen.outcomes)
            self._learn(seen, drafted=drafted)
            request_ids = [outcome.request_id for outcome in seen.outcomes]
            tradeoffs, estimates = {}, None if seen.num_may_speculate else {}
            if seen.num_may_speculate and (is_last or self._load is not before):
                tradeoffs = {way: self._tradeoff(way, request_ids) for way in self._ways}
                estimates = self._estimates(tradeoffs, request_ids)
            self._count(seen, estimates, drafted=drafted)
            if is_last and estimates:
                self._decide(tradeoffs, estimates, request_ids, len(verified))
                self._may_end = self._decision.may_end
        is_rest = self._mode is Mode.rest
        if not is_rest:
            self._scored.weight = 0.0
        self.may_score = (self._scores or self._decision.is_far) and is_rest and self._until_scoring <= 0
        self._follow()

    # --- what was measured --------------------------------------------------------------------------------------------

    def _learn(self, seen: RoundObservation, *, drafted: bool) -> None:
        self._num_running = seen.num_running
        self._since_joined += 1
        shown = self._choose_load(seen)
        self._learn_acceptance(seen, drafted=drafted)
        if self._mode is Mode.rest:
            self._learn_scored(seen)
        self._learn_costs(seen, shown, drafted=drafted)
        came = any(outcome.num_ordered and outcome.num_tokens for outcome in seen.outcomes)
        self._notice_late_drafts(seen, late=seen.skipped_drafts and not came)

    def _count(self, seen: RoundObservation, estimates: Estimates | None, *, drafted: bool) -> None:
        """What the round cost and earned, by the estimates under its load; None: those of the last decision."""
        if self._mode is not Mode.speculate:  # texts that are read while drafts go on are no exploration
            self._decision.charge((seen.unused_s + seen.read_s) / self._usual_s(seen))
        if drafted is self._decision.choice.drafts:
            tokens, expected_s = self._expected(seen, drafted=drafted)
            took_s = seen.seconds / self._speed.factor if self._load.has_measured(self._decision.choice) else expected_s
            brought = None
            if self._decision.is_far:
                brought = sum([max(1, one.num_tokens) for one in seen.outcomes]) / seen.num_running
            self._decision.count(tokens, expected_s, took_s, estimates, brought)

    def _choose_load(self, seen: RoundObservation) -> LoadCosts:
        """Set the load that decides, and return the one that the round shows.

        Prompts have to be read whatever is chosen, so rounds without them decide, with what was measured in such.
        """
        self._reads.update(seen.num_prompt_rows > 0)
        load = batch_class(seen.num_running), seen.samples
        shown = without = self._loads.of((*load, 0), self._ways)
        if seen.num_prompt_rows:
            shown = self._loads.of((*load, seen.num_prompt_rows.bit_length()), self._ways)
        self._load = shown if self._reads.mean > _STEADY else without
        self._given_s = 0.0
        if self._load is not without and self._load.plain.weight and without.plain.weight:
            self._given_s = max(0.0, self._load.plain.mean_s - without.plain.mean_s)
        return shown

    def _learn_acceptance(self, seen: RoundObservation, *, drafted: bool) -> None:
        key = self._text_class = _text_class(seen)
        if drafted:
            self._acceptance.update(key, self._way, seen.outcomes, self._lengths.retried)
        elif not self._decision.is_far:  # else drafts beside plain decoding go on
            self._acceptance.of_class(key).fade(IDLE_DECAY)
        self._lengths.update(seen.outcomes, self._acceptance)

    def _learn_scored(self, seen: RoundObservation) -> None:
        """What drafts without a pass would have brought. Where the drafter has models too it is the least that drafts
        bring: it raises what is expected of them, and lowers nothing."""
        self._until_scoring -= 1
        if seen.scored_s and self._scores:
            self._until_scoring = max(self._until_scoring, seen.scored_s / self._usual_s(seen) / SCORED_SHARE)
        if not seen.scored:
            return
        self._scored.update_round([len(outcome.path) for outcome in seen.scored])
        expected = self._acceptance.expected_of(self._text_class, seen.scored, self._way) - 1
        if not (self._scores and self._runs_passes) or self._scored.mean > expected:
            self._acceptance.update(self._text_class, self._way, seen.scored, self._lengths.retried)
            num_ordered = sum([outcome.num_ordered for outcome in seen.scored])
            num_found = sum([one.num_ordered - one.num_missing for one in seen.scored if one.num_tokens])
            if self._scores:
                self._load.by_choice[self._way].arrived.update(num_found / num_ordered)
        self._lengths.update([outcome for outcome in seen.scored if outcome.path], self._acceptance)

    def _learn_costs(self, seen: RoundObservation, shown: LoadCosts, *, drafted: bool) -> None:
        """The round is measured if it shows what rounds of its choice cost."""
        after_prompt, self._last_read_prompt = self._last_read_prompt, seen.num_prompt_rows > 0
        if after_prompt and not seen.num_prompt_rows and self._reads.mean < _STEADY:
            return  # it finds other data in the caches, and may be the first of its size
        if not drafted:
            is_disturbed = self._mode is Mode.catch_up and shown.plain.weight >= PLAIN_ROUNDS
            if seen.serves_drafts or is_disturbed:
                return
            num_rows = len(seen.outcomes) + seen.num_prompt_rows
            self._loads.saw_plain_pass(num_rows, seen.verify_s / self._speed.factor)
        num_requests = len(seen.outcomes)
        longest = max([outcome.num_ordered for outcome in seen.outcomes])
        verified = sum([one.num_ordered - one.num_missing for one in seen.outcomes if one.num_tokens])  # that came
        arrived = 1.0  # of drafts that are late, the next pass may wait for all
        if drafted and not seen.skipped_drafts:
            arrived = verified / sum([outcome.num_ordered for outcome in seen.outcomes])
        gap_s, served = max(0.0, seen.seconds - seen.verify_s - seen.read_s), num_requests / seen.num_running
        draft_s = max(0.0, seen.draft_s - seen.read_s)
        times = MeasuredRound(seen.verify_s, gap_s, draft_s, longest, verified / num_requests, served, arrived)
        choice = self._way if drafted else Decoding.plain
        shown.measure(choice, times, self._speed, is_first=not self._decision.is_settled)

    def _usual_s(self, seen: RoundObservation) -> float:
        """Seconds of a plain round at the present speed; of a pass, where none was measured under this load."""
        known_s = self._speed.factor * self._load.plain.mean_s
        return known_s if self._load.has_measured(Decoding.plain) else max(known_s, seen.verify_s, 1e-9)

    def _notice_late_drafts(self, seen: RoundObservation, *, late: bool) -> None:
        """Drafts that never come in time show no cost: what was measured is dropped, and a trial is due later."""
        self._num_late = self._num_late + 1 if late and self._decision.choice.drafts else 0
        if self._num_late:
            usual_s = self._usual_s(seen)
            self._decision.charge(max(0.0, seen.seconds - usual_s) / usual_s)
        if self._num_late == LATE_ROUNDS:
            self._num_late = 0
            self._load.forget_drafts()
            self._decision.give_up()

    # --- what follows -------------------------------------------------------------------------------------------------

    def _expected(self, seen: RoundObservation, *, drafted: bool) -> tuple[float, float]:
        """Tokens of a request in the mean, and seconds, of rounds like this one."""
        tokens = self._acceptance.expected_of(self._text_class, seen.outcomes, self._way) if drafted else 1.0
        lengths = [outcome.num_ordered for outcome in seen.outcomes]
        lines = self._load.by_length(self._way if drafted else Decoding.plain)
        seconds = lines.round_of(max(lengths), sum(lengths) / len(lengths))
        return tokens * len(lengths) / seen.num_running, self._without_prompts(seconds)

    def _estimates(self, tradeoffs: Mapping[Decoding, Tradeoff], request_ids: Collection[int]) -> Estimates:
        """Every choice at its best draft length, under the load of this round."""
        estimates = {}
        if self.weighs_waiting:
            plain = self._load.plain
            estimates[Decoding.plain] = Estimate(1.0, self._without_prompts(plain.mean_s), 0, plain.weight)
        num_drafts = self._acceptance.of_class(self._text_class).weight
        num_own_drafts = self._acceptance.num_drafts_of_mean(request_ids)
        for way, tradeoff in tradeoffs.items():
            best = self.longest_draft if self._longest_only else tradeoff.best
            costs = self._load.by_choice[way]
            tokens, seconds = tradeoff.tokens[best] * costs.served.mean, tradeoff.seconds[best]
            estimates[way] = Estimate(tokens, seconds, best, costs.weight, num_drafts, num_own_drafts)
        return estimates

    def _decide(
        self,
        tradeoffs: Mapping[Decoding, Tradeoff],
        estimates: Estimates,
        request_ids: Collection[int],
        num_rounds: int,
    ) -> None:
        """Choose for the next rounds, about as many as were learned from, and the draft lengths if they have drafts."""
        drafted = self._decision.choice.drafts
        self._decision.decide(estimates)
        way, self._least_chance = self._way, 0.0
        is_trial = self._mode in (Mode.catch_up, Mode.trial)
        if self._mode is not Mode.trial:  # of those that join a trial the texts would have to be read
            self._tries_all = is_trial and self._should_try_all(tradeoffs[way], estimates)
        if self._decision.choice.drafts and not drafted:
            self.wait.clear_delays()
        if not self._load.by_choice[way].weight or not (is_trial or self._decision.choice.drafts):
            return
        chances = self._acceptance.of_class(self._text_class).chances
        if self.weighs_waiting and self._mode is Mode.speculate:  # in a trial all are verified, which shows more
            speed = tradeoffs[way].speeds[tradeoffs[way].best]
            self._least_chance = speed * self._load.by_length(way).verify_s
        spend = self._decision.spend
        self._lengths.choose(
            tradeoffs[way], request_ids, self._acceptance, chances, lambda lost: spend(num_rounds * lost)
        )
        if is_trial:
            self._lengths.choose_for_all(tradeoffs[way].informative())

    def _should_try_all(self, tradeoff: Tradeoff, estimates: Estimates) -> bool:
        """Whether a trial with every request loses less than one with a few, by what is known: where most of the time
        that drafts take is the exchange, each request more makes a trial cheaper."""
        plain, drafted = estimates[Decoding.plain], estimates[self._way]
        left_out = max(0.0, 1 - _num_tried(self._num_running) / self._num_running)
        gain = left_out * (drafted.tokens - 1 - drafted.length * tradeoff.verify_s / plain.seconds)
        return plain.is_known and drafted.is_known and gain > LEAST_SAVED

    def _without_prompts(self, seconds: float) -> float:
        """Seconds of a round without those that its prompts take. Where other rounds waited longer beside theirs, at
        least a part of a plain round without prompts."""
        least_s = LEAST_ROUND * (self._load.plain.mean_s - self._given_s)
        return max(seconds - self._given_s, least_s, 1e-9)

    @property
    def _way(self) -> Decoding:
        """How drafts are made, or would be."""
        return self._decision.choice if self._decision.choice.drafts else self._drafting

    def _tradeoff(self, way: Decoding, request_ids: Collection[int]) -> Tradeoff:
        """What lengths bring these requests and cost; drafts in turn that were never made should cost what drafting
        ahead showed."""
        tokens = self._acceptance.expected(self._text_class, request_ids, way)
        if self._load.by_choice[way].weight:
            lines = self._load.by_length(way)
            seconds = [self._without_prompts(one) for one in lines.seconds(self.longest_draft)]
            return Tradeoff(tokens, seconds, lines.draft_s, lines.ordered_s, self._shortest)
        ahead, plain_s = self._load.by_choice[Decoding.ahead], self._load.plain.verify.mean_y
        draft_s = ahead.draft_s.mean_y / ahead.draft_s.mean_x if ahead.draft_s.mean_x else 0.0
        pass_s = self._without_prompts(plain_s or ahead.verify.mean_y)
        seconds = [pass_s + k * draft_s for k in range(self.longest_draft + 1)]
        return Tradeoff(tokens, seconds, draft_s, 0.0, self._shortest)


def _num_tried(num_requests: int) -> int:
    """Requests of a trial."""
    return max(2, num_requests // TRIAL_SHARE)


def _text_class(seen: RoundObservation) -> Hashable:
    """Class of texts whose acceptance is alike: context lengths in steps of twice as much, and sampling."""
    return int(seen.mean_len / 512).bit_length(), seen.samples


def make_policy(pipeline: str, shortest: int, longest: int, *, adaptive: bool, **options: Any) -> Policy:
    """The policy of a pipeline, where it adapts with these `options`; without draft tokens nothing can be adapted."""
    if not (adaptive and longest):
        return Policy(pipeline, longest)
    return AdaptivePolicy(pipeline, shortest, longest, **options)
