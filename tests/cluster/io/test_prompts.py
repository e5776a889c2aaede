from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from cluster.io.prompts import Prompt, prompt_sets, read_prompts, spread
from tests.damage import damaged_json, tried


def write(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_reads_both_formats_and_keeps_labels(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "def f(x):\n", "source": "calendar.py"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["Compose \u2028 a post.", "Rewrite it."], "reference": []},
    )
    first, second = read_prompts(path)
    assert (first.content, first.labels()) == ("def f(x):\n", {"source": "calendar.py"})
    assert second.content == "Compose \u2028 a post."
    assert second.labels() == {"category": "writing", "question_id": 81}


def test_every_field_of_a_line_has_its_place(tmp_path):
    line = {"prompt": "p", "turns": ["t"], "category": "c", "task_id": "h/1", "source": "s", "drafter": "d"}
    path = write(tmp_path, line, {"prompt": "", "turns": ["t"]} | {"prompt": None, "question_id": 0, "task_id": 3})
    assert read_prompts(path) == [
        Prompt("p", "c", "h/1", "s", drafter="d"),
        Prompt("t", question_id=0),
    ]
    assert [len(read_prompts(path, limit)) for limit in (0, 1, 2, 3)] == [2, 1, 2, 2]


def test_what_of_a_file_is_not_used_is_said(tmp_path):
    line = {"prompt": "p", "reference": 1}
    path = write(tmp_path, line | {"max_tokens": 3}, line | {"temperature": None, "seed": 1}, line)
    said: list[str] = []
    assert len(read_prompts(path, 3, note=said.append)) == 3
    unread = "max_tokens, seed, temperature of its lines are not read; sampling.* hold for all prompts"
    assert said == [f"job.prompts={path}: {unread}"]
    path = write(tmp_path, line, line, line)
    cut = "job.limit=2: 2 of the 3 prompts of prompts.jsonl; job.limit=0 takes all"
    for limit, note in ((0, []), (3, []), (2, [cut])):
        said.clear()
        read_prompts(path, limit, note=said.append)
        assert said == note


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert [prompt.text for prompt in read_prompts(path)] == ["a"]


def test_a_line_may_name_a_drafter_that_the_engine_has_or_none(tmp_path):
    path = write(tmp_path, {"prompt": "a"}, *({"prompt": "b", "drafter": name} for name in ("none", "ngram", "medusa")))
    assert [prompt.drafter for prompt in read_prompts(path)] == [None, "none", "ngram", "medusa"]
    assert len(read_prompts(path, drafters=["ngram", "medusa"])) == 4
    with pytest.raises(ValueError) as refusal:
        read_prompts(path, limit=1, drafters=["suffix", "ngram"])
    remedy = "name one of suffix, ngram, none, or leave it out"
    assert str(refusal.value) == f"job.prompts={path}: line 4: the engine has no drafter 'medusa'; {remedy}"
    with pytest.raises(
        ValueError, match="line 3: the engine has no drafter 'ngram'; name one of none, or leave it out$"
    ):
        read_prompts(path, drafters=())


def test_the_sets_of_a_folder_have_the_names_of_files_or_folders(tmp_path):
    for name in ("code.jsonl", "both.jsonl", "spec/question.jsonl", "both/question.jsonl", "no/other.jsonl", "no.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert prompt_sets(tmp_path) == {
        "spec": tmp_path / "spec/question.jsonl",
        "both": tmp_path / "both.jsonl",
        "code": tmp_path / "code.jsonl",
    }


def test_a_made_prompt_is_submitted_as_its_tokens():
    assert Prompt("", token_ids=(3, 4)).content == (3, 4)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ('{"prompt": "x"', "is not JSON"),
        ("[1, 2]", "must be object, got array"),
        ('{"text": "x"}', "neither"),
        ('{"prompt": 3}', "prompt=3: must be str or null"),
        ('{"turns": ["x", 3]}', r"turns\[1\]=3: must be str"),
        ('{"prompt": "x", "category": ["a"]}', r"category=\['a'\]: must be str or null"),
        ('{"prompt": "x \\ud83d"}', "is not Unicode text"),
        ('{"prompt": ' + "[" * 100_000, "is nested too deeply"),
        ('{"prompt": "x", "other": ' + '{"a":' * 100_000, "is nested too deeply"),
        ('{"turns": []}', "neither"),
        ('{"prompt": ""}', "empty prompt"),
    ],
)
def test_a_bad_line_refuses_the_file_by_number(tmp_path, bad, complaint):
    path = write(tmp_path, {"prompt": "fine"}, "", bad, {"prompt": "fine"})
    with pytest.raises(ValueError, match=complaint) as refusal:
        read_prompts(path, limit=1)
    assert f"{path}: line 3" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_pairs_of_surrogates_are_characters(tmp_path):
    assert read_prompts(write(tmp_path, {"prompt": "\U0001f600 \\ud800"}))[0].text == "\U0001f600 \\ud800"


def test_a_damaged_file_is_one_line_with_its_number_or_prompts_that_can_be_run(tmp_path):
    rng, path = random.Random(0), tmp_path / "prompts.jsonl"
    good = {"prompt": "a é", "category": "b", "question_id": 3, "turns": ["x", "y"], "source": "s", "other": {"a": [1]}}
    for _ in range(300):
        kind, line = damaged_json(json.dumps(good), rng)
        path.write_bytes(json.dumps(good).encode() + b"\n" + line)
        prompts, refusal = tried(lambda: read_prompts(path, limit=2))
        assert prompts or refusal.startswith((f"job.prompts={path}: line 2", f"job.prompts={path}: is not UTF-8")), kind
        assert all(prompt.text.encode() and json.dumps(prompt.labels()) for prompt in prompts or ()), kind


def test_an_empty_file_and_a_binary_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(write(tmp_path, "", "  "))
    path = tmp_path / "binary"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(path)


def test_a_limit_keeps_order_and_covers_every_category():
    prompts = [Prompt(str(i), category=c) for i, c in enumerate("aaaaaabbbbccd")]
    chosen = spread(prompts, 6)
    assert Counter(p.category for p in chosen) == {"a": 2, "b": 2, "c": 1, "d": 1}
    assert [int(p.text) for p in chosen] == sorted(int(p.text) for p in chosen)
    assert len(spread(prompts, 100)) == len(prompts)
    assert [p.text for p in spread([Prompt("x"), Prompt("y"), Prompt("z")], 2)] == ["x", "y"]
