"""The decision against the best fixed draft length on the virtual clock:
`python -m docs.measurements.decider [PART OF A CASE'S NAME ...] [--texts N]` (half an hour; prints a Markdown table).

Every case is run with the same policy twice: from a cold start, and warm. The best fixed choice is plain decoding, or
the fastest of `LENGTHS` in the case's pipeline or in `sync`, on the very same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation import Disturbances, Language, PassCost, Scenario, SimulationResult, power_law, simulate
from cluster.tools.simulation.language import RequestText
from docs.measurements import lines

LENGTHS = (1, 2, 3, 4, 6, 8)
PASS_S, DRAFT_S = 15e-3, 1.5e-3


@dataclass(frozen=True, slots=True)
class Drifting:
    """A text that is easy and hard in turn, `block` tokens each."""

    easy: Language
    hard: Language
    block: int = 150

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> RequestText:
        return _DriftingText(self.easy.text(request_id, prompt), self.hard.text(request_id, prompt), self.block)


@dataclass(frozen=True, slots=True)
class _DriftingText:
    easy: RequestText
    hard: RequestText
    block: int

    def _at(self, position: int) -> RequestText:
        return self.hard if position // self.block % 2 else self.easy

    def token(self, position: int) -> int:
        return self._at(position).token(position)

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        return self._at(position).children(position, distance, count)


def language(acceptance: float, seed: int) -> Language:
    return Language((acceptance,), power_law(0.8), seed=seed)


def scenario(pipeline: str, requests: int, acceptance: float, seed: int, link_s: float = 5e-5) -> Scenario:
    """A row adds a fiftieth of a pass, so that drafts for large batches are expensive."""
    row_s = PASS_S / 50 if requests > 1 else 0.0
    return Scenario(
        pipeline,
        PassCost(((1, PASS_S), (101, PASS_S + 100 * row_s))),
        PassCost(((1, DRAFT_S), (101, DRAFT_S + 10 * row_s))),
        ModelDrafterConfig(num_draft_tokens=8, fan_out=4, ahead_width=8),
        language(acceptance, seed),
        num_requests=requests,
        max_tokens={1: 1200, 4: 500, 16: 200, 64: 100}[requests],
        target_link_s=5e-5,
        draft_link_s=link_s,
    )


def cases(seed: int) -> Iterator[tuple[str, Scenario]]:
    for pipeline in ("sync", "branches"):
        for requests in (1, 4, 16, 64):
            for acceptance in (0.8, 0.5):
                yield f"near, {acceptance}, {pipeline}, {requests}", scenario(pipeline, requests, acceptance, seed)
        for requests in (1, 4, 16, 64):
            yield f"random drafter, {pipeline}, {requests}", scenario(pipeline, requests, 0.02, seed)
        for requests in (1, 4, 16):
            far = scenario(pipeline, requests, 0.8, seed, 10e-3)
            yield f"10 ms each way, {pipeline}, {requests}", far
        far = scenario(pipeline, 1, 0.8, seed, 80e-3)
        yield f"80 ms each way, {pipeline}, 1", far
        slow = replace(far, verify=PassCost.flat(120e-3), draft=PassCost.flat(6e-3), max_tokens=800)
        yield f"80 ms each way, a pass of 120 ms, {pipeline}, 1", slow
        for requests in (1, 4):
            near = scenario(pipeline, requests, 0.8, seed)
            pauses = Disturbances(slowest=1.0, pause_every_s=1.0, seed=seed)
            yield f"pauses, {pipeline}, {requests}", replace(near, disturbances=pauses)
            drifting = Drifting(language(0.9, seed), language(0.15, seed))
            yield f"drifting text, {pipeline}, {requests}", replace(near, language=drifting, draft=PassCost.flat(3e-3))


def at_length(case: Scenario, length: int) -> Scenario:
    return replace(case, drafter=replace(case.drafter, num_draft_tokens=length))


def decided(case: Scenario) -> list[SimulationResult]:
    """Runs of the decision: from a cold start, and of the same policy once more."""
    adaptive = replace(case, adaptive=True)
    policy = adaptive.make_policy()
    return [simulate(adaptive, policy) for _ in range(2)]


@dataclass(frozen=True, slots=True)
class Row:
    """Speeds in tokens/s: plain decoding, the best fixed choice, and the policy, cold and warm."""

    plain: float
    best: float
    best_length: int
    cold: float
    warm: float


def measure(case: Scenario) -> Row:
    plain = simulate(replace(case, pipeline="plain")).tokens_per_s
    fixed = {0: plain}
    for pipeline in dict.fromkeys((case.pipeline, "sync")):
        for length in LENGTHS:
            one = at_length(replace(case, pipeline=pipeline), length)
            if pipeline != "sync":
                one = replace(one, drafter=replace(one.drafter, ahead_width=8 * case.num_requests))
            fixed[length] = max(simulate(one).tokens_per_s, fixed.get(length, 0.0))
    cold, warm = (run.tokens_per_s for run in decided(case))
    best = max(fixed, key=lambda length: fixed[length])
    return Row(plain, fixed[best], best, cold, warm)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("wanted", nargs="*", metavar="PART")
    parser.add_argument("--texts", type=int, default=2)
    given = parser.parse_args()
    columns = "case, requests", "plain", "best fixed (tokens)", "cold / plain", "cold / best", "warm / plain"
    print(lines.head(*columns, "warm / best", "worst"))
    for name, *_ in cases(0):
        if given.wanted and not any(part in name for part in given.wanted):
            continue
        rows = [measure(dict(cases(seed))[name]) for seed in range(given.texts)]
        means = [mean(getattr(row, key) for row in rows) for key in ("plain", "best", "cold", "warm")]
        plain, best, cold, warm = means
        worst = min(row.warm / row.best for row in rows)
        lengths = ", ".join(str(row.best_length) for row in rows)
        ratios = (f"{ratio:.3f}" for ratio in (cold / plain, cold / best, warm / plain, warm / best, worst))
        print(lines.row(name, f"{plain:.0f}", f"{best:.0f} ({lengths})", *ratios), flush=True)


if __name__ == "__main__":
    main()
