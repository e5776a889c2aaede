"""Nothing but attention grows with a text: records of a round and rows of its passes are those behind a short one."""

from __future__ import annotations

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.model.config import DraftRows, ModelDrafterConfig
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.protocol.messages import Request, SamplingParams
from actors.transport.codec import CODEC
from tests.actors.conftest import MAX_LEN

LENGTH, NUM_TOKENS = 5, 24
CHUNKS = dict(rows=DraftRows.chunks, chunk_size=2, num_chunks=4, choose_every=6)
NEWEST = dict(rows=DraftRows.streaming, sinks=2, window=9)
DRAFTERS = {
    "model": ModelDrafterConfig(num_draft_tokens=LENGTH),
    "model, streaming": ModelDrafterConfig(num_draft_tokens=LENGTH, **NEWEST),
    "self, chunks": SelfDrafterConfig(num_draft_tokens=LENGTH, **CHUNKS),
    "TriForce": CascadeDrafterConfig(
        levels=(
            ModelDrafterConfig(path="small", num_draft_tokens=2, **NEWEST),
            SelfDrafterConfig(num_draft_tokens=LENGTH, **CHUNKS),
        ),
        num_draft_tokens=LENGTH,
    ),
    "longspec": SpeculatorDrafterConfig(path="longspec", num_draft_tokens=LENGTH),
}
DIGITS = 32
"""Bytes that larger numbers may take in a record."""


def largest(room, length):
    """The longest record of each type behind a prompt of this length, and the most rows of a pass of the target."""
    sizes, rows = dict[str, int](), [0]
    answers = {role: role.answer for role in (room.target, room.draft) if role is not None}
    forward = room.target.runner.forward

    def count(record):
        if record.round > 2:  # the first ones bring the prompt
            name = type(record).__name__
            sizes[name] = max(sizes.get(name, 0), len(CODEC.encode(record)))

    def answering(role):
        def answer(batch, *args):
            count(batch)
            for one in answers[role](batch, *args):
                count(one)
                yield one

        return answer

    def passing(spans, token_ids, *args, **options):
        if len(sizes) > 1:
            rows[0] = max(rows[0], len(token_ids))
        return forward(spans, token_ids, *args, **options)

    for role in answers:
        role.answer = answering(role)
    room.target.runner.forward = passing
    prompt = tuple(2 + 7 * i * i % 90 for i in range(length))
    room.serve([Request(0, prompt, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))])
    assert len(room.tokens[0]) == NUM_TOKENS and room.stats.num_spec_steps > 2
    return sizes, rows[0]


@pytest.mark.extended
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rounds_behind_a_long_text_are_those_behind_a_short_one(open_room, drafter):
    found = []
    for length in (20, MAX_LEN - NUM_TOKENS - LENGTH):
        found.append(largest(open_room(DRAFTERS[drafter], attached="model" not in drafter), length))
    (short, _), (long, _) = found
    assert short.keys() == long.keys() >= {"VerifyBatch", "VerdictBatch"}
    assert all(abs(long[name] - short[name]) <= DIGITS for name in short), (short, long)
    assert all(0 < rows <= 2 * (LENGTH + 1) for _, rows in found), found
