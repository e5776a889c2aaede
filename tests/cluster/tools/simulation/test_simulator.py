"""The simulator drives the real coordinator: no token changes, runs repeat exactly, and all time is accounted for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import PipelineName
from actors.policy.policy import Policy
from cluster.observability.timeline import chrome_trace
from cluster.tools.simulation import Language, PassCost, Scenario, power_law, simulate, tuned
from tests.matrices import in_turn

TARGET, DRAFT = PassCost(((1, 10.0e-3), (32, 13e-3))), PassCost(((1, 2.0e-3), (32, 3e-3)))
CHAIN = ModelDrafterConfig(num_draft_tokens=4, fan_out=4, ahead_width=12)
TREE = replace(CHAIN, strategy=Strategy.best_first, num_draft_tokens=8, depth=3, width=3)
LANGUAGE = Language((0.75,), power_law(0.8))
AHEAD = ("pearl", "branches", "tree")


def scenario(pipeline, drafter=CHAIN, **options):
    return replace(Scenario(pipeline, TARGET, DRAFT, drafter, LANGUAGE, max_tokens=200), **options)


HARDWARE = {
    "one": dict(num_requests=1, max_tokens=90),
    "batch": dict(num_requests=5, max_tokens=40, target_link_s=4e-3, draft_link_s=1e-3, coordinator_s=3e-4),
    "slow-drafter": dict(num_requests=2, max_tokens=50, draft=PassCost.flat(30e-3)),  # slower than the target
    "far-drafter": dict(num_requests=3, max_tokens=40, verify=PassCost.flat(1e-4), draft_link_s=2e-2, prompt_len=700),
    "layer-parallel": dict(num_requests=2, max_tokens=50, exact=PassCost.flat(3e-3)),
}
DRAFTERS = {"chain": CHAIN, "tree": TREE}


@pytest.mark.parametrize(
    ("hardware", "pipeline", "drafter"),
    list(in_turn(HARDWARE, PipelineName, DRAFTERS, times=dict.fromkeys(HARDWARE, 3))),
)
def test_the_text_is_the_languages_own(pipeline, drafter, hardware):
    case = replace(scenario(pipeline, DRAFTERS[drafter]), **HARDWARE[hardware])
    result = simulate(case)
    for request_id in range(case.num_requests):
        first = case.prompt_len
        assert result.tokens[request_id] == tuple(
            map(case.text(request_id).token, range(first, first + case.max_tokens))
        )


@pytest.mark.parametrize("pipeline", list(in_turn(["sync", *AHEAD], times={"pearl": 0, "branches": 0})))
def test_one_seed_one_run(pipeline):
    case = scenario(pipeline, num_requests=2, max_tokens=60)
    result = simulate(case)
    assert result == simulate(case)
    other = simulate(replace(case, language=replace(LANGUAGE, seed=1)))
    assert other.tokens != result.tokens and other.round_ms != result.round_ms


@pytest.mark.extended
@pytest.mark.parametrize("acceptance", [pytest.param(0.6, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("pipeline", AHEAD)
def test_overlap_beats_sync_but_never_its_ceiling(pipeline, acceptance):
    """One chain, one target: hiding all of the draft gains 1 + t_draft / t_verify and not more."""
    case = replace(scenario(pipeline), language=Language((acceptance,), power_law(1.0)), max_tokens=400)
    case = replace(case, verify=PassCost.flat(10e-3), draft=PassCost.flat(1.9e-3))
    ceiling = 1 + CHAIN.num_draft_tokens * 1.9 / 10
    gain = simulate(case).tokens_per_s / simulate(replace(case, pipeline="sync")).tokens_per_s
    assert 1.05 < gain < ceiling * 1.01


@pytest.mark.extended
@pytest.mark.parametrize(
    ("delay", "pipeline"),
    list(in_turn(["target_link_s", "draft_link_s", "coordinator_s"], ["sync", "branches", "plain"])),
)
def test_delays_never_help(pipeline, delay):
    speeds = [simulate(scenario(pipeline, **{delay: seconds})).tokens_per_s for seconds in (0.0, 1e-3, 4e-3)]
    assert speeds[0] >= speeds[1] * 0.99 >= speeds[2] * 0.99**2
    assert speeds[2] < speeds[0] * 0.9 or (pipeline, delay) == ("plain", "draft_link_s")


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", ["sync", *AHEAD])
def test_time_is_accounted_for(pipeline):
    result = simulate(scenario(pipeline, target_link_s=5e-4, draft_link_s=5e-4))
    shares = result.critical
    assert shares.target + shares.draft + shares.exchange == pytest.approx(1)
    # The engine's own counters, kept by the real coordinator, tell the same.
    window_s = result.counters["window_s"]
    assert result.counters["target_busy_s"] / window_s == pytest.approx(result.target_busy, abs=0.01)
    assert result.counters["draft_busy_s"] / window_s == pytest.approx(result.draft_busy, abs=0.01)
    assert result.counters["num_tokens"] / window_s == pytest.approx(result.tokens_per_s)


def test_what_binds():
    assert simulate(scenario("sync", draft=PassCost.flat(9e-3))).binding == "draft"
    assert simulate(scenario("sync", target_link_s=2e-2)).binding == "exchange"
    assert simulate(scenario("branches")).binding == "target"


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", AHEAD)
def test_the_timeline_shows_the_overlap(pipeline):
    result = simulate(scenario(pipeline, max_tokens=200))
    trace = chrome_trace(result.spans)
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"target", "draft"} <= lanes
    verifying = [(start, end) for lane, name, start, end, _ in result.spans if name == "verify"]
    ahead = [(start, end) for lane, name, start, end, _ in result.spans if name == "ahead"]
    hidden = [pass_ for pass_ in ahead if any(start <= pass_[0] < end for start, end in verifying)]
    assert len(hidden) > 0.9 * len(ahead) > 0


@pytest.mark.extended
def test_tuned_finds_the_best_length():
    case = scenario("sync")
    speeds = {
        length: simulate(replace(case, drafter=replace(CHAIN, num_draft_tokens=length))).tokens_per_s
        for length in (1, 3, 9)
    }
    length, result = tuned(case, (1, 3, 9))
    assert speeds[length] == max(speeds.values()) == result.tokens_per_s and length == 3


def test_another_pipeline_object_takes_the_place_of_the_named_one():
    case = scenario("branches")
    assert simulate(case, Policy("plain", 4)).counters["num_spec_steps"] == 0


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", ["branches", "tree"])
def test_a_miss_is_answered_with_a_short_draft(pipeline):
    """A proposal of many nodes must not turn into as many passes while the target waits."""
    result = simulate(scenario(pipeline, replace(TREE, num_draft_tokens=16)))
    sync = simulate(scenario("sync", replace(TREE, num_draft_tokens=16)))
    waits = result.round_ms * (1 - result.target_busy) / (1 - result.branch_hit_rate)
    assert waits < 1e3 * 4.5 * DRAFT(3), "a miss costs a root pass, a level or two and the pass that was under way"
    assert result.tokens_per_s > sync.tokens_per_s


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("pipeline", dict(pipeline="warp")),
        ("num_requests", dict(num_requests=0)),
        ("max_tokens", dict(max_tokens=8)),
        ("draft_link_s", dict(draft_link_s=-1.0)),
    ],
)
def test_a_scenario_that_makes_no_sense_names_the_field(field, values):
    with pytest.raises(ValueError, match=f"scenario.{field}="):
        replace(scenario("sync"), **values)
