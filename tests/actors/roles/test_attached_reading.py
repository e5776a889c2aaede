"""An attached drafter reads the text before a trial of speculation, whose rounds then cost what later ones do; a round
after which it drafts nothing is one of plain decoding."""

from __future__ import annotations

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.policy.policy import AdaptivePolicy, Policy
from parallel.model.block import Block

LONGEST = 5


def test_the_text_was_read_before_the_first_draft(open_room, make_requests):
    room = open_room(SpeculatorDrafterConfig(path="eagle3", num_draft_tokens=LONGEST), attached=True)
    attached, unread = room.target._drafter, []
    contexts, runner, draft = attached.role.contexts, attached.role.drafter.runner, attached.follow

    def watched(batch, *rest):
        for item in batch.items:
            if item.num_draft_tokens:
                context = contexts.get(item.request_id)
                assert context is not None, "a draft was ordered of a text that the drafter does not know"
                unread.append(len(context.token_ids) - runner.cached_len(item.request_id))
        return draft(batch, *rest)

    attached.follow = watched
    (request,) = make_requests(1, max_tokens=40)
    room.serve([request], policy=AdaptivePolicy("sync", 0, LONGEST))
    assert unread, "nothing was drafted: the test shows nothing"
    assert max(unread) <= LONGEST + 1 < len(request.prompt)


@pytest.mark.extended
@pytest.mark.parametrize("method", ["streaming", "mask_lora"])
def test_a_pass_that_no_draft_follows_has_no_streams(open_room, make_requests, monkeypatch, method):
    room = open_room(SpeculatorDrafterConfig(path=method, num_draft_tokens=LONGEST), attached=True)
    room.target.runner.run_eagerly()  # a recorded pass calls no layer
    room.target._ahead = None  # each pass is made where it is counted
    rows_of_layers, seen, call, answer = [], {True: [], False: []}, Block.attend, room.target.answer

    def counted(block, hidden, *rest):
        rows_of_layers.append(len(hidden))
        return call(block, hidden, *rest)

    def watched(batch):
        rows_of_layers.clear()
        for verdicts in answer(batch):
            if batch.items:
                is_ordered = any(item.num_draft_tokens for item in batch.items)
                seen[is_ordered].append(set(rows_of_layers) == {verdicts.num_tokens})
            yield verdicts

    monkeypatch.setattr(Block, "attend", counted)
    monkeypatch.setattr(room.target, "answer", watched)
    room.serve(make_requests(1, max_tokens=40), policy=AdaptivePolicy("sync", 0, LONGEST))
    assert seen[False] and all(seen[False]), "each layer has the rows of the verified tokens alone"
    assert seen[True] and not any(seen[True]), "before a draft there are streams"


class EndsSoon(Policy):
    may_end = property(lambda _: True)


def test_no_draft_is_made_behind_a_verdict_that_may_end_speculation(open_room, make_requests, monkeypatch):
    room = open_room(SpeculatorDrafterConfig(path="eagle3", num_draft_tokens=LONGEST), attached=True)
    passes, answer = [], room.target.answer

    def watched(batch):
        passes.append((any(item.proposal for item in batch.items), any(item.num_draft_tokens for item in batch.items)))
        return answer(batch)

    monkeypatch.setattr(room.target, "answer", watched)
    room.serve(make_requests(1, max_tokens=20), policy=EndsSoon("sync", LONGEST))
    assert {(False, True), (True, False)} <= {*passes} <= {(False, True), (True, False), (False, False)}


def test_the_first_token_leaves_before_the_draft_model_has_its_prompt(open_room, make_requests, monkeypatch):
    room = open_room(ModelDrafterConfig(num_draft_tokens=LONGEST), attached=True)
    role, parts, answer = room.target._drafter.role, [], room.target.answer

    def watched(batch):
        for part in answer(batch):
            is_known = [verdict.request_id in role.contexts for verdict in part.verdicts]
            parts.append((batch.round, len(part.verdicts), part.drafts_follow, part.drafts is not None, *is_known))
            yield part

    monkeypatch.setattr(room.target, "answer", watched)
    (request,) = make_requests(1, max_tokens=20)
    assert len(request.prompt) > 32
    room.serve([request], policy=Policy("sync", LONGEST))
    assert parts[:2] == [(1, 1, True, False, False), (1, 0, False, True)]
    assert {part[1:3] for part in parts[2:]} == {(1, False)}, "later verdicts and drafts leave together"
    assert room.stats.num_rounds == len(parts) - 1
