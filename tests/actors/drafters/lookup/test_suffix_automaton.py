"""The suffix automaton against searches of the whole text: matches, counts, followers, and what it costs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from actors.drafters.lookup.suffix_automaton import SuffixAutomaton, suffix_automaton
from parallel.kernels import library
from parallel.kernels.suffixes import CompiledSuffixAutomaton

needs_kernels = pytest.mark.skipif(library.library() is None, reason="no C++ compiler")


@pytest.fixture(params=[SuffixAutomaton, pytest.param(CompiledSuffixAutomaton, marks=needs_kernels)])
def new(request):
    """Both classes, one after the other."""
    return request.param


def places(text, string):
    return [i for i in range(len(text) - len(string) + 1) if text[i : i + len(string)] == string]


def state_of(automaton, string):
    state = matched = 0
    state, matched = automaton.read(state, matched, string)
    assert matched == len(string), "every string of the text has a state"
    return state


def random_text(seed, longest=30):
    choose = random.Random(seed)
    return [choose.randrange(choose.randint(1, 4)) for _ in range(choose.randint(1, longest))]


@pytest.mark.parametrize("seed", range(25))
def test_the_match_is_the_longest_suffix_that_occurred_before(new, seed):
    automaton, text = new(), []
    for token in random_text(seed):
        automaton.extend([token])
        text.append(token)
        longest = next((n for n in range(len(text) - 1, 0, -1) if len(places(text, text[-n:])) > 1), 0)
        state, length = automaton.match
        assert length == longest and (not longest or state == state_of(automaton, text[-longest:]))


@pytest.mark.parametrize("seed", range(25))
def test_counts_and_likeliest_followers_are_those_of_a_search(new, seed):
    texts = [random_text(seed), random_text(seed + 100)]
    automaton = new()
    for text in texts:
        automaton.add_text(text)
    strings = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for string in map(list, strings):
        state = state_of(automaton, string)
        total = sum(len(places(text, string)) for text in texts)
        after = Counter(
            text[i + len(string)] for text in texts for i in places(text, string) if i + len(string) < len(text)
        )
        if after:
            shares = {token: share for share, token, _ in automaton.followers(state, width=9)}
            assert shares == {token: count / total for token, count in after.items()}
            assert next(iter(shares.values())) == max(shares.values()), "the likeliest comes first"


def test_of_equally_frequent_followers_the_latest_is_first(new):
    automaton = new()
    automaton.add_text([1, 2, 3, 1, 2, 4])
    assert [token for _, token, _ in automaton.followers(state_of(automaton, [1, 2]), width=2)] == [4, 3]


def test_reading_falls_back_to_the_longest_suffix_that_is_known(new):
    automaton = new()
    automaton.add_text([1, 2, 3, 4])
    automaton.add_text([3, 9])
    state, matched = 0, 0
    lengths = []
    for token in [2, 3, 9, 5, 1]:
        state, matched = automaton.read(state, matched, [token])
        lengths.append(matched)
    assert lengths == [1, 2, 2, 0, 1], "2 3, then only 3 9, then nothing"


def test_nothing_is_learnt_across_the_beginning_of_a_text(new):
    automaton = new()
    automaton.add_text([1, 2])
    automaton.add_text([3])
    assert automaton.followers(state_of(automaton, [2]), width=1) == []


@pytest.mark.parametrize("text", [[7] * 3000, [1, 2, 3] * 1000, list(range(3000))])
def test_states_and_work_per_token_stay_bounded(text, monkeypatch):
    """Also for texts in which every suffix repeats, where counting all of them would cost the square."""
    calls = 0
    follow = SuffixAutomaton._follow

    def counting(self, state, token):
        nonlocal calls
        calls += 1
        return follow(self, state, token)

    monkeypatch.setattr(SuffixAutomaton, "_follow", counting)
    automaton = SuffixAutomaton()
    automaton.add_text(text)
    assert automaton.num_states <= 2 * len(text) and calls < 40 * len(text)


@needs_kernels
@pytest.mark.parametrize("text", [[7] * 3000, [1, 2, 3] * 1000, list(range(3000))])
def test_the_kernel_has_as_many_states_and_little_memory(text):
    automaton, reference = CompiledSuffixAutomaton(), SuffixAutomaton()
    for one in (automaton, reference):
        one.extend(text)
    assert automaton.num_states == reference.num_states and automaton.num_bytes < 160 * len(text)


@needs_kernels
def test_a_machine_with_kernels_uses_them():
    assert type(suffix_automaton(3)) is CompiledSuffixAutomaton


def test_a_machine_without_kernels_computes_in_python(monkeypatch):
    monkeypatch.setattr(library, "library", lambda: None)
    automaton = suffix_automaton(3)
    automaton.extend([1, 2, 3, 4])
    assert type(automaton) is SuffixAutomaton and automaton.take_back(3) and not automaton.take_back(1)
