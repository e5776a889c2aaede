"""`job=search`: the file of layers it writes, the curves, and a drafter that uses it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.self_speculation.layer_files import read_layers
from actors.options import SamplingConfig
from cluster.config.compose import load_config
from cluster.config.jobs import GenerateConfig, SearchConfig
from cluster.jobs import generate, search
from cluster.tools.planning.layer_choice import LayerValues

STRETCH = 2


def test_the_layers_that_it_finds_draft(tiny_launch, write_prompts, tmp_path, one_free_thread):
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"})
    job = SearchConfig(prompts=prompts, methods=["bayesian", "random", "swift"], evaluations=12)
    drafter = SelfDrafterConfig(num_draft_tokens=3, search_every=1, search_window=8, search_trials=5, skip_share=0.3)
    sampling = SamplingConfig(max_tokens=16, ignore_eos=True)
    config = tiny_launch(job, drafter=drafter, sampling=sampling)
    config = replace(config, target=replace(config.target, stretch=STRETCH))
    search.run(config, tmp_path)
    report = json.loads((tmp_path / "search.json").read_text())
    curves = report["curves"]
    assert len(curves["bayesian"]) == len(curves["random"]) == 12 and 0 < len(curves["swift"]) <= 5
    best = [point[2] for point in curves["bayesian"]]
    assert best == sorted(best) and best[-1] == max(point[1] for point in curves["bayesian"])
    num_layers, skipped = read_layers(tmp_path / "layers.json")
    assert skipped == report["skip"] and skipped and report["expected_speedup"] > 0
    assert (tmp_path / "search.png").stat().st_size > 1000

    found = str(tmp_path / "layers.json")
    named = load_config(
        ["drafter=self", f"drafter.layers={found}", f"target.path={config.target.path}", f"target.stretch={STRETCH}"]
    ).drafter
    assert named.skip == skipped
    target = replace(config.target, stretch=STRETCH)
    run = replace(config, drafter=named, target=target, job=GenerateConfig(prompts=prompts, trace=False))
    generate.run(run, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["num_draft_tokens"] > 0
    with pytest.raises(ValueError, match=rf"drafter.layers=.* is for a target of {num_layers} layers, not"):
        load_config(["drafter=self", f"drafter.layers={found}", f"target.path={config.target.path}"])


def test_times_that_contradict_each_other_are_named(
    tiny_launch, write_prompts, tmp_path, one_free_thread, monkeypatch, capsys
):
    """A plain pass measured in a slow moment: three times as long as passes over more rows."""
    slow_at_first = [3.0, 1.0, 1.0, 1.0] + [0.1] * 3
    monkeypatch.setattr(LayerValues, "_pass_times", lambda *_: slow_at_first)
    job = SearchConfig(prompts=write_prompts({"prompt": "x = 1"}), methods=["random"], evaluations=3)
    sampling = SamplingConfig(max_tokens=16, ignore_eos=True)
    search.run(tiny_launch(job, drafter=SelfDrafterConfig(num_draft_tokens=3), sampling=sampling), tmp_path)
    report = json.loads((tmp_path / "search.json").read_text())
    assert report["expected_speedup"] < report["num_draft_tokens"] + 1
    assert report["doubt"] == "a pass of the target over 2 rows took 0.33 of the time of one over fewer"
    assert f"warning: {report['doubt']}" in capsys.readouterr().out


def test_files_and_drafters_that_make_no_sense_are_refused(tmp_path):
    (tmp_path / "trees.json").write_text("[1]")
    (tmp_path / "words.json").write_text(json.dumps({"num_layers": 6, "skip": ["3m", "x"]}))
    for keys, error in (
        (["drafter=self", f"drafter.layers={tmp_path}/trees.json"], "is no choice of layers"),
        (["drafter=self", f"drafter.layers={tmp_path}/words.json"], "^drafter.layers=.*: names what is no sublayer"),
        (
            ["drafter=self", "drafter.search=swift", "drafter.exit=2"],
            "drafter.exit=2: is chosen by drafter.search=swift",
        ),
        (["job=search"], "job=search needs drafter=self"),
    ):
        with pytest.raises(ValueError, match=error):
            load_config(keys)
