"""`job=bench` from axes to files, on a tiny pair in this process, with transformers as a peer."""

from __future__ import annotations

import csv
import json
import os
import shutil

import pytest

from cluster.config.jobs import BenchConfig
from cluster.jobs import bench
from cluster.observability.report import RunFigures
from cluster.tools.bench import trials

FILES = {"report.json", "bench.csv", "bench.md", "bench.png", "acceptance.png", "drafters.png"}


@pytest.fixture
def prompts(write_prompts):
    return write_prompts(
        {"turns": ["Name a bird."], "category": "qa"}, {"turns": ["Write of a bird."], "category": "writing"}
    )


@pytest.mark.extended
@pytest.mark.parametrize("batches", [[1], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_times_every_setting_against_plain_decoding_and_peers(tiny_launch, prompts, tmp_path, capsys, batches):
    job = BenchConfig(
        prompts=prompts,
        repeats=2,
        warmup=0,
        drafters=["model", "ngram"],
        batches=batches,
        draft_lengths=[3],
        peers=["transformers"],
    )
    bench.run(tiny_launch(job), tmp_path)

    assert {path.name for path in tmp_path.iterdir()} >= FILES
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is True and report["machine"]["num_cores"] >= 1
    entries = {entry["name"]: entry for entry in report["settings"]}
    first, second = (f" b={batch}" if len(batches) > 1 else "" for batch in (1, 2))  # an axis of one value is not named
    names = [f"{drafter} k=3{batch}" for drafter in ("model", "ngram") for batch in (first, second)[: len(batches)]]
    assert list(entries) == names
    for entry in entries.values():
        assert set(RunFigures.__annotations__) <= set(entry)
        assert entry["tokens"] == 26 and entry["tokens_equal_plain"] is True and entry["repeats"] == 2
        ratio = entry["ratios"]["speculative / plain"]
        assert ratio["min"] <= ratio["median"] == entry["speedup_vs_ar"] <= ratio["max"]
        assert set(entry["categories"]) == {"qa", "writing"}
        (held,) = entry["resident_bytes"].values()  # of the one process of all threads
        assert held > 1e7
        role = entry["bytes_per_role"].get("draft")  # a lookup holds nothing
        assert entry["drafter_bytes"] == (role or {"weights": 0, "kv": 0})
        assert (entry["mbsu"] is None) == (entry["mean_acceptance_length"] is None)
    assert 0 < entries[f"model k=3{first}"]["mbsu"] < 4
    assert (
        entries[f"model k=3{first}"]["drafter_bytes"]["weights"] > 0 < entries[f"model k=3{first}"]["draft_share"] < 1
    )
    alone, count = entries[f"model k=3{first}"], len(os.sched_getaffinity(0))
    baselines = {"model": "an engine of its own", "ngram": "the same engine"}
    assert all(entry["baseline"].partition(",")[0] == baselines[name.split()[0]] for name, entry in entries.items())
    assert all(entry["num_threads"] == dict.fromkeys(("target", "plain", "peers"), count) for entry in entries.values())
    assert alone["mean_acceptance_length"] == 4.0 and alone["categories"]["qa"]["mean_acceptance_length"] == 4.0
    assert set(alone["sides"]) == {"speculative", "plain", "transformers", "transformers draft model"}
    lookup = entries[f"ngram k=3{first}"]["sides"]
    assert set(lookup) == {"speculative", "plain", "transformers", "transformers prompt lookup"}
    assert report["peers"]["transformers"]["arithmetic"] == "float32"
    for name in (f"model k=3{first}", f"ngram k=3{first}"):
        for side in entries[name]["sides"].values():
            assert side["num_unequal_requests"] == 0 and side["tokens"] == 26 and side["equal_share"] == 1.0

    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [row["name"] for row in rows] == list(entries)
    assert float(rows[0]["speculative / plain"]) == alone["speedup_vs_ar"]
    assert float(rows[0]["transformers draft model tokens_per_s"]) > 0
    assert float(rows[0]["ms_per_draft"]) > 0
    assert float(rows[0]["prediction_error"]) > -1  # how far the formula is off depends on what else runs
    if len(batches) > 1:
        assert set(entries[f"model k=3{second}"]["sides"]) == {"speculative", "plain"}
        assert rows[1]["transformers tokens_per_s"] == ""
        assert rows[1]["predicted_tokens_per_s"] == ""  # two requests at a time are not what the formula describes
    assert (tmp_path / "bench.md").read_text().count("model k=3") == len(batches)
    assert float(rows[len(batches)]["writing: speculative / plain"]) > 0
    shown = capsys.readouterr().out
    assert "Other engines" in shown and "category" in shown and "all processes of this run" in shown


@pytest.mark.slow
def test_contexts_and_temperatures_are_axes(tiny_launch, prompts, tmp_path):
    job = BenchConfig(prompts=prompts, limit=1, repeats=1, warmup=0, contexts=[40, 300], temperatures=[0.0, 1.0])
    bench.run(tiny_launch(job), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [entry["setting"]["context"] for entry in report["settings"]] == [40, 300, 40, 300]
    assert all(entry["tokens_equal_plain"] for entry in report["settings"])


@pytest.mark.extended
def test_workloads_are_an_axis(tiny_launch, tmp_path, prompts, capsys):
    folder = tmp_path / "sets"
    (folder / "spec_bench").mkdir(parents=True)
    shutil.copy(prompts, folder / "spec_bench/question.jsonl")
    (folder / "humaneval.jsonl").write_text('{"task_id": "HumanEval/0", "prompt": "def f():"}')
    job = BenchConfig(prompts=str(folder), limit=1, repeats=1, warmup=0, workloads=["spec_bench", "humaneval"])
    bench.run(tiny_launch(job), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [entry["setting"]["workload"] for entry in report["settings"]] == ["spec_bench", "humaneval"]
    assert [list(entry["categories"]) for entry in report["settings"]] == [["qa"], []]
    assert "category" in capsys.readouterr().out


@pytest.mark.extended
def test_an_interrupt_keeps_the_repeats_that_were_finished(tiny_launch, prompts, tmp_path, monkeypatch):
    serve, calls = trials.serve_prompts, []

    def interrupted_in_second_repeat(*arguments, **options):
        calls.append(options)
        run = serve(*arguments, **options)
        run.interrupted = len(calls) == 2  # plain decoding runs in another process
        return run

    monkeypatch.setattr(trials, "serve_prompts", interrupted_in_second_repeat)
    with pytest.raises(KeyboardInterrupt):
        bench.run(tiny_launch(BenchConfig(prompts=prompts, repeats=3, warmup=0)), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is False and report["settings"][0]["repeats"] == 1


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ({"contexts": [510]}, "job.contexts=510: with sampling.max_tokens=13 it exceeds the context of 512"),
        ({"peers": ["magic"]}, "job.peers=magic: is unknown"),
        ({"drafters": ["eagle"]}, "job.drafters=eagle: no such choice"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(tiny_launch, prompts, tmp_path, axes, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        bench.run(tiny_launch(BenchConfig(prompts=prompts, **axes)), tmp_path)
    assert not (tmp_path / "report.json").exists()
