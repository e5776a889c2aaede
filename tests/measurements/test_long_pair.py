"""The program that makes a pocket pair for long texts: its rows, its positions, its losses."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from cluster import pocket
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import HELD_OUT, Corpus, Source
from docs.measurements import long_pair
from docs.measurements.far_texts import PIECE, TESTED, FarTexts, imported_names, module_name
from parallel.model.families.registry import read_config

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TRAINED = ("argparse.py", "gettext.py", "locale.py", "shutil.py", "fnmatch.py", "uuid.py", "email/message.py")
TRAINED = (*TRAINED, "email/utils.py", "email/charset.py", "ftplib.py", "zipfile.py", "optparse.py")
LENGTH, REACH = 512, 4096


def sources_of(paths: tuple[str, ...]) -> tuple[Source, ...]:
    return tuple(Source(path, (LIBRARY / path).read_text(encoding="utf-8")) for path in paths)


@pytest.fixture(scope="module")
def texts() -> FarTexts:
    held_out = tuple(f"{name}.py" for name in TESTED)
    training = tuple(path for path in TRAINED if path not in HELD_OUT)
    return FarTexts(Corpus(sources_of(training), sources_of(held_out)), load_tokenizer(pocket.TARGET))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return long_pair.load(pocket.TARGET, max_position_embeddings=REACH).eval()


def test_imports_are_named_in_order_whatever_their_form():
    text = "import os.path, re\nfrom . import charset\ndef f():\n    from ..http import server\nfrom re import sub\n"
    assert imported_names(Source("email/message.py", text)) == [
        "os.path",
        "re",
        "email",
        "email.charset",
        "re.sub",
        "http",
        "http.server",
    ]
    assert imported_names(Source("email/__init__.py", "from .charset import x")) == ["email.charset", "email.charset.x"]
    assert imported_names(Source("old.py", "print 1")) == []
    assert module_name("email/__init__.py") == "email" and module_name("email/utils.py") == "email.utils"


@pytest.mark.extended
def test_a_module_stands_behind_what_it_imports_at_positions_of_its_own(texts: FarTexts):
    assert set(texts.imports("argparse")) == {"gettext", "shutil"}
    seen = set()
    for seed in range(12):
        tokens, positions = texts.row(seed, LENGTH, REACH)
        assert tokens.shape == (LENGTH + 1,) and positions.shape == (LENGTH,)
        assert torch.equal(tokens, texts.row(seed, LENGTH, REACH)[0])
        steps = positions.diff()
        (jump,) = (steps != 1).nonzero().flatten().tolist() or [None]
        assert jump is None or (steps[jump] > 1 and jump + 1 >= LENGTH // 2)
        assert positions[0] == 0 and positions[-1] < REACH
        assert torch.equal(texts.row(seed, LENGTH, LENGTH)[1], torch.arange(LENGTH))
        seen.add(int(positions[-1]) // 1024)
        own = tokens[LENGTH // 2 + 1 :].tolist()
        name = next(one for one in texts.names if _holds(texts.tokens(one), own))
        before = tokens[: LENGTH // 2 + 1].tolist()
        nearest = before[-(LENGTH // 4) :]
        assert any(nearest == texts.tokens(one)[: LENGTH // 4] for one in texts.imports(name))
    assert len(seen) > 2, "distances differ"


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[first : first + len(part)] == part for first in range(len(tokens) - len(part) + 1))


@pytest.mark.extended
def test_held_out_texts_are_tests_behind_the_modules_they_test_or_behind_others(texts: FarTexts):
    fronts, between, tests = texts.held_out(40, 700)
    assert len(fronts["tested"]) == len(fronts["other"]) == PIECE * len(TESTED)
    assert len(between) == 700 and [len(one) for one in tests] == [41] * len(TESTED)
    tokenizer = load_tokenizer(pocket.TARGET)
    for place, name in enumerate(TESTED):
        piece = fronts["tested"][place * PIECE : (place + 1) * PIECE]
        assert (LIBRARY / f"{name}.py").read_text().startswith(tokenizer.decode(piece[1:])[:200])


@torch.no_grad()
def test_a_row_is_one_text_though_its_positions_jump(model: LlamaForCausalLM):
    tokens = torch.tensor([[0, 5, 6, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 2, 900, 901, 902]])
    logits = long_pair.logits_at(model, tokens, positions)
    changed = long_pair.logits_at(model, torch.tensor([[0, 99, 6, 7, 8, 9]]), positions)
    assert (changed[0, -1] - logits[0, -1]).abs().max() > 1e-3, "what stands before the jump is read"
    near = long_pair.logits_at(model, tokens, torch.arange(6)[None])
    torch.testing.assert_close(near, model(tokens).logits)
    assert (near[0, -1] - logits[0, -1]).abs().max() > 1e-3, "and the distance too"


@torch.no_grad()
def test_losses_are_those_of_one_pass_over_everything(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(long_pair, "CHUNK", 7)
    front, between, texts = [0, *range(20, 30)], [*range(40, 45)], [[0, 30, 31, 32], [0, 7, 8]]
    for before in ([], between):
        found = list(long_pair.losses(model, front, before, texts))
        for text, loss in zip(texts, found, strict=True):
            whole = torch.tensor([[*front, *before, *text]])
            logits = model(whole[:, :-1]).logits[0, -(len(text) - 1) :]
            assert abs(loss - float(F.cross_entropy(logits, torch.tensor(text[1:])))) < 1e-4


@pytest.mark.extended
def test_a_trained_pair_has_the_positions_and_is_behind_what_it_began_with(
    texts: FarTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(long_pair, "far_texts", lambda: texts)
    words = ["train", str(tmp_path), "--length", "128", "--reach", str(REACH), "--steps", "2", "--minutes", "60"]
    monkeypatch.setattr("sys.argv", ["long_pair", *words])
    long_pair.main()
    target, drafter = read_config(tmp_path / "target"), read_config(tmp_path / "drafter")
    assert target.max_positions == drafter.max_positions == REACH
    assert target.rope is not None and target.rope.rope_theta == long_pair.BASE
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == (pocket.TARGET / "tokenizer.json").read_bytes()
    lines = (tmp_path / "work" / "loss.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["tokens"] == 128
    monkeypatch.setattr("sys.argv", ["long_pair", "prompts", str(tmp_path), "--distances", "0", "50"])
    long_pair.main()
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "tested-50.jsonl").read_text().splitlines()]
    assert len(prompts) == len(TESTED) and prompts[0].startswith("<|endoftext|>")
