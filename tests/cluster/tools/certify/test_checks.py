"""The verdict of every check and its figures, on outputs, leads and counts made by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import VerifyConfig, VerifyRule
from actors.protocol.messages import SamplingKind, SamplingParams
from cluster.tools.certify.certificate import Certificate
from cluster.tools.certify.checks import (
    DIVERGENCES_SHOWN,
    check_distribution,
    check_identity,
    check_rounding,
    notes_of,
    schemes_of,
)
from cluster.tools.certify.goodness import GoodnessOfFit, detectable_distance
from cluster.tools.certify.identity import OutputPair, complete, must_be_equal, settings
from cluster.tools.certify.scoring import EXPLAINED, LogitMovement

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=3)
TOLERANCE = 0.1
TOKENIZER = SimpleNamespace(decode=lambda token_ids: " ".join(map(str, token_ids)))


class Scorer:
    """The lead of a token is a tenth of its number."""

    def gaps(self, output):
        return [token / 10 for token in output.plain]

    def has_ties(self, output):
        return output.prompt != 9


def pair(plain, speculative, *, prompt=0, sampling=GREEDY, accepted=1):
    return OutputPair(prompt, (7, 8), sampling, tuple(plain), tuple(speculative), accepted)


@pytest.mark.parametrize("rule", [VerifyRule.coupled, VerifyRule.rejection])
@pytest.mark.parametrize("seed", range(10))
def test_outputs_are_equal_up_to_ties(rule, seed):
    draw, outputs = random.Random(seed), []
    for prompt in range(8):
        plain = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 6))]
        other, sampling = list(plain), draw.choice([GREEDY, SAMPLED])
        change = draw.choice(["none", "token", "longer", "shorter"])
        if change == "token":
            other[draw.randrange(len(other))] = 5
        elif change != "none":
            other = [*other, 5] if change == "longer" else other[:-1]
        outputs.append(pair(plain, other, prompt=prompt, sampling=sampling, accepted=prompt))
    promised = [one for one in outputs if rule is VerifyRule.coupled or one.sampling is GREEDY]
    assert promised == [one for one in outputs if must_be_equal(rule, one.sampling)]
    unequal = [one for one in promised if one.plain != one.speculative]
    check = check_identity(outputs, rule, Scorer(), TOKENIZER, TOLERANCE)
    places, excused = [], 0
    for one in unequal:
        place = 0
        while one.plain[: place + 1] == one.speculative[: place + 1]:
            place += 1
        places.append((one.prompt + 1, place))
        excused += place < len(one.plain) and one.plain[place] == 1  # a lead of the tolerance
    figures = check.figures
    assert [(found["prompt"], found["position"]) for found in figures["divergences"]] == places
    assert check.passed == (excused == len(unequal)) and check.result == ("passed" if check.passed else "FAILED")
    assert figures["num_unequal_outputs"] == len(unequal) and figures["num_excused_by_ties"] == excused
    assert figures["num_outputs"] == len(promised)
    assert figures["num_tokens"] == sum(len(one.plain) for one in promised)
    assert figures["num_accepted_draft_tokens"] == sum(one.num_accepted_tokens for one in promised)
    used = {(one.sampling.temperature, one.sampling.seed) for one in promised}
    assert {(one["temperature"], one["seed"]) for one in figures["settings"]} == used
    assert sum(line.startswith("- prompt") for line in check.details) == min(len(unequal), DIVERGENCES_SHOWN)
    more = len(unequal) - DIVERGENCES_SHOWN
    assert any(f"and {more} more" in line for line in check.details) == (more > 0)


def test_a_divergence_shows_where_it_begins():
    check = check_identity([pair((1, 2, 3), (1, 2), prompt=4)], VerifyRule.coupled, Scorer(), TOKENIZER, TOLERANCE)
    (found,) = check.figures["divergences"]
    assert (found["prompt"], found["position"], found["after"], found["gap"]) == (5, 2, "7 8 1 2", 0.3)
    assert (found["plain"]["text"], found["speculative"]["token_ids"]) == ("3", ()) and not found["is_tie"]
    (line,) = [line for line in check.details if line.startswith("- ")]
    assert "plain '3', speculative ''" in line and "3.00e-01, NOT a tie" in line
    longer = check_identity([pair((1,), (1, 2))], VerifyRule.coupled, Scorer(), TOKENIZER, TOLERANCE)
    assert longer.figures["divergences"][0]["gap"] is None and not longer.passed


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_rounding_is_what_the_dtype_explains(share):
    allowed = EXPLAINED[torch.bfloat16]
    movement, reader = LogitMovement(40, allowed * share, 3), SimpleNamespace(dtype=torch.bfloat16, explained=allowed)
    outputs = [pair((1, 20), ()), pair((9, 5), ()), pair((1, 1), (), prompt=9)]  # the last has no ties
    check = check_rounding(movement, outputs, Scorer(), reader)
    assert check.passed == (share < 1)
    assert (check.figures["num_choices"], check.figures["num_ties"], check.figures["smallest_gap"]) == (4, 3, 0.1)
    assert (check.figures["num_rows"], check.figures["num_flipped_choices"]) == (40, 3)
    assert check.figures["dtype"] == "bfloat16" and "3 of 4 choices are ties" in check.findings


MODEL = ModelDrafterConfig(path="x", strategy=Strategy.tree, width=3)


@pytest.mark.parametrize(
    ("drafter", "width", "coupled"),
    [
        (MODEL, 3, SamplingKind.COUPLED),
        (replace(MODEL, strategy=Strategy.chain), 1, SamplingKind.COUPLED),
        (replace(MODEL, width=30), 8, SamplingKind.COUPLED),
        (SuffixDrafterConfig(width=2), 2, SamplingKind.DETERMINISTIC),
        (NgramDrafterConfig(), 1, SamplingKind.DETERMINISTIC),
        (CascadeDrafterConfig(levels=(MODEL, MODEL)), 1, SamplingKind.COUPLED),
    ],
)
def test_drafts_are_drawn_as_the_drafter_draws_them(drafter, width, coupled):
    kinds = {SamplingKind.WITHOUT_REPLACEMENT, SamplingKind.DETERMINISTIC}
    found = schemes_of(VerifyConfig(VerifyRule.rejection, law_size=8), drafter, kinds)
    assert [(one.kind, one.width, one.law_size) for one in found] == [(kind, width, 8) for kind in sorted(kinds)]
    (default,) = schemes_of(VerifyConfig(VerifyRule.rejection, law_size=8), drafter, set())
    assert default.kind is SamplingKind.DETERMINISTIC
    (shared,) = schemes_of(VerifyConfig(VerifyRule.coupled, law_size=8), drafter, kinds)
    assert (shared.rule, shared.kind, shared.width) == ("coupled", coupled, width)


def test_a_bias_that_could_be_seen_is_reported_by_kind():
    names = ("text 1, first token", "text 2, first token", "text 1, tokens the drafter favours", "text 1, second token")
    fits = [GoodnessOfFit(name, 1000 * i, 10 * i, 0.1, 0.2 * i) for i, name in enumerate(names, 1)]
    check = check_distribution(fits, 0.01, 0.9)
    bounds = [detectable_distance(fit.num_draws, fit.num_cells, 0.01 / 4, 0.9) for fit in fits]
    assert check.passed and check.figures["visible_bias"] == {
        "of first tokens": max(bounds[:2]),
        "towards what the drafter favours": bounds[2],
        "of second tokens": bounds[3],
        "of the engine's tokens": None,
    }
    assert (check.figures["num_draws"], check.figures["smallest_p_value"]) == (3000, 0.2)
    assert [one["visible_bias"] for one in check.figures["comparisons"]] == bounds
    failed = check_distribution([*fits, replace(fits[0], name="bad", p_value=1e-9)], 0.01, 0.9)
    assert not failed.passed and failed.figures["alarms"] == ["bad"] and "- does not fit: bad" in failed.details


@pytest.mark.parametrize("rule", [VerifyRule.coupled, VerifyRule.rejection])
def test_notes_say_what_was_not_tested(rule):
    ran, idle = pair((1,), (1,), sampling=SAMPLED), pair((1,), (1,), accepted=0)
    starts = [note.partition(":")[0].partition(" of ")[0] for note in notes_of([idle], rule, 90, 97)]
    nothing, greedy = "no draft token was accepted anywhere", "only greedy decoding was asked for"
    assert starts == [nothing, greedy, "the draft model has 90 tokens"]
    sampled = notes_of([ran, idle], rule, 97, 97)
    assert len(sampled) == (rule is not VerifyRule.coupled) and all(
        "keeps the distribution" in note for note in sampled
    )


def test_a_certificate_passes_if_all_of_its_checks_do():
    good = check_distribution([], 0.01, 0.9)
    bad = replace(good, name="other", passed=False, details=["a detail"])
    for checks, failed in (([good], []), ([good, bad], ["other"])):
        certificate = Certificate({"rule": "x"}, checks, ["a note"])
        content, page = certificate.to_json(), certificate.to_markdown()
        assert certificate.failed == failed and content["passed"] == (not failed)
        assert [one["name"] for one in content["checks"]] == [one.name for one in checks]
        assert page.startswith(f"# Certificate of unchanged output: {'FAILED' if failed else 'PASSED'}")
        assert ("a detail" in page) == bool(failed) and "- rule: x" in page and "Note: a note." in page


def test_every_temperature_is_run_with_every_seed_and_greedy_once():
    found = [(one.temperature, one.seed) for one in settings(SAMPLED, [0.0, 1.0, 0.0], [4, 5, 4])]
    assert found == [(0.0, 4), (1.0, 4), (1.0, 5)]


def test_both_sides_of_a_pair_are_of_one_prompt(monkeypatch):
    asked = []

    def serve(engine, prompts, sampling, *, speculate, concurrency, on_finished):
        asked.append((speculate, concurrency))
        stats = SimpleNamespace(num_accepted_tokens=6)
        for _ in prompts:
            on_finished(None)
        return [
            SimpleNamespace(index=i, prompt=SimpleNamespace(text=text), token_ids=(i, 10 + speculate), stats=stats)
            for i, text in enumerate(prompts)
        ]

    monkeypatch.setattr("cluster.tools.certify.identity.serve_prompts", serve)
    monkeypatch.setattr("cluster.tools.certify.identity.all_completed", lambda run: run)
    encode = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text)]))
    ended = []
    pairs = complete(SimpleNamespace(tokenizer=encode), ["a", "bc"], SAMPLED, 4, lambda: ended.append(1))
    assert asked == [(False, 4), (True, 4)] and len(ended) == 4
    assert pairs == [OutputPair(i, (1 + i,), SAMPLED, (i, 10), (i, 11), 6) for i in range(2)]
    assert [one.first_difference for one in pairs] == [1, 1] and pair((1,), (1,)).first_difference is None
