from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.config import NoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.options import Parallel, PipelineConfig, PipelineName
from cluster import pocket
from cluster.config.jobs import BenchConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.tools.bench.plan import expand, setting_names
from cluster.tools.bench.trials import EnginePool, may_share


@pytest.fixture
def bench_launch(tiny_launch, write_prompts):
    prompts = write_prompts({"prompt": "x"})
    return lambda **axes: tiny_launch(BenchConfig(prompts=prompts, **axes))


def test_empty_axes_stay_as_configured(bench_launch):
    config = bench_launch()
    (setting,) = expand(config)
    assert setting.drafter == config.drafter and setting.pipeline == config.pipeline
    assert (setting.temperature, setting.batch, setting.context) == (0.0, 1, 0)
    assert setting.configure(config) == config


def test_every_combination_once(bench_launch):
    settings = expand(
        bench_launch(drafters=["ngram", "none"], draft_lengths=[2, 4], batches=[1, 4], temperatures=[0, 1])
    )
    assert len(settings) == (2 + 1) * 2 * 2  # a drafter of none has no length
    assert {setting.drafter for setting in settings} == {
        NgramDrafterConfig(num_draft_tokens=2),
        NgramDrafterConfig(num_draft_tokens=4),
        NoDrafterConfig(),
    }
    assert len({setting.engine_key for setting in settings}) == 3


def test_the_configured_choice_keeps_its_keys(bench_launch):
    config = bench_launch(drafters=["ngram"], pipelines=["plain", "sync"])
    config = replace(config, drafter=NgramDrafterConfig(max_ngram=9))
    settings: Any = expand(config)
    assert {setting.drafter.max_ngram for setting in settings} == {9}
    names_ = (PipelineName.plain, PipelineName.sync)
    assert [setting.pipeline for setting in settings] == [PipelineConfig(name, adaptive=False) for name in names_]


def test_lengths_that_are_compared_are_kept(bench_launch):
    config = bench_launch(pipelines=["plain", "tree"], draft_lengths=[2, 3])
    config = replace(config, pipeline=PipelineConfig(min_draft_tokens=3))
    assert not any(setting.pipeline.adaptive for setting in expand(config))
    assert setting_names(expand(config))[-1] == "model k=3 tree"


def test_other_pipelines_keep_the_keys_of_the_configured_one(bench_launch):
    config = replace(bench_launch(pipelines=["plain", "tree"]), pipeline=PipelineConfig(adaptive=True))
    assert [setting.pipeline.adaptive for setting in expand(config)] == [True, True]
    assert setting_names(expand(config)) == ["model k=3 plain", "model k<=3 tree"]


def test_a_setting_carries_its_temperature_into_the_sampling(bench_launch):
    config = bench_launch(temperatures=[0.5])
    assert expand(config)[0].configure(config).sampling.temperature == 0.5


def test_a_draft_model_is_shared_in_every_way_on_the_same_ranks(bench_launch, tiny_checkpoint):
    config = bench_launch(parallels=["single", "tensor", "layer"])
    path = str(tiny_checkpoint("Llama", num_hidden_layers=5))
    drafter = replace(config.drafter, path=path, parallel=Parallel.layer, ranks=2, layer_group=2)
    settings: Any = expand(replace(config, drafter=drafter))
    shared = [(one.drafter.parallel, one.drafter.ranks, one.drafter.layer_group) for one in settings]
    assert shared == [("single", 1, 0), ("tensor", 2, 0), ("layer", 2, 2)]
    assert setting_names(settings) == ["model k=3 single", "model k=3 tensor", "model k=3 layer"]


def test_only_layers_side_by_side_have_a_partition(bench_launch, tiny_checkpoint):
    config = bench_launch(parallels=["single", "tensor", "layer"])
    path = str(tiny_checkpoint("Llama", num_hidden_layers=5))
    sizes = [[0], [1, 2], [3, 4]]
    drafter = replace(config.drafter, path=path, parallel=Parallel.layer, ranks=2, layer_partition=sizes)
    settings: Any = expand(replace(config, drafter=drafter))
    assert [one.drafter.layer_partition for one in settings] == [[], [], sizes]


def test_a_drafter_is_a_name_or_its_keys_or_the_levels_of_a_cascade(bench_launch):
    deep = {"name": "model", "path": "pocket-deep"}
    auto = {"name": "cascade", "levels": ["ngram", "model"], "lengths": "auto"}
    config = bench_launch(drafters=["ngram", deep, ["ngram", deep], auto])
    config = replace(config, target=replace(config.target, path=str(pocket.TARGET)))
    settings: Any = expand(config)
    assert setting_names(settings) == ["ngram k=5", "pocket-deep k=5", "ngram+pocket-deep k=5", "ngram+model auto k=5"]
    assert settings[2].drafter.levels[1] == settings[1].drafter
    assert len({setting.engine_key for setting in settings}) == 4


def test_placements_and_shapes_are_distinguished(bench_launch):
    attached = {"name": "ngram", "placement": "attached"}
    tree = {"name": "model", "strategy": "best_first", "placement": "attached"}
    config = bench_launch(drafters=["ngram", attached, tree])
    config = replace(config, target=replace(config.target, path=str(pocket.TARGET)))
    assert setting_names(expand(config)) == ["ngram k=5", "ngram attached k=5", "model best_first attached k=5"]


def test_names_of_self_drafts_say_which_layers_and_those_of_modules_which_run(bench_launch, tmp_path):
    trained = shutil.copytree(pocket.SPECULATOR, tmp_path / "mine" / "drafter")
    chosen = [{"exit": 4}, {"skip": ["3m", 4]}, {"search": "swift"}]
    drafters = [
        *({"name": "self", "num_draft_tokens": 3} | one for one in chosen),
        {"name": "speculator", "path": str(trained)},
    ]
    config = bench_launch(drafters=drafters)
    config = replace(config, target=replace(config.target, path=str(pocket.TARGET)))
    names = ["self exit=4 k=3", "self skip=3m+4 k=3", "self swift k=3"]
    assert setting_names(expand(config)) == [*names, "mine k=5"]


def test_workloads_share_the_engines(bench_launch):
    config = bench_launch(workloads=["completion", "agent"])
    settings = expand(replace(config, job=replace(config.job, prompts="")))
    assert setting_names(settings) == ["model k=3 completion", "model k=3 agent"]
    assert len({setting.engine_key for setting in settings}) == 1


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ({"drafters": [{"path": "x"}]}, "job.drafters={'path': 'x'}: has no known name; choose from none, model"),
        ({"drafters": [{"name": "ngram", "depth": 3}]}, "job.drafters.depth"),
        ({"drafters": [["ngram"]]}, "drafter.levels=['ngram']: must be at least two"),
        (
            {"drafters": ["eagle"]},
            "job.drafters=eagle: no such choice; choose from none, model, speculator, self, ngram",
        ),
        ({"pipelines": ["zigzag"]}, "job.pipelines=zigzag: no such choice"),
        ({"parallels": ["wide"]}, "job.parallels=wide: no such way; choose from single, tensor, layer"),
        ({"batches": [1, 99]}, "job.batches=99: only 64 sequences"),
        ({"draft_lengths": [4000]}, "scheduler.max_num_batched_tokens=2048: cannot hold"),
    ],
)
def test_what_never_runs_is_refused(bench_launch, axes, complaint):
    with pytest.raises(ValueError) as refusal:
        expand(bench_launch(**axes))
    assert str(refusal.value).startswith(complaint)


def test_names_say_what_differs(bench_launch):
    assert setting_names(expand(bench_launch())) == ["model k=3"]
    settings = expand(bench_launch(drafters=["ngram", "none"], batches=[1, 4], temperatures=[0.0, 0.6]))
    assert setting_names(settings)[:3] == ["ngram k=5 T=0.0 b=1", "ngram k=5 T=0.0 b=4", "ngram k=5 T=0.6 b=1"]
    assert setting_names(settings)[-1] == "none T=0.6 b=4"
    assert setting_names(expand(bench_launch(contexts=[64, 128]))) == ["model k=3 c=64", "model k=3 c=128"]


def test_engines_stand_side_by_side_where_devices_can_be_shared(bench_launch):
    config = bench_launch(drafters=["ngram", "none"], batches=[1, 2])
    settings = expand(config)
    assert may_share(config)
    assert EnginePool(config, print).blocks(settings) == [settings]
    on_ray = replace(config, cluster=ClusterConfig(ClusterName.local))
    assert not may_share(on_ray)
    assert EnginePool(on_ray, print).blocks(settings) == [settings[:2], settings[2:]]
    assert not may_share(replace(config, target=replace(config.target, device="cuda")))
