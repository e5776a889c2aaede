"""The tokenizer, bundled and freshly trained: no text is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from cluster import pocket
from cluster.tools.training.corpus import Source
from cluster.tools.training.token_stream import END_OF_TEXT_ID, pack
from docs.measurements.pocket.models import END_OF_TEXT, load_tokenizer, save_tokenizer, train_tokenizer

SOURCES = [Source(f"{name}.py", f"def {name}(x):\n    return x + 1\n" * 20) for name in ("first", "second")]


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return load_tokenizer(pocket.TARGET)


@pytest.mark.extended
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_round_trips(bundled: Tokenizer, text: str):
    if END_OF_TEXT not in text:
        assert bundled.decode(bundled.encode(text).ids, skip_special_tokens=False) == text


def test_python_source_round_trips_through_transformers():
    text = Path(__file__).read_text() + "\n\tif x:\r\n\t\tprint('naïve 🐍 \\x00', 0x1F)  # 漢字\n\n\n"
    tokenizer = AutoTokenizer.from_pretrained(pocket.TARGET)
    text = text.replace(END_OF_TEXT, "")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == load_tokenizer(pocket.TARGET).encode(text).ids
    assert len(ids) < len(text) / 2


def test_special_token_is_one_id_everywhere():
    tokenizer = AutoTokenizer.from_pretrained(pocket.TARGET)
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == END_OF_TEXT_ID
    assert tokenizer("a" + END_OF_TEXT)["input_ids"][-1] == END_OF_TEXT_ID


def test_both_models_share_the_tokenizer():
    assert (pocket.TARGET / "tokenizer.json").read_bytes() == (pocket.DRAFTER / "tokenizer.json").read_bytes()


def test_training_is_deterministic_and_saves(tmp_path: Path):
    tokenizer = train_tokenizer(SOURCES, 280)
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.to_str() == train_tokenizer(SOURCES, 280).to_str()
    save_tokenizer(tokenizer, tmp_path, context=128)
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 128


def test_packing_separates_sources():
    tokenizer = train_tokenizer(SOURCES, 280)
    stream = pack(tokenizer, SOURCES).tolist()
    assert stream[0] == END_OF_TEXT_ID
    assert stream.count(END_OF_TEXT_ID) == 2
    first, second = " ".join(map(str, stream[1:])).split(f" {END_OF_TEXT_ID} ")
    assert [tokenizer.decode([int(token) for token in part.split()]) for part in (first, second)] == [
        source.text for source in SOURCES
    ]


def test_missing_tokenizer_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="tokenizer stage"):
        load_tokenizer(tmp_path)
