"""The target role on a real model with requests whose texts begin alike: what it feeds and answers, to the bit
where kernels compute a row without those beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.protocol.messages import Admit, Commit, SamplingParams, VerifyBatch, VerifyItem
from actors.roles.target import TargetRole
from parallel.model.layers.backends import default_backend
from parallel.runtime.runner import open_model

PROMPT = tuple(3 + i * 7 % 90 for i in range(40))


class Watched:
    """A role with the logits of its passes."""

    def __init__(self, path, num_slots=128):
        runner = open_model(path, num_slots=num_slots)
        self.role = TargetRole(runner, "coupled", [1], is_lead=True)
        self.logits = []
        verifier: Any = self.role._verifier
        verify = verifier.verify
        verifier.verify = lambda inputs, logits: self.logits.append(logits) or verify(inputs, logits)
        self.round = 0

    def send(self, **parts):
        self.round += 1
        (answer,) = self.role.answer(VerifyBatch(self.round, **parts))
        self.role.runner.pool.check()
        return answer

    def complete(self, admit: Admit, num_tokens: int, chunk: int = 512) -> tuple[list[int], int]:
        """The request's tokens, and the rows of its prompt that were not fed."""
        length, tokens, hit, parts = len(admit.token_ids), [], 0, {"admits": (admit,)}
        while len(tokens) < num_tokens:
            items = (VerifyItem(admit.request_id, chunk if not tokens else 1),)
            answer = self.send(**parts, items=items)
            hit += sum(dict(answer.hits).values())
            parts = {}
            for verdict in answer.verdicts:
                prefix_len = length + len(tokens)
                tokens += verdict.token_ids
                commit = Commit(admit.request_id, admit.epoch, prefix_len, (), verdict.token_ids)
                parts = {"commits": (commit,)}
        self.send(**parts, releases=(admit.request_id,))
        return tokens, hit


def admit(request_id, text=PROMPT, *, scope=0, salt: str | None = ""):
    return Admit(request_id, 0, tuple(text), len(text), SamplingParams(), scope=scope, cache_salt=salt)


@pytest.fixture
def watched(models):
    return Watched(models["target"])


@pytest.mark.parametrize("chunk", [512, 7])
def test_tokens_and_logits_of_a_hit_are_those_of_a_cold_run(watched, chunk):
    cold, none = watched.complete(admit(1), 6, chunk)
    expected = torch.cat(watched.logits)
    watched.logits.clear()
    warm, hit = watched.complete(admit(2), 6, chunk)
    assert (none, hit) == (0, len(PROMPT) - 1) and warm == cold
    if default_backend(watched.role.runner.pool) == "ragged":
        assert torch.equal(torch.cat(watched.logits), expected)
    else:
        torch.testing.assert_close(torch.cat(watched.logits), expected, rtol=1e-4, atol=1e-5)


def test_the_last_commit_of_a_request_is_kept_with_its_release(watched):
    tokens, _ = watched.complete(admit(1), 6)
    _, hit = watched.complete(admit(2, (*PROMPT, *tokens, 9, 9)), 1)
    assert hit == len(PROMPT) + 5


@pytest.mark.parametrize(
    "changes", [{"salt": None}, {"salt": "another"}, {"scope": 7}], ids=["unshared", "salt", "client"]
)
def test_what_is_not_shared(watched, changes):
    watched.complete(admit(1), 2)
    assert watched.complete(admit(2, **changes), 2)[1] == 0


def test_requests_of_one_moment_share_what_was_read_before(watched):
    """Three choices beside the first one: one prompt's rows in the pool."""
    free = watched.role.runner.pool.num_free
    (verdict,) = watched.send(admits=(admit(1),), items=(VerifyItem(1, 512),)).verdicts
    commit = Commit(1, 0, len(PROMPT), (), verdict.token_ids)
    choices, items = tuple(map(admit, (2, 3, 4))), tuple(VerifyItem(i, 512) for i in (2, 3, 4))
    answer = watched.send(commits=(commit,), admits=choices, items=items)
    assert answer.hits == tuple((i, len(PROMPT) - 1) for i in (2, 3, 4)) and answer.num_tokens == 3
    assert free - watched.role.runner.pool.num_free == len(PROMPT) + 3


def test_a_role_that_comes_together_anew_knows_no_text(watched):
    """Another rank of it may be new: what they have must agree."""
    watched.complete(admit(1), 2)
    watched.role.forget()
    assert watched.complete(admit(2), 2)[1] == 0


def test_texts_give_way_to_one_that_needs_the_slots(models):
    watched, cold = Watched(models["target"], 100), Watched(models["target"], 100)
    texts = [tuple((3 * i + j * (7 + i)) % 90 + 3 for j in range(45)) for i in range(4)]
    for i, text in enumerate([*texts, *texts]):
        tokens, _ = watched.complete(admit(2 * i, text), 8)
        assert tokens == cold.complete(replace(admit(2 * i, text), cache_salt=None), 8)[0]
