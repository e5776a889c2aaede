"""What the keys of `drafter.search` become, and the bounds by which a search looks, rests and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.config import DraftSetup
from actors.drafters.interface import Context
from actors.drafters.self_speculation import searches
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.self_speculation.fly import idle_attentions
from actors.drafters.self_speculation.layer_search import LayerSearch, TextWindow
from actors.drafters.self_speculation.sublayers import Sublayers
from actors.options import SchedulerConfig, VerifyConfig
from actors.protocol.messages import SamplingParams
from parallel.comm.group import SINGLE
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model


@pytest.fixture(scope="module")
def setup(models):
    target = open_model(models["target"], num_slots=8, stretch=3)
    return DraftSetup(VerifyConfig("coupled"), "sync", SchedulerConfig(), SINGLE, "cpu", (1,), target_runner=target)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (dict(search="swift", skip_share=0.3), dict(num_skipped=3, window=32, every=8, trials=120, fruitless=40)),
        (
            dict(search="swift", skip_share=0.9, search_trials=100, search_every=3, search_window=9),
            dict(num_skipped=5, window=9, every=3, trials=100, fruitless=34),
        ),
        (
            dict(search="swift", skip_share=0.01, search_trials=1),
            dict(num_skipped=1, window=32, every=8, trials=1, fruitless=1),
        ),
        (dict(search="clasp", skip_share=0.5, search_every=3), dict(num_skipped=2, every=3)),
        (dict(search="clasp", skip_share=0.99), dict(num_skipped=4, every=8)),
        (dict(search="clasp", skip_share=0.01), dict(num_skipped=1, every=8)),
        (dict(search="fly", least_cosine=0.7, search_window=11), dict(threshold=0.7, window=11)),
        (
            dict(search="exit", num_draft_tokens=6, search_every=2, search_window=10),
            dict(longest=6, window=10, every=2),
        ),
    ],
)
def test_every_key_reaches_its_search(setup, monkeypatch, keys, expected):
    """The target has five layers: ten sublayers, of which six are inner ones."""
    made = []
    for name in ("SwiftSearch", "ClaspSearch", "FlySearch", "ExitSearch"):
        monkeypatch.setattr(searches, name, lambda *_, name=name, **options: made.append((name, options)))
    searches.open_search(replace(SelfDrafterConfig(), **keys | {"search": Search(keys["search"])}), setup)
    assert setup.target_runner.config.num_layers == 5
    assert made == [(f"{keys['search'].title()}Search", expected)]


def test_without_a_search_there_is_none(setup):
    assert searches.open_search(SelfDrafterConfig(), setup) is None


@pytest.mark.parametrize("num_layers", [2, 3, 4, 7])
def test_the_ends_of_a_target_of_four_layers_or_more_always_run(num_layers):
    places = Sublayers.inner(num_layers).places
    inner = range(num_layers) if num_layers < 4 else range(1, num_layers - 1)
    assert places == tuple((layer, part) for layer in inner for part in (0, 1))
    assert Sublayers.every(num_layers).places == tuple((layer, part) for layer in range(num_layers) for part in (0, 1))


def text(num_tokens, prompt_len):
    return Context(0, 0, [*range(100, 100 + num_tokens)], prompt_len, SamplingParams())


@pytest.mark.parametrize(
    ("num_tokens", "prompt_len", "first"),
    [(13, 6, None), (14, 6, 5), (15, 6, 5), (25, 6, 14), (10, 1, 0), (9, 1, 0), (8, 1, None)],
)
def test_a_window_is_the_last_generated_tokens_and_what_followed_each(num_tokens, prompt_len, first):
    """The last token of the prompt is followed by a generated one; eight are the fewest."""
    window = TextWindow.of(text(num_tokens, prompt_len), 10)
    if first is None:
        assert window is None
        return
    assert window is not None and window.first == first
    assert window.token_ids == [*range(100 + first, 100 + num_tokens - 1)]
    assert window.following == [token + 1 for token in window.token_ids]
    assert TextWindow.of(text(num_tokens, prompt_len), 10, fewest=len(window.token_ids)) is not None
    assert TextWindow.of(text(num_tokens, prompt_len), 10, fewest=len(window.token_ids) + 1) is None


class Looks(LayerSearch):
    """Each look finds what it is given; None: there was too little text."""

    def __init__(self, *found, every, tries_others=False):
        self.found, self.at = list(found), []
        self.tries_others = tries_others
        super().__init__(LayerPlan.prefix(1), None, list, every, iter(range(1000)).__next__)

    def _look(self, context):
        self.at.append(context)
        found = self.found.pop(0) if self.found else self.layers.attention[-1] + 1
        if found is not None:
            self.layers = LayerPlan.prefix(found)
            self._found(0.5)
        return found is not None


def rounds_of_looks(search, num_rounds, batch=("a",)):
    rounds = []
    for number in range(num_rounds):
        before = len(search.at)
        search.before_draft(batch)
        rounds += [number] * (len(search.at) - before)
    return rounds


def test_a_look_that_changes_nothing_doubles_the_pause_up_to_sixteen_times():
    assert rounds_of_looks(Looks(every=3), 240) == [0, 6, 18, 42, 90, 138, 186, 234]
    changed = Looks(1, 2, 2, None, 2, every=3)
    assert rounds_of_looks(changed, 26) == [0, 6, 9, 15, 18, 24], "what changes, or finds no text, begins anew"
    assert rounds_of_looks(Looks(every=3, tries_others=True), 10) == [0, 3, 6, 9]


def test_requests_take_turns_and_one_without_text_is_looked_at_again():
    search = Looks(None, 1, 1, every=1, tries_others=True)
    rounds_of_looks(search, 4, batch=("a", "b"))
    assert search.at == ["a", "a", "b", "a"]
    assert [step.at_s for step in search.history] == [1, 2, 3]


@pytest.mark.parametrize(("rounds", "num_looks"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_look_that_is_due_within_half_of_its_time_is_made_before_a_trial(rounds, num_looks):
    search = Looks(every=6, tries_others=True)
    for _ in range(rounds):
        search.before_draft(["a"])
    search.before_trial(["a"])
    assert len(search.at) == num_looks


def test_attention_is_idle_above_the_threshold_only():
    assert idle_attentions([0.0, 0.9, 0.5, 0.91, 0.2, 0.0], 0.9) == (3,)
    assert idle_attentions([1.0, 0.95], 0.9) == (0,), "of two layers one at most in a row"


@pytest.mark.parametrize(
    ("keys", "plan"),
    [
        ({}, LayerPlan.prefix(3)),
        ({"exit": 2}, LayerPlan.prefix(2)),
        ({"skip": ["1a", "4m", "2"]}, LayerPlan((0, 3, 4, 5), (0, 1, 3, 5))),
        ({"skip": ["0a"], "exit": 2}, LayerPlan((1,), (0, 1))),
    ],
)
def test_layers_that_draft(keys, plan):
    assert SelfDrafterConfig(**keys).layer_plan(6) == plan


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"exit": 6}, "exit=6"),
        ({"skip": ["6a"]}, "skip=6a"),
        ({"skip": [*range(6)]}, "leaves no sublayer"),
        ({"exit": 5}, ""),
        ({"skip": ["5m"]}, ""),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(keys, wrong):
    config = SelfDrafterConfig(**keys)
    if not wrong:
        config.check_layers(6)
        return
    with pytest.raises(ValueError, match=wrong):
        config.check_layers(6)
