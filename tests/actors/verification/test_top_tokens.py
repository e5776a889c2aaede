"""What a drafter learns from the target: the likeliest tokens at every row of a pass, as separate passes find them."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
import torch

from actors.drafters.adjacency.config import RecyclingDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.protocol.messages import NO_TOKEN, TopTokens
from actors.roles.target import TargetRole
from actors.verification.top_tokens import TopTokensReader
from parallel.runtime.runner import Span, open_model
from tests.actors.conftest import VOCAB_SIZE

CONFIG = RecyclingDrafterConfig(num_draft_tokens=6, width=4)


def rows_of(top):
    """(token before, token) and the tokens and probabilities after them."""
    contexts = np.frombuffer(top.contexts, np.int32).reshape(-1, 2)
    return contexts, *(
        np.frombuffer(part, kind).reshape(-1, top.k)
        for part, kind in ((top.token_ids, np.int32), (top.probs, np.float32))
    )


def run_of(runner):
    return lambda spans, token_ids: runner.forward(spans, token_ids).logits


@pytest.fixture
def verdicts(monkeypatch):
    """Every verdict batch of a test."""
    seen, answer = [], TargetRole.answer

    def watched(role, batch):
        for verdicts in answer(role, batch):
            seen.append(verdicts)
            yield verdicts

    monkeypatch.setattr(TargetRole, "answer", watched)
    return seen


@pytest.mark.parametrize("reads_prompts", [True, False])
def test_every_row_of_a_tree_has_the_targets_own_top_tokens(models, reads_prompts):
    """A prompt in two chunks and a tree with two branches, beside another sequence, against passes of one path each."""
    runner, reader = open_model(models["target"], num_slots=64), TopTokensReader(4, reads_prompts=reads_prompts)
    texts = {"a": [5, 6, 7, 8, 9], "b": [40, 41]}
    for seq_id in texts:
        runner.open(seq_id)

    class Fed:
        def __init__(self, token_ids):
            self.token_ids, self.scope = token_ids, len(token_ids)

    reader.forward(runner, run_of(runner), [Span("a", 2, num_logits=0)], [5, 6], [Fed(texts["a"])])
    first: Any = reader.read()
    runner.commit("a", range(2))
    tree = Span("a", 6, [-1, 0, 1, 2, 2, 3], 4)  # 7 8 9, then 20 and 21 after 9, and 22 after 20
    fed = [Fed(texts["a"]), Fed(texts["b"])]
    logits = reader.forward(runner, run_of(runner), [tree, Span("b", 2)], [7, 8, 9, 20, 21, 22, 40, 41], fed)
    top: Any = reader.read()
    contexts, token_ids, probs = rows_of(top)
    paths = [[5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9]]
    paths += [[*paths[2], 20], [*paths[2], 21], [*paths[2], 20, 22], [40], [40, 41]]
    if not reads_prompts:
        paths = [*paths[2:6], paths[7]]
        assert first is None and top.spans == (("a", 5, 4), ("b", 2, 1))
    else:
        assert first.spans == (("a", 5, 2),) and top.spans == (("a", 5, 6), ("b", 2, 2))
        assert rows_of(first)[0].tolist() == [[NO_TOKEN, 5], [5, 6]]
    assert contexts.tolist() == [[NO_TOKEN, *path][-2:] for path in paths]
    for path, tokens, shares in zip(paths, token_ids, probs, strict=True):
        expected = models["reference"](torch.tensor([path])).logits[0, -1].softmax(-1).topk(4)
        assert tokens.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(shares, expected.values.detach(), atol=1e-4)
    assert len(logits) == 5, "the rule sees the rows that it verifies"
    assert reader.read() is None, "they are read once"


def test_rows_without_numbers_are_left_out(models):
    runner, reader = open_model(models["target"], num_slots=64), TopTokensReader(2)
    runner.open("a")
    runner.open("b")
    spans: list[Span] = [Span("a", 2, num_logits=2), Span("b", 1)]
    fed: list[Any] = [type("Fed", (), {"token_ids": [5, 6], "scope": 4})] * 2
    logits = reader.forward(runner, run_of(runner), spans, [5, 6, 7], fed)
    with torch.inference_mode():
        logits[0] = nan
    top: Any = reader.read()
    top.check(VOCAB_SIZE)
    assert rows_of(top)[0].tolist() == [[5, 6], [NO_TOKEN, 7]] and [size for *_, size in top.spans] == [1, 1]
    assert top.scopes == (4, 4)


def test_they_travel_only_to_a_drafter_that_asks(open_room, make_requests, verdicts):
    requests = make_requests(2, max_tokens=12)
    open_room(NgramDrafterConfig(min_ngram=1)).serve(requests)
    assert len(verdicts) > 5 and not any(verdict.top_tokens for verdict in verdicts)
    verdicts.clear()
    room = open_room(CONFIG).serve(requests)
    assert all(verdict.top_tokens for verdict in verdicts)
    known = (room.draft.drafter.matrices.of(0).rows[:-1, 0] >= 0).sum()
    assert known >= len({token for request in requests for token in request.prompt}), "prompts are read too"


def test_requests_without_speculation_leave_none(open_room, make_requests, verdicts):
    """The plain side of a measurement pays for no top tokens, and a drafter learns nothing from it."""
    requests = [replace(request, drafter="none") for request in make_requests(2, max_tokens=12)]
    open_room(CONFIG).serve(requests)
    assert len(verdicts) > 5 and not any(verdict.top_tokens for verdict in verdicts)


TOP = TopTokens(
    2,
    np.array([-1, 3, 3, 4], "i4").tobytes(),
    np.array([1, 2, 3, 4], "i4").tobytes(),
    np.array([0.5, 0.25, 1, 0], "f4").tobytes(),
    ((7, 3, 1), (8, 5, 1)),
)


@pytest.mark.parametrize(
    "changes",
    [
        dict(k=0),
        dict(k=3),
        dict(contexts=TOP.contexts[:-4]),
        dict(contexts=np.array([-1, 3, 3, -1], "i4").tobytes()),
        dict(contexts=np.array([-2, 3, 3, 4], "i4").tobytes()),
        dict(token_ids=np.array([1, 2, 3, VOCAB_SIZE], "i4").tobytes()),
        dict(token_ids=np.array([1, 2, 3, -1], "i4").tobytes()),
        dict(probs=np.array([0.5, nan, 0.5, 0.5], "f4").tobytes()),
        dict(probs=np.array([0.5, 2, 0.5, 0.5], "f4").tobytes()),
        dict(probs=TOP.probs[:8]),
        dict(spans=((7, 3, 1),)),
        dict(spans=((7, 3, 3), (8, 5, -1))),
    ],
)
def test_impossible_ones_are_refused(changes):
    TOP.check(VOCAB_SIZE)
    with pytest.raises(ValueError, match="top tokens"):
        replace(TOP, **changes).check(VOCAB_SIZE)
