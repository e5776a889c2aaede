"""Published operating points rebuilt from the authors' pass costs, and how far off the simulator is:
`python -m docs.measurements.published`.

A parameter that a paper does not give is either assumed, as noted beside it, or fitted to another figure of the same
paper; never to the figure that is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from actors.drafters.model.config import ModelDrafterConfig, Strategy
from cluster.tools.simulation.language import Language, power_law
from cluster.tools.simulation.simulator import Scenario, SimulationResult, simulate, tuned
from parallel.pass_cost import PassCost


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure as published and as simulated; `fitted`: a free parameter was fitted to it."""

    system: str
    figure: str
    published: float
    simulated: float
    fitted: bool = False
    result: SimulationResult | None = field(default=None, repr=False)

    @property
    def deviation(self) -> float:
        return self.simulated / self.published - 1


def fit_acceptance(scenario: Scenario, tokens_per_s: float, low: float = 0.3, high: float = 0.995) -> float:
    """The i.i.d. acceptance at which a scenario reaches a speed, to about a thousandth; bisection on one seed."""
    while high - low > 1e-3:
        middle = (low + high) / 2
        reached = simulate(with_acceptance(scenario, middle)).tokens_per_s
        low, high = (middle, high) if reached < tokens_per_s else (low, middle)
    return (low + high) / 2


def with_acceptance(scenario: Scenario, acceptance: float) -> Scenario:
    assert isinstance(scenario.language, Language)
    return replace(scenario, language=replace(scenario.language, acceptance=(acceptance,)))


# --- SSD (arXiv 2603.03251): Llama-3.1-70B on four H100, Llama-3.2-1B on a fifth, batch 1, greedy ---------------------

SSD_SYNC = Scenario(
    "sync",
    PassCost.flat(1 / 66),  # its plain decoding, 66 tokens/s; assumed: eight rows cost as much as one (weight-bound)
    PassCost.flat(1.5e-3),  # assumed: 2.5 GB of weights take 0.75 ms on an H100, engines reach half of that bound
    ModelDrafterConfig(num_draft_tokens=6),
    Language((0.817,), power_law(1.0)),  # fitted to 170 tokens/s, the best synchronous engine; exponent assumed
    max_tokens=2000,  # about 1 % of noise in the speed
)
SSD_ASYNC = replace(
    SSD_SYNC,
    pipeline="branches",
    drafter=ModelDrafterConfig(num_draft_tokens=7, fan_out=4, ahead_width=24),  # K = 7, three alternatives a position
)


def ssd() -> Iterator[Comparison]:
    plain, sync, ahead = (simulate(case) for case in (replace(SSD_SYNC, pipeline="plain"), SSD_SYNC, SSD_ASYNC))
    yield Comparison("SSD", "plain decoding, tokens/s", 66, plain.tokens_per_s, True, plain)
    yield Comparison("SSD", "best synchronous engine, tokens/s", 170, sync.tokens_per_s, True, sync)
    yield Comparison("SSD", "asynchronous, tokens/s", 260, ahead.tokens_per_s, False, ahead)
    yield Comparison("SSD", "asynchronous over plain", 4.0, ahead.tokens_per_s / plain.tokens_per_s)


# --- SwiftSpec (arXiv 2506.11309): Llama3-70B int4 on eight Hopper GPUs, a 3B drafter, batch 1 ------------------------

SWIFT_ASYNC = Scenario(
    "tree",
    PassCost.flat(11.86e-3),  # their target step at eight rows on four GPUs; assumed flat from 1 to 17 rows
    PassCost.flat(2.61e-3),  # their drafter on two GPUs
    ModelDrafterConfig(strategy=Strategy.best_first, num_draft_tokens=8, depth=2, width=4, fan_out=8, ahead_width=16),
    Language((0.95,), power_law(1.0)),  # fitted to 348 tokens/s, high for this pair: see docs/simulator.md
    max_tokens=2000,
)
SWIFT_SYNC_CHAIN = replace(
    SWIFT_ASYNC,
    pipeline="sync",
    verify=PassCost.flat(11.22e-3),  # their target step on eight GPUs
    drafter=ModelDrafterConfig(),
)
SWIFT_SYNC_TREE = replace(SWIFT_SYNC_CHAIN, drafter=replace(SWIFT_ASYNC.drafter, depth=5))


def swiftspec() -> Iterator[Comparison]:
    """The ratios are to synchronous speculation on all eight GPUs, tuned; the paper's is to other engines."""
    ahead, tree = simulate(SWIFT_ASYNC), simulate(SWIFT_SYNC_TREE)
    _, chain = tuned(SWIFT_SYNC_CHAIN, range(6, 13, 3))
    wide = simulate(replace(SWIFT_ASYNC, draft=PassCost.flat(2.80e-3)))  # their drafter on four GPUs
    speed = ahead.tokens_per_s
    yield Comparison("SwiftSpec", "asynchronous, drafter on two GPUs, tokens/s", 348, speed, True, ahead)
    yield Comparison("SwiftSpec", "asynchronous, drafter on four GPUs, tokens/s", 348, wide.tokens_per_s, False, wide)
    yield Comparison("SwiftSpec", "over synchronous chains", 1.75, speed / chain.tokens_per_s, False, chain)
    yield Comparison("SwiftSpec", "over synchronous trees", 1.75, speed / tree.tokens_per_s, False, tree)


def main() -> None:
    for row in (*ssd(), *swiftspec()):
        figures = f"{row.published:8.2f} {row.simulated:8.2f} {row.deviation:+.1%}"
        print(f"{row.system:10} {row.figure:46} {figures}{' fitted' * row.fitted}")


if __name__ == "__main__":
    main()
