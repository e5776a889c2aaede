"""Damaged files of the drafters' options: one line, or what the code that uses them can take."""

from __future__ import annotations

import json
import random

import pytest

from actors.drafters.corpus import read_corpus
from actors.drafters.model.fixed_trees import FixedTreeGrowth, read_trees, write_trees
from actors.drafters.self_speculation.layer_files import read_layers, write_layers
from actors.drafters.vocabulary.token_list import read_token_list, write_token_list
from actors.drafters.vocabulary.token_pieces import TokenPieces, has_same_tokens
from actors.tokenizer_file import tokenizer_digest
from tests.actors.drafters.vocabulary.small_tokenizers import KINDS, train
from tests.damage import damaged_json, tried

NUM_DAMAGES = 150


def damages(content, name, count=NUM_DAMAGES):
    rng = random.Random(name)
    return (damaged_json(content, rng) for _ in range(count))


def refused_of(path, read, use):
    """How many of the damages of a file are refused; `use` takes what is read of the others."""
    num_refused = 0
    for kind, content in damages(path.read_text(), path.name):
        path.write_bytes(content)
        value, refusal = tried(lambda: read(path))
        num_refused += bool(refusal)
        assert refusal or use(value), kind
    return num_refused


def test_choices_of_layers(tmp_path):
    write_layers(tmp_path / "layers", 8, ["1", "2a", "3m"], {"gain": 1.2})
    names = lambda read: 1 <= read[0] <= 4096 and all(isinstance(entry, str) for entry in read[1])  # noqa: E731
    assert refused_of(tmp_path / "layers", read_layers, names) > 50


def test_trees(tmp_path):
    write_trees(tmp_path / "trees", [(-1, 0), (-1, 0, 0), (-1, 0, 0, 1, 2)], {"acceptance": [0.7, 0.2]})
    grows = lambda trees: FixedTreeGrowth(trees, 8).max_depth(4) >= 1  # noqa: E731
    assert refused_of(tmp_path / "trees", read_trees, grows) > 50


def test_token_lists(tmp_path):
    write_token_list(tmp_path / "list", [4, 2, 9], {4: 3, 2: 1}, "digest")
    distinct = lambda tokens: len({*tokens}) == len(tokens) > 0 <= min(tokens)  # noqa: E731
    assert refused_of(tmp_path / "list", read_token_list, distinct) > 40


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers(tmp_path, kind):
    """Read as JSON and by the library: what one of them takes, the other may refuse."""
    content = json.loads(train(kind, 300).to_str())
    (tmp_path / "good").mkdir()
    for folder in (tmp_path, tmp_path / "good"):
        (folder / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text("a text")
    num_refused = 0
    for what, damaged in [
        ("nothing", json.dumps(content).encode()),
        *damages(json.dumps(content), kind, NUM_DAMAGES // 3),
    ]:
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        uses = {
            "digest": lambda: tokenizer_digest(tmp_path),
            "pieces": lambda: TokenPieces(tmp_path).encode("a b").ids,
            "same": lambda: has_same_tokens(tmp_path, tmp_path / "good"),
            "corpus": lambda: read_corpus(tmp_path / "text.txt", tmp_path),
        }
        refusals = {use: refusal for use, read in uses.items() if (refusal := tried(read)[1])}
        assert all("tokenizer.json" in line for line in refusals.values()), what
        assert what != "nothing" or not refusals
        num_refused += bool(refusals)
    assert num_refused > 10
