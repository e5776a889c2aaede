"""Checks of every speculator with a pool: a tree is its paths, and rounds leave the rows of a fresh cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.speculators.runner import SpeculatorRunner

TOKENS, PARENTS = [3, 4, 5, 6, 7, 8], [-1, -1, 0, 1, 2, 2]
"""A tree below a text."""


def draft_chain(runner: Any, tokens: Sequence[int], features: Tensor | None, length: int, steps: int) -> Tensor:
    """Logits [steps, V] after the text's first `length` tokens, then after each of the next, drafted. `features` are
    those that the runner reads, None for one that reads none."""
    logits = [_feed(runner, tokens, features, length)]
    for token in tokens[length : length + steps - 1]:
        logits.append(runner.forward([Span("a", 1)], [token], fuzzy=True).logits)
    runner.close("a")
    return torch.cat(logits)


def check_tree(runner: SpeculatorRunner, tokens: Sequence[int], features: Tensor, length: int) -> None:
    """Level by level, or in one pass with the text, its logits are those of its paths fed alone."""
    paths = []
    for node in range(len(TOKENS)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        logits = _feed(runner, tokens, features, length)
        for step in path:
            logits = runner.forward([Span("a", 1)], [TOKENS[step]], fuzzy=True).logits
        paths.append(logits[0])
        runner.close("a")
    _feed(runner, tokens, features, length)
    runner.drop_pending("a")
    text = tokens[runner.cached_len("a") : length]
    after = [len(text) + parent if parent >= 0 else len(text) - 1 for parent in PARENTS]
    runner.forward([Span("a", len(text))], text)
    levels = [
        runner.forward([Span("a", 2, after[i : i + 2], 2)], TOKENS[i : i + 2], fuzzy=True).logits for i in (0, 2, 4)
    ]
    torch.testing.assert_close(torch.cat(levels), torch.stack(paths), atol=1e-5, rtol=1e-5)
    runner.drop_pending("a")
    span = Span("a", len(text) + len(TOKENS), [*range(-1, len(text) - 1), *after], len(TOKENS))
    at_once = runner.forward([span], [*text, *TOKENS]).logits
    torch.testing.assert_close(at_once, torch.stack(paths), atol=1e-5, rtol=1e-5)
    runner.close("a")


def check_rounds(
    runner: SpeculatorRunner, tokens: Sequence[int], features: Tensor, exact_len: Callable[[int, int], int]
) -> None:
    """Rounds of four draft tokens of which some are accepted; rows without features are computed again from them.
    `exact_len` of the text's length and the number accepted is how much of both is cached after `drop_fuzzy`."""
    rng, length = random.Random(3), 3
    runner.open("a")
    runner.read_features("a", 0, features[: length - 1])
    while length < len(tokens) - 5:
        suffix = tokens[runner.cached_len("a") : length]
        logits = runner.forward([Span("a", len(suffix))], suffix).logits
        runner.open("fresh")
        runner.read_features("fresh", 0, features[: length - 1])
        text = tokens[runner.cached_len("fresh") : length]
        again = runner.forward([Span("fresh", len(text))], text).logits
        torch.testing.assert_close(logits, again, atol=1e-5, rtol=1e-5)
        for rows in (runner.pool.keys, runner.pool.values):
            mine, fresh = (rows[:, runner.pool.slots(name)[: length - 1]] for name in ("a", "fresh"))
            torch.testing.assert_close(mine, fresh, atol=1e-5, rtol=1e-5)
        runner.close("fresh")
        for token in tokens[length : length + 4]:
            runner.forward([Span("a", 1)], [token], fuzzy=True)
        accepted = rng.randrange(5)
        runner.commit("a", range(len(suffix) + accepted))
        cached = runner.cached_len("a")
        assert runner.drop_fuzzy("a") == (runner.cached_len("a") < cached)
        assert runner.cached_len("a") == exact_len(length, accepted)
        runner.truncate("a", min(runner.cached_len("a"), length + accepted))  # the newest token has no row
        runner.read_features("a", length - 1, features[length - 1 : length + accepted])
        length += accepted + 1
    runner.pool.check()
    runner.close("a")
    assert runner.pool.num_free == runner.pool.num_slots


def _feed(runner: Any, tokens: Sequence[int], features: Tensor | None, length: int) -> Tensor:
    """Open a text of `length` tokens and feed it; its newest token has no features."""
    runner.open("a")
    if length > 1 and features is not None:
        runner.read_features("a", 0, features[: length - 1])
    text = tokens[runner.cached_len("a") : length]
    return runner.forward([Span("a", len(text))], text).logits
