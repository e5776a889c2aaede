"""What a round costs: its seconds by choice and draft length, at the machine's present speed.

All estimates are divided by one factor, the present slowness of the machine, which follows the target's passes: they
are part of every kind of round, so a slow phase moves every choice alike, and a kind of round that was not measured
lately keeps its place beside the others. Works on seconds and counts that the caller measured; decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field, replace

from actors.policy.decision import Decoding
from actors.policy.estimators import MEMORY, OUTLIER, Ewma, LinearFit

SPEED_SHARE = 0.25
"""Share of a pass's deviation that is put down to the machine's speed, where the pass time is well known: the factor
follows a change within about four passes."""
WELL_KNOWN = 8.0
"""Weight of an estimate at which half of `SPEED_SHARE` applies; before, a deviation rather corrects the estimate."""
IDLE_DECAY = 0.99
"""Weight that an estimate keeps per round of another kind: after 70 rounds it has half."""
INHERITED = 2.0
"""Weight of estimates that are taken over from a similar load."""
UNSETTLED = 0.2
"""Weight of the first round after a change, which only counts until the next one."""
_LENGTH_STIFFNESS = 0.1
"""Variance of draft lengths at which their measured cost and the expected one weigh the same."""
_ROW_MEMORY, _ROW_STIFFNESS = 0.999, 1.0
"""What a row of a pass costs is kept for a thousand passes, and counts where rows varied by more than one."""
_LEAST_VERIFY = 0.5
"""Least pass that is extrapolated to, in mean passes."""


@dataclass(slots=True)
class MachineSpeed:
    """The present slowness of the machine: seconds of a pass over what its estimate says."""

    factor: float = 1.0

    def update(self, seconds: float, expected_s: float, weight: float) -> None:
        """A pass took `seconds`; `expected_s` is its estimate, of this weight, without the factor."""
        if not expected_s or seconds <= 0:
            return
        deviation = min(seconds / (expected_s * self.factor), OUTLIER) - 1
        # A power of what the same deviation makes of the estimate: their product is known from passes, their ratio is
        # not, and unless both move together the noise of passes turns the one up and the other down without end.
        corrected = 1 / (MEMORY * weight + 1)
        share = SPEED_SHARE * weight / (weight + WELL_KNOWN)
        self.factor *= (1 + corrected * deviation) ** (share / corrected)


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """Seconds and draft lengths of a round."""

    verify_s: float
    """The target's pass."""
    gap_s: float
    """The rest of the round."""
    draft_s: float
    """Drafting for which the target waited, a part of `gap_s`."""
    longest: int
    """The longest draft that was ordered for the batch."""
    mean: float
    """The mean draft that came, in tokens."""
    served: float = 1.0
    """Share of the batch that the pass served."""
    arrived: float = 1.0
    """Share of the ordered draft tokens whose drafts came: a lookup finds none for some requests."""

    def at(self, factor: float) -> MeasuredRound:
        """The same on a machine without this slowness."""
        seconds = self.verify_s / factor, self.gap_s / factor, self.draft_s / factor
        return MeasuredRound(*seconds, self.longest, self.mean, self.served, self.arrived)


@dataclass(frozen=True, slots=True)
class RoundLines:
    """Expected seconds of a round of one choice, by its draft lengths."""

    gap_s: float
    """Seconds in which the target does not work, without a draft token."""
    draft_s: float
    """What one more token of the longest draft adds to them."""
    pass_s: float
    """The target's pass without a draft token, on the line through passes over drafts."""
    verify_s: float
    """What one more draft token for every request adds to it."""
    least_pass_s: float
    """A pass over drafts takes at least as long as a plain one, since it reads what that reads."""
    arrived: float = 1.0
    """Share of the ordered draft tokens whose drafts come, which the pass has to verify."""

    @property
    def ordered_s(self) -> float:
        """What one more token that is ordered for every request adds to the pass."""
        return self.arrived * self.verify_s

    def gap_of(self, longest: int) -> float:
        """Seconds outside of the target's pass in a round whose longest draft has so many tokens."""
        return max(0.0, self.gap_s + longest * self.draft_s)

    def pass_of(self, mean: float) -> float:
        """Seconds of a pass over drafts of `mean` tokens."""
        return max(self.least_pass_s, self.pass_s + mean * self.verify_s)

    def round_of(self, longest: int, mean: float) -> float:
        """Seconds of a round for which `mean` draft tokens are ordered for a request, and at most `longest`."""
        return self.gap_of(longest) + self.pass_of(self.arrived * mean)

    def seconds(self, longest: int) -> list[float]:
        """Seconds of a round in which 0, 1, ... `longest` draft tokens are ordered for every request."""
        return [self.round_of(length, length) for length in range(longest + 1)]


@dataclass(slots=True)
class RoundCosts:
    """Seconds of the rounds of one choice as a function of draft length, which is 0 in plain rounds.

    Two lines: the time in which the target does not work, against the longest draft (drafting, messages, waiting), and
    the target's pass, against the mean draft. The slope of the first tells whether the target's pass hides drafting.
    """

    gap: LinearFit = field(default_factory=LinearFit)
    verify: LinearFit = field(default_factory=lambda: LinearFit(corrects_first=True))
    draft_s: LinearFit = field(default_factory=lambda: LinearFit(corrects_first=True))
    """Drafting for which the target waited: by it a draft token has a price where lengths did not vary."""
    served: Ewma = field(default_factory=lambda: Ewma(mean=1.0))
    """Share of the batch that a pass serves: where two halves take turns about a half."""
    arrived: Ewma = field(default_factory=lambda: Ewma(mean=1.0))
    """Share of the ordered draft tokens whose drafts come."""
    rows_s: float = 0.0
    """Seconds that as many rows as there are requests add to a pass without drafts; 0: not known."""

    @property
    def weight(self) -> float:
        """Rounds that were measured, with forgetting."""
        return self.verify.weight

    @property
    def beside_s(self) -> float:
        """Seconds of a round beside its pass and its drafts."""
        return max(0.0, self.gap.mean_y - self.draft_s.mean_y)

    @property
    def mean_s(self) -> float:
        """Seconds of a round in the mean: of plain rounds all there is to know."""
        return self.gap.mean_y + self.verify.mean_y

    def update(self, times: MeasuredRound, slope: float = 0.0) -> None:
        """A round was measured; a draft token more for every request is taken to add `slope` seconds to its pass, where
        that decides whether the pass is an outlier."""
        self.gap.update(times.longest, times.gap_s)
        self.verify.update(times.mean, times.verify_s, slope)
        self.draft_s.update(times.longest, times.draft_s)
        self.served.update(times.served)
        self.arrived.update(times.arrived)

    def fade(self, share: float) -> None:
        for estimate in (self.gap, self.verify, self.draft_s, self.served, self.arrived):
            estimate.decay(share)

    def by_length(self, plain_verify_s: float) -> RoundLines:
        """What rounds cost by draft length; `plain_verify_s` is the mean pass without drafts, 0: not measured."""
        gap, verify = self.gap, self.verify
        drafted = self.draft_s.mean_y / self.draft_s.mean_x if self.draft_s.mean_x else 0.0
        read = 0.0
        if plain_verify_s and verify.mean_x:
            read = max(0.0, verify.mean_y - plain_verify_s) / verify.mean_x
        if self.rows_s:
            known = verify.mean_x**2
            read = (known * read + _LENGTH_STIFFNESS * self.rows_s) / (known + _LENGTH_STIFFNESS)
        draft_s, verify_s = gap.slope(drafted, _LENGTH_STIFFNESS), verify.slope(read, _LENGTH_STIFFNESS)
        least_s = max(plain_verify_s, _LEAST_VERIFY * verify.mean_y)
        return RoundLines(gap.at(0, draft_s), draft_s, verify.at(0, verify_s), verify_s, least_s, self.arrived.mean)


@dataclass(slots=True)
class LoadCosts:
    """What rounds under one kind of load cost, by choice.

    A choice that was not measured under this load has the estimates of a similar one (`borrow`): its passes take what
    they take there, and longer by the rows that they have here beyond it.
    """

    by_choice: defaultdict[Decoding, RoundCosts] = field(default_factory=lambda: defaultdict(RoundCosts))
    _measured: set[Decoding] = field(default_factory=set)

    @property
    def plain(self) -> RoundCosts:
        return self.by_choice[Decoding.plain]

    def has_measured(self, choice: Decoding) -> bool:
        return choice in self._measured

    def by_length(self, choice: Decoding) -> RoundLines:
        """What rounds of a choice cost by draft length."""
        return self.by_choice[choice].by_length(self.plain.verify.mean_y)

    def measure(self, choice: Decoding, times: MeasuredRound, speed: MachineSpeed, *, is_first: bool) -> None:
        """A round of this choice ended; after a change the first one hardly counts."""
        costs, plain, factor = self.by_choice[choice], self.plain, speed.factor
        for other in self.by_choice.values():
            if other is not costs:
                other.fade(IDLE_DECAY)
        if is_first and costs.weight:
            return
        lines = costs.by_length(plain.verify.mean_y)
        expected_s, weight = self._expected_pass(costs, lines, times, factor)
        if self._measured:
            speed.update(times.verify_s, expected_s, weight)
        elif expected_s and costs is plain:  # this load's own level, and no other speed of the machine
            self._add_to_borrowed(times.verify_s / factor - expected_s)
        self._measured.add(choice)
        before_s = plain.verify.mean_y
        times = times.at(factor)
        slope = 0.0
        if costs is not plain:
            slope = lines.verify_s if costs.weight else costs.rows_s
            times = self._without_pause(costs, times, slope)
            if not times.mean and Decoding.plain not in self._measured:  # no draft came: it takes what a plain one does
                plain.verify.add((times.verify_s - before_s) / (1 + plain.weight))
                before_s = 0.0
            elif not times.mean and not times.arrived:
                plain.gap.update(0.0, max(0.0, times.gap_s - times.draft_s))
                plain.verify.update(0.0, times.verify_s)
        costs.update(times, slope)
        if before_s:
            self._add_to_borrowed(plain.verify.mean_y - before_s)
        if is_first:
            costs.fade(UNSETTLED)

    def assume(self, choice: Decoding, gap_s: float, draft_s: float, longest: int) -> None:
        """Takes rounds of the choice, until it is measured, with drafts of so many tokens to last so much longer
        than plain ones, beside what the rows of these add."""
        if choice in self._measured or not self.plain.weight:
            return
        costs = self.by_choice[choice]
        if not costs.verify.mean_x:
            costs.update(MeasuredRound(self.plain.verify.mean_y, gap_s, draft_s, longest, 0.0))
            costs.fade(min(1.0, INHERITED / costs.weight))

    def forget_drafts(self) -> None:
        """Measure every way to draft anew."""
        plain = self.plain
        self.by_choice.clear()
        self.by_choice[Decoding.plain] = plain
        self._measured &= {Decoding.plain}

    def borrow(
        self, choice: Decoding, other: LoadCosts, more_s: float = 0.0, token_s: float = 0.0, least_s: float = 0.0
    ) -> None:
        """Take over what a similar load knows of a choice that this one knows nothing of; plain decoding first.

        The rows that a pass without drafts has more here add `more_s` to it, and those of a draft token `token_s`. It
        takes at least `least_s`.
        """
        costs = self.by_choice[choice] = deepcopy(other.by_choice[choice])
        costs.fade(min(1.0, INHERITED / costs.weight))  # to be corrected soon
        known_s = other.plain.verify.mean_y
        least_s = least_s or _LEAST_VERIFY * (known_s or costs.verify.mean_y)
        more_s = max(more_s, least_s - (known_s or costs.verify.mean_y))
        costs.verify.add(more_s, token_s)
        if costs is not self.plain and self.plain.weight and other.plain.weight:
            costs.verify.add(self.plain.verify.mean_y - known_s - more_s)

    def _add_to_borrowed(self, seconds: float) -> None:
        """Plain passes take so much longer than was known; so will those that were not measured here."""
        for choice, costs in self.by_choice.items():
            if choice not in self._measured:
                costs.verify.add(seconds)

    def _without_pause(self, costs: RoundCosts, times: MeasuredRound, slope: float) -> MeasuredRound:
        """A pass over drafts that is an outlier beside what passes of its rows usually take was a pause.

        Of a first one the plain passes tell that, and what rows of prompts or of other batches add to them; of later
        ones the line of this `slope` too: where a batch is large, many rows take many times a plain pass, and a clamped
        pass over long drafts would hold the line down for a hundred rounds.
        """
        plain = self.plain
        if plain.weight <= 1:
            return times
        usual_s = max(plain.verify.mean_y + costs.rows_s * times.mean, costs.verify.at(times.mean, slope))
        return times if times.verify_s < OUTLIER * usual_s else replace(times, verify_s=OUTLIER * usual_s)

    def _expected_pass(
        self, costs: RoundCosts, lines: RoundLines, times: MeasuredRound, factor: float
    ) -> tuple[float, float]:
        """Seconds expected of the target's pass, without the factor, and the weight of that estimate.

        A pass over drafts that is quicker than plain passes were shows that the machine has become faster since.
        """
        weight = costs.verify.weight_at(times.mean, _LENGTH_STIFFNESS)
        if times.verify_s < self.plain.verify.mean_y * factor:
            weight = max(weight, self.plain.weight)
        return lines.pass_of(times.mean), weight


Load = tuple[int, bool, int]
"""Twice the binary logarithm of a batch's size, whether most requests are sampled, and classes of prompt rows read."""


def _prompt_rows(load: Load) -> float:
    """Prompt rows of a pass under this load, in the mean: so many have the bit length that is its class."""
    return 0.75 * (1 << load[2]) if load[2] else 0.0


class LoadTable:
    """Costs by load. What was not measured under one begins with the most similar load that knows it."""

    def __init__(self) -> None:
        self._loads: defaultdict[Load, LoadCosts] = defaultdict(LoadCosts)
        self._passes = LinearFit(_ROW_MEMORY)  # without drafts, by their rows

    def saw_plain_pass(self, num_rows: int, seconds: float) -> None:
        """A pass without drafts: prompts and batches of several sizes tell what the rows of drafts will add."""
        self._passes.update(num_rows, seconds, self._row_s)

    @property
    def _row_s(self) -> float:
        return self._passes.slope(0.0, _ROW_STIFFNESS)

    def of(self, load: Load, ways: Collection[Decoding]) -> LoadCosts:
        """Costs under this load, of plain decoding and of these ways to draft as far as any load knows them."""
        costs, num_requests = self._loads[load], 2 ** (load[0] / 2)
        least_s = self._loads[*load[:2], 0].plain.verify.mean_y if load[2] else 0.0  # without the prompts
        for choice in (Decoding.plain, *ways):
            if not costs.by_choice[choice].weight and (similar := self._most_similar(load, choice)):
                more = num_requests - 2 ** (similar[0] / 2)
                more_prompts = _prompt_rows(load) - _prompt_rows(similar)
                more_s, token_s = (more + more_prompts) * self._row_s, more * self._row_s
                costs.borrow(choice, self._loads[similar], more_s, token_s, least_s)
            costs.by_choice[choice].rows_s = num_requests * self._row_s
        return costs

    def _most_similar(self, load: Load, choice: Decoding) -> Load | None:
        """The load most like this one under which the choice is known."""
        batch, samples, prompts = load

        def distance(one: Load) -> tuple[int, bool, int]:
            return abs(one[2] - prompts), one[1] != samples, abs(one[0] - batch)

        known = [one for one, costs in self._loads.items() if costs.by_choice[choice].weight]
        alike = [one for one in known if (one[2] > 0) == (prompts > 0)]
        return min(alike, key=distance, default=None)
