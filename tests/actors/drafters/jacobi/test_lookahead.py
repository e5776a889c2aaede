"""Lookahead decoding: window and pool against a plain reference of the published algorithm, and known mistakes."""

from __future__ import annotations

import pytest

from actors.drafters.jacobi.config import LookaheadDrafterConfig
from actors.drafters.jacobi.lookahead import LookaheadDrafter, NgramPool
from tests.actors.drafters.jacobi.scripted_target import ScriptedTarget

PROMPT = [5, 3, 8, 1, 9, 3, 2]
END = 1


def config(window=4, ngram=4, guesses=3, **options):
    base = LookaheadDrafterConfig(window=window, ngram=ngram, guesses=guesses, num_draft_tokens=200, **options)
    return base


def published(**shape):
    """The published drafter without the n-grams of the text, which its code has off by default."""
    return config(reads_text=False, **shape)


def opened(settings, next_token, prompt=PROMPT, ends=(), **options):
    target = ScriptedTarget(LookaheadDrafter(settings, ends), next_token, prompt, **options)
    return target, target.drafter._requests[1]


def two_back(text):
    return (7 * text[-1] + 3 * text[-2] + 1) % 11


class Reference:
    """The published algorithm on lists: rows of the window beside the text, every answer a pass of its own.

    `key_shift` 1 looks an n-gram up by the row-0 token of its own column without counting the last token of the text as
    column 0: an index that is off by one, as one gets it easily from lists whose row 0 lacks that token.
    """

    def __init__(self, first_row, ngram, guesses, next_token, key_shift=0):
        self.rows, self.pool = [first_row], {}
        self._ngram, self._guesses, self._next, self._key_shift = ngram, guesses, next_token, key_shift

    def paths(self):
        """What the rows see, as paths below the last token of the text."""
        row_0 = self.rows[0]
        found = {tuple(row_0[:i]) for i in range(1, len(row_0) + 1)}
        for r in range(1, len(self.rows)):
            for i in range(len(row_0) + 1):
                found.add((*row_0[:i], *(row[i] for row in self.rows[1 : r + 1])))
        return found

    def step(self, text):
        row_0, above = self.rows[0], self.rows[1:]
        new = [self._next((*text, *row_0[:i], *(row[i] for row in above))) for i in range(len(row_0) + 1)]
        if len(self.rows) < self._ngram - 1:
            self.rows = [row[1:] for row in self.rows] + [new[1:]]
            return
        keys = [text[-1], *row_0][self._key_shift :]
        for i, key in enumerate(keys):
            kept = self.pool.setdefault(key, [])
            entry = (*(row[i] for row in above), new[i])
            if entry in kept:
                kept.remove(entry)
            kept.append(entry)
            del kept[: -self._guesses]
        if len(self.rows) == 1:
            self.rows = [new[1:]]
        else:
            self.rows = [self.rows[1][1:], *self.rows[2:], new]


def paths_of(tree):
    return {tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(1, len(tree.token_ids))}


@pytest.mark.parametrize(
    ("window", "ngram", "guesses"), [(1, 2, 2), (4, 2, 3), (1, 3, 1), (3, 3, 4), (5, 4, 2), (4, 6, 3)]
)
def test_window_and_pool_are_those_of_the_published_algorithm(window, ngram, guesses):
    target, request = opened(published(window=window, ngram=ngram, guesses=guesses), two_back)
    reference = Reference(list(request.window.rows[0]), ngram, guesses, two_back)
    assert set(reference.rows[0]) <= set(PROMPT) and len(reference.rows[0]) == window + ngram - 3
    for _ in range(25):
        text = tuple(target.context.token_ids)
        expected = reference.paths()
        for guess in reference.pool.get(text[-1], ()):
            expected |= {guess[: i + 1] for i in range(len(guess))}
        assert paths_of(target.round(200)) == expected
        reference.step(text)
        assert request.window.rows == reference.rows
        assert {key: list(kept) for key, kept in request.pool._guesses.items()} == reference.pool
    assert [len(row) for row in request.window.rows] == [window - 1] + [window] * (ngram - 2)
    assert request.window.num_nodes <= config(window, ngram).window_nodes


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_a_period_is_found(ngram):
    """The next token follows from the last one, so all n-grams of the window are right once they are complete."""
    target, _ = opened(
        published(window=6, ngram=ngram, guesses=2), lambda text: (text[-1] + 1) % 7, [0, 1, 2, 3, 4, 5, 6]
    )
    for _ in range(30):
        target.round(200)
    assert all(len(tokens) >= ngram for tokens in target.rounds[20:])


def test_an_index_off_the_key_finds_no_period():
    """Negative control: with n-grams under the token after the one they follow, no guess is right."""

    def next_token(text):
        return (text[-1] + 1) % 7

    text, right = [0, 1, 2, 3], {}
    for shift in (0, 1):
        reference = Reference([3, 1, 5, 0], 3, 2, next_token, shift)
        for _ in range(12):
            reference.step(tuple(text))
            text.append(next_token(text))
        guesses = [(key, guess) for key, kept in reference.pool.items() for guess in kept]
        right[shift] = sum(guess[0] == (key + 1) % 7 for key, guess in guesses) / len(guesses)
    assert right[0] >= 0.5 and right[1] == 0, "what the window began with is right in neither"


@pytest.mark.parametrize("ends", [(), (END,)])
def test_end_tokens_leave_the_window(ends):
    """What the target says after an end token is of no use; kept in the window, they fill it from right to left."""

    def next_token(text):
        return END if text[-1] in (END, 6) else (text[-1] + 1) % 11

    target, request = opened(published(window=6), next_token, [7, 8, 2, 3, 4], ends)
    for _ in range(4):
        target.round(200)
    num_ends = sum(row.count(END) for row in request.window.rows)
    assert (num_ends == 0) == bool(ends)


@pytest.mark.parametrize("reads_text", [True, False])
def test_text_enters_the_pool_once_it_is_committed(reads_text):
    target, request = opened(config(ngram=3, guesses=1000, reads_text=reads_text), two_back)
    for _ in range(10):
        target.round(200)
        text = target.context.token_ids[: -len(target.rounds[-1])]
        known = [(text[i + 1], text[i + 2]) in request.pool.after(text[i]) for i in range(len(text) - 2)]
        assert all(known) if reads_text else not all(known[: len(PROMPT) - 2])


def test_the_pool_drops_what_was_added_longest_ago():
    pool = NgramPool(2)
    for guess in ((1,), (2,), (1,), (3,)):
        pool.add(0, guess)
    assert pool.after(0) == [(3,), (1,)] and pool.after(1) == []


def test_a_small_order_verifies_guesses_and_leaves_the_window():
    target, request = opened(config(window=4, ngram=3, guesses=3), two_back)
    for _ in range(5):
        target.round(200)
    rows = [list(row) for row in request.window.rows]
    root = target.context.token_ids[-1]
    guesses = {guess[: i + 1] for guess in request.pool.after(root) for i in range(2)}
    budget = request.window.num_nodes + 1
    assert paths_of(target.round(budget)) <= guesses | {target.rounds[-1][:2]} and request.window.rows == rows
    target.round(budget + 1)
    assert request.window.rows != rows


def test_a_window_whose_rows_were_lost_stays():
    lost = {3, 4, 9}
    target, request = opened(published(), two_back, loses=lost.__contains__)
    for number in range(12):
        rows = [list(row) for row in request.window.rows]
        target.round(200)
        assert (request.window.rows == rows) == (number in lost)
