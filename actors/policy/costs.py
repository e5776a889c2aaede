"""What a round costs: seconds of plain rounds and of rounds with drafts, at the machine's present speed.

All estimates are divided by one factor, the present slowness of the machine, which follows the target's passes: they
are part of every kind of round, so a slow phase moves every choice alike, and a kind of round that was not measured
lately keeps its place beside the others. Works on seconds and counts that the caller measured; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from copy import deepcopy
from dataclasses import dataclass, field, replace

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
    """Seconds of a round: the target's pass, the time outside of it, and drafting; with its draft lengths, the longest
    and the mean of the batch, and the share of the batch that the pass served."""

    verify_s: float
    gap_s: float
    draft_s: float
    longest: int
    mean: float
    served: float = 1.0

    def at(self, factor: float) -> MeasuredRound:
        """The same on a machine without this slowness."""
        seconds = self.verify_s / factor, self.gap_s / factor, self.draft_s / factor
        return MeasuredRound(*seconds, self.longest, self.mean, self.served)


@dataclass(slots=True)
class PlainCosts:
    """Seconds of rounds without drafts: the target's pass, and the rest of the round."""

    verify: Ewma = field(default_factory=lambda: Ewma(MEMORY, OUTLIER))
    gap: Ewma = field(default_factory=lambda: Ewma(MEMORY, OUTLIER))

    @property
    def weight(self) -> float:
        return self.verify.weight

    @property
    def seconds(self) -> float:
        return self.verify.mean + self.gap.mean

    def verify_s(self, mean: float, plain_verify_s: float) -> float:  # noqa: ARG002  as of `DraftedCosts`
        return self.verify.mean

    def round_s(self, longest: int, mean: float, plain_verify_s: float) -> float:  # noqa: ARG002  as of `DraftedCosts`
        return self.seconds

    def update(self, times: MeasuredRound) -> None:
        self.verify.update(times.verify_s)
        self.gap.update(times.gap_s)

    def fade(self, share: float) -> None:
        self.verify.decay(share)
        self.gap.decay(share)

    def scale_pass(self, ratio: float) -> None:
        self.verify.mean *= ratio


@dataclass(slots=True)
class DraftedCosts:
    """Seconds of rounds with drafts as a function of draft length.

    Two lines: the time in which the target does not work, against the longest draft (drafting, messages, waiting), and
    the target's pass, against the mean draft. The slope of the first tells whether the target's pass hides drafting.
    """

    gap: LinearFit = field(default_factory=LinearFit)
    verify: LinearFit = field(default_factory=lambda: LinearFit(corrects_first=True))
    draft_s: LinearFit = field(default_factory=lambda: LinearFit(corrects_first=True))
    served: Ewma = field(default_factory=lambda: Ewma(mean=1.0))
    """Share of the batch that a pass serves: where two halves take turns about a half."""

    @property
    def weight(self) -> float:
        return self.verify.weight

    def update(self, times: MeasuredRound) -> None:
        self.gap.update(times.longest, times.gap_s)
        self.verify.update(times.mean, times.verify_s)
        self.draft_s.update(times.longest, times.draft_s)
        self.served.update(times.served)

    def fade(self, share: float) -> None:
        for line in (self.gap, self.verify, self.draft_s, self.served):
            line.decay(share)

    def scale_pass(self, ratio: float) -> None:
        self.verify.scale(ratio)

    def per_token_s(self, plain_verify_s: float) -> tuple[float, float]:
        """Seconds that one more draft token for every request costs: outside the target's pass, and in it.

        `plain_verify_s` is the mean target pass without drafts; 0: not measured.
        """
        drafted = self.draft_s.mean_y / self.draft_s.mean_x if self.draft_s.mean_x else 0.0
        read = 0.0
        if plain_verify_s and self.verify.mean_x:
            read = max(0.0, self.verify.mean_y - plain_verify_s) / self.verify.mean_x
        return self.gap.slope(drafted, _LENGTH_STIFFNESS), self.verify.slope(read, _LENGTH_STIFFNESS)

    def verify_s(self, mean: float, plain_verify_s: float) -> float:
        """Seconds of a pass over drafts of `mean` tokens: at least a plain pass, since it reads what that reads."""
        return self._pass_s(mean, self.per_token_s(plain_verify_s)[1], plain_verify_s)

    def _pass_s(self, mean: float, per_token_s: float, plain_verify_s: float) -> float:
        return max(plain_verify_s, _LEAST_VERIFY * self.verify.mean_y, self.verify.at(mean, per_token_s))

    def round_s(self, longest: int, mean: float, plain_verify_s: float) -> float:
        """Seconds of a round with drafts of so many tokens, the longest and the mean of the batch."""
        return self.gap_s(longest, plain_verify_s) + self.verify_s(mean, plain_verify_s)

    def gap_s(self, longest: int, plain_verify_s: float) -> float:
        """Seconds outside of the target's pass in a round whose longest draft has so many tokens."""
        return max(0.0, self.gap.at(longest, self.per_token_s(plain_verify_s)[0]))

    def seconds(self, longest: int, plain_verify_s: float) -> list[float]:
        """Seconds of a round in which every request gets a draft of 0, 1, ... `longest` tokens."""
        gap_token_s, pass_token_s = self.per_token_s(plain_verify_s)
        gap_s = self.gap.at(0, gap_token_s)
        return [
            max(0.0, gap_s + k * gap_token_s) + self._pass_s(k, pass_token_s, plain_verify_s)
            for k in range(longest + 1)
        ]


@dataclass(slots=True)
class LoadCosts:
    """What rounds under one kind of load cost: without drafts, and for every way to draft.

    Rounds that were not measured under this load have the estimates of a similar one (`borrow`). Their passes over
    drafts keep the ratio to plain passes that they have there: they read what these read.
    """

    plain: PlainCosts = field(default_factory=PlainCosts)
    drafted: dict[Hashable, DraftedCosts] = field(default_factory=dict)
    _measured: set[Hashable | None] = field(default_factory=set)

    def way(self, way: Hashable) -> DraftedCosts:
        known = self.drafted.get(way)
        if known is None:
            known = self.drafted[way] = DraftedCosts()
        return known

    def measure(self, way: Hashable | None, times: MeasuredRound, speed: MachineSpeed, *, is_first: bool) -> None:
        """A round with drafts made in this way, or without, ended; after a change the first one hardly counts."""
        costs = self.plain if way is None else self.way(way)
        self._fade_others(costs)
        if is_first and costs.weight:
            return
        factor = speed.factor
        expected_s, weight = self._expected_pass(costs, times, factor)
        if self._measured:
            speed.update(times.verify_s, expected_s, weight)
        elif expected_s and way is None:  # this load's own level, and no other speed of the machine
            ratio = times.verify_s / (expected_s * factor)
            self.plain.scale_pass(ratio)
            self._follow_plain(ratio)
        self._measured.add(way)
        before_s = self.plain.verify.mean
        costs.update(self._without_pause(costs, times.at(factor)))
        if before_s:
            self._follow_plain(self.plain.verify.mean / before_s)
        if is_first:
            costs.fade(UNSETTLED)

    def forget_drafts(self) -> None:
        """Measure every way to draft anew."""
        self.drafted.clear()
        self._measured &= {None}

    def borrow(self, way: Hashable | None, other: LoadCosts) -> None:
        """Take over what a similar load knows of a kind of round that this one knows nothing of."""
        if way is None:
            self.plain = deepcopy(other.plain)
            self.plain.fade(_inherited_share(self.plain.weight))
            return
        costs = self.drafted[way] = deepcopy(other.way(way))
        costs.fade(_inherited_share(costs.weight))
        if self.plain.weight and other.plain.weight:
            costs.scale_pass(self.plain.verify.mean / other.plain.verify.mean)

    def _follow_plain(self, ratio: float) -> None:
        """Plain passes are expected to take so many times as long as before."""
        for way, one in self.drafted.items():
            if way not in self._measured:
                one.scale_pass(ratio)

    def _without_pause(self, costs: PlainCosts | DraftedCosts, times: MeasuredRound) -> MeasuredRound:
        """A pass over drafts that is an outlier beside all passes known was a pause, however few these were."""
        plain = self.plain.verify
        if not isinstance(costs, DraftedCosts) or plain.weight <= 1:
            return times
        most_s = OUTLIER * max(plain.mean, costs.verify.mean_y)
        return times if times.verify_s <= most_s else replace(times, verify_s=most_s)

    def _expected_pass(
        self, costs: PlainCosts | DraftedCosts, times: MeasuredRound, factor: float
    ) -> tuple[float, float]:
        """Seconds expected of the target's pass, without the factor, and the weight of that estimate.

        A pass over drafts that is quicker than plain passes were shows that the machine has become faster since.
        """
        plain = self.plain.verify
        is_faster = times.verify_s < plain.mean * factor
        return costs.verify_s(times.mean, plain.mean), max(costs.weight, plain.weight if is_faster else 0.0)

    def _fade_others(self, present: PlainCosts | DraftedCosts) -> None:
        for one in (self.plain, *self.drafted.values()):
            if one is not present:
                one.fade(IDLE_DECAY)


Load = tuple[int, bool, int]
"""Classes of batch sizes, whether most requests are sampled, and classes of prompt rows read."""


class LoadTable:
    """Costs by load. What was not measured under one begins with the most similar load that knows it."""

    def __init__(self) -> None:
        self._loads: dict[Load, LoadCosts] = {}

    def of(self, load: Load, ways: Collection[Hashable]) -> LoadCosts:
        """Costs under this load, of rounds without drafts and of these ways to draft as far as any load knows them."""
        costs = self._loads.setdefault(load, LoadCosts())
        if not costs.plain.weight and (similar := self._most_similar(load, lambda known: known.plain.weight)):
            costs.borrow(None, similar)
        for way in ways:
            if not costs.way(way).weight and (
                similar := self._most_similar(load, lambda known, way=way: known.way(way).weight)
            ):
                costs.borrow(way, similar)
        return costs

    def _most_similar(self, load: Load, knows: Callable[[LoadCosts], float]) -> LoadCosts | None:
        batch, samples, prompts = load

        def distance(one: Load) -> tuple[int, bool, int]:
            return abs(one[2] - prompts), one[1] != samples, abs(one[0] - batch)

        known = [one for one, costs in self._loads.items() if knows(costs) and (one[2] > 0) == (prompts > 0)]
        return self._loads[min(known, key=distance)] if known else None


def _inherited_share(weight: float) -> float:
    """Share of its weight that an estimate keeps where it is taken over, to be corrected soon."""
    return min(1.0, INHERITED / weight)
