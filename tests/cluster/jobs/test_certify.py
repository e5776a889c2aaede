"""`job=certify` on a tiny pair in this process: it passes what is right, and every check fails what is broken."""

from __future__ import annotations

import json
from functools import partial

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import INDEPENDENT_ONLY, PipelineConfig, SamplingConfig, VerifyConfig, VerifyRule
from actors.verification.rules import RULES
from cluster.config.jobs import CertifyConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.jobs import certify
from tests.actors.verification.rule_enumeration import PatchedSource
from tests.cluster.config.quick_loading import load_quickly

LAW, IDENTITY, ROUNDING = (
    "distribution at the model's vocabulary",
    "token identity",
    "rounding",
)
DRAWS = 800


@pytest.fixture
def run_certify(tiny_launch, write_prompts, half_agreeing_drafter, one_free_thread, tmp_path):
    """Certify; returns the certificate and the error it ended with."""

    def run(rule="coupled", drafter=None, **options):
        prompts = write_prompts({"prompt": "Name a bird."}, {"prompt": "abab" * 8})
        job = CertifyConfig(prompts=prompts, **({"contexts": 1, "draws": DRAWS, "seeds": [0, 1]} | options))
        drafter = drafter or ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=3, device="cpu")
        sampling = SamplingConfig(max_tokens=20, ignore_eos=True)
        config = tiny_launch(job, drafter=drafter, verify=VerifyConfig(VerifyRule(rule)), sampling=sampling)
        error = None
        try:
            certify.run(config, tmp_path)
        except RuntimeError as failure:
            error = str(failure)
            assert error.startswith("certificate: FAILED"), "an engine failed, not a check"
        return json.loads((tmp_path / "certificate.json").read_text()), error

    return run


def failed(certificate):
    return {check["name"] for check in certificate["checks"] if not check["passed"]}


def check(certificate, name):
    return next(one for one in certificate["checks"] if one["name"] == name)


SELDOM = [pytest.param(rule, marks=pytest.mark.slow) for rule in (VerifyRule.traversal, *INDEPENDENT_ONLY)]


@pytest.mark.parametrize(
    "rule", [VerifyRule.coupled, pytest.param(VerifyRule.rejection, marks=pytest.mark.extended), *SELDOM]
)
def test_every_rule_is_certified(run_certify, rule, tmp_path, capsys):
    certificate, error = run_certify(rule)
    assert error is None and certificate["passed"] and not failed(certificate)
    identity = check(certificate, IDENTITY)
    assert identity["num_outputs"] == (6 if rule == "coupled" else 2) and identity["num_accepted_draft_tokens"] > 0
    distribution = check(certificate, LAW)
    assert distribution["num_draws"] == DRAWS and 0 < distribution["visible_bias"]["of first tokens"] < 0.2
    assert {fit["name"] for fit in distribution["comparisons"]} >= {
        "T=1, text 1, first token",
        "the engine's sampled tokens",
    }
    page = (tmp_path / "certificate.md").read_text()
    assert page.startswith("# Certificate of unchanged output: PASSED") and str(rule) in page
    assert "PASSED" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        NgramDrafterConfig(min_ngram=1),
        partial(ModelDrafterConfig, strategy=Strategy.tree, num_draft_tokens=6),
    ],
)
def test_lookups_and_trees_are_certified(run_certify, drafter, half_agreeing_drafter):
    """By default chains are, and draws of every kind are scored (`tools/certify/test_scoring.py`)."""
    if not isinstance(drafter, NgramDrafterConfig):
        drafter = drafter(path=str(half_agreeing_drafter), device="cpu")
    certificate, error = run_certify("rejection", drafter, draws=300)
    assert error is None and certificate["passed"]


@pytest.mark.slow
def test_a_cascade_is_certified(run_certify, half_agreeing_drafter, tmp_path):
    """Tokens of the lookup reach, as tails, the target as they are."""
    path = str(half_agreeing_drafter)
    levels = [NgramDrafterConfig(min_ngram=1), ModelDrafterConfig(path=path, num_draft_tokens=2, device="cpu")]
    drafter = CascadeDrafterConfig(levels=levels, tails=[0, 2], num_draft_tokens=4)
    certificate, error = run_certify("rejection", drafter, draws=400)
    assert error is None and certificate["passed"]
    page = (tmp_path / "certificate.md").read_text()
    described = f"cascade of 2 levels (0: ngram, 5 draft tokens; 1: model {path} chain, 2 draft tokens), tails 0/2"
    assert described in page and "- seeds: 0, 1" in page and "- sampling: ignore_eos=True" in page
    assert "- drafts: draft tokens drawn as DETERMINISTIC, IID, which is exact under this rule" in page


@pytest.mark.extended
@pytest.mark.parametrize("always_draft", [True, False])
def test_the_default_drafts_where_the_engine_would_decode_plainly(
    tiny_launch, write_prompts, one_free_thread, tmp_path, always_draft
):
    """The drafter is the target, but its answers are late: drafts never pay, and every one of them is accepted."""
    options = {} if always_draft else {"always_draft": False}
    prompts = write_prompts({"prompt": "Name a bird."}, {"prompt": "abab" * 8})
    job = CertifyConfig(prompts=prompts, temperatures=[0.0], **options)
    delay_ms = 15.0 if always_draft else 150.0  # no draft pays for that, however slow the machine's passes are
    late = ClusterConfig(ClusterName.inprocess, link_delay_ms=delay_ms)
    sampling = SamplingConfig(max_tokens=40, ignore_eos=True)
    certify.run(tiny_launch(job, pipeline=PipelineConfig(), cluster=late, sampling=sampling), tmp_path)
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    share = check(certificate, IDENTITY)["num_accepted_draft_tokens"] / check(certificate, IDENTITY)["num_tokens"]
    assert (share > 0.45) is always_draft, "at least one of two tokens, that of the prompt's pass aside"
    said = (
        "a draft is asked for in every round"
        if always_draft
        else "drafts while they measure faster than plain decoding"
    )
    assert certificate["subject"]["pipeline"] == f"sync, {said}"


# --- what must fail ---------------------------------------------------------------------------------------------------


def accept_always(draft, target_row, random_source):
    """The classic mistake: drafts stand untested."""
    tree = draft.tree
    leaf = len(tree.parents) - 1
    return tuple(tree.path_to(leaf)), random_source.sample(target_row(leaf), leaf)


def correct_from_the_target(draft, target_row, random_source):
    """The quiet one: after a rejection the next token comes from p instead of the residual."""

    wrong = PatchedSource(random_source.accept, lambda _, node: random_source.sample(target_row(node), node))
    return RIGHT(draft, target_row, wrong)


RIGHT = RULES["rejection"]


@pytest.mark.slow
def test_a_rejection_rule_that_accepts_always_fails_everywhere(run_certify, monkeypatch, tmp_path):
    monkeypatch.setitem(RULES, "rejection", accept_always)
    certificate, error = run_certify("rejection")
    assert failed(certificate) == {IDENTITY, LAW}
    assert error.startswith("certificate: FAILED at token identity, distribution at the model's vocabulary")
    (first, *_) = check(certificate, IDENTITY)["divergences"]
    assert first["plain"]["token_ids"] != first["speculative"]["token_ids"] and first["after"] and not first["is_tie"]
    assert "NOT a tie" in (tmp_path / "certificate.md").read_text()


@pytest.mark.extended
def test_a_rejection_rule_that_corrects_from_the_target_fails_by_its_law(run_certify, monkeypatch):
    """Greedy tokens cannot show it."""
    monkeypatch.setitem(RULES, "rejection", correct_from_the_target)
    certificate, error = run_certify("rejection")
    assert failed(certificate) == {LAW} and error is not None


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("job.limit=-1", "job.limit=-1: must be 0 (all prompts) or above"),
        ("job.concurrency=-1", "job.concurrency=-1: must be 0 (all at once) or above"),
        ("job.temperatures=[]", "job.temperatures=[]: must name at least one"),
        ("job.temperatures=[-1]", "job.temperatures=[-1.0]: must all be 0 (greedy) or between"),
        ("job.seeds=[]", "job.seeds=[]: must name at least one"),
        ("job.contexts=0", "job.contexts=0: must be at least 1"),
        ("job.draws=10", "job.draws=10: must be at least 100; fewer show nothing"),
        ("job.significance=0", "job.significance=0.0: must be between 0 and 1"),
        ("job.power=1", "job.power=1.0: must be between 0 and 1"),
        ("job.prompts=/no/such.jsonl", "job.prompts=/no/such.jsonl: no such file"),
    ],
)
def test_what_makes_no_sense_is_refused(override, line):
    with pytest.raises(ValueError) as caught:
        load_quickly(["job=certify", override])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
