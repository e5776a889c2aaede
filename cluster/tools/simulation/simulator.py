"""Runs a scenario: the real coordinator, scheduler and pipeline on a virtual clock, roles with scripted passes.

Predicts the speed of a policy on hardware that is not at hand, and which role or link binds. One call is one run; all
randomness follows from the scenario's seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any

from actors.coordinator.local_drafts import LocalDrafts
from actors.coordinator.port import open_port
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.coordinator.stats import TimelineSpan
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineName, SchedulerConfig
from actors.policy.policy import Policy, make_policy
from actors.protocol.messages import (
    DraftBatch,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    Tokens,
    VerifyBatch,
)
from cluster.tools.simulation.clock import (
    ARRIVAL,
    QUIET,
    CoordinatorLane,
    Disturbances,
    LaneClock,
    RoleLane,
    TimeShares,
    VirtualClock,
    split_time,
)
from cluster.tools.simulation.language import Language, RequestText, TextSource
from cluster.tools.simulation.roles import ScriptedLookup, ScriptedRunner, ScriptedTarget, draft_role
from parallel.pass_cost import PassCost
from parallel.ranges import OneOf, Range, Section, require


@dataclass(frozen=True, slots=True)
class Scenario(Section):
    """Hardware, language and policy of one run. Times in seconds; links are one way."""

    pipeline: Annotated[str, OneOf(tuple(PipelineName))]
    verify: PassCost
    draft: PassCost = field(default_factory=lambda: PassCost.flat(0.0))
    drafter: ModelDrafterConfig = field(default_factory=ModelDrafterConfig)
    language: TextSource = field(default_factory=Language)
    num_requests: Annotated[int, Range(1)] = 1
    max_tokens: int = 2000
    prompt_len: Annotated[int, Range(1)] = 8
    target_link_s: Annotated[float, Range(0)] = 0.0
    draft_link_s: Annotated[float, Range(0)] = 0.0
    interference: Annotated[float, Range(0)] = 0.0
    """Share by which a target pass takes longer beside a drafter that works all the time: shared memory bandwidth."""
    disturbances: Disturbances = QUIET
    """How the machine of both roles slows down and pauses; by default it does not."""
    coordinator_s: Annotated[float, Range(0)] = 0.0
    """Time the coordinator takes for every record."""
    exact: PassCost | None = None
    """Exact passes of a layer-parallel draft model, whose other passes cost `draft`; None for other models."""
    adaptive: bool = False
    """The value of `pipeline.adaptive`; if true, `drafter.num_draft_tokens` is the longest draft."""
    min_draft_tokens: int = 0
    """The value of `pipeline.min_draft_tokens`."""
    local_acceptance: Annotated[float, Range(0, 1)] = 0.0
    """Above 0: a lookup beside the coordinator drafts where the drafter's draft is not there, and each token of it is
    right with this probability."""

    def __post_init__(self) -> None:
        self.check("scenario")

    def check_fields(self, where: str) -> None:
        draft_len = self.drafter.num_draft_tokens
        remedy = f"must exceed two proposals of {draft_len} tokens"
        require(self.max_tokens > 2 * draft_len + 2, f"{where}.max_tokens", self.max_tokens, remedy)

    def make_policy(self) -> Policy:
        return make_policy(
            self.pipeline,
            self.min_draft_tokens,
            self.drafter.num_draft_tokens,
            adaptive=self.adaptive,
            longest_only=self.drafter.chooses_lengths,
            waits=not self.local_acceptance,
        )

    def prompt(self, request_id: int) -> tuple[int, ...]:
        return tuple(range(request_id, request_id + self.prompt_len))

    def text(self, request_id: int) -> RequestText:
        """The output of this request under every pipeline."""
        return self.language.text(request_id, self.prompt(request_id))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of a run, from the moment all requests decode until the first is about to end."""

    tokens_per_s: float
    tokens_per_pass: float
    """Committed tokens per sequence and target pass, passes without a draft included."""
    mean_acceptance_length: float | None
    """The same over passes with a draft; None without any."""
    per_position_acceptance: tuple[float, ...]
    branch_hit_rate: float | None
    """Share of proposals that were prepared before their verdict; None without proposals."""
    round_ms: float
    target_busy: float
    draft_busy: float
    critical: TimeShares
    """The wall time by role."""
    tokens: dict[int, tuple[int, ...]]
    """Output tokens of each request."""
    counters: dict[str, Any]
    spans: tuple[TimelineSpan, ...]

    @property
    def binding(self) -> str:
        """What takes the largest share of the wall time: target, draft or exchange (links and coordinator)."""
        return max(("target", "draft", "exchange"), key=lambda lane: getattr(self.critical, lane))


def simulate(scenario: Scenario, policy: Policy | None = None) -> SimulationResult:
    """Run a scenario to its end; `policy` replaces the named one, and may hold estimates of earlier runs."""
    return _Simulation(scenario, policy or scenario.make_policy()).result()


def tuned(scenario: Scenario, num_draft_tokens: Iterable[int] = range(1, 13)) -> tuple[int, SimulationResult]:
    """The draft length that makes this scenario fastest, and its run."""
    runs = {
        length: simulate(replace(scenario, drafter=replace(scenario.drafter, num_draft_tokens=length)))
        for length in num_draft_tokens
    }
    best = max(runs, key=lambda length: runs[length].tokens_per_s)
    return best, runs[best]


class _Simulation:
    """One run: the wiring of lanes, links and coordinator, and the client that receives the tokens."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._scenario, self._policy = scenario, policy
        self._text_of = cache(scenario.text)
        self._clock = VirtualClock()
        limits = SchedulerConfig(max_num_seqs=scenario.num_requests)
        local = LocalDrafts("lookup", ScriptedLookup(self._text_of, scenario.local_acceptance))
        drafter = open_port(
            policy,
            limits.prefill_chunk,
            drafts=scenario.pipeline != "plain",
            local_drafter=local if scenario.local_acceptance else "none",
        )
        self._coordinator = Coordinator(Scheduler(limits, Capacity(1 << 40, 1 << 40)), policy, (), drafter)
        self._lane = CoordinatorLane(self._coordinator, self._clock, self._send, scenario.coordinator_s)
        self._target, self._draft = self._target_lane(), self._draft_lane()
        self._tokens: dict[int, list[int]] = {i: [] for i in range(scenario.num_requests)}
        self._num_verdicts = 0  # since the window opened
        self._opened: float | None = None  # the measured window
        self._closed: tuple[float, Report, int] | None = None  # the time, its counters and its verdicts

    def result(self) -> SimulationResult:
        scenario = self._scenario
        for request_id in range(scenario.num_requests):
            sampling = SamplingParams(max_tokens=scenario.max_tokens)
            self._lane.receive(Request(request_id, scenario.prompt(request_id), sampling), 0.0)
        self._clock.run()
        assert self._coordinator.num_requests == 0, "a request did not end"
        return self._summary()

    # --- wiring -------------------------------------------------------------------------------------------------------

    def _target_lane(self) -> RoleLane:
        scenario, time = self._scenario, LaneClock()
        role = ScriptedTarget(self._text_of, time, scenario.verify, self._slowdown, scenario.disturbances)
        return RoleLane(self._clock, time, role.answer, partial(self._lane.receive, delay_s=scenario.target_link_s))

    def _slowdown(self) -> float:
        """Factor on the pass that begins: the drafter is taken to work as much beside it as beside the one before, but
        not where the policy has it draft in turn."""
        stopped = PipelineName(self._scenario.pipeline).works_ahead and not self._policy.works_ahead
        if not self._scenario.interference or not self._target.busy or stopped:
            return 1.0
        start, end = self._target.busy[-1]
        beside_s = 0.0
        for began, ended in reversed(self._draft.busy):
            if ended <= start:
                break
            beside_s += max(0.0, min(end, ended) - max(start, began))
        return 1 + self._scenario.interference * beside_s / (end - start)

    def _draft_lane(self) -> RoleLane:
        scenario, time = self._scenario, LaneClock()
        longest = scenario.prompt_len + scenario.max_tokens
        costs = scenario.draft, longest, scenario.exact, scenario.disturbances
        seen = None if scenario.drafter.keeps_all_rows else scenario.drafter.row_limits.seen
        runner = ScriptedRunner(self._text_of, time, *costs, seen)
        role = draft_role(scenario.pipeline, scenario.drafter, runner, time, adapts=scenario.adaptive)
        send = partial(self._lane.receive, delay_s=scenario.draft_link_s)
        return RoleLane(self._clock, time, role.answer, send, role)

    def _send(self, answers: Iterable[Any]) -> None:
        scenario, now = self._scenario, self._clock.now
        for answer in answers:
            match answer:
                case VerifyBatch():
                    self._clock.at(now + scenario.target_link_s, ARRIVAL, partial(self._target.receive, answer))
                case DraftBatch():
                    self._clock.at(now + scenario.draft_link_s, ARRIVAL, partial(self._draft.receive, answer))
                case Tokens(request_id, position, token_ids):
                    assert answer.error is None, answer.error
                    assert position == len(self._tokens[request_id]), "tokens arrive once and in order"
                    self._tokens[request_id] += token_ids
                    self._num_verdicts += 1  # of which each brings tokens
        self._update_window()

    # --- results ------------------------------------------------------------------------------------------------------

    def _update_window(self) -> None:
        """Open and close the measured window: it leaves out prompts and the shortened proposals of the end."""
        lengths, now = [len(tokens) for tokens in self._tokens.values()], self._clock.now
        if self._opened is None and min(lengths):
            self._opened, self._num_verdicts = now, 0
            self._coordinator.on(ReportOrder(reset=True), now)
        last = self._scenario.max_tokens - self._scenario.drafter.num_draft_tokens - 1
        if self._closed is None and max(lengths) >= last:
            (report,) = self._coordinator.on(ReportOrder(), now)
            assert isinstance(report, Report)
            self._closed = now, report, self._num_verdicts

    def _summary(self) -> SimulationResult:
        assert self._opened is not None
        assert self._closed is not None
        closed, report, num_verdicts = self._closed
        counters: dict[str, Any] = dict(report.counters)
        window_s = closed - self._opened
        shares = split_time(self._target.busy, self._draft.busy, self._opened, closed)
        round_ms = 1e3 * window_s / counters["num_rounds"]
        steps, lookups = counters["num_spec_steps"], counters["num_branch_lookups"]
        pairs = zip(counters["num_accepted_per_pos"], counters["num_drafted_per_pos"], strict=True)
        return SimulationResult(
            tokens_per_s=counters["num_tokens"] / window_s,
            tokens_per_pass=counters["num_tokens"] / num_verdicts,
            mean_acceptance_length=1 + counters["num_accepted_tokens"] / steps if steps else None,
            per_position_acceptance=tuple(accepted / drafted for accepted, drafted in pairs),
            branch_hit_rate=counters["num_branch_hits"] / lookups if lookups else None,
            round_ms=round_ms,
            target_busy=shares.target,
            draft_busy=shares.draft_busy,
            critical=shares,
            tokens={request_id: tuple(tokens) for request_id, tokens in self._tokens.items()},
            counters=counters,
            spans=report.spans,
        )
