"""An attached drafter reads the text before a trial of speculation, whose rounds then cost what later ones do."""

from __future__ import annotations

from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.policy.policy import AdaptivePolicy

LONGEST = 5


def test_the_text_was_read_before_the_first_draft(open_room, make_requests):
    room = open_room(SpeculatorDrafterConfig(path="eagle3", num_draft_tokens=LONGEST), attached=True)
    attached, unread = room.target._attached, []
    contexts, runner, draft = attached.role.contexts, attached.role.drafter.runner, attached.draft

    def watched(batch, *rest):
        for item in batch.items:
            if item.num_draft_tokens:
                context = contexts.get(item.request_id)
                assert context is not None, "a draft was ordered of a text that the drafter does not know"
                unread.append(len(context.token_ids) - runner.cached_len(item.request_id))
        return draft(batch, *rest)

    attached.draft = watched
    (request,) = make_requests(1, max_tokens=40)
    room.serve([request], policy=AdaptivePolicy("sync", 0, LONGEST))
    assert unread, "nothing was drafted: the test shows nothing"
    assert max(unread) <= LONGEST + 1 < len(request.prompt)
