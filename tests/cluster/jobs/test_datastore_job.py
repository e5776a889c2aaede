"""`job=datastore` and the drafter that uses its file, from the command line's side."""

from __future__ import annotations

import json

import pytest

from actors.drafters.retrieval.datastore import Datastore
from cluster.jobs import datastore
from tests.cluster.config.quick_loading import load_quickly


def test_texts_become_a_file_that_a_launch_accepts(tmp_path, capsys):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("def one():\n    return 1\n")
    (tmp_path / "texts" / "deep" / "b.jsonl").write_text('{"text": "x = 1"}\n{"prompt": "y", "text": " = 2"}\n')
    job = ["job=datastore", f"job.files=['{tmp_path}/texts/**']", f"job.out={tmp_path}/store"]
    datastore.run(load_quickly(job), tmp_path)
    about = json.loads((tmp_path / "datastore.json").read_text())
    assert (about["files"], about["documents"]) == (2, 3)
    assert about["tokens"] == Datastore(tmp_path / "store").about["num_tokens"]
    assert f"drafter.datastore={tmp_path}/store" in capsys.readouterr().out.replace("\n", "")
    assert (
        load_quickly(["drafter=rest", f"drafter.datastore={tmp_path}/store"]).drafter.datastore == f"{tmp_path}/store"
    )
    header = (tmp_path / "store").read_bytes().replace(b'"tokenizer": "', b'"tokenizer": "0', 1)
    (tmp_path / "other").write_bytes(header[:4095] + header[4096:])
    with pytest.raises(ValueError, match=r"drafter.datastore=.*: was made with another tokenizer than the target's"):
        load_quickly(["drafter=rest", f"drafter.datastore={tmp_path}/other"])


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["drafter=rest"], "drafter.datastore='': name a file made by job=datastore"),
        (["drafter=rest", "drafter.datastore=README.md"], r"drafter.datastore=/.*/README.md: is no datastore"),
        (["drafter=rest", "drafter.datastore=x", "drafter.depth=20"], "drafter.depth=20: is more than 32 tokens"),
        (["job=datastore"], r"job.files=\[\]: must name at least one"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides, line):
    with pytest.raises(ValueError, match=line):
        load_quickly(overrides)


def test_the_file_is_beside_the_report_or_in_a_folder_that_is_made(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x = 1\n")
    job = ["job=datastore", f"job.files=[{tmp_path}/a.txt]"]
    for out in (tmp_path / "datastore", tmp_path / "deep" / "er" / "store"):
        datastore.run(load_quickly([*job, f"job.out={out}"] if out.parent != tmp_path else job), tmp_path)
        about = json.loads((tmp_path / "datastore.json").read_text())
        assert about["datastore"] == str(out) and about["bytes"] == out.stat().st_size
        assert (about["job"], about["config"]["job"]["files"]) == ("datastore", [f"{tmp_path}/a.txt"])
        shown = capsys.readouterr().out.replace("\n", "")
        assert f"{about['tokens']:,} tokens of 1 files written to {out}: drafter=rest drafter.datastore={out}" in shown


def test_patterns_without_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="job.files=.*: name no file"):
        datastore.run(load_quickly(["job=datastore", f"job.files=[{tmp_path}/*.txt]"]), tmp_path)
