"""Settings of `job=generate` and `job=bench` that make no sense: refused in one line before anything starts."""

from __future__ import annotations

import pytest

from cluster.config.compose import checked
from tests.cluster.config.quick_loading import load_quickly


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["job.concurrency=-1"], "job.concurrency=-1: must be 0 (all at once) or above"),
        (["job.limit=-1"], "job.limit=-1: must be 0 (all prompts) or above"),
        (["job=bench", "job.repeats=0"], "job.repeats=0: must be at least 1"),
        (["job=bench", "job.warmup=-1"], "job.warmup=-1: must be 0 or above"),
        (["job=bench", "job.batches=[1,0]"], "job.batches=[1, 0]: must all be at least 1"),
        (["job=bench", "job.draft_lengths=[0]"], "job.draft_lengths=[0]: must all be at least 1"),
        (["job=bench", "job.temperatures=[-1]"], "job.temperatures=[-1.0]: must all be 0 (greedy) or between"),
        (["job=bench", "job.contexts=[0]"], "job.contexts=[0]: must all be at least 1"),
        (["job.workload=chat"], "job.workload=chat: is unknown; choose one of completion, editing, agent"),
        (["job.workload=agent", "job.prompts=x"], "job.workload=agent: names no set of a single file; drop it or"),
        (["job=bench", "job.workloads=[chat]"], "job.workload=chat: is unknown; choose one of completion, editing"),
        (["job=bench", "job.workloads=[agent]", "job.prompts=x"], "job.workloads=['agent']: names no sets of a single"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, line):
    with pytest.raises(ValueError) as caught:
        load_quickly(overrides)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.extended
@pytest.mark.parametrize("job", ["generate", "bench", "certify"])
def test_a_workload_is_a_bundled_file(job):
    paths = [
        load_quickly([f"job={job}", f"job.workload={name}"]).job.prompts
        for name in ("completion", "editing", "agent", "meaning")
    ]
    assert [path.rpartition("/")[2] for path in paths] == [
        "prompts.jsonl",
        "editing.jsonl",
        "agent.jsonl",
        "meaning.jsonl",
    ]


def test_a_workload_is_a_file_of_a_folder(tmp_path):
    (tmp_path / "spec_bench").mkdir()
    for name in ("spec_bench/question.jsonl", "humaneval.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}')
    for workload, name in (("spec_bench", "spec_bench/question.jsonl"), ("humaneval", "humaneval.jsonl")):
        config = load_quickly([f"job.prompts={tmp_path}", f"job.workload={workload}"])
        assert checked(config).job.prompts == config.job.prompts == str(tmp_path / name)
    with pytest.raises(ValueError, match="^job.workload=completion: is unknown; choose one of spec_bench, humaneval$"):
        load_quickly([f"job.prompts={tmp_path}"])
