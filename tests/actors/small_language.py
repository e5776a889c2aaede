"""A language of eleven words, in which the whole history decides what follows; and requests in it."""

from __future__ import annotations

import random

from actors.protocol.messages import HASH_SEED, Request, SamplingParams, extend_hash

EOS = 1
MAX_MODEL_LEN = 40


def next_word(history) -> int:
    """The language: what follows depends on all of the history, and is the end now and then."""
    return extend_hash(HASH_SEED, history) % 11


def oracle(request: Request) -> list[int]:
    """Plain decoding, one word after the other."""
    history, sampling = list(request.prompt), request.sampling
    while len(history) < min(MAX_MODEL_LEN, len(request.prompt) + sampling.max_tokens):
        history.append(next_word(history))
        ends = history[-1] == EOS and not sampling.ignore_eos
        if ends or history[-1] in sampling.stop_token_ids:
            break
    return history[len(request.prompt) :]


def requests_of(choose: random.Random, count: int, max_source_len: int = 0) -> list[Request]:
    return [
        Request(
            i,
            tuple(choose.randrange(2, 11) for _ in range(choose.randrange(1, 20))),
            SamplingParams(
                max_tokens=choose.randint(1, 25),
                stop_token_ids=tuple(choose.sample(range(2, 11), choose.randint(0, 1))),
            ),
            drafter=None if choose.random() < 0.8 else "none",
            source=tuple(choose.randrange(2, 11) for _ in range(choose.randint(1, max_source_len)))
            if max_source_len
            else (),
        )
        for i in range(count)
    ]
