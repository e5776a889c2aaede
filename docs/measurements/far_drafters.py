"""Speed by the distance of the drafter on the virtual clock:
`python -m docs.measurements.far_drafters [--tokens N]` (a few minutes; prints a Markdown table and break-even delays).

Every column is a link's delay, one way; every cell shares of plain decoding's speed: the best of two fixed draft
lengths, the decision from a cold start, and the same policy once more. With `--lookup ACCEPTANCE` drafts are never
waited for and a lookup of that acceptance drafts where none has come: a cell is then eight tokens fixed without it and
with it, and with it the decision from a cold start and once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import mean

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation import Language, PassCost, Scenario, power_law, simulate
from docs.measurements import lines
from docs.measurements.decider import at_length, decided

DELAYS_MS = (1, 5, 10, 20, 30, 50, 80)
ACCEPTANCES, PASSES_MS, PIPELINES = (0.6, 0.8, 0.95), (15, 50), ("sync", "branches")
FAR_DELAYS_MS, FAR_PASSES_MS, FAR_PIPELINES = (0, 5, 10, 20, 40, 80), (15,), ("pearl", "branches", "tree")
FIXED, LONGEST = (4, 8), 8
TARGET_LINK_S = 5e-5


def scenario(pipeline: str, acceptance: float, pass_ms: float, delay_ms: float, tokens: int, seed: int) -> Scenario:
    return Scenario(
        pipeline,
        PassCost.flat(pass_ms / 1e3),
        PassCost.flat(1.5e-3),
        ModelDrafterConfig(num_draft_tokens=LONGEST, fan_out=4, ahead_width=8),
        Language((acceptance,), power_law(0.8), seed=seed),
        max_tokens=tokens,
        target_link_s=TARGET_LINK_S,
        draft_link_s=delay_ms / 1e3,
    )


@cache
def plain_tokens_per_s(verify: PassCost, tokens: int) -> float:
    """Speed of plain decoding, which depends on no drafter and no text."""
    return simulate(Scenario("plain", verify, max_tokens=tokens, target_link_s=TARGET_LINK_S)).tokens_per_s


def shares(case: Scenario) -> tuple[float, float, float]:
    """Speed over that of plain decoding: the best fixed length, and the decision cold and warm."""
    best = max(simulate(at_length(case, length)).tokens_per_s for length in FIXED)
    plain = plain_tokens_per_s(case.verify, case.max_tokens)
    cold, warm = (run.tokens_per_s / plain for run in decided(case))
    return best / plain, cold, warm


def shares_with_lookup(case: Scenario, acceptance: float) -> tuple[float, float, float, float]:
    """Speed over that of plain decoding: eight tokens fixed, the same with a lookup of this acceptance beside the
    target, and with that the decision cold and warm."""
    local = replace(case, local_acceptance=acceptance)
    runs = [simulate(case), simulate(local), *decided(local)]
    plain = plain_tokens_per_s(case.verify, case.max_tokens)
    without, fixed, cold, warm = (run.tokens_per_s / plain for run in runs)
    return without, fixed, cold, warm


def lookup_alone(acceptance: float, pass_ms: float, tokens: int, seed: int) -> float:
    """Speed over that of plain decoding of drafts of eight tokens that cost nothing, each right with this chance."""
    near = scenario("sync", acceptance, pass_ms, 0.0, tokens, seed)
    free = replace(near, draft=PassCost.flat(0.0))
    return simulate(free).tokens_per_s / simulate(replace(near, pipeline="plain")).tokens_per_s


def break_even_ms(delays_ms: Sequence[float], speedups: Sequence[float]) -> float | None:
    """The delay from which on drafts are slower than plain decoding, between the measured ones; None: none of these."""
    for before, after in zip(range(len(delays_ms)), range(1, len(delays_ms)), strict=False):
        if speedups[before] >= 1 > speedups[after]:
            share = (speedups[before] - 1) / (speedups[before] - speedups[after])
            return delays_ms[before] + share * (delays_ms[after] - delays_ms[before])
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--delays", type=float, nargs="+")
    parser.add_argument("--lookup", type=float, default=0.0)
    parser.add_argument("--pipelines", nargs="+")
    parser.add_argument("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    parser.add_argument("--passes", type=float, nargs="+", help="milliseconds of a target pass")
    given = parser.parse_args(arguments)
    far = given.lookup > 0
    delays = given.delays or (FAR_DELAYS_MS if far else DELAYS_MS)
    print(lines.head("pipeline, acceptance, pass", *(f"{delay:g} ms" for delay in delays), "break-even"))
    lowest = list[tuple[float, str]]()  # of the decision over plain decoding, and where
    for pipeline in given.pipelines or (FAR_PIPELINES if far else PIPELINES):
        for acceptance in given.acceptances:
            for pass_ms in given.passes or (FAR_PASSES_MS if far else PASSES_MS):
                cells = []
                for delay in delays:
                    cases = [
                        scenario(pipeline, acceptance, pass_ms, delay, given.tokens, seed)
                        for seed in range(given.texts)
                    ]
                    runs = [shares_with_lookup(case, given.lookup) if far else shares(case) for case in cases]
                    cells.append([mean(column) for column in zip(*runs, strict=True)])
                    where = f"{pipeline}, {acceptance}, {pass_ms:g} ms, {delay:g} ms away"
                    lowest += [(min(run[-2:]), f"{where}, text {seed}") for seed, run in enumerate(runs)]
                even = break_even_ms(delays, [cell[0] for cell in cells])
                shown = (", ".join(f"{share:.2f}" for share in cell) for cell in cells)
                known = "" if even is None else f"{even:.0f} ms"
                print(lines.row(f"{pipeline}, {acceptance}, {pass_ms:g} ms", *shown, known), flush=True)
    least = "; ".join(f"{share:.3f} ({where})" for share, where in sorted(lowest)[:8])
    print(f"\nThe decision, least of single texts, cold or warm: {least}")
    if far:
        alone = mean(lookup_alone(given.lookup, FAR_PASSES_MS[0], given.tokens, seed) for seed in range(given.texts))
        print(f"\nThe lookup alone: {alone:.2f}")


if __name__ == "__main__":
    main()
