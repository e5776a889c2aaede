"""The text a drafter knows of a request, over random extensions and cuts."""

from __future__ import annotations

import random

import pytest

from actors.drafters.interface import Context, Draft
from actors.protocol.messages import HASH_SEED, Admit, SamplingKind, SamplingParams, extend_hash


@pytest.mark.parametrize("seed", range(12))
def test_the_digest_is_of_the_tokens_as_they_came_and_no_step_comes_twice(seed):
    draw = random.Random(seed)
    vocab_size = draw.choice([None, 20])
    committed = [draw.randrange(30) for _ in range(draw.randrange(1, 9))]
    prompt_len = draw.randrange(1, len(committed) + 1)
    context = Context.admitted(Admit(1, 2, tuple(committed), prompt_len, SamplingParams(), 5), vocab_size)
    assert context.readmitted_len == (len(committed) if len(committed) > prompt_len else 0)
    assert (context.epoch, context.admission, context.settled_len) == (2, 5, prompt_len)
    steps = {context.step}
    for _i in range(20):
        if draw.random() < 0.3 and len(committed) > prompt_len:
            length = draw.randrange(prompt_len, len(committed))
            beyond = vocab_size is not None and any(token >= vocab_size for token in committed[length:])
            if beyond:
                continue  # only text of levels below is taken back, and they know the tokens they propose
            context.cut(length)
            del committed[length:]
        else:
            more = [draw.randrange(30) for _ in range(draw.randrange(1, 4))]
            context.extend(more)
            committed += more
        assert context.prefix_hash == extend_hash(HASH_SEED, committed)
        known = committed if vocab_size is None else [min(token, vocab_size - 1) for token in committed]
        assert context.token_ids == known and context.prompt == known[:prompt_len]
        assert context.step not in steps, "a position that is drafted again gets other noise"
        steps.add(context.step)


def test_an_empty_draft_is_the_root_alone():
    context = Context.admitted(Admit(1, 0, (3, 4), 2, SamplingParams()), None)
    assert Draft.nothing(context).tree.token_ids == (4,)
    assert Draft.nothing(context).sampling_kinds == (SamplingKind.ROOT,)
