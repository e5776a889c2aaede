"""Measured and predicted costs of drafts, and the drafter chosen by them, from runs and entries made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName
from actors.policy.cascade_model import LevelCost, tokens_per_s
from cluster.io.console import ABSENT
from cluster.io.prompts import Prompt
from cluster.observability.results import Run, Served
from cluster.tools.bench.figures import drafting_figures
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tables import choices, comparisons, drafter_table, write_markdown
from cluster.tools.bench.tasks import SPECULATIVE

MODEL = ModelDrafterConfig(num_draft_tokens=4)
FIXED = PipelineConfig(PipelineName.sync, adaptive=False)
ALONE = Setting(MODEL, FIXED, 0.0, 1, 0)
CASCADE = CascadeDrafterConfig(levels=[NgramDrafterConfig(num_draft_tokens=2), MODEL], num_draft_tokens=4)


def run(levels: dict[str, dict[str, float]] | None = None, num_rounds: int = 10, accepted: int = 20) -> Run:
    """Every round 4 draft tokens in 5 ms, verified in 18 ms; 2 ms are overhead."""
    tokens = 1 + num_rounds + accepted
    served = Served(0, Prompt("x"), tuple(range(tokens)), ttft_s=0.1, latency_s=0.1 + 0.025 * num_rounds)
    counters = {
        "num_spec_steps": num_rounds,
        "num_draft_tokens": 4 * num_rounds,
        "num_accepted_tokens": accepted,
        "num_spec_rounds": num_rounds,
        "spec_round_s": 0.025 * num_rounds,
        "spec_round_overhead_s": 0.002 * num_rounds,
        "levels": levels or {},
    }
    spans = [("draft", "prefill", 0.0, 9.0, {}), ("target", "prefill", 0.0, 9.0, {})]
    for i in range(num_rounds):
        spans += [("draft", "propose", 10.0 + i, 10.005 + i, {}), ("target", "verify", 10.5 + i, 10.518 + i, {})]
    return Run([served], 1.0, counters, tuple(spans))


def test_a_round_is_a_draft_a_verification_and_what_lies_between():
    found, _ = drafting_figures(ALONE, [{SPECULATIVE: run()}])
    assert found["ms_per_draft"] == pytest.approx(5) and found["verify_ms"] == pytest.approx(18)
    assert found["draft_share"] == pytest.approx(0.2)
    assert found["decode_tokens_per_s"] == pytest.approx(30 / 0.25)  # the first token and its time are left out
    assert found["predicted_tokens_per_s"] == pytest.approx(3 / 0.025, rel=1e-3)  # 1 + 20 / 10 tokens a round
    assert found["prediction_error"] == pytest.approx(0, abs=1e-3)


def test_a_cascade_is_predicted_from_its_levels():
    # One token a draft: its acceptance is a plain share, found in every other pass.
    lookup = {"num_passes": 20, "busy_s": 0.002, "num_drafts": 10, "num_draft_tokens": 10, "num_accepted_tokens": 8}
    model = {"num_passes": 25, "busy_s": 0.05, "num_drafts": 10, "num_draft_tokens": 10, "num_accepted_tokens": 7}
    levels = [replace(one, num_draft_tokens=1) for one in (NgramDrafterConfig(), MODEL)]
    setting = replace(ALONE, drafter=replace(CASCADE, levels=levels))
    found, _ = drafting_figures(setting, [{SPECULATIVE: run({"1-model": model, "0-ngram": lookup})}])
    costs = [LevelCost(1e-4, 0.4, 1, drafts_at_once=True), LevelCost(2e-3, 0.7, 4)]
    assert found["predicted_tokens_per_s"] == pytest.approx(tokens_per_s(costs, 0.02))


@pytest.mark.parametrize(
    "setting",
    [
        replace(ALONE, batch=2),
        replace(ALONE, pipeline=replace(FIXED, name=PipelineName.pearl)),
        replace(ALONE, pipeline=replace(FIXED, adaptive=True)),
        replace(ALONE, drafter=replace(CASCADE, lengths=LevelLengths.auto)),
        replace(ALONE, drafter=replace(CASCADE, tails=[0, 2])),
    ],
)
def test_what_the_formula_does_not_describe_is_not_predicted(setting):
    found, _ = drafting_figures(setting, [{SPECULATIVE: run()}])
    assert found["predicted_tokens_per_s"] is None and found["ms_per_draft"] == pytest.approx(5)


def test_a_lookup_pays_for_the_rounds_in_which_it_finds_nothing():
    idle = run(num_rounds=10, accepted=20)
    idle.counters["num_spec_steps"] = 5  # every other round had no draft
    idle.counters["num_draft_tokens"] = 25
    lookup = replace(ALONE, drafter=NgramDrafterConfig(num_draft_tokens=5))
    found, _ = drafting_figures(lookup, [{SPECULATIVE: idle}])
    assert found["predicted_tokens_per_s"] == pytest.approx(3 / 0.025, rel=1e-2)


def entry(name: str, speed: float, predicted: float | None, workload: str = "agent") -> Any:
    labels = {"pipeline": "sync", "temperature": 0.0, "batch": 1, "context": None, "workload": workload}
    return {
        "name": name,
        "setting": labels,
        "decode_tokens_per_s": speed,
        "predicted_tokens_per_s": predicted,
        "first_prediction": predicted,
        "prediction_error": None if predicted is None else predicted / speed - 1,
        "mean_acceptance_length": 2.5,
        "ms_per_draft": 1.0,
        "draft_share": 0.05,
        "mbsu": 1.5,
        "drafter_bytes": {"weights": 3 << 20, "kv": 0},
        "verify_ms": 20.0,
        "speedup_vs_ar": 1.5,
    }


def test_the_choice_is_made_by_prediction_and_judged_by_measurement(tmp_path):
    entries = [entry("a", 100, 120), entry("b", 125, 110), entry("c", 90, None), entry("d", 10, 10, "editing")]
    (remark,) = choices(entries)  # of a single drafter there is nothing to choose
    assert "chooses a" in remark and "b is 25 % faster" in remark
    assert [len(group) for group in comparisons(entries)] == [3, 1]
    write_markdown(tmp_path / "bench.md", entries)
    lines = (tmp_path / "bench.md").read_text().splitlines()
    assert [line.startswith("| **") for line in lines] == [False, False, False, True, False, True]
    assert drafter_table(entries)[1][0][6:8] == ["120.0", "+20 %"] and ABSENT in lines[4]
