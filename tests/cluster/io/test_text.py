"""Text at the edge: tokenizers, end tokens, vocabularies, and text out of a stream of tokens."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.io.text import TextStream, load_tokenizer, named_files, read_eos_token_ids
from tests.examples import examples


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and an end token that has no text."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def word_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Words with a mark for the space before them, bytes for everything else, and an end token that has no text."""
    words = ["▁", "▁▁", "a", "b", "!", "▁a", "▁ab"]
    vocab = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(vocab)}, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


LLAMA = word_tokenizer(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
)
METASPACE = word_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
FIRST_WORD = 2 + 256
UNITS = [*([i] for i in range(FIRST_WORD, FIRST_WORD + 7)), [1], *([2 + byte for byte in c.encode()] for c in "é😀€")]
"""Words, the end token, and characters of several bytes."""
SPELLED = st.lists(st.sampled_from(UNITS), max_size=12)


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

    def test_special_tokens_are_shown_by_name(self):
        stream = TextStream(BYTES, [0], ("d>b",), skips_special=False)
        assert "".join(push_all(stream, [*BYTES.encode("a").ids, 0, *BYTES.encode("b").ids])) == "a<en"

    def test_a_stop_string_across_tokens_ends_the_text_before_it(self):
        stream, token_ids = TextStream(BYTES, (), ("END",)), BYTES.encode("go ENDING").ids
        pieces = push_all(stream, token_ids)
        assert stream.stopped and len(pieces) == len("go END") and stream.text == "".join(pieces) == "go "
        assert stream.end() == ""

    def test_what_could_begin_a_stop_string_is_held_back(self):
        stream = TextStream(BYTES, (), ("END",))
        assert push_all(stream, BYTES.encode("abcEN").ids) == ["", "", "a", "b", "c"]
        assert stream.text == "abc" and stream.end() == "EN" and stream.text == "abcEN"

    def test_the_earliest_of_several_stop_strings_counts(self):
        stream = TextStream(BYTES, (), ("yz", "xyz", "q"))
        push_all(stream, BYTES.encode("wxyz").ids)
        assert stream.stopped and stream.text == "w"

    def test_one_character_stops_without_holding_anything_back(self):
        stream = TextStream(BYTES, (), ("\n",))
        assert push_all(stream, BYTES.encode("ab\nc").ids) == ["a", "b", ""] and stream.text == "ab"

    def test_a_stop_string_beyond_ascii_is_found_in_split_characters(self):
        stream = TextStream(BYTES, (), ("é!",))
        push_all(stream, BYTES.encode("caféé!x").ids)
        assert stream.stopped and stream.text == "café"

    @settings(max_examples=examples(150), deadline=None)
    @given(
        text=st.text("abc", max_size=30),
        stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
        least=st.integers(0, 12),
    )
    def test_stopping_agrees_with_a_search_of_the_whole_text(self, text, stop, least):
        stream = TextStream(BYTES, (), tuple(stop), min_tokens=least)
        pieces = push_all(stream, BYTES.encode(text).ids)
        # The shortest beginning of the text that holds a stop string, cut before the earliest it holds.
        ends = [i for i in range(least + 1, len(text) + 1) if any(text[:i].endswith(word) for word in stop)]
        if not ends:
            assert not stream.stopped and stream.text + stream.end() == text
        else:
            places = [text[: ends[0]].find(word, max(0, least + 1 - len(word))) for word in stop]
            expected = text[: min(place for place in places if place >= 0)]
            assert stream.stopped and len(pieces) == ends[0] and stream.text == expected == "".join(pieces)

    @pytest.mark.parametrize("tokenizer", [LLAMA, METASPACE], ids=["Llama", "Metaspace"])
    @settings(max_examples=examples(200), deadline=None)
    @given(before=SPELLED, after=SPELLED, cut=st.integers(0, 3))
    def test_prompt_and_text_are_what_both_decode_to(self, tokenizer, before, after, cut):
        """The space before the first word is part of it; a character that was cut is shown as such at the end."""
        prompt, output = list(chain(*before)), list(chain(*after))
        whole = tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]
        stream = TextStream(tokenizer, prompt)
        assert "".join(push_all(stream, output)) + stream.end() == whole == stream.text
        cut_short = TextStream(tokenizer, prompt)
        push_all(cut_short, output[: len(output) - cut])
        assert whole.startswith(cut_short.text)
        assert set(cut_short.end()) <= {"\ufffd"}

    @settings(max_examples=examples(200), deadline=None)
    @given(before=SPELLED, after=SPELLED, stop=st.lists(st.sampled_from([" a", "b", "!a", "é ", "  "]), max_size=2))
    def test_stop_strings_are_found_across_the_spaces_between_words(self, before, after, stop):
        prompt, output = list(chain(*before)), list(chain(*after))
        whole = LLAMA.decode(prompt + output)[len(LLAMA.decode(prompt)) :]
        stream = TextStream(LLAMA, prompt, stop)
        push_all(stream, output)
        assert stream.stopped == any(word in whole for word in stop)
        assert whole.startswith(stream.text + stream.end()) and not any(word in stream.text for word in stop)

    def test_the_first_word_after_a_long_prompt_keeps_its_space(self):
        for length in (1, 7, 8, 9, 40):
            for last in ([260], [1] * 9, [259] + [1] * 20, UNITS[-2], UNITS[-2] * 9):
                stream = TextStream(LLAMA, [260] * length + last)
                assert stream.push(263) == " a"

    @settings(max_examples=examples(60), deadline=None)
    @given(token_ids=st.lists(st.integers(0, FIRST_WORD + 6), max_size=40))
    def test_bytes_that_are_no_text_never_break_the_stream(self, token_ids):
        """Byte fallback may read the same bytes otherwise once more of them are there."""
        stream = TextStream(LLAMA, [260])
        push_all(stream, [*token_ids, 260, 261, 260])
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
            ValueError, match=r"^target\.path: .*tokenizer.json: cannot be read as a tokenizer"
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


def test_paths_and_patterns_name_each_file_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("b.txt", "deep/er/a.txt", "deep/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert named_files([f"{tmp_path}/**/*.txt", "~/b.txt"]) == [tmp_path / "b.txt", tmp_path / "deep/er/a.txt"]
    assert named_files(["~/deep/*"]) == [tmp_path / "deep/c.md"], "folders are no files"
    with pytest.raises(ValueError, match=r"^job\.files=\['~/deep', '~/no\.txt'\]: name no file; give paths or"):
        named_files(["~/deep", "~/no.txt"])
