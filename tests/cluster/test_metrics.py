"""Ray's counters follow the tally: each grows by what was counted since the last look."""

from __future__ import annotations

from actors.tally import Tally
from cluster.metrics import MetricsWatch


class Counters:
    """Counters that refuse to grow by nothing, as Ray's do."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.described: dict[str, str] = {}

    def make(self, name, description):
        self.values[name], self.described[name] = 0.0, description

        def increment(amount):
            assert amount > 0
            self.values[name] += amount

        return increment


def test_counters_grow_by_what_was_counted_since_the_last_look():
    counters, tally = Counters(), Tally()
    watch = MetricsWatch(counters.make)
    watch(tally)
    assert set(counters.values.values()) == {0.0}
    for num_tokens, busy_s in ((3, 0.5), (3, 0.5), (10, 0.75)):
        tally.num_tokens, tally.target_busy_s = num_tokens, busy_s
        watch(tally)
        assert counters.values["specdec_generation_tokens_total"] == num_tokens
        assert counters.values["specdec_target_busy_seconds_total"] == busy_s


def test_a_reset_loses_nothing():
    counters, first, second = Counters(), Tally(), Tally()
    watch = MetricsWatch(counters.make)
    first.num_tokens = 5
    watch(first)
    first.num_tokens = 7  # counted between the last look and the reset
    second.num_tokens = 1
    watch(second)
    watch(second)
    assert counters.values["specdec_generation_tokens_total"] == 8


def test_every_counter_is_described_and_named_after_ours():
    counters = Counters()
    MetricsWatch(counters.make)
    assert all(name.startswith("specdec_") and text for name, text in counters.described.items())
    assert {"specdec_spec_decode_num_accepted_tokens_total", "specdec_prompt_tokens_total"} <= set(counters.values)
