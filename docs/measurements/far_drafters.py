"""Speed by the distance of the drafter on the virtual clock:
`python docs/measurements/far_drafters.py [--tokens N]` (a few minutes; prints a Markdown table and break-even delays).

Every row is a link's delay, one way; every column a share of plain decoding's speed: the best of two fixed draft
lengths, the decision from a cold start, and the same policy once more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation import Language, PassCost, Scenario, power_law, simulate

DELAYS_MS = (1, 5, 10, 20, 30, 50, 80)
ACCEPTANCES, PASSES_MS, PIPELINES = (0.6, 0.8, 0.95), (15, 50), ("sync", "branches")
FIXED, LONGEST, SEEDS = (4, 8), 8, (0, 1)


def scenario(pipeline: str, acceptance: float, pass_ms: float, delay_ms: float, tokens: int, seed: int) -> Scenario:
    return Scenario(
        pipeline,
        PassCost.flat(pass_ms / 1e3),
        PassCost.flat(1.5e-3),
        ModelDrafterConfig(num_draft_tokens=LONGEST, fan_out=4, ahead_width=8),
        Language((acceptance,), power_law(0.8), seed=seed),
        max_tokens=tokens,
        target_link_s=5e-5,
        draft_link_s=delay_ms / 1e3,
    )


def shares(case: Scenario) -> tuple[float, float, float]:
    """Speed over that of plain decoding: the best fixed length, and the decision cold and warm."""
    lengths = [replace(case, drafter=replace(case.drafter, num_draft_tokens=length)) for length in FIXED]
    adaptive = replace(case, adaptive=True)
    policy = adaptive.make_policy()
    speeds = [max(simulate(fixed).tokens_per_s for fixed in lengths)]
    speeds += [simulate(adaptive, policy).tokens_per_s for _ in range(2)]
    plain = simulate(replace(case, pipeline="plain")).tokens_per_s
    fixed, cold, warm = (speed / plain for speed in speeds)
    return fixed, cold, warm


def break_even_ms(delays_ms: Sequence[float], speedups: Sequence[float]) -> float | None:
    """The delay from which on drafts are slower than plain decoding, between the measured ones; None: none of these."""
    for before, after in zip(range(len(delays_ms)), range(1, len(delays_ms)), strict=False):
        if speedups[before] >= 1 > speedups[after]:
            share = (speedups[before] - 1) / (speedups[before] - speedups[after])
            return delays_ms[before] + share * (delays_ms[after] - delays_ms[before])
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_MS)
    given = parser.parse_args(arguments)
    print("| pipeline, acceptance, pass |", " | ".join(f"{delay:g} ms" for delay in given.delays), "| break-even |")
    print("|---" * (len(given.delays) + 2) + "|")
    for pipeline in PIPELINES:
        for acceptance in ACCEPTANCES:
            for pass_ms in PASSES_MS:
                cells = []
                for delay in given.delays:
                    runs = [
                        shares(scenario(pipeline, acceptance, pass_ms, delay, given.tokens, seed)) for seed in SEEDS
                    ]
                    cells.append([mean(column) for column in zip(*runs, strict=True)])
                even = break_even_ms(given.delays, [fixed for fixed, _, _ in cells])
                shown = (", ".join(f"{share:.2f}" for share in cell) for cell in cells)
                known = "" if even is None else f"{even:.0f} ms"
                print(f"| {pipeline}, {acceptance}, {pass_ms} ms |", " | ".join(shown), f"| {known} |", flush=True)


if __name__ == "__main__":
    main()
