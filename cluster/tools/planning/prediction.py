"""How fast every layout would be: the engine's own coordinator and drafters in the simulator, on given pass costs.

Says what to expect and nothing of how costs came about; a layout whose costs nobody knows is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.planning.costs import Costs
from cluster.tools.planning.layouts import Layout
from cluster.tools.planning.transcript import Transcript
from cluster.tools.simulation import Language, Scenario, SimulationResult, simulate

NUM_TOKENS = 1200
"""Per simulated request: one to two per cent of noise in the speed."""


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU cores of each rank of a role in one layout; 0 where that does not matter."""

    target: int = 0
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a layout comes to at one draft length, from the time all requests decode until the first ends."""

    layout: Layout
    num_draft_tokens: int
    tokens_per_s: float
    round_ms: float
    tokens_per_round: float
    branch_hit_rate: float | None
    target_busy: float
    draft_busy: float
    binding: str

    @property
    def overrides(self) -> list[str]:
        return self.layout.overrides(self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is drafted for: the drafter's options, requests in flight, and recorded text where there is some."""

    drafter: ModelDrafterConfig
    batch: int = 1
    transcript: Transcript | None = None


def predict_all(
    layouts: Iterable[tuple[Layout, Cores]], lengths: Sequence[int], costs: Costs, workload: Workload
) -> list[Prediction]:
    """Every layout at its best draft length, fastest first."""
    best = []
    for layout, cores in layouts:
        tried = [predict(layout, length, costs, workload, cores) for length in (lengths if layout.shape else [1])]
        known = [prediction for prediction in tried if prediction is not None]
        if known:
            best.append(max(known, key=lambda prediction: prediction.tokens_per_s))
    return sorted(best, key=lambda prediction: -prediction.tokens_per_s)


def predict(
    layout: Layout, num_draft_tokens: int, costs: Costs, workload: Workload, cores: Cores | None = None
) -> Prediction | None:
    """None where the costs of a role in this layout are not known."""
    cores = cores or Cores()
    target = costs.of_target(layout.target_ranks, layout.shape, cores.target, beside=layout.overlaps)
    draft = None
    if layout.shape is not None:
        draft = costs.of_drafter(layout.shape, layout.target_ranks, cores.draft, beside=layout.overlaps)
    if target is None or (layout.shape is not None and draft is None):
        return None
    scenario = Scenario(
        layout.pipeline,
        target.passes,
        drafter=replace(workload.drafter, num_draft_tokens=num_draft_tokens),
        language=Language(costs.acceptance, costs.runners_up),
        num_requests=workload.batch,
        max_tokens=NUM_TOKENS,
        target_link_s=costs.link_s,
        draft_link_s=costs.link_s,
        coordinator_s=costs.coordinator_s,
    )
    if draft is not None:
        acceptance = draft.acceptance or costs.acceptance
        language = Language(acceptance, costs.runners_up)
        scenario = replace(scenario, draft=draft.passes, exact=draft.exact, language=language)
        if workload.transcript is not None:
            scenario = replace(scenario, language=_worse(workload.transcript, costs.acceptance, draft.acceptance))
    return _prediction(layout, num_draft_tokens, simulate(scenario))


def _worse(transcript: Transcript, exact: Sequence[float], acceptance: Sequence[float]) -> Transcript:
    """The recorded drafter, as often right as the one that was measured beside it."""
    if not acceptance:
        return transcript
    return replace(
        transcript, kept=tuple(min(1.0, a / e) if e else 1.0 for a, e in zip(acceptance, exact, strict=False))
    )


def _prediction(layout: Layout, num_draft_tokens: int, result: SimulationResult) -> Prediction:
    """In the terms of `cluster/observability/report.py`: rounds are those with a draft, where there are any."""
    rounds = result.counters["num_spec_rounds"]
    return Prediction(
        layout,
        num_draft_tokens if layout.shape else 0,
        result.tokens_per_s,
        1e3 * result.counters["spec_round_s"] / rounds if rounds else result.round_ms,
        result.mean_acceptance_length or result.tokens_per_pass,
        result.branch_hit_rate,
        result.target_busy,
        result.draft_busy,
        result.binding,
    )
