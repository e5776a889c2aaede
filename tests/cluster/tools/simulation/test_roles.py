"""The scripted runner: what a pass costs, which rows are exact, and which position of the text a row reads."""

from __future__ import annotations

from cluster.tools.simulation.clock import LaneClock
from cluster.tools.simulation.roles import ScriptedRunner
from parallel.kv.pass_plan import Span
from parallel.pass_cost import PassCost


class Text:
    def children(self, position, distance, count):
        return position, distance


def read(runner, num_tokens, num_logits=1, *, parents=None, fuzzy=False):
    """(position, distance from the root) of the rows with logits."""
    spans = [Span(0, num_tokens, parents, num_logits)]
    return [row.children(1) for row in runner.forward(spans, [0] * num_tokens, fuzzy=fuzzy).logits]


def test_fuzzy_rows_are_cheap_and_dropped_as_a_whole():
    time = LaneClock()
    runner = ScriptedRunner(lambda _: Text(), time, PassCost.flat(1.0), 100, exact=PassCost.flat(3.0))
    runner.open(0)
    assert read(runner, 4) == [(4, 0)] and time.now == 3.0
    runner.commit(0, range(4))
    assert not runner.drop_fuzzy(0), "all rows are exact"
    assert read(runner, 1) == [(5, 0)] and time.now == 6.0
    assert read(runner, 2, 2, parents=[0, 1], fuzzy=True) == [(6, 1), (7, 2)] and time.now == 7.0
    runner.commit(0, [0, 1, 2])
    assert runner.cached_len(0) == 7
    assert read(runner, 1) == [(8, 0)] and time.now == 8.0, "behind a fuzzy row every pass is fuzzy"
    assert runner.drop_fuzzy(0) and runner.cached_len(0) == 5 and not runner.drop_fuzzy(0)
    assert read(runner, 3) == [(8, 0)] and time.now == 11.0, "what was dropped is fed again, exactly"


def test_rows_that_stay_pending_keep_their_depth():
    time = LaneClock()
    runner = ScriptedRunner(lambda _: Text(), time, PassCost(((1, 1.0), (5, 2.0))), 100)
    runner.open(0)
    assert read(runner, 1) == [(1, 0)] and time.now == 1.0
    assert read(runner, 4, 4, parents=[0, 0, 1, 3], fuzzy=True) == [(2, 1), (2, 1), (3, 2), (4, 3)]
    assert time.now == 1.0 + 1.75
    runner.commit(0, [0, 1], [3, 4])
    assert runner.cached_len(0) == 2 and not runner.drop_fuzzy(0), "no pass of this model is fuzzy"
