"""Drafts that were written in another tokenizer's tokens: string-level exact match."""

from __future__ import annotations

import random

import pytest
import torch

from actors.drafters.interface import Context
from actors.drafters.model.string_drafter import StringDrafter
from actors.drafters.vocabulary.token_pieces import TokenPieces
from actors.protocol.messages import Commit, SamplingKind, SamplingParams
from parallel.runtime.runner import Span, open_model
from tests.actors.drafters.vocabulary.small_tokenizers import AWKWARD, KINDS, save
from tests.actors.drafters.vocabulary.test_translated_runner import DRAFT_SIZE, TARGET_SIZE, save_model


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers")
    return {kind: TokenPieces(save(path / kind, kind, TARGET_SIZE)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_encoded_with_the_text_before_it(pieces, kind):
    """Exactly, but after some cuts where the tokenizer puts a space before every text that it encodes."""
    vocabulary, num_cuts, num_same = pieces[kind], 0, 0
    for text in AWKWARD:
        for cut in range(1, len(text)):
            before, whole = vocabulary.encode(text[:cut]).ids, vocabulary.encode(text).ids
            after = vocabulary.continued(before, text[cut:])
            written = vocabulary.text_of([*before, *after]).removeprefix(" " * vocabulary.prepends_space)
            num_cuts, num_same = num_cuts + 1, num_same + (written == text)
            if whole[: len(before)] == before and not vocabulary.prepends_space:
                assert after == whole[len(before) :]
    assert num_same == num_cuts if not vocabulary.prepends_space else num_same > 0.8 * num_cuts


def test_a_draft_ends_before_a_special_token_and_before_half_a_character(pieces):
    vocabulary = pieces["bytes"]
    byte = {piece: token for piece, token in vocabulary.by_bytes().items() if len(piece) == 1}
    half = [byte[bytes([one])] for one in "\U0001f600".encode()[:3]]
    assert vocabulary.text_of([byte[b"a"], *half]) == "a"
    assert vocabulary.text_of([byte[b"a"], vocabulary.special["<|endoftext|>"], byte[b"b"]]) == "a"
    assert vocabulary.text_of([byte[b"a"], 10**6]) == "a"


def check_rows(runner, path, token_ids, seq_id):
    cached = runner.cached_len(seq_id)
    assert cached < len(token_ids) and runner.pool.pending_len(seq_id) == 0
    if not cached:
        return
    fresh = open_model(path, num_slots=1000)
    fresh.open("fresh")
    fresh.forward([Span("fresh", cached)], token_ids[:cached])
    ours, theirs = runner.pool.slots(seq_id)[:cached], fresh.pool.slots("fresh")
    for kept, read in ((runner.pool.keys, fresh.pool.keys), (runner.pool.values, fresh.pool.values)):
        torch.testing.assert_close(kept[:, ours], read[:, theirs], atol=2e-5, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("target", "draft"),
    [("bytes", "pieces"), pytest.param("pieces", "bytes", marks=pytest.mark.slow), ("words", "bytes")],
)
def test_rows_after_any_verdict_over_awkward_text(pieces, tmp_path, target, draft):
    save_model(tmp_path, DRAFT_SIZE)
    save(tmp_path, draft, DRAFT_SIZE)
    ours, theirs = pieces[target], TokenPieces(tmp_path)
    runner = open_model(tmp_path, num_slots=2000)
    drafter = StringDrafter(runner, ours, theirs, 16)
    choose = random.Random(target + draft)
    written = ours.encode("".join(AWKWARD)).ids
    contexts = [Context(i, 0, written[: 20 + i], 20 + i, SamplingParams(seed=i)) for i in range(2)]
    for context in contexts:
        drafter.open(context)
    drafted = 0
    for step in range(25):
        drafts = drafter.propose(contexts, [5, 3])
        for context, draft_, budget in zip(contexts, drafts, (5, 3), strict=True):
            tree = draft_.tree
            drafted += tree.num_draft_tokens
            assert tree.token_ids[0] == context.token_ids[-1] and tree.num_draft_tokens <= budget
            assert all(0 <= token < TARGET_SIZE for token in tree.token_ids)
            assert set(draft_.sampling_kinds[1:]) <= {SamplingKind.DETERMINISTIC}
            last = choose.randrange(len(tree.parents))
            start = len(context.token_ids)
            tokens = (*tree.token_ids[1 : last + 1], *written[start % len(written) :][: 1 + step % 3])
            drafter.observe(context, Commit(context.request_id, 0, start, tuple(range(1, last + 1)), tokens))
            context.token_ids += tokens
            if choose.random() < 0.2:
                context.cut(len(context.token_ids) - choose.randrange(1, 9))
                drafter.truncate(context)
            check_rows(runner, tmp_path, drafter._texts[context.request_id].text.token_ids, context.request_id)
            runner.pool.check()
    assert drafted > 20
    for context in contexts:
        drafter.release(context.request_id)
    assert runner.can_reserve(2000)


def test_the_draft_of_an_equal_tokenizer_is_the_models_own_continuation(tmp_path):
    save_model(tmp_path, DRAFT_SIZE)
    save(tmp_path, "bytes", DRAFT_SIZE)
    pieces = TokenPieces(tmp_path)
    runner = open_model(tmp_path, num_slots=500)
    drafter, num_drafted = StringDrafter(runner, pieces, pieces, 512), 0
    for i, prompt in enumerate(["hello world", "def f(x):", "a  b", "3.14159", "the theory"]):
        context = Context(i, 0, pieces.encode(prompt).ids, 0, SamplingParams())
        drafter.open(context)
        (draft,) = drafter.propose([context], [4])
        text = [*pieces.beginning, *context.token_ids]
        runner.open(100 + i)
        for _ in range(4):
            runner.truncate(100 + i, 0)
            text.append(int(runner.forward([Span(100 + i, len(text))], text).logits.argmax()))
        own = pieces.text_of(text[-4:])
        assert draft.tree.token_ids[1:] == tuple(pieces.continued(context.token_ids, own)[:4] if own else ())
        num_drafted += draft.tree.num_draft_tokens
    assert num_drafted > 3, "the model wrote nothing: the test shows nothing"
