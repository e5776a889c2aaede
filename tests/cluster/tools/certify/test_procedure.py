"""What a certificate says it is about, how many steps it takes, and the words of its page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.protocol.messages import SamplingKind, SamplingParams
from cluster.tools.certify import procedure as module
from cluster.tools.certify.certificate import Certificate, Check
from cluster.tools.certify.procedure import describe_subject, num_steps
from tests.cluster.config.quick_loading import load_quickly

GREEDY, WARM, HOT = (SamplingParams(temperature=temperature) for temperature in (0.0, 0.8, 1.0))


def subject(*overrides: str) -> dict[str, str]:
    return describe_subject(load_quickly(["job=certify", *overrides]))


def test_a_subject_names_what_was_configured_and_no_more():
    config = load_quickly(
        ["job=certify", "drafter=model", "verify=coupled", "sampling.top_k=5", "sampling.max_tokens=9", "target.tp=2"]
    )
    assert describe_subject(config) == {
        "target": f"{config.target.path}, tp=2",
        "drafter": f"model {config.drafter.path} chain, 5 draft tokens",
        "rule": f"coupled, law_size={config.verify.law_size}",
        "drafts": "any draft tokens, which is exact under this rule by the enumerations of the tests",
        "pipeline": "sync, drafts while they measure faster than plain decoding",
        "temperatures": "0, 1",
        "seeds": "0, 1",
        "sampling": "top_k=5",
        "prompts": f"{config.job.prompts}, 9 tokens each at most",
    }
    assert subject("verify=coupled")["sampling"] == "no further processors"
    several = subject(
        "verify=coupled", "sampling.top_k=5", "sampling.min_p=0.1", "job.seeds=[3]", "job.temperatures=[0.75]"
    )
    assert (several["sampling"], several["seeds"], several["temperatures"]) == ("top_k=5, min_p=0.1", "3", "0.75")


@pytest.mark.parametrize(
    ("overrides", "drafter"),
    [
        (["drafter=ngram"], "ngram, 5 draft tokens"),
        (["drafter=none"], "none"),
        (
            [
                "drafter=cascade",
                "drafter.levels=[suffix,{name: model, num_draft_tokens: 3}]",
                "drafter.num_draft_tokens=6",
            ],
            "cascade of 2 levels (0: suffix, 8 draft tokens; 1: model ",
        ),
        (["drafter=auto", "drafter.drafters=[ngram,suffix]"], "auto of ngram, 5 draft tokens; suffix, 8 draft tokens"),
    ],
)
def test_a_drafter_is_described_with_those_inside_it(overrides, drafter):
    assert subject("verify=coupled", *overrides)["drafter"].startswith(drafter)


@pytest.mark.parametrize(
    ("overrides", "drafted"),
    [
        ([], "sync, drafts while they measure faster than plain decoding"),
        (["pipeline.adaptive=false"], "sync, a draft is asked for in every round"),
        (["pipeline.min_draft_tokens=1"], "sync, a draft is asked for in every round"),
        (["drafter=none"], "sync, no drafts"),
        (["pipeline=plain"], "plain, no drafts"),
    ],
)
def test_how_much_is_drafted_is_said(overrides, drafted):
    assert subject("verify=coupled", *overrides)["pipeline"] == drafted


@pytest.mark.parametrize(
    ("overrides", "drafts"),
    [
        (["verify=rejection", "drafter=model"], f"draft tokens drawn as {SamplingKind.WITHOUT_REPLACEMENT.name}"),
        (["verify=rejection", "drafter=ngram"], "draft tokens drawn as DETERMINISTIC"),
        (["verify=rejection", "drafter=none"], "draft tokens drawn as DETERMINISTIC"),
    ],
)
def test_under_a_ratio_rule_the_kind_of_draw_is_said(overrides, drafts):
    assert subject(*overrides)["drafts"].startswith(f"{drafts}, which is exact")


def test_steps_are_requests_of_both_sides_rounding_and_draws(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    config = load_quickly(["job=certify", "verify=coupled", "drafter=ngram", "job.draws=250", "job.contexts=3"])
    assert num_steps(config, [GREEDY], 4) == 2 * 4 + 1
    assert num_steps(config, [GREEDY, WARM], 4) == 2 * 4 * 2 + 1 + 3 * 3
    assert num_steps(config, [WARM, HOT, replace(HOT, seed=9)], 2) == 2 * 2 * 3 + 1 + 3 * 2 * 2, "of equal heats one"
    two = load_quickly(
        ["job=certify", "verify=coupled", "drafter=auto", "drafter.drafters=[ngram,{name: suffix, width: 2}]"]
    )
    assert num_steps(replace(two, job=config.job), [WARM], 4) == 2 * 4 + 1 + 3 * 3 * 2, "for each way of drafting"


def test_the_model_that_is_read_is_that_of_the_last_drafter(monkeypatch):
    read: list[object] = []
    monkeypatch.setattr(module, "TextReader", lambda model, num_slots: read.append((model.num_draft_tokens, num_slots)))

    def of(*overrides: str) -> list[object]:
        read.clear()
        module._draft_reader(load_quickly(["job=certify", "verify=coupled", *overrides]), 7)
        return list(read)

    assert of("drafter=model", "drafter.num_draft_tokens=4") == [(4, 7)] and of("drafter=ngram") == []
    model = "{name: model, num_draft_tokens: 3}"
    assert of("drafter=cascade", f"drafter.levels=[ngram,{model}]") == [(3, 7)]
    assert of("drafter=auto", f"drafter.drafters=[model,{model},suffix]") == [(3, 7)]
    assert of("drafter=auto", "drafter.drafters=[ngram,suffix]") == []


def test_a_page_has_a_row_for_each_check_and_their_details():
    checks = [Check("a", True, "fine", {"n": 1}), Check("b", False, "bad", {"n": 2}, ["why"])]
    certificate = Certificate({"rule": "x", "seeds": "1"}, checks, ["n1", "n2"])
    assert certificate.to_markdown().splitlines()[2:] == [
        "Speculative decoding as configured here emits what plain decoding of the same target emits, as far as the",
        "checks below can see. `certificate.json` holds every figure.",
        "",
        "- rule: x",
        "- seeds: 1",
        "",
        "| check | result | findings |",
        "|---|---|---|",
        "| a | passed | fine |",
        "| b | FAILED | bad |",
        "",
        "why",
        "Note: n1.",
        "",
        "Note: n2.",
    ]
    assert certificate.to_json() == {
        "passed": False,
        "subject": {"rule": "x", "seeds": "1"},
        "checks": [{"name": "a", "passed": True, "n": 1}, {"name": "b", "passed": False, "n": 2}],
        "notes": ["n1", "n2"],
    }
    assert certificate.verdict == "FAILED" and [check.row for check in checks][1] == ["b", "FAILED", "bad"]
