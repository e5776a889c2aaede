"""`drafter=suffix` from the command line: what is refused, how its paths are resolved, and that an engine runs it."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.drafters.lookup.suffix import SuffixDrafterConfig
from tests.cluster.config.quick_loading import load_quickly


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drafter.num_draft_tokens=0", "drafter.num_draft_tokens=0: must be at least 1; for none write drafter=none"),
        ("drafter.min_match=0", "drafter.min_match=0: must be at least 1"),
        ("drafter.tokens_per_match=0", "drafter.tokens_per_match=0.0: must be above 0"),
        ("drafter.min_probability=2", "drafter.min_probability=2.0: must be between 0 and 1"),
        ("drafter.width=0", "drafter.width=0: must be at least 1"),
        ("drafter.shared_tokens=-1", "drafter.shared_tokens=-1: must be 0 (requests share nothing) or above"),
        ("drafter.corpus=/no/such.txt", "drafter.corpus=/no/such.txt: no such file; give a text file"),
        ("verify=kseq", "verify.rule=kseq would bias the output of a drafter that chooses its tokens and draws none"),
    ],
)
def test_what_makes_no_sense_is_refused(override, line):
    with pytest.raises(ValueError) as caught:
        load_quickly(["drafter=suffix", override])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_the_corpus_is_read_with_the_targets_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("words")
    monkeypatch.chdir(tmp_path)
    config = load_quickly(["drafter=suffix", "drafter.corpus=words.txt"])
    assert config.drafter.corpus == str(tmp_path / "words.txt")
    assert config.drafter.tokenizer == config.target.path


@pytest.mark.parametrize("drafter", ["suffix", "aded"])
def test_the_corpus_is_read_with_the_tokenizer_that_is_given(tiny_checkpoint, tmp_path, drafter):
    """One that knows two words, which no other tokenizer would write so."""
    path = shutil.copytree(tiny_checkpoint("Llama"), tmp_path / "other")
    other = Tokenizer(models.WordLevel({"a": 0, "bird": 1, "?": 2}, unk_token="?"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.save(str(path / "tokenizer.json"))
    (tmp_path / "words.txt").write_text("bird a bird")
    record = load_quickly(
        [f"drafter={drafter}", f"drafter.corpus={tmp_path}/words.txt", f"drafter.tokenizer={path}"]
    ).drafter
    assert record.tokenizer == str(path) and record.documents() == [[1, 0, 1]]


def test_an_engine_drafts_from_earlier_answers_and_from_the_corpus(open_engine, tiny_checkpoint, tmp_path):
    """The tiny target's answer to a prompt is drafted when the prompt comes again, or when the corpus holds it."""
    prompt = "Name a bird."
    first, again = open_engine(SuffixDrafterConfig()).generate([prompt]), None
    corpus = tmp_path / "earlier.jsonl"
    corpus.write_text(json.dumps({"prompt": prompt, "text": first[0].text}))
    for config, repeats in (
        (SuffixDrafterConfig(), 2),
        (SuffixDrafterConfig(corpus=str(corpus), tokenizer=str(tiny_checkpoint("Llama"))), 1),
    ):
        engine = open_engine(config)
        for _ in range(repeats):
            again = engine.generate([prompt])[0]
        assert again.token_ids == first[0].token_ids
        assert again.stats.num_accepted_tokens > first[0].stats.num_accepted_tokens
