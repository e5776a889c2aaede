"""The rounds of a batch by kind, from a timeline by hand."""

import pytest

from docs.measurements import batch_rounds
from docs.measurements.batch_rounds import Sums

SPANS = [
    ("target", "prefill", 0.0, 1.0, {"round": 1, "rows": 12, "requests": 2, "tokens": 2}),
    ("target", "decode", 1.1, 1.4, {"round": 2, "rows": 2, "requests": 2, "tokens": 2}),
    ("messages", "verdict", 1.4, 1.45, {"round": 2}),
    ("draft", "propose", 1.4, 1.5, {"round": 2, "requests": 2, "tokens": 6}),
    ("target", "commit", 1.6, 1.61, {"round": 3}),
    ("target", "verify", 1.61, 2.0, {"round": 3, "rows": 15, "requests": 2, "tokens": 5}),
    ("draft", "prefill", 2.0, 2.1, {"round": 3}),
    ("target", "decode", 2.2, 2.5, {"round": 4, "rows": 2, "requests": 2, "tokens": 2}),
    ("target", "prefill", 2.5, 3.5, {"round": 5, "rows": 12, "requests": 2, "tokens": 2}),
]


def parts(sums):
    return sums.rounds, sums.requests, sums.tokens, sums.prompt_rows, sums.passes, sums.drafts, sums.between


def test_a_round_has_the_drafts_behind_the_pass_before_it():
    kinds = {kind: parts(sums) for kind, sums in batch_rounds.kinds_of(SPANS).items()}
    assert kinds == {
        "decode": pytest.approx((1, 2, 2, 0, 0.3, 0, 0.1)),
        "verify": pytest.approx((1, 2, 5, 7, 0.39, 0.1, 0.11)),
        "decode behind drafts": pytest.approx((1, 2, 2, 0, 0.3, 0.1, 0.1)),
        "prefill": pytest.approx((1, 2, 2, 10, 1.0, 0, 0)),
    }


def test_plain_rounds_price_tokens_and_rows_of_prompts():
    runs = [{"decode": Sums(10, 20, 20, 0, 1.0, 0.0, 0.2), "prefill": Sums(1, 0, 0, 100, 0.5)}]
    costs = batch_rounds.plain_costs(runs)
    assert costs == pytest.approx([0.06, 0.005])
    (row,) = batch_rounds.table([{"verify": Sums(2, 4, 10, 0, 0.4, 0.1, 0.1)}], costs).splitlines()[2:]
    assert row == "| verify | 2 | 4 | 10 | 0 | 400 | 100 | 100 | 600 | 600 |"
