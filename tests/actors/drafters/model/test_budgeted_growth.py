"""Dynamic trees: one budget for a batch, growth while it pays, values under the shared noise; the same tokens."""

from __future__ import annotations

import math
import random

import pytest
import torch

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.model.budgeted_growth import DynamicGrowth, PassPrice
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.tree_growth import Candidate, GrowingTree
from actors.protocol.messages import SamplingParams
from actors.sampling.logits import choose, top_children

DYNAMIC = ModelDrafterConfig(strategy=Strategy.dynamic, num_draft_tokens=9, depth=4, width=3)
SHARED = ModelDrafterConfig(strategy=Strategy.dynamic, num_draft_tokens=9, depth=4, width=3, batch_nodes=14)
RUNS = [("sync", DYNAMIC), ("sync", SHARED), pytest.param("branches", DYNAMIC, marks=pytest.mark.slow)]
SAMPLINGS = {
    "greedy": {},
    "T=1": dict(temperature=1.0),
    "processed": dict(temperature=0.7, top_k=40, repetition_penalty=1.2, min_tokens=6),
}


def grow(growth, trees, budgets, offer):
    """Grow to the end; `offer(i, node, width)` gives (token, log_prob) of children. Returns trees and passes."""
    frontiers, passes = [[0] for _ in trees], 0
    for level in range(growth.depth):
        offered = [
            [Candidate(node, *child) for node in nodes for child in offer(i, node, growth.width(level))]
            for i, nodes in enumerate(frontiers)
        ]
        passes += 1
        frontiers = growth.extend_all(trees, offered, budgets)
        if not any(frontiers):
            break
    return growth.finish_all(trees, budgets), passes


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_the_best_of_everything_that_could_have_been_grown(seed):
    """Feeding only what stands loses nothing: the same nodes as from trees grown in full, then cut."""
    choose_ = random.Random(seed)
    depth, width, budgets, shared = 3, 2, [choose_.randint(1, 6) for _ in range(3)], choose_.randint(2, 9)
    distributions: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def children(path):
        if path not in distributions:
            first = choose_.uniform(0.4, 0.9)
            distributions[path] = [(0, math.log(first)), (1, math.log(1 - first))]
        return distributions[path]

    def path(tree, node):
        tokens = []
        while node > 0:
            tokens.append(tree.token_ids[node])
            node = tree.parents[node]
        return tuple(tokens[::-1])

    trees = [GrowingTree(9) for _ in budgets]
    growth = DynamicGrowth(depth, width, shared, lambda: 0.0)
    grown, _ = grow(growth, trees, budgets, lambda i, node, w: children((i, *path(trees[i], node))))
    everything = []
    for i, budget in enumerate(budgets):
        nodes, level = [], [((), 0.0)]
        for _ in range(depth):
            level = [((*p, t), v + lp) for p, v in level for t, lp in children((i, *p))]
            nodes += [(-value, p) for p, value in level]
        everything += [(value, i, p) for value, p in sorted(nodes)[:budget]]
    expected = {(i, p) for _, i, p in sorted(everything)[:shared]}
    found = {(i, path(trees[i], node)) for i, (_, kept) in enumerate(grown) for node in kept[1:]}
    assert found == expected
    for tree, _ in grown:
        tree.check()


def test_a_sure_request_gets_a_deep_tree_and_an_unsure_one_a_wide_one():
    trees = [GrowingTree(9), GrowingTree(9)]
    odds = [(0.98, 0.01), (0.4, 0.35)]
    growth = DynamicGrowth(6, 2, 8, lambda: 0.0)
    (sure, unsure), _ = grow(growth, trees, [8, 8], lambda i, n, w: [(t, math.log(p)) for t, p in enumerate(odds[i])])
    assert max(sure[0].depths()) == 6 and sure[0].is_chain
    assert max(unsure[0].depths()) == 1 and unsure[0].num_draft_tokens == 2


def test_growth_ends_when_a_pass_costs_more_than_it_brings():
    def passes(price):
        growth = DynamicGrowth(8, 2, 0, lambda: price)
        return grow(growth, [GrowingTree(9)], [30], lambda i, node, width: [(1, math.log(0.7))])[1]

    taken = [passes(price) for price in (0.0, 0.05, 0.1, 0.2, 0.9)]
    assert taken[0] == 8 and taken[-1] == 1 and 1 < taken[2] < 8
    assert taken == sorted(taken, reverse=True)


def test_the_price_is_a_pass_over_a_round():
    now = 0.0
    price = PassPrice(clock=lambda: now)
    for _ in range(30):
        price.draft_ordered()
        now += 2.0
        price.draft_started()
        for _ in range(3):
            now += 1.0
            price.pass_done()
        now += 5.0
    assert price.share == pytest.approx(0.1)


def test_idleness_and_pauses_do_not_make_passes_cheap():
    """Rounds take 10 s, and some of them follow an idle minute."""
    now = 0.0
    price = PassPrice(clock=lambda: now)
    for number in range(30):
        now += 60.0 if number in (1, 20, 29) else 0.0
        price.draft_ordered()
        price.draft_started()
        now += 1.0
        price.pass_done()
        now += 9.0
        if number > 3:
            assert price.share == pytest.approx(0.1, rel=0.2)


def test_values_given_the_noise_tell_better_whom_the_target_draws():
    """Proper scoring: mean log-likelihood of the target's own draws, over draws by a drafter that is a little off."""
    torch.manual_seed(0)
    target = torch.randn(400, 50) * 3
    drafter = target + 0.5 * torch.randn_like(target)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(400)]
    drawn = choose(target, params, [7] * 400)
    scores = {}
    for given_noise in (False, True):
        token_ids, log_probs = top_children(drafter, params, [7] * 400, 50, given_noise=given_noise)
        place = (token_ids == drawn[:, None]).float().argmax(dim=-1, keepdim=True)
        scores[given_noise] = float(log_probs.gather(1, place).mean())
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(400))
    assert scores[True] > scores[False] + 0.3


@pytest.mark.extended
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("pipeline", "config"), RUNS, ids=["own budgets", "shared budget", "branches"])
def test_tokens_are_those_of_plain_decoding(open_room, make_requests, config, sampling, pipeline):
    requests = make_requests(4, max_tokens=14, **SAMPLINGS[sampling])
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(config, pipeline=pipeline).serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends) and room.stats.num_accepted_tokens > 0


def test_a_dynamic_tree_may_be_the_base_of_a_cascade(open_room, make_requests):
    requests = make_requests(3, max_tokens=16, temperature=1.0)
    plain = open_room(pipeline="plain").serve(requests)
    base = ModelDrafterConfig(path="small", strategy=Strategy.dynamic, num_draft_tokens=8, depth=3, width=3)
    levels = (base, ModelDrafterConfig(path="drafter", num_draft_tokens=5))
    room = open_room(CascadeDrafterConfig(levels=levels, tails=(0, 0), num_draft_tokens=5)).serve(requests)
    assert room.tokens == plain.tokens and room.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_under_a_ratio_rule_its_tokens_are_chosen_and_say_so(open_room, make_requests, rule):
    requests = make_requests(3, max_tokens=20)
    plain = open_room(pipeline="plain").serve(requests)
    assert open_room(DYNAMIC, rule=rule).serve(requests).tokens == plain.tokens
