"""Chains of which only those tokens are proposed that are likely enough: what is dropped, and what is learned."""

from __future__ import annotations

import math
import random

import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.config import LengthRule, ModelDrafterConfig
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.priced_chains import LeadChances, PricedRule
from actors.protocol.messages import Commit, MeasuredCosts, SamplingParams
from parallel.runtime.runner import open_model


def proposed(rule, leads, least_chance, request_id=0, *, samples=False):
    """(Tokens of the chain, tokens of it that are proposed)."""
    rule.begin(request_id, samples=samples, least_chance=least_chance)
    length = next((i for i in range(1, len(leads)) if not rule.continues(request_id, 0, leads[:i])), len(leads))
    if length == len(leads):
        rule.continues(request_id, 0, leads)
    return length, length - rule.num_dropped(request_id)


def test_a_chain_ends_before_the_first_token_that_is_not_worth_a_row():
    rule = PricedRule()
    chance = rule.chances[False].of(2.0)
    assert proposed(rule, [2.0] * 8, 0.0) == (8, 8), "nothing is known of costs"
    assert proposed(rule, [2.0] * 8, 0.99 * chance**3) == (4, 3)
    assert proposed(rule, [2.0] * 3, 0.99 * chance**3) == (3, 3), "the ordered length"
    assert proposed(rule, [0.0, 9.0], 0.9) == (1, 0)


def test_greedy_and_sampled_requests_teach_chances_of_their_own():
    """Tokens are kept by a logistic law of the logarithm of their leads."""
    rule, draw = PricedRule(), random.Random(0)
    for _ in range(400):
        for request_id in range(8):
            samples, leads = bool(request_id % 2), [draw.expovariate(0.7) for _ in range(5)]
            _, length = proposed(rule, leads, 0.2, request_id, samples=samples)
            law = [1 / (1 + math.exp(-(0.3 + (not samples) + 1.5 * math.log(lead + 0.03)))) for lead in leads]
            rule.update(request_id, next((i for i in range(length) if draw.random() > law[i]), length))
    for samples, first in ((False, 1.3), (True, 0.3)):
        chances = rule.chances[samples]
        chances.fit()
        for lead in (0.3, 1.0, 4.0):
            law = 1 / (1 + math.exp(-(first + 1.5 * math.log(lead + 0.03))))
            assert chances.of(lead) == pytest.approx(law, abs=0.06)


def test_what_is_not_proposed_teaches_nothing_and_pessimism_wears_off():
    untouched = LeadChances()
    chances = LeadChances()
    for _ in range(30):
        for _ in range(20):
            chances.add(3.0, kept=False)
        chances.fit()
    low = chances.of(3.0)
    assert low < 0.1
    for _ in range(600):
        chances.add(0.0, kept=False)  # another one is tested now and then
        chances.fit()
    assert low < chances.of(3.0)
    rule = PricedRule()
    proposed(rule, [0.0] * 4, 0.9)
    rule.update(0, 0)
    rule.chances[False].fit()
    assert rule.chances[False].of(1.0) == untouched.of(1.0)


@pytest.fixture
def open_drafter(models):
    def open_(length_rule, **options):
        config = ModelDrafterConfig(num_draft_tokens=6, length_rule=length_rule, **options)
        runner = open_model(models["drafter"], num_slots=2000)
        return ModelDrafter(runner, config, ModelOptions("coupled", 8, (1,), prefill_chunk=64))

    return open_


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("by_pass", [False, True])
def test_a_priced_chain_is_the_beginning_of_the_ordered_one(open_drafter, temperature, by_pass):
    """Round after round on the same text, whatever is dropped."""
    ordered, priced = open_drafter(LengthRule.ordered), open_drafter(LengthRule.priced)
    choose, prompt = random.Random(5), [random.Random(i).randrange(2, 97) for i in range(12)]
    sampling, found = SamplingParams(seed=3, temperature=temperature), set()
    texts = [Context(0, 0, [*prompt], 12, sampling) for _ in range(2)]
    for drafter, text in zip((ordered, priced), texts, strict=True):
        drafter.open(text)
    for round_ in range(14):
        least_chance = (0.0, 0.3, 0.7, 1.0)[round_ % 4]
        texts[1].costs = MeasuredCosts(least_chance=least_chance)
        if by_pass:
            priced.begin([texts[1]], [5])
            while priced.is_drafting(0):
                priced.advance(None)
        (whole,) = ordered.propose([texts[0]], [5])
        (draft,) = priced.propose([texts[1]], [5])
        count = draft.tree.num_draft_tokens
        assert draft.tree.token_ids == whole.tree.token_ids[: count + 1]
        assert draft.tree.parents == whole.tree.parents[: count + 1]
        if least_chance in (0.0, 1.0):
            assert count == (0 if least_chance else 5)
        found.add(count)
        path = tuple(range(1, 1 + choose.randrange(count + 1)))
        tokens = (*[whole.tree.token_ids[node] for node in path], choose.randrange(2, 97))
        for drafter, text in zip((ordered, priced), texts, strict=True):
            drafter.observe(text, Commit(0, 0, len(text.token_ids), path, tokens))
            text.extend(tokens)
    assert len(found) > 2
