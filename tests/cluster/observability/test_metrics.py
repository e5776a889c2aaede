"""Metrics follow the stats: each counter grows by what was counted since the last snapshot, under its window's name."""

from __future__ import annotations

from collections import defaultdict

import pytest

from actors.coordinator.scheduler import Load
from actors.coordinator.stats import CoordinatorStats, RequestTimes, StatsSnapshot
from actors.policy.decision import Mode
from actors.protocol.membership import Ready
from cluster.config import load_config
from cluster.observability.metrics import (
    COUNTERS,
    ENGINE_LABELS,
    FURTHER_PHASES,
    MOST_PHASES,
    PREFIX,
    MetricsWatch,
    metric_labels,
    model_name,
)
from cluster.observability.report import figures
from cluster.observability.results import Run

LABELS = dict.fromkeys(ENGINE_LABELS, "x")
LOAD = Load(num_running=2, num_waiting=1, kv_slots_used=30, kv_slots=120)
READY = [Ready("target", 0, {"weight_bytes": 70, "kv_bytes": 8}), Ready("draft", 0, {})]


class Registry:
    """Keeps values; refuses, as Ray does, unknown labels and counters that grow by nothing."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = defaultdict(float)
        self.observed: dict[str, list[float]] = defaultdict(list)
        self.described: dict[str, str] = {}
        self.labels: dict[str, tuple[str, ...]] = {}

    def counter(self, name, text, labels):
        def increment(amount, values):
            assert amount > 0 and set(values) == set(labels)
            self.values[self.key(name, values)] += amount

        self.described[name], self.labels[name] = text, labels
        return increment

    def gauge(self, name, text, labels):
        def set_to(amount, values):
            assert set(values) == set(labels)
            self.values[self.key(name, values)] = amount

        self.described[name], self.labels[name] = text, labels
        return set_to

    def histogram(self, name, text, labels, boundaries):
        def observe(amount, values):
            assert set(values) == set(labels)
            self.observed[name].append(amount)

        assert list(boundaries) == sorted(set(boundaries))
        self.described[name], self.labels[name] = text, labels
        return observe

    def key(self, name, values):
        return name.removeprefix(PREFIX), *(value for label, value in values.items() if label not in ENGINE_LABELS)


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def show(registry):
    watch = MetricsWatch(registry, LABELS)
    return lambda stats: watch(StatsSnapshot(stats, LOAD, READY))


def test_counters_grow_by_what_was_counted_since_the_last_look(registry, show):
    stats = CoordinatorStats(phase="plain")
    show(stats)
    assert not any(key[0].endswith("_total") for key in registry.values)
    for num_tokens, busy_s in ((3, 0.5), (3, 0.5), (10, 0.75)):
        stats.num_tokens, stats.target_busy_s, stats.active_s = num_tokens, busy_s, 1.0
        show(stats)
        assert registry.values["generation_tokens_total", "plain"] == num_tokens
        assert registry.values["busy_seconds_total", "plain", "target"] == busy_s
    assert registry.values["idle_seconds_total", "plain", "draft"] == 1.0
    assert registry.values["idle_seconds_total", "plain", "target"] == 0.5, "a counter never falls"


def test_every_window_counts_from_zero_under_its_own_name(registry, show):
    first, second, third = (
        CoordinatorStats(phase="a", num_tokens=5),
        CoordinatorStats(phase="b", num_tokens=1),
        CoordinatorStats(phase="a"),
    )
    for stats in (first, second, second, third):
        show(stats)
    third.num_tokens = 2
    show(third)
    assert registry.values["generation_tokens_total", "a"] == 7
    assert registry.values["generation_tokens_total", "b"] == 1


def test_names_of_windows_are_bounded_in_number(registry, show):
    for i in range(2 * MOST_PHASES):
        show(CoordinatorStats(phase=str(i), num_tokens=1))
    show(CoordinatorStats(phase="3", num_tokens=1))
    counts = {key[1]: value for key, value in registry.values.items() if key[0] == "generation_tokens_total"}
    assert len(counts) == MOST_PHASES + 1 and counts["3"] == 2 and counts[FURTHER_PHASES] == MOST_PHASES


def test_what_is_derived(registry, show):
    stats = CoordinatorStats(num_draft_tokens=9, num_accepted_tokens=4, num_branch_lookups=7, num_branch_hits=5)
    stats.num_accepted_per_pos = [3, 1, 0]
    show(stats)
    assert registry.values["spec_decode_num_wasted_tokens_total", ""] == 5
    assert registry.values["branch_misses_total", ""] == 2
    positions = {key[2]: value for key, value in registry.values.items() if "per_pos" in key[0]}
    assert positions == {"0": 3, "1": 1}


def test_losses_are_counted_by_role(registry, show):
    stats = CoordinatorStats(num_role_losses={"draft": 2, "target": 1}, num_refused={"draft": 3}, no_drafter_s=0.5)
    stats.add_outage("draft", 0.5)
    stats.add_outage("target", 2.0)
    show(stats)
    show(stats)
    found = {key[0]: value for key, value in registry.values.items() if key[1:] == ("", "draft")}
    losses = {"role_losses_total": 2, "refused_records_total": 3}
    assert found == losses | {"role_restarts_total": 1, "role_outage_seconds_total": 0.5}
    assert registry.values["fallback_seconds_total", "", "no_drafter"] == 0.5


def test_what_the_guard_does_is_counted_as_the_report_counts_it(registry, show):
    stats = CoordinatorStats()
    for mode, seconds in ((Mode.speculate, 3.0), (Mode.rest, 2.0), (Mode.catch_up, 0.5), (Mode.trial, 1.0)):
        stats.add_mode(mode, seconds, [])
    stats.no_drafter_s = 0.25
    show(stats)
    assert registry.values["guard_seconds_total", "", "speculate"] == 3.0
    report = figures(Run(counters=stats.report(1.0).counters))
    assert registry.values["guard_turns_total", "", "trial"] == report["num_trials"] == 1
    fallback = {key[2]: value for key, value in registry.values.items() if key[0] == "fallback_seconds_total"}
    assert fallback == {"guard": 2.5, "no_drafter": 0.25}
    assert sum(fallback.values()) == report["fallback_s"]


def test_levels_of_a_cascade_count_for_themselves(registry, show):
    stats = CoordinatorStats(levels={"small": {"busy_s": 0.5, "num_draft_tokens": 8, "num_accepted_tokens": 6}})
    show(stats)
    found = {key[0]: value for key, value in registry.values.items() if key[1:] == ("", "small")}
    assert found == {
        "level_busy_seconds_total": 0.5,
        "level_draft_tokens_total": 8,
        "level_accepted_tokens_total": 6,
    }


def test_a_far_drafter_and_the_local_one_count_for_themselves(registry, show):
    stats = CoordinatorStats()
    stats.add_source("far", 4, 2)
    stats.add_source("local", 3, 0)
    stats.add_source("local", 2, 1)
    show(stats)
    found = {key: value for key, value in registry.values.items() if "source_" in key[0]}
    assert found == {
        ("source_drafts_total", "", "far"): 1,
        ("source_drafts_total", "", "local"): 2,
        ("source_draft_tokens_total", "", "far"): 4,
        ("source_draft_tokens_total", "", "local"): 5,
        ("source_accepted_tokens_total", "", "far"): 2,
        ("source_accepted_tokens_total", "", "local"): 1,
    }


def test_ended_requests_are_observed_once(registry, show):
    stats = CoordinatorStats(phase="plain")
    stats.ended.append(RequestTimes("length", 0.1, 0.25, 1.25, num_tokens=5))
    stats.ended.append(RequestTimes("abort", None, None, 0.5, num_tokens=0))
    show(stats)
    show(stats)
    assert registry.values["request_success_total", "plain", "length"] == 1
    assert registry.values["request_success_total", "plain", "abort"] == 1
    assert registry.observed == {
        "specdec_time_to_first_token_seconds": [0.25],
        "specdec_request_time_per_output_token_seconds": [0.25],
        "specdec_request_queue_time_seconds": [0.1],
        "specdec_e2e_request_latency_seconds": [1.25, 0.5],
    }


def test_gauges_tell_how_full_the_engine_is(registry, show):
    show(CoordinatorStats())
    assert registry.values["num_requests_running",] == 2 and registry.values["num_requests_waiting",] == 1
    assert registry.values["kv_slots_used",] == 30 and registry.values["kv_cache_usage_perc",] == 0.25
    assert registry.values["weight_bytes", "target", "0"] == 70 and registry.values["kv_bytes", "draft", "0"] == 0


def test_names_are_ours_and_vllms(registry, show):
    assert all(name.startswith("specdec_") and text for name, text in registry.described.items())
    assert len({counted.name for counted in COUNTERS}) == len(COUNTERS)
    vllms = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    assert {f"specdec_spec_decode_{name}_total" for name in vllms} <= set(registry.described)


def test_labels_say_which_engine_it_is(tiny_launch):
    labels = metric_labels(tiny_launch(None))
    assert labels["engine"] == "specdec" and labels["drafter"] == "model" and labels["pipeline"] == "sync"
    assert labels["model_name"] and "/" not in labels["model_name"]


@pytest.mark.parametrize(
    ("overrides", "name"), [([], "pocket"), (["server.model_name=org/mine"], "org/mine")], ids=["bundled", "named"]
)
def test_the_model_has_one_name_in_replies_and_metrics(overrides, name):
    config = load_config(["cluster=inprocess", *overrides])
    assert model_name(config) == metric_labels(config)["model_name"] == name
