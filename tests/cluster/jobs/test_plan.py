"""`job=plan` from models, or a file of costs, to files and the line to paste."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from cluster.config.jobs import PlanConfig
from cluster.jobs import plan
from cluster.tools.planning.cost_file import read_costs

ROOT = Path(__file__).parents[3]
FILES = {"plan.json", "plan.csv", "plan.png", "costs.yaml"}


@pytest.mark.extended
def test_plans_for_this_machine_and_tries_the_best(tiny_launch, write_prompts, tmp_path, capsys, one_free_thread):
    job = PlanConfig(
        prompts=write_prompts({"prompt": "Name a bird."}, {"prompt": "Write of a bird."}),
        draft_lengths=[1, 3],
        target_ranks=[1],
        parallels=["single"],
        pipelines=["sync"],
        seconds=0.1,
        trials=2,
        repeats=1,
    )
    plan.run(tiny_launch(job), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= FILES
    report = json.loads((tmp_path / "plan.json").read_text())
    layouts = report["layouts"]
    assert report["best"] == layouts[0] and [e["tokens_per_s"] for e in layouts] == sorted(
        (e["tokens_per_s"] for e in layouts), reverse=True
    )
    drafting = [entry for entry in layouts if entry["num_draft_tokens"]]
    assert drafting, "the drafter is the target: all its tokens are accepted"
    for entry in drafting:
        assert entry["tokens_per_round"] == pytest.approx(1 + entry["num_draft_tokens"], rel=0.02)
    tried = [entry for entry in layouts if entry["measured"]]
    assert len(tried) == 2
    for entry in tried:
        measured = entry["measured"]
        assert measured["round_ms_off"] == pytest.approx(entry["round_ms"] / measured["round_ms"] - 1)
    costs = yaml.safe_load((tmp_path / "costs.yaml").read_text())
    assert costs["acceptance"][0] == 1.0 and costs["link_ms"] > 0
    assert read_costs(tmp_path / "costs.yaml").target, "what was measured can be planned with again"
    rows = list(csv.DictReader((tmp_path / "plan.csv").open()))
    assert len(rows) == len(layouts) and rows[0]["overrides"] == " ".join(report["best"]["overrides"])
    shown = capsys.readouterr().out
    assert "Predicted and measured" in shown and "python -m cluster.launch" in shown


def test_plans_for_a_described_cluster(tiny_launch, tmp_path, capsys):
    costs = str(ROOT / "docs" / "plans" / "ssd-70b.yaml")
    choices = dict(draft_lengths=[6], target_ranks=[4], layer_groups=[2], pipelines=["sync", "branches"])
    plan.run(tiny_launch(PlanConfig(costs=costs, **choices)), tmp_path)
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["described"] is True and report["best"]["overrides"][1] == "pipeline=branches"
    plain = next(entry for entry in report["layouts"] if not entry["num_draft_tokens"])
    assert plain["tokens_per_s"] == pytest.approx(66, rel=0.01) and plain["over_plain"] == 1.0
    assert not [entry for entry in report["layouts"] if entry["measured"]]
    assert "target.tp=4" in capsys.readouterr().out


def test_plans_behind_a_text(tiny_launch, tmp_path):
    """A plain pass reads all of it."""
    file = tmp_path / "costs.yaml"
    file.write_text("target: [{pass_ms: 10, context_ms: 0.5}]\ndrafter: [{pass_ms: 1}]")
    found = {}
    for context in (0, 20_000):
        out = tmp_path / str(context)
        out.mkdir()
        plan.run(tiny_launch(PlanConfig(costs=str(file), context=context, pipelines=["sync"], draft_lengths=[4])), out)
        layouts = json.loads((out / "plan.json").read_text())["layouts"]
        found[context] = next(entry["round_ms"] for entry in layouts if not entry["num_draft_tokens"])
    assert found[0] < 11 and found[20_000] == pytest.approx(20, rel=0.05)


def test_refuses_what_cannot_be_planned(tiny_launch, tmp_path):
    costs = str(ROOT / "docs" / "plans" / "ssd-70b.yaml")
    with pytest.raises(ValueError, match="^job=plan: no layout fits"):
        plan.run(tiny_launch(PlanConfig(costs=costs, target_ranks=[3])), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_plans_a_fleet(tiny_launch, tmp_path, capsys):
    content = yaml.safe_load((ROOT / "docs" / "plans" / "three-regions.yaml").read_text())
    content["load"] |= {"seconds": 1.0, "warmup_s": 0.2, "requests_per_s": 30, "prompt": [16], "output": [8]}
    content["drafter"]["merging"] = ["calls"]
    content["losses"]["outages"] = [{"region": "west", "at_s": 0.5, "seconds": 0.2}]
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    out.mkdir()
    plan.run(tiny_launch(PlanConfig(fleet=str(tmp_path / "fleet.yaml"), pool_targets=[5])), out)
    assert {path.name for path in out.iterdir()} == {"fleet.json", "fleet.csv", "fleet.png"}
    report = json.loads((out / "fleet.json").read_text())
    found = report["layouts"]
    names = {"plain", "attached", "a drafter each", "pools of 5", "pools of 5 in central"}
    assert {entry["layout"] for entry in found} == names and report["best"] == found[0]
    fit = [entry["bears_load"] for entry in found]
    assert fit == sorted(fit, reverse=True), "layouts that bear the load come first"
    prices = [entry["dollars_per_million"] for entry in found if entry["bears_load"]]
    assert prices == sorted(prices), "of them, the cheapest tokens"
    assert sum(entry["num_different"] for entry in found) == 0 and found[0]["num_tokens"] > 100
    assert [one["name"] for one in report["fleet"]["regions"]] == ["east", "central", "west"]
    rows = list(csv.DictReader((out / "fleet.csv").open()))
    assert len(rows) == len(found) and rows[0]["targets east"] == str(found[0]["targets"]["east"])
    shown = capsys.readouterr().out
    assert "dollars per million tokens" in shown and "differ from plain decoding, in all layouts: 0" in shown


def test_a_fleet_that_cannot_be_planned_is_one_line(tiny_launch, tmp_path):
    with pytest.raises(ValueError, match=r"^job\.fleet=.*cannot be read"):
        plan.run(tiny_launch(PlanConfig(fleet=str(tmp_path / "none.yaml"))), tmp_path)
    with pytest.raises(ValueError, match=r"job\.fleet.*replaces job\.costs"):
        PlanConfig(fleet="a.yaml", costs="b.yaml").check("job")
