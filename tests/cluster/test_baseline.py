"""Plain decoding by itself: when it needs an engine of its own, what that one is, and that it gives the same tokens."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from actors.worker import openmp
from cluster.apart import Apart
from cluster.baseline import PlainEngine, alone, describe, needs_own_engine
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, ClusterName, PlacementConfig, PlacementName
from cluster.io.prompts import Prompt
from cluster.placement.ranks import Devices, RankPlacement, lay_out

PROMPTS = [Prompt("a", token_ids=(5, 6, 7)), Prompt("b", token_ids=(9, 8))]


def rank(role: str, device: str = "cpu", *, threads: int = 1, share: float = 1.0, host: str = "") -> RankPlacement:
    return RankPlacement(role, 0, 1, device, (0,), threads, share, host)


@pytest.mark.parametrize(
    ("places", "needs"),
    [
        ([rank("target")], False),
        ([rank("target"), rank("draft")], True),
        ([rank("target"), rank("draft-1")], True),
        ([rank("target", share=0.5), rank("draft", share=0.5)], True),
        ([rank("target"), rank("draft", share=0.0)], False),
        ([rank("target"), rank("draft", "cuda:0")], False),
        ([rank("target", "cuda:0"), rank("draft")], False),
        ([rank("target", "cuda:0"), rank("draft", "cuda:1")], False),
    ],
)
def test_a_target_that_has_its_devices_for_itself_is_compared_with_itself(tiny_launch, places, needs):
    config = tiny_launch(GenerateConfig())
    for name, is_here in {"inprocess": True, "local": True, "slurm": False, "existing": False}.items():
        there = replace(config, cluster=ClusterConfig(ClusterName(name)))
        assert needs_own_engine(there, places) is (needs and is_here)


@pytest.mark.parametrize("name", list(ClusterName)[:2])
@pytest.mark.parametrize("placement", PlacementName)
def test_by_itself_the_target_has_every_core(tiny_launch, placement, name):
    cluster = ClusterConfig(name, num_cpus=4)
    config = tiny_launch(GenerateConfig(), placement=PlacementConfig(placement), cluster=cluster)
    beside, by_itself = (lay_out(each, Devices((0, 1, 2, 3))) for each in (config, alone(config)))
    assert needs_own_engine(config, beside) and not needs_own_engine(alone(config), by_itself)
    assert [(place.role, place.num_threads, place.share) for place in by_itself] == [("target", 4, 1.0)]
    assert alone(config).target == config.target and alone(config).cluster.num_cpus == 4
    assert describe(by_itself, own_engine=True) == "an engine of its own, 4 threads"
    assert describe(beside, own_engine=False).startswith("the same engine, ")
    assert describe([rank("target", "cuda:0")], own_engine=False) == "the same engine, the same devices"


@pytest.mark.slow
def test_its_tokens_are_those_of_the_measured_engine_and_errors_cross_over(open_engine, monkeypatch):
    """By default a job compares them (`jobs/test_generate.py`), and a death of such a process is seen here."""
    engine = open_engine("model")
    sampling = engine.config.sampling_params(engine.tokenizer)
    expected = [engine.submit(prompt.content, sampling).result().token_ids for prompt in PROMPTS]
    with PlainEngine(engine.config) as plain:
        assert [(place.role, place.num_threads) for place in plain.places] == [("target", len(os.sched_getaffinity(0)))]
        run = plain.serve(PROMPTS, sampling, 2)
        assert [list(served.token_ids) for served in run.completed] == [list(tokens) for tokens in expected]
        assert run.counters["num_spec_steps"] == 0 and run.wall_s > 0
        with pytest.raises(ValueError, match="temperature"):
            plain.serve(PROMPTS, replace(sampling, temperature=-1.0), 2)
        assert len(plain.serve(PROMPTS, sampling, 1).completed) == 2, "it goes on after an error"
    plain.close()
    with pytest.raises(OSError, match="closed"):
        plain.serve(PROMPTS, sampling, 1)


@pytest.mark.extended
def test_a_process_that_dies_is_one_line():
    with Apart("the other", _Dying) as other, pytest.raises(RuntimeError, match="^the other: its process died$"):
        other.call("die")


@pytest.mark.extended
def test_another_process_chooses_how_its_threads_wait(monkeypatch):
    for name in openmp.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "_own", {"OMP_WAIT_POLICY": "PASSIVE"})
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with Apart("the other", _Dying) as other:
        assert other.call("threads_wait") == {}
    assert openmp.in_effect() == {"OMP_WAIT_POLICY": "PASSIVE"}


class _Dying:
    def die(self) -> None:
        os._exit(3)

    def threads_wait(self) -> dict[str, str]:
        return openmp.in_effect()
