"""Runs a scenario: the real coordinator, scheduler and pipeline on a virtual clock, roles with scripted passes.

Answers how fast a policy would be on hardware that is not here, and where its time would go. One call is one run;
nothing is drawn outside the scenario's seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.coordinator.stats import Span
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import SchedulerConfig
from actors.policy.draft_length import Control, make_control
from actors.policy.pipelines import PIPELINES, Pipeline
from actors.protocol.messages import (
    DraftBatch,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    Tokens,
    VerdictBatch,
    VerifyBatch,
)
from cluster.tools.simulation.clock import ALARM, ARRIVAL, Clock, Lane, LaneTime
from cluster.tools.simulation.costs import PassCost
from cluster.tools.simulation.lanes import Shares, split_time
from cluster.tools.simulation.language import Language, Text
from cluster.tools.simulation.roles import ScriptedRunner, ScriptedTarget, draft_role


@dataclass(frozen=True, slots=True)
class Scenario:
    """Hardware, language and policy of one run. Times in seconds; links are one way."""

    pipeline: str
    verify: PassCost
    draft: PassCost = PassCost.flat(0.0)
    drafter: ModelDrafterConfig = field(default_factory=ModelDrafterConfig)
    language: Language = field(default_factory=Language)
    num_requests: int = 1
    max_tokens: int = 2000
    prompt_len: int = 8
    target_link_s: float = 0.0
    draft_link_s: float = 0.0
    coordinator_s: float = 0.0
    """Time the coordinator takes over every record."""
    exact: PassCost | None = None
    """Exact passes of a layer-parallel draft model, whose other passes cost `draft`; None for other models."""
    adaptive: bool = False
    """As `pipeline.adaptive`; `drafter.num_draft_tokens` is then the longest draft."""
    min_draft_tokens: int = 0
    """As `pipeline.min_draft_tokens`."""

    def __post_init__(self) -> None:
        draft_len = self.drafter.num_draft_tokens
        bounds = (
            ("pipeline", self.pipeline in PIPELINES, f"is not one of {', '.join(PIPELINES)}"),
            ("num_requests", self.num_requests >= 1, "must be at least 1"),
            ("prompt_len", self.prompt_len >= 1, "must be at least 1"),
            ("max_tokens", self.max_tokens > 2 * draft_len + 2, f"must exceed two proposals of {draft_len} tokens"),
            ("target_link_s", self.target_link_s >= 0, "must be 0 or above"),
            ("draft_link_s", self.draft_link_s >= 0, "must be 0 or above"),
            ("coordinator_s", self.coordinator_s >= 0, "must be 0 or above"),
        )
        for name, good, rule in bounds:
            if not good:
                raise ValueError(f"scenario.{name}={getattr(self, name)!r} {rule}")

    @property
    def speculates(self) -> bool:
        return self.pipeline != "plain"

    def make_control(self) -> Control:
        return make_control(self.adaptive, self.min_draft_tokens, self.drafter.num_draft_tokens)

    def prompt(self, request_id: int) -> tuple[int, ...]:
        return tuple(range(request_id, request_id + self.prompt_len))

    def text(self, request_id: int) -> Text:
        """What this request must come to, whatever the pipeline."""
        return self.language.text(request_id, self.prompt(request_id))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a run came to, from the moment all requests decode until the first is about to end."""

    tokens_per_s: float
    tokens_per_pass: float
    """Committed tokens per sequence and target pass, passes without a draft included."""
    mean_acceptance_length: float | None
    """The same over passes with a draft; None where there was none."""
    per_position_acceptance: tuple[float, ...]
    branch_hit_rate: float | None
    """Share of proposals that were there before their verdict; None without proposals."""
    round_ms: float
    target_busy: float
    draft_busy: float
    target_wait_ms: float
    """Per round: time the target had nothing to do."""
    draft_wait_ms: float
    critical: Shares
    """Whose time the wall time was."""
    tokens: dict[int, tuple[int, ...]]
    """Per request, prompt not included."""
    counters: dict[str, Any]
    spans: tuple[Span, ...]

    @property
    def binding(self) -> str:
        """The lane to make faster first: target, draft or exchange (links and coordinator)."""
        return max(("target", "draft", "exchange"), key=lambda lane: getattr(self.critical, lane))


def simulate(
    scenario: Scenario, pipeline: Pipeline | None = None, *, control: Control | None = None
) -> SimulationResult:
    """Run a scenario to its end; `pipeline` takes the place of the named one, to try a policy.

    A `control` that is given brings what it learned in an earlier run.
    """
    pipeline = pipeline or PIPELINES[scenario.pipeline](scenario.drafter.num_draft_tokens)
    return _Run(scenario, pipeline, control or scenario.make_control()).result()


def tuned(scenario: Scenario, num_draft_tokens: Iterable[int] = range(1, 13)) -> tuple[int, SimulationResult]:
    """The draft length that makes this scenario fastest, and its run."""
    runs = {
        length: simulate(replace(scenario, drafter=replace(scenario.drafter, num_draft_tokens=length)))
        for length in num_draft_tokens
    }
    best = max(runs, key=lambda length: runs[length].tokens_per_s)
    return best, runs[best]


class _Run:
    """One run: the wiring of lanes, links and coordinator, and the client at their end."""

    def __init__(self, scenario: Scenario, pipeline: Pipeline, control: Control) -> None:
        self._scenario = scenario
        self._texts: dict[int, Text] = {}
        self._clock = Clock()
        self._target = self._target_lane()
        self._draft = self._draft_lane()
        self._coordinator = Coordinator(
            Scheduler(SchedulerConfig(max_num_seqs=scenario.num_requests), Capacity(1 << 40, 1 << 40)),
            pipeline,
            (),
            drafts=scenario.speculates,
            control=control,
        )
        self._free_at = 0.0  # when the coordinator is through with the records it has
        self._tokens: dict[int, list[int]] = {i: [] for i in range(scenario.num_requests)}
        self._num_verdicts = 0
        self._opened: float | None = None
        self._closed: float | None = None
        self._report: Report | None = None
        self._counted_verdicts = 0

    def result(self) -> SimulationResult:
        scenario = self._scenario
        for request_id in range(scenario.num_requests):
            sampling = SamplingParams(max_tokens=scenario.max_tokens)
            self._post(Request(request_id, scenario.prompt(request_id), sampling), 0.0)
        self._clock.run()
        assert self._coordinator.num_requests == 0, "a request was left waiting"
        return self._summary()

    # --- wiring -------------------------------------------------------------------------------------------------------

    def _text(self, request_id: int) -> Text:
        if request_id not in self._texts:
            self._texts[request_id] = self._scenario.text(request_id)
        return self._texts[request_id]

    def _target_lane(self) -> Lane:
        time, delay = LaneTime(), self._scenario.target_link_s
        role = ScriptedTarget(self._text, time, self._scenario.verify)
        return Lane(self._clock, time, role, lambda record, sent: self._post(record, sent + delay))

    def _draft_lane(self) -> Lane:
        scenario, time, delay = self._scenario, LaneTime(), self._scenario.draft_link_s
        longest = scenario.prompt_len + scenario.max_tokens
        runner = ScriptedRunner(self._text, time, scenario.draft, longest, scenario.exact)
        role = draft_role(scenario.pipeline, scenario.drafter, runner, time, adapts=scenario.adaptive)
        return Lane(self._clock, time, role, lambda record, sent: self._post(record, sent + delay))

    def _post(self, record: Any, arrives: float) -> None:
        """To the coordinator, which takes one record after the other."""
        self._clock.at(arrives, ARRIVAL, lambda: self._take(record))

    def _take(self, record: Any) -> None:
        self._free_at = max(self._free_at, self._clock.now) + self._scenario.coordinator_s
        self._clock.at(self._free_at, ARRIVAL, lambda: self._decide(record))

    def _decide(self, record: Any) -> None:
        if isinstance(record, VerdictBatch):
            self._num_verdicts += len(record.verdicts)
        self._send(self._coordinator.on(record, self._clock.now))

    def _hurry(self) -> None:
        self._send(self._coordinator.overdue(self._clock.now))

    def _send(self, answers: Iterable[Any]) -> None:
        for answer in answers:
            match answer:
                case VerifyBatch():
                    self._deliver(self._target, answer, self._scenario.target_link_s)
                case DraftBatch():
                    self._deliver(self._draft, answer, self._scenario.draft_link_s)
                case Tokens():
                    self._read(answer)
        self._watch()
        if self._coordinator.patience_ends is not None:
            self._clock.at(max(self._clock.now, self._coordinator.patience_ends), ALARM, self._hurry)

    def _deliver(self, lane: Lane, record: Any, delay: float) -> None:
        self._clock.at(self._clock.now + delay, ARRIVAL, lambda: lane.receive(record))

    # --- the client ---------------------------------------------------------------------------------------------------

    def _read(self, news: Tokens) -> None:
        assert news.error is None, news.error
        tokens = self._tokens[news.request_id]
        assert news.position == len(tokens), "tokens arrive once and in order"
        tokens += news.token_ids

    def _watch(self) -> None:
        """Open and close the measuring window: neither prompts nor the shortened proposals of the end belong to it."""
        lengths = [len(tokens) for tokens in self._tokens.values()]
        if self._opened is None and min(lengths):
            self._opened, self._num_verdicts = self._clock.now, 0
            self._coordinator.on(ReportOrder(reset=True), self._clock.now)
        last = self._scenario.max_tokens - self._scenario.drafter.num_draft_tokens - 1
        if self._closed is None and max(lengths) >= last:
            self._closed = self._clock.now
            (self._report,) = self._coordinator.on(ReportOrder(), self._clock.now)
            self._counted_verdicts = self._num_verdicts

    def _summary(self) -> SimulationResult:
        assert self._report is not None and self._opened is not None and self._closed is not None
        counters, window_s = self._report.counters, self._closed - self._opened
        shares = split_time(self._target.busy, self._draft.busy, self._opened, self._closed)
        num_passes = counters["num_rounds"]
        steps, accepted = counters["num_spec_steps"], counters["num_accepted_tokens"]
        offers = counters["num_branch_lookups"]
        pairs = zip(counters["num_accepted_per_pos"], counters["num_drafted_per_pos"], strict=True)
        return SimulationResult(
            tokens_per_s=counters["num_tokens"] / window_s,
            tokens_per_pass=counters["num_tokens"] / self._counted_verdicts,
            mean_acceptance_length=1 + accepted / steps if steps else None,
            per_position_acceptance=tuple(taken / drafted for taken, drafted in pairs),
            branch_hit_rate=counters["num_branch_hits"] / offers if offers else None,
            round_ms=1e3 * window_s / num_passes,
            target_busy=shares.target,
            draft_busy=shares.draft_busy,
            target_wait_ms=1e3 * window_s * (1 - shares.target) / num_passes,
            draft_wait_ms=1e3 * window_s * (1 - shares.draft_busy) / num_passes,
            critical=shares,
            tokens={request_id: tuple(tokens) for request_id, tokens in self._tokens.items()},
            counters=counters,
            spans=self._report.spans,
        )
