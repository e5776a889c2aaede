"""Counted rounds: what target and drafter get in each, on a target whose next token is a function of the last one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.interface import Capabilities, Draft
from actors.protocol.messages import Commit, SamplingParams, TokenTree
from actors.verification.features import FeatureReader
from actors.verification.verifier import Verifier
from cluster.tools.bench.rounds import CountedRound, acceptance_by_rank, complete
from parallel.speculators.config import FINAL
from tests.actors.verification.scripted_runner import VOCAB, ScriptedRunner


class Target(ScriptedRunner):
    """Keeps the texts that its rows are of."""

    def __init__(self) -> None:
        super().__init__({})
        self.texts: dict[Any, list[int]] = {}
        self.closed: list[tuple[Any, list[int]]] = []

    def open(self, seq_id, text=None):
        self.texts[seq_id], self.cached[seq_id] = [], 0

    def forward(self, spans, token_ids, streams=()):
        self._fed, rest = {}, list(token_ids)
        for span in spans:
            self._fed[span.seq_id], rest = rest[: span.num_tokens], rest[span.num_tokens :]
        return super().forward(spans, token_ids, streams)

    def commit(self, seq_id, rows):
        self.texts[seq_id] += [self._fed[seq_id][row] for row in rows]
        self.cached[seq_id] = len(self.texts[seq_id])

    def close(self, seq_id):
        self.closed.append((seq_id, self.texts.pop(seq_id)))


class Drafter:
    """Proposes a wrong token and two right ones below the root, in a tree; notes what it is given."""

    def __init__(self, reads: list[Any] | None = None) -> None:
        self.log: list[Any] = []
        reader: Any = None if reads is None else SimpleNamespace(read_features=reads.append)
        self.capabilities = Capabilities(reads_features=reader)

    def open(self, context):
        self.log.append(("open", context.request_id, list(context.token_ids), context.sampling))

    def propose(self, contexts, budgets):
        self.log.append(("propose", [context.request_id for context in contexts], budgets))
        trees = []
        for context in contexts:
            last = context.token_ids[-1]
            right = 7 * last % VOCAB
            trees.append(TokenTree((last, 96, right, 7 * right % VOCAB), (-1, 0, 0, 2)))
        return [Draft.chosen(tree) for tree in trees]

    def observe(self, context, commit):
        self.log.append(("observe", list(context.token_ids), commit))

    def release(self, request_id):
        self.log.append(("release", request_id))


def following(token, count):
    found = []
    for _ in range(count):
        found.append(token := 7 * token % VOCAB)
    return found


def run(drafter: Any, target: Any, features=None):
    verifier = Verifier(target, "coupled", (), features=features)
    sampling = SamplingParams(temperature=0.0, seed=40)
    return list(complete(verifier, drafter, [[1, 2], [3, 4, 5]], sampling, 3, 7, features, first_id=10))


def test_every_prompt_gets_its_tokens_and_nothing_is_left_open():
    target, drafter = Target(), Drafter()
    rounds = run(drafter, target)
    assert [(one.prompt, one.path, one.num_tokens, one.ranks()) for one in rounds] == [
        (request, (2, 3), 3, [1, 0]) for _ in range(3) for request in (10, 11)
    ], "three tokens a round, until there are seven"
    texts = {10: [1, 2, *following(2, 9)], 11: [3, 4, 5, *following(5, 9)]}
    assert target.closed == [(request, text[:-1]) for request, text in texts.items()], "rows of all but the last token"
    opened = [("open", 10 + i, texts[10 + i][: 2 + i], SamplingParams(temperature=0.0, seed=40 + i)) for i in (0, 1)]
    assert drafter.log[:2] == opened and drafter.log[-2:] == [("release", 10), ("release", 11)]
    assert [one for one in drafter.log if one[0] == "propose"] == [("propose", [10, 11], [3, 3])] * 3
    expected = []
    for number in range(3):
        for request, text in texts.items():
            size = request - 8 + 3 * number
            commit = Commit(request, 0, size, (2, 3), tuple(text[size : size + 3]))
            expected.append(("observe", text[:size], commit))
    assert [one for one in drafter.log if one[0] == "observe"] == expected


def test_a_drafter_of_features_reads_those_of_the_text_and_of_the_accepted_path():
    reads: list[Any] = []
    run(Drafter(reads), Target(), FeatureReader([FINAL]))
    found = [(one.request_id, one.start, one.rows[:, 0].tolist()) for one in reads]
    assert found[:2] == [(10, 0, [0, 1, 3, 4]), (11, 0, [5, 6, 7, 9, 10])], "two or three rows of a prompt, then a tree"
    assert found[2:4] == [(10, 4, [0, 2, 3]), (11, 5, [4, 6, 7])]


@pytest.mark.parametrize("path", [(), (1,), (2, 3), (2, 4)])
def test_ranks_are_places_among_siblings(path):
    tree = TokenTree((0, 5, 6, 7, 8), (-1, 0, 0, 2, 2))
    places = {1: 0, 2: 1, 3: 0, 4: 1}
    one = CountedRound(0, tree, path)
    assert one.ranks() == [places[node] for node in path] and one.num_tokens == len(path) + 1


def test_acceptance_by_rank_is_over_the_rounds_that_had_a_draft():
    star = TokenTree((0, 1, 2, 3), (-1, 0, 0, 0))
    rounds = [CountedRound(0, star, path) for path in ((1,), (1,), (3,), ())]
    rounds.append(CountedRound(0, TokenTree.root(0), ()))
    assert acceptance_by_rank(rounds, 4) == [0.5, 0.0, 0.25, 0.0]
