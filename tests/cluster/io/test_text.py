"""Text at the edge: tokenizers, end tokens, vocabularies, and text out of a stream of tokens."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.io.text import TextStream, check_same_vocabulary, load_tokenizer, read_eos_token_ids


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and an end token that has no text."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """As Llama 2 has it: words with a space mark, and bytes for everything else."""
    vocab = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)},
        "▁": 257,
        "a": 258,
        "b": 259,
        "▁a": 260,
    }
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTES = byte_tokenizer()


def push_all(stream: TextStream, token_ids) -> list[str]:
    pieces = []
    for token in token_ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return pieces


class TestStream:
    def test_text_is_what_the_tokens_decode_to(self):
        stream, token_ids = TextStream(BYTES), BYTES.encode("def é(): 😀\n").ids
        assert "".join(push_all(stream, token_ids)) == stream.text == "def é(): 😀\n"
        assert not stream.stopped and stream.end() == ""

    def test_a_character_appears_with_its_last_byte(self):
        assert push_all(TextStream(BYTES), BYTES.encode("a😀b").ids) == ["a", "", "", "", "😀", "b"]

    def test_special_tokens_have_no_text(self):
        assert push_all(TextStream(BYTES), [*BYTES.encode("a").ids, 0]) == ["a", ""]

    def test_a_stop_string_across_tokens_ends_the_text_before_it(self):
        stream, token_ids = TextStream(BYTES, ("END",)), BYTES.encode("go ENDING").ids
        pieces = push_all(stream, token_ids)
        assert stream.stopped and len(pieces) == len("go END") and stream.text == "".join(pieces) == "go "
        assert stream.end() == ""

    def test_what_could_begin_a_stop_string_is_held_back(self):
        stream = TextStream(BYTES, ("END",))
        assert push_all(stream, BYTES.encode("abcEN").ids) == ["", "", "a", "b", "c"]
        assert stream.text == "abc" and stream.end() == "EN" and stream.text == "abcEN"

    def test_the_earliest_of_several_stop_strings_counts(self):
        stream = TextStream(BYTES, ("yz", "xyz", "q"))
        push_all(stream, BYTES.encode("wxyz").ids)
        assert stream.stopped and stream.text == "w"

    def test_one_character_stops_without_holding_anything_back(self):
        stream = TextStream(BYTES, ("\n",))
        assert push_all(stream, BYTES.encode("ab\nc").ids) == ["a", "b", ""] and stream.text == "ab"

    def test_a_stop_string_beyond_ascii_is_found_in_split_characters(self):
        stream = TextStream(BYTES, ("é!",))
        push_all(stream, BYTES.encode("caféé!x").ids)
        assert stream.stopped and stream.text == "café"

    @settings(max_examples=150, deadline=None)
    @given(text=st.text("abc", max_size=30), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
    def test_stopping_agrees_with_a_search_of_the_whole_text(self, text, stop):
        stream = TextStream(BYTES, tuple(stop))
        pieces = push_all(stream, BYTES.encode(text).ids)
        # The shortest beginning of the text that holds a stop string, cut before the earliest it holds.
        ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(word) for word in stop)]
        if not ends:
            assert not stream.stopped and stream.text + stream.end() == text
        else:
            expected = text[: min(i for word in stop if (i := text[: ends[0]].find(word)) >= 0)]
            assert stream.stopped and len(pieces) == ends[0] and stream.text == expected == "".join(pieces)

    def test_bytes_that_are_no_text_never_break_the_stream(self):
        """Byte fallback may read the same bytes otherwise once more of them are there."""
        tokenizer = fallback_tokenizer()
        for seed in range(60):
            choose = random.Random(seed)
            token_ids = [choose.choice([257, 258, 259, 260, choose.randrange(1, 257)]) for _ in range(40)]
            stream = TextStream(tokenizer)
            push_all(stream, [*token_ids, 258, 259, 258])
            assert stream.text.endswith("aba")

    def test_a_token_the_tokenizer_does_not_have_is_no_error(self):
        """Models often have more rows than their tokenizer has tokens."""
        assert push_all(TextStream(BYTES), [*BYTES.encode("a").ids, 9_999, *BYTES.encode("b").ids])[0] == "a"


def save(path, *, tokenizer=BYTES, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": 257, **config}))
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return path


class TestCheckpoint:
    def test_a_tokenizer_is_loaded(self, tmp_path):
        assert load_tokenizer(save(tmp_path)).encode("ab").ids == BYTES.encode("ab").ids

    def test_a_missing_or_broken_tokenizer_is_one_line(self, tmp_path):
        with pytest.raises(ValueError, match=rf"^target\.path: {tmp_path} has no tokenizer.json; "):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(
            ValueError, match=r"^target\.path: .*tokenizer.json cannot be read as a tokenizer"
        ) as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            (None, {}, ()),
            (None, {"eos_token_id": 5}, (5,)),
            (None, {"eos_token_id": [5, 6]}, (5, 6)),
            ({"eos_token_id": [7, 8]}, {"eos_token_id": 5}, (7, 8)),
            ({"eos_token_id": 0}, {"eos_token_id": 5}, (0,)),
            ({"eos_token_id": None}, {"eos_token_id": 5}, (5,)),
            ({}, {"eos_token_id": None}, ()),
        ],
    )
    def test_end_tokens_are_those_of_generation_or_else_of_the_model(self, tmp_path, generation, config, expected):
        save(tmp_path, **config)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert read_eos_token_ids(tmp_path) == expected

    def test_a_broken_configuration_is_one_line(self, tmp_path):
        (tmp_path / "config.json").write_text("{not json")
        with pytest.raises(ValueError, match=r"config.json: is not JSON .*; save the checkpoint again") as caught:
            read_eos_token_ids(tmp_path)
        assert "\n" not in str(caught.value)


class TestVocabulary:
    def test_the_same_vocabulary_is_fine(self, tmp_path):
        check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b"))

    def test_a_drafter_without_a_tokenizer_is_believed(self, tmp_path):
        check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b", tokenizer=None))

    def test_another_size_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"^drafter\.path: vocabulary of 300 tokens against the target's 257; use"):
            check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b", vocab_size=300))

    def test_a_family_may_pad_its_smaller_model_less(self, tmp_path):
        check_same_vocabulary(save(tmp_path / "a", vocab_size=320), save(tmp_path / "b", vocab_size=300))
        with pytest.raises(ValueError, match="vocabulary of 320 tokens against the target's 300"):
            check_same_vocabulary(save(tmp_path / "c", vocab_size=300), save(tmp_path / "d", vocab_size=320))

    def test_other_ids_for_the_same_tokens_are_refused(self, tmp_path):
        alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)]
        other = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
        with pytest.raises(ValueError, match=r"^drafter\.path: the tokenizer of .*/b gives other ids"):
            check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b", tokenizer=other))
