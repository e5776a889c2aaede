"""`job=search`: the file of layers it writes, the curves, and a drafter that uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.self_speculation.layer_files import read_layers
from actors.options import SamplingConfig
from cluster.config.jobs import GenerateConfig, SearchConfig
from cluster.jobs import generate, search
from cluster.tools.planning.layer_choice import LayerValues
from tests.cluster.config.quick_loading import load_quickly

STRETCH = 2


@pytest.mark.extended
def test_the_layers_that_it_finds_draft(tiny_launch, write_prompts, tmp_path, one_free_thread, capsys):
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
    for curve in curves.values():
        assert [point[0] for point in curve] == sorted(point[0] for point in curve), "in the order of their times"
        assert [point[2] for point in curve][-1] >= max(point[1] for point in curve[:1])
    found_last = max((curve[-1] for curve in curves.values()), key=lambda point: point[2])
    assert found_last[3] == skipped, "the best of all methods is written"
    assert report["layers"] == str(tmp_path / "layers.json") and report["job"] == "search"
    assert (report["verify"], report["sampling"]["max_tokens"]) == ("coupled", 16)
    assert report["sampling"] == report["config"]["sampling"] and report["plain_pass_s"] > 0
    assert 1 <= report["num_draft_tokens"] <= 3 and report["pass_share"] > 0
    assert all(0 <= chance <= 1 for chance in report["acceptance"])
    shown = capsys.readouterr().out.replace("\n", "")
    expected = f"expected {report['expected_speedup']:.2f} times plain decoding with {report['num_draft_tokens']} draft"
    assert expected in shown and f"drafter.num_draft_tokens={report['num_draft_tokens']}" in shown
    assert (tmp_path / "search.png").stat().st_size > 1000

    found = str(tmp_path / "layers.json")
    named: Any = load_quickly(
        ["drafter=self", f"drafter.layers={found}", f"target.path={config.target.path}", f"target.stretch={STRETCH}"]
    ).drafter
    assert named.skip == skipped
    target = replace(config.target, stretch=STRETCH)
    run = replace(config, drafter=named, target=target, job=GenerateConfig(prompts=prompts, trace=False))
    generate.run(run, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["num_draft_tokens"] > 0
    with pytest.raises(ValueError, match=rf"drafter.layers=.* is for a target of {num_layers} layers, not"):
        load_quickly(["drafter=self", f"drafter.layers={found}", f"target.path={config.target.path}"])


def test_times_that_contradict_each_other_are_named(
    tiny_launch, write_prompts, tmp_path, one_free_thread, monkeypatch, capsys
):
    """A plain pass measured in a slow moment: three times as long as passes over more rows."""
    slow_at_first = [3.0, 1.0, 1.0, 1.0] + [0.1] * 3
    monkeypatch.setattr(LayerValues, "_pass_times", lambda *_: slow_at_first)
    out = tmp_path / "deep" / "er" / "found.json"
    job = SearchConfig(prompts=write_prompts({"prompt": "x = 1"}), methods=["random"], evaluations=3, out=str(out))
    sampling = SamplingConfig(max_tokens=16, ignore_eos=True)
    search.run(tiny_launch(job, drafter=SelfDrafterConfig(num_draft_tokens=3), sampling=sampling), tmp_path)
    report = json.loads((tmp_path / "search.json").read_text())
    assert report["layers"] == str(out) and read_layers(out)[1] == report["skip"]
    assert report["expected_speedup"] < report["num_draft_tokens"] + 1
    assert report["contradiction"] == "a pass of the target over 2 rows took 0.33 of the time of one over fewer"
    assert f"warning: {report['contradiction']}" in capsys.readouterr().out


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
            load_quickly(keys)
