"""What constants of the decision are worth, on the virtual clock: speeds with other values over those with the present
ones: `python -m docs.measurements.constants decision.REQUEST_ERROR=0 draft_length.TRIAL_COST=0 [--seeds N]` (minutes;
prints a Markdown table of means, with the least and the most).

Rounds near by are those of `tests/actors/policy/test_noisy_machine.py`, requests one after the other, and those of
`test_changing_batches.py` there; the far drafter is that of `far_drafters.py`, one text, from a cold start and warm.
Where a lookup and a draft model are chosen from, rounds are those of `test_drafter_choice.py` there, one request of
`CHOSEN_ROUNDS` at the start of a process. `--only TEXT` runs the rows whose names have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import product
from statistics import mean

from actors.policy.policy import AdaptivePolicy
from docs.measurements import far_drafters, lines
from docs.measurements.decider import decided
from tests.actors.policy.test_changing_batches import Batches
from tests.actors.policy.test_drafter_choice import World, unlucky_start
from tests.actors.policy.test_noisy_machine import LONGEST, Machine

NEAR = {
    "drafts that do not pay": Machine(0.3, draft_s=1.5e-3, slowest=1.2, paused=0.02, noise=0.25),
    "that hardly pay": Machine(0.45, draft_s=0.8e-3),
    "that pay": Machine(0.8, draft_s=0.4e-3, slowest=1.2, paused=0.01),
}
BATCHES = {"64 requests, 16 at once, that hardly pay": Batches(0.3, 16, 64)}
FAR_DELAYS_MS = (10, 20, 50)
CHOSEN_ROUNDS = 60
POOR = {
    "of two drafters, the model's first 2 drafts poor": (2, 0),
    "of two drafters, 12 poor ones of a request before": (0, 12),
}
"""Drafts of the model of which nothing is accepted: at the start of the request, and before it."""
CHOICES = [*product((0.001, 0.003), (0.2, 0.5), (0.2, 0.8, 0.95))]
"""Seconds of a draft token of the model beside rounds of 10 ms, and how often tokens of the lookup and of the model are
accepted."""
Case = Callable[[], float]
"""Runs the decision; tokens per second."""


@contextmanager
def changed(setting: str) -> Iterator[None]:
    """With `FILE.NAME=NUMBER` of actors/policy."""
    place, _, value = setting.partition("=")
    file, _, name = place.partition(".")
    module = import_module(f"actors.policy.{file}")
    before = getattr(module, name)
    setattr(module, name, float(value))
    try:
        yield
    finally:
        setattr(module, name, before)


def cases(num_seeds: int) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {
        name: [partial(_near, machine, seed) for seed in range(num_seeds)] for name, machine in NEAR.items()
    }
    for name, batches in BATCHES.items():
        found[name] = [partial(_batches, batches, seed) for seed in range(max(2, num_seeds // 4))]
    places = [*product(FAR_DELAYS_MS, far_drafters.ACCEPTANCES)]
    for pipeline, is_warm in product(far_drafters.PIPELINES, (False, True)):
        name = f"far, `{pipeline}`, {'warm' if is_warm else 'cold'}"
        found[name] = [partial(_far, pipeline, *place, is_warm=is_warm) for place in places]
    for name, poor in POOR.items():
        seeds = range(max(2, num_seeds // 2))
        found[name] = [partial(_chosen, *poor, *choice, seed) for choice, seed in product(CHOICES, seeds)]
    return found


def _chosen(num_first: int, num_before: int, pass_s: float, lookup: float, model: float, seed: int) -> float:
    world = World(seed, lookup, lambda round_: 0.0 if round_ < num_first else model, pass_s)
    unlucky_start(world, num_before).run(CHOSEN_ROUNDS)
    return world.tokens / world.seconds


def _near(machine: Machine, seed: int) -> float:
    return machine.tokens_per_s(AdaptivePolicy("sync", 0, LONGEST), seed)


def _batches(batches: Batches, seed: int) -> float:
    return mean(batches.shares(seed, 2))


def _far(pipeline: str, delay_ms: float, acceptance: float, *, is_warm: bool) -> float:
    cold, warm = decided(far_drafters.scenario(pipeline, acceptance, 15, delay_ms, 600, 0))
    return (warm if is_warm else cold).tokens_per_s


def ratios(runs: Sequence[Case], before: Sequence[float], setting: str) -> str:
    with changed(setting):
        shares = [run() / speed for run, speed in zip(runs, before, strict=True)]
    return f"{mean(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("settings", nargs="+", metavar="FILE.NAME=NUMBER")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose names have this text")
    given = parser.parse_args()
    print(lines.head("rounds", *(f"`{setting}`" for setting in given.settings)))
    for name, runs in cases(given.seeds).items():
        if given.only not in name:
            continue
        before = [run() for run in runs]
        print(lines.row(name, *(ratios(runs, before, setting) for setting in given.settings)), flush=True)


if __name__ == "__main__":
    main()
