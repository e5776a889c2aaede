"""What a search does with what its looks found: measured shares and costs are given here, no model is read."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.self_speculation.drafter import SelfDrafter
from actors.drafters.self_speculation.exits import ExitSearch
from actors.drafters.self_speculation.layer_search import Scores
from actors.drafters.self_speculation.sublayers import PassShares, Sublayers, best_speed
from actors.drafters.self_speculation.swift import SwiftSearch
from actors.policy.estimators import Ewma
from actors.protocol.messages import Admit, DraftBatch, DraftOrder, SamplingParams
from actors.roles.draft import DraftRole
from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from parallel.self_speculation.runner import SelfDraftRunner

NUM_LAYERS, LONGEST = 7, 6
AGREE = list


class Reads:
    """Always room to read text again."""

    def can_read(self, num_tokens):
        return True


class Found(Scores):
    """Scores that are given: of every mask, or of every exit."""

    replay: Any = Reads()

    def __init__(self, by_exit=(), of_mask=0.5):
        self._by_exit, self._of_mask = by_exit, of_mask

    def reproduced_by_exit(self, window, num_layers):
        return list(self._by_exit[:num_layers])

    def reproduced(self, window, layers):
        return self._of_mask


def generated(num_tokens=64):
    return Context(0, 0, list(range(num_tokens)), 1, SamplingParams())


@pytest.mark.parametrize("seed", range(30))
def test_an_exit_costs_what_its_layers_read(seed):
    """The choice is the best of all exits by the bytes of exactly the layers before them."""
    draw = random.Random(seed)
    bytes_of = [draw.randrange(1, 100) for _ in range(NUM_LAYERS)]
    head = draw.randrange(1, 300)
    acceptance = sorted(draw.random() for _ in range(NUM_LAYERS - 1))

    class Shares(PassShares):
        def __init__(self):
            self._attention, self._mlp, self._head = bytes_of, [0] * NUM_LAYERS, head

    search = ExitSearch(NUM_LAYERS, Found(acceptance), AGREE, Shares(), longest=LONGEST, window=32, every=1)
    shares = [(sum(bytes_of[:stop]) + head) / (sum(bytes_of) + head) for stop in range(1, NUM_LAYERS)]
    speeds = [best_speed(*pair, LONGEST)[0] for pair in zip(acceptance, shares, strict=True)]
    assert search.before_draft([generated()]) == LayerPlan.prefix(1 + speeds.index(max(speeds)))


def test_a_pass_reads_its_sublayers_and_the_head(models):
    decoder = open_model(models["target"], num_slots=8).decoder
    attention, mlp = ([getattr(layer, part).nbytes() for layer in decoder.layers] for part in ("attention", "mlp"))
    head, shares = decoder.lm_head.nbytes(), PassShares(decoder)
    whole = sum(attention) + sum(mlp) + head
    assert head and shares.of(LayerPlan.whole(len(mlp))) == 1.0
    assert shares.of(LayerPlan((), ())) == head / whole
    assert shares.of(LayerPlan((1,), ())) == (attention[1] + head) / whole
    assert shares.of(LayerPlan((), (0,))) == (mlp[0] + head) / whole


@pytest.mark.parametrize(("trials", "fruitless", "looks"), [(40, 9, 9), (7, 9, 7)])
def test_swift_ends_after_so_many_looks_without_a_better_mask(trials, fruitless, looks):
    """Every mask reproduces half of the text."""
    sublayers = Sublayers.inner(NUM_LAYERS)
    numbers: dict[str, Any] = dict(num_skipped=4, window=32, every=1, trials=trials, fruitless=fruitless)
    search = SwiftSearch(sublayers, Found(), AGREE, **numbers)
    for _ in range(60):
        search.before_draft([generated()])
    assert search.ended and len(search.history) == looks


def test_the_best_mask_is_worth_the_mean_of_its_texts_and_another_what_it_did_better_on_one():
    """Scores of the looks, first of the best mask and then of the one that is tried."""

    class Given(Found):
        scores = iter((0.4, 0.5, 0.6, 0.2, 0.1, 0.15))

        def reproduced(self, window, layers):
            return next(self.scores)

    numbers: dict[str, Any] = dict(num_skipped=4, window=32, every=1, trials=40, fruitless=40)
    search = SwiftSearch(Sublayers.inner(NUM_LAYERS), Given(), AGREE, **numbers)
    values = []
    for _ in range(3):
        search.before_draft([generated()])
        values.append(search.history[-1].value)
    assert values[0] == pytest.approx(0.5), "the one that was tried: 0.4, and 0.1 better"
    mean = Ewma(0.8, mean=0.5, weight=1.0)
    mean.update(0.6)
    assert values[1] == pytest.approx(mean.mean), "it stays the best, by both of its texts"
    mean.update(0.1)
    assert values[2] == pytest.approx(mean.mean + 0.05), "the one that was tried on its third"
    assert search.search.best_value == values[2]


def test_a_search_may_look_at_text_before_a_trial_and_fixed_layers_need_not(models):
    """The look is a prefill, for which the role asks those alone that say they have one."""
    runner, options = open_model(models["target"], num_slots=64), ModelOptions("coupled", 16, (1,), 64)
    config, target = SelfDrafterConfig(exit=1, num_draft_tokens=3), SelfDraftRunner(runner, LayerPlan.prefix(1))
    looked: list[list[int]] = []

    class Search:
        layers = LayerPlan.prefix(1)

        def before_trial(self, contexts):
            looked.append([one.request_id for one in contexts])
            return self.layers

    search: Any = Search()
    assert SelfDrafter(target, config, options).capabilities.prefills is None
    drafter = SelfDrafter(target, config, options, search)
    role, admit = DraftRole(drafter), Admit(7, 0, tuple(range(2, 8)), 6, SamplingParams())
    list(role.answer(DraftBatch(1, (admit,), (), (), ())))
    runner.open(7)
    runner.forward([Span(7, 5)], list(range(2, 7)))
    runner.commit(7, range(5))
    list(role.answer(DraftBatch(2, (), (), (), (DraftOrder(7, 0),))))
    assert looked == [[7]]
