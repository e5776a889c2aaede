"""`drafter.lengths=auto`: on synthetic costs with a known best it gets there, stays, and notices when things change."""

from __future__ import annotations

import itertools

from actors.drafters import lengths
from actors.drafters.lengths import PROBE_EVERY, WINDOW, LengthControl
from actors.levels import CascadeDrafterConfig, LevelLengths
from actors.messages import LevelWork
from actors.options import ModelDrafterConfig, NgramDrafterConfig
from actors.pipelines.walltime import LevelCost, best_lengths, draft_s, tokens_per_round


class World:
    """Two levels and a target with fixed costs; every draft does what is expected of it."""

    def __init__(self, lookup: float, model: float, verify_s: float = 5.0) -> None:
        self.now = 0.0
        self.lookup, self.model, self.verify_s = lookup, model, verify_s
        self.control = LengthControl(["0", "1"], (6, 10), drafts_at_once=True, clock=lambda: self.now)

    def run(self, drafts: int) -> list[tuple[int, ...]]:
        chosen = []
        for _ in range(drafts):
            self.control.ordered()
            below, length = self.control.lengths
            chosen.append(self.control.lengths)
            levels = [LevelCost(0.05, self.lookup, below, True), LevelCost(1.0, self.model, length)]
            seconds = draft_s(levels, length)
            passes = seconds / 1.05 if below else float(length)
            reviewed = min(below, length - 1)
            accepted = tokens_per_round(self.lookup, reviewed) - 1
            self.control.saw(
                [
                    LevelWork("0", passes, 0.05 * passes, passes, passes * reviewed, passes * accepted),
                    LevelWork("1", passes, passes),
                    LevelWork("1", 0, 0, 1, length, tokens_per_round(self.model, length) - 1),
                ]
                if below
                else [LevelWork("1", passes, passes, 1, length, tokens_per_round(self.model, length) - 1)]
            )
            self.now += seconds
            self.control.answered()
            self.now += self.verify_s
        return chosen


def best(lookup, model, verify_s=5.0):
    return best_lengths([LevelCost(0.05, lookup, 0, True), LevelCost(1.0, model, 0)], verify_s, (6, 10))


def test_it_finds_the_best_lengths_and_keeps_them():
    world = World(0.5, 0.8)
    world.run(2 * WINDOW)
    chosen = world.run((PROBE_EVERY - 3) * WINDOW)
    below, length = best(0.5, 0.8)
    assert all(abs(one[0] - below) <= 1 and abs(one[1] - length) <= 1 for one in chosen)


def test_a_level_that_says_nothing_useful_is_dropped_and_tried_again():
    world = World(0.0, 0.8)
    chosen = world.run(3 * WINDOW)
    assert chosen[-1][0] == 0
    world.lookup = 0.9
    chosen = world.run(2 * PROBE_EVERY * WINDOW)
    assert chosen[-1][0] > 0, "a window at full length has shown that it is useful now"


def test_tokens_are_those_of_plain_decoding_while_lengths_change(open_room, make_requests, monkeypatch):
    chosen = itertools.cycle([(0, 2), (3, 6), (1, 1), (0, 5), (2, 3)])
    monkeypatch.setattr(lengths, "WINDOW", 2)
    monkeypatch.setattr(LengthControl, "choose", lambda control: next(chosen))
    requests = make_requests(4, max_tokens=50, temperature=0.7)
    plain = open_room(pipeline="plain").serve(requests)
    levels = (NgramDrafterConfig(num_draft_tokens=3, min_ngram=1), ModelDrafterConfig(path="drafter"))
    config = CascadeDrafterConfig(levels=levels, tails=(0, 0), num_draft_tokens=6, lengths=LevelLengths.auto)
    room = open_room(config).serve(requests)
    assert room.tokens == plain.tokens and room.tally.num_accepted_tokens > 0
    assert len(room.tally.num_drafted_per_pos) > 1 and room.tally.num_drafted_per_pos[-1] < room.tally.num_spec_steps
    assert room.draft.drafter._lengths.lengths in [(0, 2), (3, 6), (1, 1), (0, 5), (2, 3)]


def test_what_was_measured_is_seen(open_room, make_requests):
    levels = (NgramDrafterConfig(num_draft_tokens=3, min_ngram=1), ModelDrafterConfig(path="drafter"))
    config = CascadeDrafterConfig(levels=levels, tails=(0, 0), num_draft_tokens=6, lengths=LevelLengths.auto)
    room = open_room(config).serve(make_requests(1, max_tokens=60))
    control = room.draft.drafter._lengths
    assert all(seen.num_passes and seen.num_drafts for seen in control._seen.values()) and control._away_s > 0
    assert control.choose() != (3, 6), "passes of all models cost alike here: the full length cannot be best"
