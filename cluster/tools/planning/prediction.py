"""Predicts the speed of every layout: the engine's own coordinator and drafters in the simulator, on given pass costs.

Must not know where costs come from; a layout whose costs are unknown is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.planning.costs import PassCosts, RankCores
from cluster.tools.planning.layouts import Layout
from cluster.tools.planning.transcript import Transcript
from cluster.tools.simulation import Language, Scenario, simulate

SHORTEST = 8
"""Tokens of a prompt."""
NUM_TOKENS = 1200
"""Tokens of a simulated request: one to two per cent of noise in the speed."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of a layout at one draft length, from the time all requests decode until the first ends."""

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
    """The drafter's options, requests in flight, and the recorded text if there is one."""

    drafter: ModelDrafterConfig
    batch: int = 1
    transcript: Transcript | None = None
    context: int = 0
    """Tokens of text before the output, at least."""


def predict_all(
    layouts: Iterable[tuple[Layout, RankCores]], lengths: Sequence[int], costs: PassCosts, workload: Workload
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
    layout: Layout, num_draft_tokens: int, costs: PassCosts, workload: Workload, cores: RankCores | None = None
) -> Prediction | None:
    """None where the costs of a role in this layout are unknown. Rounds are those with a draft, where there are any, as
    in `cluster/observability/report.py`."""
    cores, shape = cores or RankCores(), layout.shape
    target = costs.of_target(layout.target_ranks, shape, cores.target, beside=layout.overlaps)
    if target is None:
        return None
    scenario = Scenario(
        layout.pipeline,
        target.passes,
        drafter=replace(workload.drafter, num_draft_tokens=num_draft_tokens),
        language=Language(costs.acceptance, costs.runners_up),
        num_requests=workload.batch,
        max_tokens=NUM_TOKENS,
        prompt_len=max(SHORTEST, workload.context),
        target_link_s=costs.link_s,
        draft_link_s=0.0 if layout.placement == "attached" else costs.link_s,
        coordinator_s=costs.coordinator_s,
    )
    if shape is not None:
        draft = costs.of_drafter(shape, layout.target_ranks, cores.draft, beside=layout.overlaps)
        if draft is None:
            return None
        if workload.transcript is None:
            language = Language(draft.acceptance or costs.acceptance, costs.runners_up)
        else:
            language = _as_accepted(workload.transcript, costs.acceptance, draft.acceptance)
        scenario = replace(scenario, draft=draft.passes, exact=draft.exact, language=language)
    result = simulate(scenario)
    rounds = result.counters["num_spec_rounds"]
    return Prediction(
        layout,
        num_draft_tokens if shape else 0,
        tokens_per_s=result.tokens_per_s,
        round_ms=1e3 * result.counters["spec_round_s"] / rounds if rounds else result.round_ms,
        tokens_per_round=result.mean_acceptance_length or result.tokens_per_pass,
        branch_hit_rate=result.branch_hit_rate,
        target_busy=result.target_busy,
        draft_busy=result.draft_busy,
        binding=result.binding,
    )


def _as_accepted(transcript: Transcript, exact: Sequence[float], acceptance: Sequence[float]) -> Transcript:
    """The recorded drafter with the measured acceptance of this shape, if it was measured."""
    kept = tuple(min(1.0, a / e) if e else 1.0 for a, e in zip(acceptance, exact, strict=False))
    return replace(transcript, kept=kept) if kept else transcript
