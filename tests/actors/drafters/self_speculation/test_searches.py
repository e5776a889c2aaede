"""Searches for layers on a real target: what they find, that ranks agree, and that they leave the target alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from actors.drafters.config import DraftSetup
from actors.drafters.interface import Context
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.self_speculation.layer_search import Scores, TextWindow
from actors.drafters.self_speculation.searches import open_search
from actors.options import SchedulerConfig, VerifyConfig
from actors.protocol.messages import SamplingParams
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from parallel.self_speculation.replay import Replay
from tests.parallel.conftest import on_ranks  # noqa: F401  a fixture

REAL, STRETCH = 2, 4
"""Layers of the target, and layers after them that add nothing."""


def written(target, num_tokens=40, prompt_len=6, request_id=0, **sampling):
    """A request whose text the target wrote, and its rows but the last."""
    generator = torch.Generator().manual_seed(request_id)
    context = Context(request_id, 0, [], prompt_len, SamplingParams(**sampling))
    context.extend(torch.randint(0, 97, (prompt_len,), generator=generator).tolist())
    target.open(request_id)
    fed = context.token_ids[:-1]
    target.forward([Span(request_id, len(fed))], fed)
    target.commit(request_id, range(len(fed)))
    for _ in range(num_tokens):
        token = int(target.forward([Span(request_id, 1)], context.token_ids[-1:]).logits.argmax())
        target.commit(request_id, [0])
        context.extend([token])
    return context


def opened(path, group=SINGLE, **keys):
    target = open_model(path, group, num_slots=256, stretch=STRETCH)
    setup = DraftSetup(VerifyConfig("coupled"), "sync", SchedulerConfig(), group, "cpu", (1,), target_runner=target)
    config = replace(SelfDrafterConfig(search_every=1, search_window=24, num_draft_tokens=4), **keys)
    return target, open_search(config, setup)


def test_swift_finds_the_layers_that_add_nothing(models):
    """The 6 of 20 inner sublayers to skip lie among the silent 6 of layers 2 to 4: one mask of 38,760."""
    target, search = opened(models["target"], search=Search.swift, skip_share=0.5, search_trials=300)
    contexts = [written(target, request_id=i) for i in range(3)]
    slots = target.pool.slots(0).copy()
    rows = [part[:, slots].clone() for part in (target.pool.keys, target.pool.values)]
    for _ in range(40):
        layers = search.before_draft(contexts[:1])
    assert not search.ended, "the same text confirms nothing twice"
    for _ in range(360):
        layers = search.before_draft(contexts)
    assert search.ended and search.search.best_value >= 0.95
    assert 0 not in {layer for layer in range(6) if layer not in layers.attention}
    assert len(search.history) < 300, "it ends when it found a mask that is good enough"
    looks = len(search.history)
    search.before_draft(contexts)
    assert len(search.history) == looks
    for before, after in zip(rows, (target.pool.keys, target.pool.values), strict=True):
        assert torch.equal(before, after[:, slots]), "scoring touched the target's rows"
    target.pool.check()


def test_swift_gives_up_after_a_third_of_its_trials_without_a_better_mask(models, monkeypatch):
    monkeypatch.setattr(Scores, "reproduced", lambda *_: 0.5)
    target, search = opened(models["target"], search=Search.swift, search_trials=10)
    context = written(target)
    while not search.ended:
        search.before_draft([context])
    assert len(search.history) == 4


def test_swift_waits_for_text(models):
    target, search = opened(models["target"], search=Search.swift)
    first = search.layers
    assert search.before_draft([written(target, num_tokens=3)]) == first and not search.history


def test_clasp_skips_the_layers_that_add_nothing(models):
    target, search = opened(models["target"], search=Search.clasp, skip_share=0.6)
    layers = search.before_draft([written(target)])
    assert layers == LayerPlan.prefix(REAL) and search.history[-1].value == pytest.approx(1.0)


def test_a_choice_that_stays_is_looked_at_less_and_less(models):
    target, search = opened(models["target"], search=Search.clasp, skip_share=0.6, search_every=2)
    context, rounds = written(target), []
    for i in range(200):
        looks = len(search.history)
        search.before_draft([context])
        rounds += [i] * (len(search.history) - looks)
    assert [b - a for a, b in pairwise(rounds)] == [4, 8, 16, 32, 32, 32, 32, 32]


def test_fly_skips_the_attention_that_adds_nothing(models):
    target, search = opened(models["target"], search=Search.fly, least_cosine=0.999)
    contexts = [written(target, request_id=i) for i in range(2)]
    layers = search.before_draft(contexts)
    assert layers == LayerPlan.skipping(6, attention=[2, 3, 4]), "half of the layers in a row, never the last"
    assert len(search.history) == 1
    search.before_draft(contexts)
    assert len(search.history) == 1, "prompts are read once"
    search.release(1)
    search.before_draft(contexts[:1])
    assert len(search.history) == 2, "another batch has another mean"


def test_the_exit_is_the_one_behind_which_nothing_happens(models):
    target, search = opened(models["target"], search=Search.exit)
    assert search.before_draft([written(target)]) == LayerPlan.prefix(REAL)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_layers_reproduce_what_the_target_wrote(models, temperature):
    """They do so under the coupled rule with the noise of the draw, too."""
    from actors.sampling.logits import choose_plain

    target = open_model(models["target"], num_slots=256)
    context = written(target, num_tokens=0, temperature=temperature, seed=3)
    for _ in range(20):
        logits = target.forward([Span(0, 1)], context.token_ids[-1:]).logits
        target.commit(0, [0])
        context.extend(choose_plain(logits, [context.sampling], [len(context.token_ids)]).tolist())
    window = TextWindow.of(context, 16)
    scores = Scores(Replay(target), coupled=True)
    assert len(window.token_ids) == 16 and scores.reproduced(window, LayerPlan.whole(REAL)) == 1.0
    assert scores.reproduced_by_exit(window, REAL)[-1] == 1.0
    if temperature:
        assert Scores(Replay(target), coupled=False).reproduced(window, LayerPlan.whole(REAL)) < 1.0


@pytest.mark.extended
@pytest.mark.parametrize("search", [Search.swift, pytest.param(Search.exit, marks=pytest.mark.slow)])
def test_ranks_that_measure_differently_choose_alike(models, on_ranks, search):  # noqa: F811
    """Every rank has a shard of the target; what rank 0 measured decides."""

    class Contrary(Scores):
        def reproduced(self, *args):
            return 1 - super().reproduced(*args)

        def reproduced_by_exit(self, *args):
            return [1 - one for one in super().reproduced_by_exit(*args)]

    def choices(group):
        target, found = opened(models["target"], group, search=search, search_trials=25)
        if group.rank:
            found._scores = Contrary(found._scores.replay, coupled=True)
        context, first = written(target, num_tokens=16), found.layers
        return [first, *(found.before_draft([context]) for _ in range(8))]

    alone = choices(SINGLE)
    first, second = on_ranks(2, choices)
    assert first == second == alone and len(set(alone)) > 1
