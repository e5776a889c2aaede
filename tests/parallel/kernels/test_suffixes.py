"""The automaton in C++ against the one in Python: they answer every call alike, after every kind of change."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from actors.drafters.lookup.suffix_automaton import SuffixAutomaton
from parallel.kernels import library, suffixes
from parallel.kernels.suffixes import CompiledSuffixAutomaton
from tests.matrices import in_turn

needs_kernels = pytest.mark.skipif(library.library() is None, reason="no C++ compiler")
LARGEST = 2**31 - 1


class Pair:
    """An automaton of each kind, changed alike."""

    def __init__(self, num_revocable=0):
        self.both = CompiledSuffixAutomaton(num_revocable), SuffixAutomaton(num_revocable)

    def call(self, name, *arguments):
        """The result of a call, which is the same of both."""
        found, expected = (getattr(one, name)(*arguments) for one in self.both)
        assert found == expected, (name, arguments)
        return found

    def check(self, states, tokens):
        """What follows from some states, and where tokens lead from them."""
        found, expected = self.both
        assert (found.num_tokens, found.num_states) == (expected.num_tokens, expected.num_states)
        assert found.match == expected.match
        for state in states:
            for width in (1, 2, 9, 10**9):
                self.call("followers", state, width)
            for length, width, least in ((0, 1, 0.1), (8, 1, 0.1), (9, 3, 0.05), (20, 2, 0.0)):
                self.call("likeliest", state, length, width, least)
            self.call("read", state, 5, tokens)


def piece(choose, kind):
    """Tokens of a kind of text: few or many different ones, or a repetition with a slip here and there."""
    length = choose.randrange(1, 24)
    if kind == "periodic":
        period = choose.randint(1, 5)
        return [i % period if choose.random() < 0.95 else choose.randrange(9) for i in range(length)]
    most = {"few": 3, "many": 60, "far apart": 7}[kind]
    step = LARGEST // 7 if kind == "far apart" else 1
    return [step * choose.randrange(most) for _ in range(length)]


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "num_revocable"), list(in_turn(["few", "many", "periodic", "far apart"], [0, 1, 7, 40]))
)
def test_both_agree_after_every_change(kind, num_revocable):
    choose, pair = random.Random(f"{kind} {num_revocable}"), Pair(num_revocable)
    for _ in range(30):
        change = choose.random()
        if change < 0.1:
            pair.call("add_text", piece(choose, kind))
        elif change < 0.4:
            pair.call("take_back", choose.randrange(min(num_revocable, pair.both[0].num_tokens) + 2))
        else:
            pair.call("extend", piece(choose, kind))
        states = {0, *(choose.randrange(pair.both[0].num_states) for _ in range(3)), pair.both[0].match[0]}
        pair.check(states, piece(choose, kind))
    pair.check(range(pair.both[0].num_states), piece(choose, kind))


@needs_kernels
def test_a_state_with_many_followers_loses_and_regains_them():
    """Its table grows, and what is removed leaves no hole in front of what is found behind it."""
    choose, pair = random.Random(1), Pair(300)
    for _ in range(5):
        pair.call("extend", [choose.randrange(400) * choose.choice((1, 4096)) for _ in range(200)])
        pair.check([0], [])
        assert pair.call("take_back", choose.randrange(280))
        pair.check(range(pair.both[0].num_states), [choose.randrange(400)])


@needs_kernels
def test_a_long_repetition_counts_as_many_suffixes_as_the_reference():
    pair = Pair()
    pair.call("extend", [5] * 100)
    pair.check(range(101), [5, 5])


@needs_kernels
def test_the_largest_token_is_one_and_none_is_below_zero():
    automaton = CompiledSuffixAutomaton()
    automaton.extend([LARGEST, 0, LARGEST])
    assert automaton.match == automaton.read(0, 0, [LARGEST]) and automaton.match[1] == 1
    with pytest.raises(AssertionError, match="a token below 0"):
        automaton.extend([3, -1])
    with pytest.raises(OverflowError):
        automaton.extend([LARGEST + 1])
    assert automaton.num_tokens == 3 and automaton.read(0, 0, [-1]) == (0, 0)


@needs_kernels
@pytest.mark.parametrize("state", [-1, 4, 2**40])
def test_a_state_that_is_not_there_is_refused(state):
    automaton = CompiledSuffixAutomaton()
    automaton.extend([1, 2, 3])
    calls = [
        lambda: automaton.read(state, 1, [1]),
        *(lambda: automaton.followers(state, 1), lambda: automaton.likeliest(state, 3, 1, 0.1)),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match=f"state {state}: there are 4"):
            call()


@needs_kernels
def test_more_states_than_have_a_number_are_refused(monkeypatch):
    monkeypatch.setattr(suffixes, "_MOST_STATES", 9)
    automaton = CompiledSuffixAutomaton()
    automaton.extend([1, 2, 3, 4])
    with pytest.raises(AssertionError, match="more states"):
        automaton.extend([5, 6, 7])


@needs_kernels
def test_memory_goes_with_the_automaton_and_is_that_of_its_text(monkeypatch):
    calls, closed = suffixes._calls(), []
    watched = calls._replace(close=lambda automaton: closed.append(automaton) or calls.close(automaton))
    monkeypatch.setattr(suffixes, "_calls", lambda: watched)
    automaton = CompiledSuffixAutomaton(8)
    before, at = automaton.num_bytes, automaton._record.automaton
    automaton.extend(list(range(1000)))
    grown = automaton.num_bytes
    assert before < 1000 and 24 * 1000 < grown < 200 * 1000
    for _ in range(50):
        assert automaton.take_back(8)
        automaton.extend(list(range(8)))
    assert automaton.num_bytes < 2 * grown, "what is taken back is used again"
    gone = weakref.ref(automaton)
    del automaton
    gc.collect()
    assert gone() is None and closed == [at]


def test_without_kernels_there_is_no_such_automaton(monkeypatch):
    monkeypatch.setattr(suffixes, "function", lambda *_: None)
    monkeypatch.setattr(suffixes, "_calls", suffixes._calls.__wrapped__)
    with pytest.raises(LookupError):
        CompiledSuffixAutomaton()
