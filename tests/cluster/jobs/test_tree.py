"""`job=tree`: acceptance by rank, the file, and a drafter that grows its trees."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.fixed_trees import read_trees
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import SamplingConfig, VerifyConfig, VerifyRule
from actors.protocol.messages import TokenTree
from cluster.config.compose import load_config
from cluster.config.jobs import GenerateConfig, TreeConfig
from cluster.jobs import generate, tree
from cluster.tools.bench.rounds import CountedRound, acceptance_by_rank
from parallel.speculators.heads.training import HeadsOptions, build
from parallel.training.interface import TargetShape
from tests.actors.small_speculators import train_speculator


def test_ranks_are_counted_among_siblings_below_the_root():
    whole = TokenTree((0, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 2))
    rounds = [CountedRound(0, whole, path) for path in ((2, 5), (1, 3), (2,), ())]
    assert [one.ranks() for one in rounds] == [[1, 1], [0, 0], [1], []]
    assert acceptance_by_rank(rounds, 3) == [0.25, 0.5, 0.0] and [one.num_tokens for one in rounds] == [3, 3, 2, 1]


@pytest.mark.extended
@pytest.mark.parametrize("rule", [pytest.param(VerifyRule.coupled, marks=pytest.mark.slow), VerifyRule.rejection])
def test_the_trees_of_a_perfect_drafter_are_chains_and_the_engine_grows_them(
    tiny_launch, write_prompts, tmp_path, one_free_thread, capsys, rule
):
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"})
    options = {"verify": VerifyConfig(rule, law_size=10**6), "sampling": SamplingConfig(temperature=1.0, max_tokens=13)}
    out = tmp_path / "deep" / "er" / "trees.json"
    job = TreeConfig(prompts=prompts, nodes=4, depth=3, width=3, out=str(out))
    config = tiny_launch(job, **options)
    tree.run(config, tmp_path)
    out.rename(tmp_path / "trees.json")
    found = json.loads((tmp_path / "trees.json").read_text())
    assert found["acceptance"] == [1.0, 0.0, 0.0] and found["verify"] == rule
    about = json.loads((tmp_path / "tree_report.json").read_text())
    assert {name: about[name] for name in ("acceptance", "rounds", "verify", "sampling")} == {
        "acceptance": [1.0, 0.0, 0.0],
        "rounds": 2 * 7,  # two tokens a round, until each prompt has 13 more
        "verify": rule,
        "sampling": about["config"]["sampling"],
    }
    assert (about["job"], about["trees"]) == ("tree", str(out))
    assert (about["config"]["job"]["nodes"], about["sampling"]["temperature"]) == (4, 1.0)
    shown = capsys.readouterr().out.replace("\n", "")
    assert "acceptance by rank: 1.000, 0.000, 0.000, over 14 rounds" in shown
    assert "the largest is expected to give 3.00" in shown and "drafter.num_draft_tokens=4" in shown
    assert read_trees(tmp_path / "trees.json")[:3] == [(-1, 0), (-1, 0, 1), (-1, 0, 1, 2)]
    drafter = replace(config.drafter, strategy=Strategy.tree, tree=str(tmp_path / "trees.json"), num_draft_tokens=3)
    generate.run(replace(config, drafter=drafter, job=GenerateConfig(prompts=prompts, trace=False)), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["draft_acceptance_rate"] == 1.0 and report["acceptance_histogram"][3] > 0


@pytest.mark.extended
def test_trees_fitted_to_heads_are_no_deeper_than_they(tiny_launch, write_prompts, tmp_path, one_free_thread):
    """Fresh Medusa heads say what the target says one token before."""
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"})
    config = tiny_launch(TreeConfig(prompts=prompts, nodes=9, depth=8, width=3))
    model: Any = AutoModelForCausalLM.from_pretrained(config.target.path)
    tables = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    heads = build(HeadsOptions("medusa", heads=2), TargetShape(model.config, *tables, torch.ones(len(tables[0]))))
    heads.save(tmp_path / "heads")
    speculator = SpeculatorDrafterConfig(path=str(tmp_path / "heads"), num_draft_tokens=9)
    target = ["target=hf", f"target.path={config.target.path}"]
    named = load_config(["job=tree", *target, "drafter=speculator", f"drafter.path={tmp_path}/heads"]).drafter
    assert isinstance(named, SpeculatorDrafterConfig) and named.path == speculator.path
    tree.run(replace(config, drafter=speculator), tmp_path)
    shapes = read_trees(tmp_path / "trees.json")
    assert max(max(TokenTree(shape, shape).depths()) for shape in shapes) <= 2
    assert json.loads((tmp_path / "trees.json").read_text())["rounds"] > 2
    drafter = replace(speculator, strategy=Strategy.tree, tree=str(tmp_path / "trees.json"))
    generate.run(replace(config, drafter=drafter, job=GenerateConfig(prompts=prompts, trace=False)), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    "recipe", ["kangaroo", *(pytest.param(one, marks=pytest.mark.slow) for one in ("streaming", "s3d"))]
)
def test_speculators_on_the_targets_layers_are_counted_too(
    tiny_launch, write_prompts, tmp_path, one_free_thread, recipe
):
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"})
    config = tiny_launch(TreeConfig(prompts=prompts, nodes=4, depth=3, width=3, out=str(tmp_path / "trees.json")))
    model: Any = AutoModelForCausalLM.from_pretrained(config.target.path)
    path = train_speculator(recipe, model, tmp_path, tmp_path / "speculator")
    tree.run(replace(config, drafter=SpeculatorDrafterConfig(path=str(path), num_draft_tokens=4)), tmp_path)
    assert sum(json.loads((tmp_path / "trees.json").read_text())["acceptance"]) > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["drafter=model", "drafter.strategy=tree", "drafter.tree=README.md"],
            "drafter.tree=README.md: is no file of trees",
        ),
        (["drafter=model", "drafter.strategy=tree", "drafter.tree=nowhere"], "drafter.tree=nowhere: no such file"),
        (
            ["drafter=model", "drafter.tree=x"],
            "drafter.tree=x: is the shape of a fixed tree; add drafter.strategy=tree",
        ),
        (["job=tree", "drafter=ngram"], "drafter.name=ngram: has no tree of a fixed shape"),
        (["job=tree", "verify=block"], "verify.rule=block: is for chains"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides, line):
    with pytest.raises(ValueError, match=line):
        load_config(overrides)


def test_a_file_of_trees_is_found_from_anywhere(tmp_path):
    (tmp_path / "trees.json").write_text('{"format": "specdec trees 1", "trees": [[-1, 0, 0]]}')
    drafter = load_config(["drafter=model", "drafter.strategy=tree", f"drafter.tree={tmp_path}/trees.json"]).drafter
    assert isinstance(drafter, ModelDrafterConfig) and drafter.tree == f"{tmp_path}/trees.json"
