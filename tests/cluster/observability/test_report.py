from __future__ import annotations

import json
from dataclasses import replace

import pytest

from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName, SamplingConfig, TargetConfig, VerifyConfig, VerifyRule
from actors.protocol.membership import Ready
from actors.protocol.messages import RequestStats
from cluster import pocket
from cluster.config import load_config
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, LaunchConfig, PlacementConfig
from cluster.io.prompts import Prompt
from cluster.observability.report import (
    Circumstances,
    RunFigures,
    bytes_per_role,
    circumstances,
    decode_ms_per_token,
    drafter_bytes,
    figures,
    mean_draft_length,
    memory_bound_speedup,
    notes,
    request_metrics,
    versions,
    write_json,
)
from cluster.observability.results import Run, Served
from cluster.placement.ranks import Devices, RankPlacement, lay_out

FIGURES, CIRCUMSTANCES = set(RunFigures.__annotations__), set(Circumstances.__annotations__)
PROMISED = [
    "num_guessed_states",
    "num_accepted_states",
    "tokens",
    "wall_s",
    "tokens_per_s",
    "plain_tokens_per_s",
    "speedup_vs_ar",
    "mean_acceptance_length",
    "acceptance_histogram",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "branch_hit_rate",
    "draft_busy",
    "target_busy",
    "round_overhead_ms",
    "bytes_per_role",
    "layout",
    "versions",
    "config",
    "tokens_equal_plain",
    "stretch",
    "preemptions",
    "stale",
    "ttft_s",
]

COUNTERS = {
    "num_spec_steps": 4,
    "num_draft_tokens": 19,
    "num_accepted_tokens": 8,
    "acceptance_histogram": (1, 1, 1, 0, 0, 1),
    "num_drafted_per_pos": (4, 4, 4, 4, 3),
    "num_accepted_per_pos": (3, 2, 1, 1, 1),
    "num_rounds": 6,
    "num_passes_ahead": 5,
    "dropped_pass_s": 0.125,
    "num_preemptions": 1,
    "num_stale": 2,
    "num_guessed_states": 9,
    "num_accepted_states": 7,
    "drafts_by_source": {"far": {"num_spec_steps": 4, "num_draft_tokens": 19, "num_accepted_tokens": 8}},
    "exported_bytes": 6000,
    "num_exports": 3,
    "draft_busy_s": 0.5,
    "target_busy_s": 1.5,
    "active_s": 2.0,
    "num_spec_rounds": 4,
    "spec_round_s": 0.4,
    "spec_round_overhead_s": 0.02,
    "wait_for_draft_s": 0.1,
    "wait_for_messages_s": 0.02,
    "orders_by_length": [5, 0, 0, 3, 1],
    "seconds_by_mode": {"speculate": 0.4, "rest": 0.75, "catch_up": 0.25},
    "rested_s": 1.0,
    "num_by_mode": {"speculate": 2, "probe": 3, "trial": 1},
    "no_drafter_s": 0.5,
    "guard": {"mode": "rest", "plain_tokens_per_s": 90.0, "gain": 0.8},
}


def served(index: int, tokens: tuple[int, ...], **more: object) -> Served:
    timing = {"ttft_s": 0.1, "latency_s": 0.5}
    return Served(index, Prompt(f"p{index}"), tokens, **{"finish_reason": "length", **timing, **more})


def a_run(wall_s: float = 2.0) -> Run:
    return Run([served(1, (4, 5, 6)), served(0, (1, 2, 3, 9, 9))], wall_s, COUNTERS)


def launch_config(**sections: object) -> LaunchConfig:
    chosen = {
        "target": TargetConfig(),
        "drafter": NgramDrafterConfig(),
        "verify": VerifyConfig(),
        "pipeline": PipelineConfig(),
        "placement": PlacementConfig(),
        "cluster": ClusterConfig(),
        "job": GenerateConfig(),
    }
    return LaunchConfig(**(chosen | sections))


def test_field_names_are_the_promised_ones():
    assert set(PROMISED) <= FIGURES | CIRCUMSTANCES


def test_functions_deliver_exactly_the_fields():
    assert set(figures(a_run(), a_run())) == FIGURES == set(figures(Run()))
    assert set(circumstances(launch_config(), [], {})) == CIRCUMSTANCES


def test_figures_from_counters():
    report = figures(a_run(wall_s=2.0), a_run(wall_s=5.0))
    assert report["tokens"] == 8 and report["tokens_per_s"] == 4.0
    assert report["plain_tokens_per_s"] == 1.6 and report["speedup_vs_ar"] == 2.5
    assert report["mean_acceptance_length"] == 3.0  # two accepted and the bonus
    assert report["acceptance_histogram"] == [1, 1, 1, 0, 0, 1]
    assert report["per_position_acceptance"] == pytest.approx([0.75, 0.5, 0.25, 0.25, 1 / 3])
    assert report["draft_acceptance_rate"] == pytest.approx(8 / 19)
    assert (report["draft_busy"], report["target_busy"]) == (0.25, 0.75)
    assert report["round_ms"] == pytest.approx(100.0) and report["round_overhead_ms"] == pytest.approx(5.0)
    assert (report["preemptions"], report["stale"], report["num_rounds"]) == (1, 2, 6)
    assert (report["passes_ahead"], report["dropped_pass_s"]) == (5, 0.125)
    assert (report["exported_bytes"], report["exported_bytes_per_round"]) == (6000, 2000)
    assert (report["num_guessed_states"], report["num_accepted_states"]) == (9, 7)
    assert report["drafts_by_source"] == COUNTERS["drafts_by_source"]
    assert report["ttft_s"] == {"median": 0.1, "max": 0.1}


def test_what_was_not_measured_is_null():
    report = figures(Run([served(0, (1, 2))], 1.0))
    for name in [
        "plain_tokens_per_s",
        "speedup_vs_ar",
        "tokens_equal_plain",
        "mean_acceptance_length",
        "acceptance_histogram",
        "per_position_acceptance",
        "num_draft_tokens",
        "num_guessed_states",
        "num_accepted_states",
        "branch_hit_rate",
        "foreseen_rate",
        "drafts_by_source",
        "draft_busy",
        "round_ms",
        "round_overhead_ms",
        "stale",
    ]:
        assert report[name] is None, name


def test_speculation_switched_off_has_counts_but_no_means():
    report = figures(Run([served(0, (1,))], 1.0, COUNTERS | {"num_spec_steps": 0, "num_draft_tokens": 0}))
    assert report["num_spec_steps"] == 0
    assert report["mean_acceptance_length"] is None and report["draft_acceptance_rate"] is None


def test_equality_compares_what_ended_in_both_runs():
    plain = Run([served(0, (1, 2, 3, 9, 9)), served(1, (4, 5, 7)), served(2, (1,))], 2.0)
    assert figures(a_run(), plain)["num_unequal_requests"] == 1
    assert figures(a_run(), plain)["tokens_equal_plain"] is False
    aborted = Run([served(0, (1, 2, 3, 9, 9)), served(1, (4,), finish_reason="abort")], 2.0)
    assert figures(a_run(), aborted)["tokens_equal_plain"] is True
    failed = Run([served(0, (), error="refused", finish_reason="error")], 2.0)
    assert figures(a_run(), failed)["tokens_equal_plain"] is True


def test_failed_requests_are_counted_and_kept_out_of_times():
    run = Run([served(0, (1, 2)), served(1, (), error="too long", latency_s=9.0, ttft_s=None)], 1.0)
    report = figures(run)
    assert (report["num_requests"], report["num_failed"]) == (2, 1)
    assert report["latency_s"] == {"median": 0.5, "max": 0.5}


def test_decode_time_leaves_the_first_token_out():
    one = served(0, (1, 2, 3), ttft_s=1.0, latency_s=1.4)
    other = served(1, (1, 2), ttft_s=2.0, latency_s=2.2)
    assert decode_ms_per_token([one, other, served(2, (1,))]) == pytest.approx(200.0)
    assert decode_ms_per_token([served(0, (1,))]) is None


def test_request_metrics_use_the_words_of_vllm():
    stats = RequestStats(3, 12, 6, (1, 0, 1, 0, 1))
    assert request_metrics(stats, num_spec_tokens=4) == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 0, 1, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_spec_tokens": 4,
    }
    short = RequestStats(3, 12, 4, (0, 2, 1))
    assert request_metrics(short, num_spec_tokens=4)["acceptance_histogram"] == [0, 2, 1, 0, 0]
    without = request_metrics(RequestStats(), num_spec_tokens=4)
    assert without["acceptance_histogram"] == [0] * 5
    ratios = without["mean_acceptance_length"], without["draft_acceptance_rate"]
    assert ratios == (0.0, 0.0) and all(type(ratio) is float for ratio in ratios)
    assert request_metrics(RequestStats(), num_spec_tokens=0)["acceptance_histogram"] == [0]


def test_bytes_are_summed_over_the_ranks_of_a_role():
    ready = {
        "target-0": Ready("target", 0, {"weight_bytes": 10, "kv_bytes": 5, "drafter": {"weight_bytes": 3}}),
        "target-1": Ready("target", 1, {"weight_bytes": 11, "kv_bytes": 5}),
        "draft-0": Ready("draft", 0, {"load_s": 0.1}),
    }
    assert bytes_per_role(ready) == {"target": {"weights": 21, "kv": 10}, "draft": {"weights": 0, "kv": 0}}
    assert drafter_bytes(ready) == {"weights": 3, "kv": 0}, "the target's part is not the drafter's"


def test_the_memory_bound_speed_up_counts_what_passes_read():
    """Rounds of 4 tokens behind drafts 3 deep; the drafter's pass reads a tenth of the target's."""
    counters = {"num_spec_steps": 10, "num_accepted_tokens": 30, "num_drafted_per_pos": [10, 10, 10]}

    def speedup(drafter, counted=counters, role="draft"):
        target = {"pass_bytes": 100, "weight_bytes": 150} | ({} if role == "draft" else {"drafter": drafter})
        ready = {"target-0": Ready("target", 0, target)}
        return memory_bound_speedup(counted, ready | ({"d": Ready("draft", 0, drafter)} if role == "draft" else {}))

    model = {"weight_bytes": 30, "pass_bytes": 10}
    assert speedup(model) == speedup(model, role="target") == pytest.approx(4 / 1.3)
    assert speedup(model | {"passes_per_draft": 1}) == pytest.approx(4 / 1.1)
    assert speedup({"draft_share": 0.25}, role="target") == pytest.approx(4 / 1.75)
    assert speedup({}) == 4, "a lookup reads no weights"
    assert speedup({"weight_bytes": 5}, role="target") is None, "what a pass of it reads is not known"
    assert speedup(model, counters | {"num_spec_steps": 0}) is None
    assert speedup(model, counters | {"levels": {"draft": {}}}) is None
    halves = {f"target-{i}": Ready("target", i, {"pass_bytes": 50}) for i in range(2)}
    assert memory_bound_speedup(counters, halves | {"d": Ready("draft", 0, model)}) == pytest.approx(4 / 1.3)


def test_circumstances_survive_json(tmp_path):
    config = launch_config(target=TargetConfig(stretch=4))
    place = RankPlacement("target", 0, 1, "cpu", (0, 1), 2, 1.0)
    write_json(tmp_path / "report.json", circumstances(config, [place, replace(place, host="10.0.0.1")], {}))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["layout"][0]["identity"] == "target-0"
    assert [place["cores"] for place in report["layout"]] == [[0, 1], []], "in a cluster no rank is bound to a core"
    assert report["config"]["pipeline"]["name"] == "sync" and report["config"]["drafter"]["max_ngram"] == 4
    assert report["stretch"] == 4 and "change no token" in report["notes"][0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["drafter.placement=separate"], "drafter.placement=attached drafts on"),
        (["pipeline=branches"], "placement=separate gives each its own, and pipeline=sync"),
        (["drafter.placement=separate", "placement=separate"], None),
        (["drafter.placement=attached"], None),
        (["drafter.placement=separate", "drafter.pace_ms=3"], None),
        (["drafter=suffix", "drafter.placement=separate"], None),
    ],
)
def test_roles_on_the_same_cores_are_noted_with_the_remedy(overrides, remedy):
    config = load_config(
        ["cluster=inprocess", "cluster.num_cpus=2", "drafter=model", "placement=colocated", *overrides]
    )
    found = [
        one for one in circumstances(config, lay_out(config, Devices((0, 1), 0)), {})["notes"] if "colocated" in one
    ]
    assert len(found) == (remedy is not None) and (remedy or "") in "".join(found)


def test_notes_warn_of_what_makes_figures_differ():
    assert notes(launch_config()) == []
    rejection = launch_config(verify=VerifyConfig(VerifyRule.rejection), sampling=SamplingConfig(temperature=1.0))
    assert "not its tokens" in notes(rejection)[0]
    assert notes(launch_config(verify=VerifyConfig(VerifyRule.rejection))) == []
    bundled = launch_config(drafter=ModelDrafterConfig(path=str(pocket.DRAFTER)))
    assert "trained for another target" in notes(bundled)[0]
    assert notes(replace(bundled, pipeline=PipelineConfig(PipelineName.plain))) == []
    assert notes(replace(bundled, target=TargetConfig(path=str(pocket.TARGET)))) == []
    paced = launch_config(target=TargetConfig(pace_ms=15), drafter=ModelDrafterConfig(pace_ms={1: 1.5, 8: 2}))
    assert notes(paced)[0].startswith("pace_ms: target 15, drafter {1: 1.5, 8: 2}: passes took at least so many")
    assert notes(replace(paced, pipeline=PipelineConfig(PipelineName.plain)))[0].startswith("pace_ms: target 15: ")
    assert notes(replace(paced, target=TargetConfig()))[0].startswith("pace_ms: drafter {1: 1.5, 8: 2}: ")
    assert "share cores" in notes(launch_config(cluster=ClusterConfig(oversubscribe=True)))[0]


def test_versions_name_what_can_change_a_figure():
    found = versions()
    assert {"python", "torch", "ray", "transformers"} < set(found)
    assert found["torch"].startswith("2.")


def test_control_and_waits_are_reported():
    report = figures(a_run())
    assert report["draft_lengths"] == [5, 0, 0, 3, 1] and mean_draft_length(report["draft_lengths"]) == 13 / 4
    assert report["fallback_s"] == 1.5, "at rest, catching up, and without a drafter"
    assert (report["num_probes"], report["num_trials"]) == (3, 1) and report["guard"]["gain"] == 0.8
    assert report["waits"] == {
        "target_for_drafter_s": 0.1,
        "target_for_messages_s": 0.02,
        "drafter_for_target_s": 1.5,
    }
    assert report["bound_by"] == "target"
    slow = figures(Run(a_run().requests, 2.0, COUNTERS | {"wait_for_draft_s": 0.3}))
    assert slow["bound_by"] == "drafter"
    plain = figures(Run(a_run().requests, 2.0, {}))
    assert plain["waits"] is None and plain["bound_by"] is None and plain["fallback_s"] == 0
