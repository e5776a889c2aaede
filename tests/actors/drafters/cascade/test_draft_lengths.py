"""`drafter.lengths=auto`: on synthetic costs with a known best it gets there, stays, and notices when things change."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from actors.drafters.cascade import draft_lengths
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.cascade.draft_lengths import TARGET, LengthControl
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.policy.cascade_model import CascadeCosts, best_lengths
from actors.protocol.messages import LevelWork, TokenTree
from tests import matrices

BOUNDS = (5, 4, 5)


class World:
    """A lookup, two models and a target with fixed costs; `rates[level, judge]` is the chance that a token is taken."""

    def __init__(self, rates, pass_s=(1.0, 4.0, 12.0), verify_s=18.0) -> None:
        self.now, self.rates, self.pass_s, self.verify_s = 0.0, dict(rates), pass_s, verify_s
        self.num_tokens = 0
        self.used = Counter()
        self.control = LengthControl(BOUNDS, ["0", "1", "2"], drafts_at_once=True, clock=lambda: self.now)
        self._chance = random.Random(0)

    def run(self, seconds: float) -> float:
        """Tokens per second."""
        until, before, started = self.now + seconds, self.num_tokens, self.now
        while self.now < until:
            self.control.drafts_ordered({})
            self.used[tuple(bool(length) for length in self.control.lengths)] += 1
            last = max(level for level in range(3) if self.control.lengths[level])
            length = self.control.lengths[last]
            self._draft(last, length)
            self.control.drafts_sent(length)
            self.now += self.verify_s
            accepted = self._accepted(last, TARGET, length)
            self.control.record_acceptance(last, TARGET, length, accepted)
            self.num_tokens += accepted + 1
        return (self.num_tokens - before) / (self.now - started)

    def _accepted(self, level, judge, length):
        rate = self.rates[level, judge]
        return next((i for i in range(length) if self._chance.random() >= rate), length)

    def _draft(self, level, missing):
        below = self.control.source(level)
        while missing > 0:
            asked = min(self.control.longest(level), missing - 1)
            if asked:
                self._draft(below, asked)
            self._work(level)
            if level == 0:
                return
            accepted = self._accepted(below, level, asked) if asked else 0
            if asked:
                self.control.record_acceptance(below, level, asked, accepted)
            missing -= accepted + 1

    def _work(self, level):
        self.now += self.pass_s[level]
        self.control.record_work([LevelWork(str(level), 1, self.pass_s[level])])

    def best(self):
        costs = {(level, fed): self.pass_s[level] for level in range(3) for fed in (False, True)}
        return best_lengths(CascadeCosts(costs, self.rates, drafts_at_once=True), lambda _: self.verify_s, BOUNDS)


LOOKUP = {(0, 1): 0.5, (0, 2): 0.5, (0, TARGET): 0.8, (1, 2): 0.8, (1, TARGET): 0.4, (2, TARGET): 0.45}
MODEL = {(0, 1): 0.0, (0, 2): 0.0, (0, TARGET): 0.1, (1, 2): 0.7, (1, TARGET): 0.75, (2, TARGET): 0.8}
SKIPPED = {(0, 1): 0.1, (0, 2): 0.8, (0, TARGET): 0.2, (1, 2): 0.2, (1, TARGET): 0.1, (2, TARGET): 0.95}
ALL = {(0, 1): 0.8, (0, 2): 0.1, (0, TARGET): 0.1, (1, 2): 0.9, (1, TARGET): 0.2, (2, TARGET): 0.95}
WORLDS = {
    "lookup": (LOOKUP, (1, 0, 0)),
    "model": (MODEL, (0, 1, 0)),
    "skip": (SKIPPED, (1, 0, 1)),
    "all": (ALL, (1, 1, 1)),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", WORLDS)
def test_it_finds_the_best_of_all_cascades_of_its_levels(name):
    """A level may be left out anywhere, the last one too; then it keeps within a few percent of that cascade alone."""
    rates, used = WORLDS[name]
    world = World(rates)
    assert tuple(int(length > 0) for length in world.best()) == used
    world.run(3_000.0)
    found = world.run(20_000.0)
    assert world.used.most_common(1)[0][0] == tuple(map(bool, used))
    alone = World(rates)
    alone.control.choose = alone.best
    alone.run(3_000.0)
    assert found > 0.95 * alone.run(20_000.0)


def test_it_notices_when_a_level_that_was_left_out_has_become_useful():
    world = World(MODEL)
    world.run(8_000.0)
    world.rates[0, TARGET] = 0.9
    world.run(10_000.0)
    world.used.clear()
    world.run(4_000.0)
    assert world.used.most_common(1)[0][0] == (True, False, False)


def test_idle_time_is_not_the_targets():
    world = World(MODEL)
    world.run(6_000.0)
    chosen = world.control.choose()
    world.now += 60_000.0  # no request, and then one
    world.control.request_opened()
    world.control.drafts_ordered({})
    assert world.control.choose() == chosen
    world.control.drafts_sent(3)
    world.now += 60_000.0  # a hiccup in the middle of one
    world.control.drafts_ordered({})
    assert world.control._target_s.mean_y < 1.1 * world.verify_s


def test_tokens_of_the_target_measure_the_acceptance_of_every_level(monkeypatch):
    """A lookup that was only ever asked below a model is known to the control as well as the model is."""
    monkeypatch.setattr(draft_lengths, "WINDOW", 99)
    control = LengthControl((3, 5), ["0", "1"], drafts_at_once=True)
    control.drafts_ordered({7: 20})
    control.record_draft(7, 20, 0, 3, TokenTree.chain(1, (4, 5, 6)))
    control.record_draft(7, 22, 0, 3, TokenTree.chain(1, (4, 5, 6)))  # behind the model's own tokens
    control.record_commit(7, (4, 5, 9, 8))
    seen = control._acceptance[0, TARGET]
    assert (seen.tokens.weight, seen.tokens.total, seen.accepted.total) == (1, 3, 2)
    control.drafts_ordered({7: 24})
    control.record_draft(7, 24, 0, 3, TokenTree.chain(8, (4, 5, 6)))
    control.record_commit(7, (4,))
    assert (seen.tokens.weight, seen.tokens.total, seen.accepted.total) == (2, 4, 3), "later tokens were not verified"


def changing(monkeypatch, *chosen):
    chosen = itertools.cycle(chosen)
    monkeypatch.setattr(draft_lengths, "WINDOW", 2)
    monkeypatch.setattr(LengthControl, "choose", lambda control: next(chosen))


NGRAM = NgramDrafterConfig(num_draft_tokens=3, min_ngram=1)


def auto(*levels):
    return CascadeDrafterConfig(levels=levels, tails=(0,) * len(levels), num_draft_tokens=6, lengths=LevelLengths.auto)


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule, temperature", [("coupled", 0.7), ("rejection", 0.0), pytest.param("traversal", 0.0, marks=pytest.mark.slow)]
)
def test_tokens_are_those_of_plain_decoding_while_lengths_change(
    open_room, make_requests, monkeypatch, rule, temperature
):
    chosen = [(0, 2, 3), (3, 0, 0), (3, 4, 6), (0, 3, 0), (1, 0, 1), (2, 3, 0), (0, 0, 5)]
    changing(monkeypatch, *chosen)
    requests = make_requests(4, max_tokens=50 if matrices.is_whole else 24, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    levels = NGRAM, ModelDrafterConfig(path="small", num_draft_tokens=4), ModelDrafterConfig(path="drafter")
    room = open_room(auto(*levels), rule=rule).serve(requests)
    assert room.tokens == plain.tokens and room.stats.num_accepted_tokens > 0
    assert room.draft.drafter._lengths.lengths in chosen
    assert sum(work["num_accepted_tokens"] for work in room.stats.levels.values()) > room.stats.num_accepted_tokens


def test_what_was_measured_is_seen(open_room, make_requests):
    room = open_room(auto(NGRAM, ModelDrafterConfig(path="drafter"))).serve(make_requests(1, max_tokens=60))
    control = room.draft.drafter._lengths
    assert {(0, 1), (0, TARGET), (1, TARGET)} <= set(control._acceptance), "every level was tried under every judge"
    assert control._target_s.mean_y > 0
