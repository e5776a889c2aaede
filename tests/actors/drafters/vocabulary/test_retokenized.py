"""Text in another tokenizer's tokens: whatever the pieces it comes in, those of the whole text."""

from __future__ import annotations

import itertools
import random

import pytest

from actors.drafters.vocabulary.retokenized import RetokenizedText
from actors.drafters.vocabulary.token_pieces import TokenPieces, has_same_tokens, shared_tokens
from tests.actors.drafters.vocabulary.small_tokenizers import AWKWARD, KINDS, save, train


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers")
    sizes = {"bytes": (300, 420), "words": (330, 330), "pieces": (330, 400)}
    return {(kind, i): TokenPieces(save(path / f"{kind}{i}", kind, sizes[kind][i])) for kind in KINDS for i in (0, 1)}


def text_of(vocabulary: TokenPieces, token_ids) -> str:
    """What the tokens stand for, without a last character that is not whole and a first space that is no text."""
    content = b"".join(vocabulary.of[token] for token in token_ids)
    for end in range(len(content), len(content) - 4, -1):
        try:
            text = content[:end].decode()
        except UnicodeDecodeError:
            continue
        return text.removeprefix(" ") if vocabulary.prepends_space else text
    raise AssertionError(content)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_bytes_of_their_text(texts, kind):
    vocabulary = texts[kind, 0]
    for text in AWKWARD:
        token_ids = vocabulary.encode(text).ids
        assert b"".join(vocabulary.of[token] for token in token_ids).decode() == " " * vocabulary.prepends_space + text


@pytest.mark.parametrize(("target", "draft"), list(itertools.product(KINDS, KINDS)))
def test_the_tokens_are_those_of_the_whole_text(texts, target, draft):
    source, sink = texts[target, 0], texts[draft, 1]
    choose = random.Random(f"{target}{draft}")
    for text in [*AWKWARD, "".join(AWKWARD)]:
        token_ids, here, ours = source.encode(text).ids, 0, RetokenizedText(source, sink)
        beginning = len(sink.beginning)
        for _ in range(60):
            before = list(ours.token_ids)
            if choose.random() < 0.2:
                here = choose.randrange(max(0, here - 6), here + 1)
                kept = ours.cut(here)
            else:
                size = choose.randrange(1, 5)
                kept = ours.extend(token_ids[here : here + size])
                here = min(here + size, len(token_ids))
            assert ours.num_target == here and ours.token_ids[:kept] == before[:kept]
            assert ours.token_ids[beginning:] == sink.encode(text_of(source, token_ids[:here])).ids


def test_tokens_of_both_are_appended_without_encoding(texts):
    source, sink = texts["bytes", 0], texts["bytes", 1]
    pairs = dict(shared_tokens(source, sink))
    ours = RetokenizedText(source, sink)
    ours.extend(source.encode("the").ids)
    fitting = [token for token in source.encode(" hello world").ids if token in pairs]
    for token in fitting:
        ours.append(token, pairs[token])
    assert ours.token_ids[-len(fitting) :] == [pairs[token] for token in fitting]
    ours.extend(source.encode(", well").ids)
    written = "the" + text_of(source, fitting) + ", well"
    assert ours.token_ids[len(sink.beginning) :] == sink.encode(written).ids


def test_half_a_character_waits_for_the_rest(texts):
    source, sink = texts["bytes", 0], texts["pieces", 1]
    token_ids = [source.by_bytes()[bytes([byte])] for byte in "\U0001f600".encode()]
    ours = RetokenizedText(source, sink)
    for token in token_ids[:-1]:
        ours.extend([token])
        assert ours.token_ids == list(sink.beginning) and not ours.is_whole
    ours.extend(token_ids[-1:])
    assert text_of(sink, ours.token_ids) == "\U0001f600" and ours.is_whole


def test_special_tokens_are_shared_by_name_and_others_by_their_bytes(texts):
    source, sink = texts["bytes", 0], texts["pieces", 1]
    for token, draft in shared_tokens(source, sink):
        assert source.of[token] == sink.of[draft] and source.of[token]
    assert len(shared_tokens(source, sink)) >= 256, "every byte at least"
    same = shared_tokens(source, texts["words", 0])
    assert (source.special["<|endoftext|>"], texts["words", 0].special["<|endoftext|>"]) in same
    ours = RetokenizedText(source, texts["bytes", 1])
    ours.extend([*source.encode("a").ids, source.special["<|endoftext|>"], *source.encode("b").ids])
    end = texts["bytes", 1].special["<|endoftext|>"]
    assert end in texts["bytes", 1].beginning and ours.token_ids.count(end) == 1, "a beginning is not said twice"


def test_other_kinds_of_tokenizers_are_refused_in_one_line(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: is neither byte-level nor SentencePiece"):
        TokenPieces(tmp_path)


def test_the_same_tokens_are_recognised(tmp_path):
    for name, size in (("a", 300), ("b", 300), ("c", 310)):
        save(tmp_path / name, "bytes", size)
    assert has_same_tokens(tmp_path / "a", tmp_path / "b")
    assert has_same_tokens(tmp_path / "a", tmp_path / "c") is False
    assert has_same_tokens(tmp_path / "a", tmp_path) is None
    assert train("bytes", 300).get_vocab_size() == 300


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_a_token_and_a_piece_of_text_goes_before_the_name_of_its_byte(texts, kind):
    """Text may hold any byte; of a character that is a token, too, the tokenizer writes that token."""
    vocabulary = texts[kind, 0]
    by_bytes = vocabulary.by_bytes()
    assert {piece for piece in by_bytes if len(piece) == 1} == {bytes([byte]) for byte in range(256)}
    assert all(vocabulary.of[token] == piece for piece, token in by_bytes.items())
    assert {vocabulary.of[token] for token in vocabulary.encode("".join(AWKWARD)).ids} <= by_bytes.keys()
    letter = by_bytes[b"e"]
    assert letter in vocabulary.encode("xe").ids, "not <0x65>"
