"""`job=generate` from prompts to files, on a tiny pair in this process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.options import PipelineConfig, PipelineName
from actors.protocol.messages import RequestStats
from cluster.completion import EngineError
from cluster.config.jobs import GenerateConfig, VocabularyConfig
from cluster.io.prompts import Prompt
from cluster.io.text import load_tokenizer
from cluster.jobs import generate, vocabulary
from cluster.observability.report import Circumstances, RunFigures, write_json
from cluster.observability.results import Served
from parallel.whole_files import WriteError
from tests.full_disk import full_disk

FILES = {"completions.jsonl", "report.json", "timeline.json", "timeline.png", "logs"}


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_writes_completions_report_and_timeline(tiny_launch, write_prompts, tmp_path, capsys):
    prompts = write_prompts(
        {"prompt": "def median(values):", "source": "statistics.py", "max_tokens": 1},
        {"turns": ["Name a bird."], "category": "qa", "question_id": 7},
    )
    config = tiny_launch(GenerateConfig(prompts=prompts, concurrency=2))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    generate.run(config, run_dir)

    assert {path.name for path in run_dir.iterdir()} == FILES
    lines = sorted(read_lines(run_dir / "completions.jsonl"), key=lambda line: line["index"])
    assert [line["prompt"] for line in lines] == ["def median(values):", "Name a bird."]
    assert lines[0]["source"] == "statistics.py" and lines[1]["question_id"] == 7
    tokenizer = load_tokenizer(Path(config.target.path))
    for line in lines:
        assert line["finish_reason"] == "length" and line["error"] is None
        assert len(line["token_ids"]) == 13 and line["text"] == tokenizer.decode(line["token_ids"])
        metrics = line["metrics"]["speculative_decoding"]
        assert metrics["num_spec_steps"] == 3 and metrics["num_spec_tokens"] == 3  # 1 + 3 rounds of 3 and a bonus
        assert metrics["mean_acceptance_length"] == 4.0 and metrics["acceptance_histogram"] == [0, 0, 0, 3]
        assert 0 < line["metrics"]["ttft_s"] < line["metrics"]["latency_s"]

    report = json.loads((run_dir / "report.json").read_text())
    assert RunFigures.__annotations__.keys() | Circumstances.__annotations__.keys() <= set(report)
    assert report["tokens"] == 26 and report["tokens_equal_plain"] is True
    assert report["mean_acceptance_length"] == 4.0 and report["per_position_acceptance"] == [1.0, 1.0, 1.0]
    assert report["speedup_vs_ar"] == pytest.approx(report["tokens_per_s"] / report["plain_tokens_per_s"])
    own = f"an engine of its own, {(count := len(os.sched_getaffinity(0)))} thread{'s' * (count > 1)}"
    assert report["baseline"] == own, "beside a drafter on the same cores plain decoding is slower"
    assert 0 < report["target_busy"] <= 1 and 0 < report["draft_busy"] <= 1
    assert 0 < report["round_overhead_ms"] < report["round_ms"]
    assert list(report["startup_s"]) == ["imports", "cluster", "processes", "loading", "first_token", "total"]
    assert report["bytes_per_role"]["target"]["weights"] > 0 and report["interrupted"] is False
    assert [rank["identity"] for rank in report["layout"]] == ["target-0", "draft-0"]

    trace = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    assert {event["cat"] for event in trace if event["ph"] == "X"} == {"target", "draft", "messages"}
    shown = capsys.readouterr().out
    assert "speed-up" in shown and "all equal" in shown
    assert f"note: job.prompts={prompts}: max_tokens of its lines are not read" in shown
    for label, value in {
        "requests": "2, 0 failed",
        "tokens": f"26 in {report['wall_s']:.1f} s",
        "speed": f"{report['tokens_per_s']:,.1f} tokens/s",
        "speed, plain decoding": f"{report['plain_tokens_per_s']:,.1f} tokens/s; {own}",
        "speed-up over plain decoding": f"{report['speedup_vs_ar']:.2f}x",
        "time to first token": f"{1e3 * report['ttft_s']['median']:.1f} ms, median",
        "time per later token": f"{report['decode_ms_per_token']:.2f} ms",
        "the same, plain decoding": f"{report['plain']['decode_ms_per_token']:.2f} ms",
        "mean acceptance length": "4.00 tokens per target pass with a draft",
        "draft tokens accepted": "100%",
        "busy": f"target {report['target_busy']:.0%}, drafter {report['draft_busy']:.0%} of the time",
        "round with a draft": f"{report['round_ms']:.2f} ms, most of it: {report['bound_by']}",
        "round overhead": f"{report['round_overhead_ms']:.2f} ms in which",
    }.items():
        assert re.search(rf"^ *{re.escape(label)}  +{re.escape(value)}", shown, re.M), label
    last = shown.splitlines()[-1]
    assert "plain decoding" in last and last.endswith(
        f"report.json, completions.jsonl, timeline.png, logs in {run_dir}"
    )
    (log,) = (run_dir / "logs").iterdir()
    text = log.read_text()
    for event in ("event=ready", "event=window phase=speculative", "event=finished request=3 reason=length tokens="):
        assert event in text, text


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "1.25x the speed of plain decoding"),
        ({"speedup_vs_ar": 0.9}, "slower than plain decoding (0.90x); most of a round with a draft went to: drafter"),
        ({"speedup_vs_ar": 0.9, "num_spec_steps": 0}, "no draft was verified: plain decoding, at 0.90x of what"),
        ({"num_spec_steps": None, "num_guessed_states": 4}, "1.25x the speed of plain decoding"),
        ({"speedup_vs_ar": 0.997}, "1.00x the speed of plain decoding"),
        ({"speedup_vs_ar": 0.9, "role_losses": {"draft": 2}}, "processes were lost: draft 2 times"),
        ({"num_unequal_requests": 1}, "tokens of 1 requests differ from plain decoding"),
        ({"num_unequal_requests": 1, "notes": ["keeps the law, not its tokens"]}, "1.25x the speed of plain decoding"),
        ({"num_unequal_requests": 1, "num_failed": 3}, "3 requests failed"),
        ({"interrupted": True, "speedup_vs_ar": None}, "interrupted: the figures are of what was generated before"),
        ({"speedup_vs_ar": None}, "80.0 tokens/s, not compared"),
    ],
)
def test_the_last_line_names_what_deserves_a_look(changed, line):
    report = {
        "num_failed": 0,
        "num_unequal_requests": 0,
        "interrupted": False,
        "role_losses": {},
        "speedup_vs_ar": 1.25,
        "tokens_per_s": 80.0,
        "bound_by": "drafter",
        "num_spec_steps": 7,
        "num_guessed_states": None,
        "notes": [],
    }
    assert generate.finding(report | changed).startswith(line)


def test_a_line_has_every_field_of_its_request():
    stats = RequestStats(2, 6, 3, (0, 1, 1), 5)
    prompt = Prompt("a", category="qa")
    served = Served(7, prompt, (3, 4), "xy", "length", None, stats, 0.25, 0.75)
    assert generate.completion_record(served, 3) == {
        "index": 7,
        "prompt": "a",
        **prompt.labels(),
        "text": "xy",
        "token_ids": [3, 4],
        "finish_reason": "length",
        "error": None,
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 2.5,
                "draft_acceptance_rate": 0.5,
                "acceptance_histogram": [0, 1, 1, 0],
                "num_spec_steps": 2,
                "num_accepted_draft_tokens": 3,
                "num_draft_tokens": 6,
                "num_spec_tokens": 3,
            },
            "ttft_s": 0.25,
            "latency_s": 0.75,
            "num_preemptions": 5,
        },
    }


@pytest.mark.extended
def test_plain_decoding_reads_the_prompts_as_speculation_had_to(tiny_launch, write_prompts, tmp_path, monkeypatch):
    """The second of two equal prompts is found in the cache, those of another run are not."""
    serve, hits = generate.serve_prompts, dict[str, int]()

    def counted(*arguments, **how):
        served = serve(*arguments, **how)
        hits[how["phase"]] = served.counters["prefix_cache_hits"]
        return served

    monkeypatch.setattr(generate, "serve_prompts", counted)
    prompts = write_prompts(*[{"prompt": "some text"}] * 2)
    generate.run(
        tiny_launch(GenerateConfig(prompts=prompts), drafter=SuffixDrafterConfig(num_draft_tokens=3)), tmp_path
    )
    assert hits["speculative"] == hits["plain"] > 0


def test_a_refused_prompt_is_recorded_and_the_others_run(tiny_launch, write_prompts, tmp_path):
    prompts = write_prompts({"prompt": "x"}, {"prompt": "long " * 200}, {"prompt": "y"})
    config = tiny_launch(GenerateConfig(prompts=prompts, baseline=False, trace=False), drafter=NoDrafterConfig())
    with pytest.raises(EngineError, match=r"^1 of 3 requests failed; prompt 2: prompt: 1000 tokens do not fit"):
        generate.run(config, tmp_path)
    lines = read_lines(tmp_path / "completions.jsonl")
    assert [len(line["token_ids"]) for line in lines] == [13, 0, 13]
    assert "do not fit the context" in lines[1]["error"] and lines[1]["finish_reason"] == "error"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_failed"] == 1 and report["tokens"] == 26
    assert report["plain_tokens_per_s"] is None and report["speedup_vs_ar"] is None
    assert report["mean_acceptance_length"] is None and report["num_spec_steps"] == 0
    assert not (tmp_path / "timeline.json").exists()


@pytest.mark.extended
def test_an_interrupt_leaves_a_report_of_what_there_is(tiny_launch, write_prompts, tmp_path, monkeypatch):
    prompts = write_prompts(*({"prompt": f"prompt {number}"} for number in range(5)))
    record = generate.completion_record

    def interrupted_at_third(served, num_spec_tokens):
        if served.index == 2:
            raise KeyboardInterrupt
        return record(served, num_spec_tokens)

    monkeypatch.setattr(generate, "completion_record", interrupted_at_third)
    with pytest.raises(KeyboardInterrupt):
        generate.run(tiny_launch(GenerateConfig(prompts=prompts)), tmp_path)
    assert [line["index"] for line in read_lines(tmp_path / "completions.jsonl")][:2] == [0, 1]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] is True and report["tokens"] >= 26 and report["plain_tokens_per_s"] is None


def test_plain_decoding_that_was_interrupted_is_compared_with_nothing(
    tiny_launch, write_prompts, tmp_path, monkeypatch
):
    serve = generate.serve_prompts

    def cut(*args, phase, **how):
        run = serve(*args, phase=phase, **how)
        run.interrupted = phase == "plain"
        return run

    monkeypatch.setattr(generate, "serve_prompts", cut)
    prompts = write_prompts({"prompt": "a prompt"})
    with pytest.raises(KeyboardInterrupt):
        generate.run(tiny_launch(GenerateConfig(prompts=prompts, trace=False), drafter=SuffixDrafterConfig()), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] is True and report["plain"]["tokens"] > 0
    assert report["plain_tokens_per_s"] is None and report["speedup_vs_ar"] is None


def test_bad_prompts_are_refused_before_an_engine_starts(tiny_launch, write_prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "Engine", None)  # starting it would fail otherwise than in words
    with pytest.raises(ValueError, match="line 1 has an empty prompt"):
        generate.run(tiny_launch(GenerateConfig(prompts=write_prompts({"prompt": ""}))), tmp_path)


def test_a_drafter_that_the_engine_will_not_have_is_refused_before_it_starts(
    tiny_launch, write_prompts, tmp_path, monkeypatch
):
    for job in (generate, vocabulary):
        monkeypatch.setattr(job, "Engine", None)
    prompts = write_prompts({"prompt": "x", "drafter": "model"}, {"prompt": "x", "drafter": "medusa"})
    for run, job in (
        (generate.run, GenerateConfig(prompts=prompts)),
        (vocabulary.run, VocabularyConfig(prompts=prompts)),
    ):
        with pytest.raises(ValueError, match="line 2: the engine has no drafter 'medusa'; name one of model, none, or"):
            run(tiny_launch(job), tmp_path)
    plain = tiny_launch(GenerateConfig(prompts=prompts), pipeline=PipelineConfig(PipelineName.plain))
    with pytest.raises(
        ValueError, match="line 1: the engine has no drafter 'model'; name one of none, or leave it out"
    ):
        generate.run(plain, tmp_path)


def test_a_resumed_run_completes_what_is_left_and_nothing_twice(tiny_launch, write_prompts, tmp_path, monkeypatch):
    config = tiny_launch(
        GenerateConfig(
            prompts=write_prompts(*({"prompt": f"prompt {number}"} for number in range(4))),
            baseline=False,
            trace=False,
            resume=True,
        )
    )
    generate.run(config, tmp_path)
    path = tmp_path / "completions.jsonl"
    whole = path.read_text().splitlines()
    path.write_text(f"{whole[1]}\n{whole[3]}\n{whole[2][:30]}")
    generate.run(config, tmp_path)
    lines = read_lines(path)
    assert [line["index"] for line in lines] == [1, 3, 0, 2]
    assert [line["token_ids"] for line in lines] == [json.loads(whole[i])["token_ids"] for i in (1, 3, 0, 2)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["num_resumed"], report["num_requests"]) == (2, 2)

    monkeypatch.setattr(generate, "Engine", None)  # with nothing left, none is started
    generate.run(config, tmp_path)
    assert read_lines(path) == lines
    assert json.loads((tmp_path / "report.json").read_text()) == report
    (tmp_path / "report.json").unlink()  # as if it had been killed before its first
    generate.run(config, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["num_resumed"], report["num_requests"], report["interrupted"]) == (4, 0, False)


@pytest.mark.extended
def test_a_run_that_is_killed_has_a_report(tiny_launch, write_prompts, tmp_path, monkeypatch):
    """A kill comes at different moments: before the first of three requests, after each, and while plain decoding is
    timed."""
    prompts = write_prompts(*({"prompt": f"prompt {number}"} for number in range(3)))
    monkeypatch.setattr(generate, "REPORT_EVERY_S", 0.0)
    seen = []

    def written(path, content):
        write_json(path, content)
        seen.append(json.loads(path.read_text()))

    monkeypatch.setattr(generate, "write_json", written)
    generate.run(tiny_launch(GenerateConfig(prompts=prompts)), tmp_path)
    assert [report["num_requests"] for report in seen] == [0, 1, 2, 3, 3, 3]
    assert [report["interrupted"] for report in seen] == [True, True, True, True, True, False]
    assert all(report["tokens"] == 13 * report["num_requests"] for report in seen)
    assert all(report["wall_s"] > 0 for report in seen[1:])
    assert [report["num_spec_steps"] is None for report in seen] == [True, True, True, True, False, False]


def test_a_full_disk_keeps_what_was_finished_and_the_rest_can_be_resumed(tiny_launch, write_prompts, tmp_path):
    prompts = write_prompts(*({"prompt": f"word {i}", "source": "x" * 20_000} for i in range(4)))
    config = tiny_launch(GenerateConfig(prompts=prompts, concurrency=1, resume=True, baseline=False, trace=False))
    with full_disk(50_000), pytest.raises(WriteError, match=rf"^{tmp_path}/completions.jsonl: cannot be written"):
        generate.run(config, tmp_path)
    kept = read_lines(tmp_path / "completions.jsonl")
    assert 0 < len(kept) < 4 and all(line["finish_reason"] == "length" for line in kept)
    generate.run(config, tmp_path)
    lines = read_lines(tmp_path / "completions.jsonl")
    assert lines[: len(kept)] == kept and sorted(line["index"] for line in lines) == [0, 1, 2, 3]
