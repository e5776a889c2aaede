"""The short run before a plan, and the predictions that are worth a trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.compose import load_config
from cluster.io.prompts import Prompt
from cluster.observability.results import Run, Served
from cluster.run_prompts import WARMUP_TOKENS
from cluster.tools.planning import trials
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.prediction import Prediction
from cluster.tools.planning.rounds import KnownText

SYNC = Layout(1, "sync", "colocated", Shape())
OVERRIDES = ["job=plan", "job.batch=2", "job.draft_lengths=[1,3]", "sampling.max_tokens=100"]


@pytest.fixture
def probed(monkeypatch):
    """Probes with answers of these lengths; returns the run, what was served, and the configuration it ran with."""

    def probe(*lengths: int, overhead_ms: float | None = 8.0) -> Any:
        served: list[Any] = []
        configured: list[Any] = []

        class Engine:
            tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text), 9]))

            def __init__(self, config, *, progress):
                configured.append((config, progress))

            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda self, *exception: None  # noqa: E731

        def serve(engine, prompts, sampling, *, speculate, concurrency):
            served.append((len(prompts), sampling.max_tokens, speculate, concurrency))
            named = [Prompt("ab"), Prompt("ab", token_ids=(5, 6, 7))]
            answers = [Served(i, named[i % 2], tuple(range(length))) for i, length in enumerate(lengths)]
            return Run(answers)

        monkeypatch.setattr(trials, "Engine", Engine)
        monkeypatch.setattr(trials, "serve_prompts", serve)
        monkeypatch.setattr(trials, "figures", lambda run: {"round_overhead_ms": overhead_ms})
        config, prompts = load_config(OVERRIDES), [Prompt("a"), Prompt("b"), Prompt("c")]
        return trials.probe(config, SYNC, prompts, print), served, *configured[0]

    return probe


@pytest.mark.extended
def test_a_probe_keeps_the_answers_that_are_long_enough_and_the_time_of_a_message(probed):
    run, served, config, progress = probed(10, 10, 9, 12)
    first, second, last = run.texts
    assert first == KnownText((2, 9, *range(10)), 2), "a prompt is read by the engine's tokenizer"
    assert second == KnownText((5, 6, 7, *range(10)), 3), "unless it came as tokens"
    assert last == KnownText((5, 6, 7, *range(12)), 3), "nine tokens are too few for drafts of three"
    assert served == [(2, WARMUP_TOKENS, True, 2), (3, 100, True, 2)]
    assert run.hop_s == pytest.approx(8e-3 / trials.HOPS) and run.sampling.max_tokens == 100
    assert config.drafter.num_draft_tokens == 3 and progress is print
    assert not config.pipeline.adaptive and config.pipeline.name == "sync" and config.placement.name == "colocated"
    assert probed(10, overhead_ms=None)[0].hop_s == 0.0


def test_answers_that_are_all_too_short_are_refused(probed):
    with pytest.raises(ValueError, match=r"^job.prompts: no answer is longer than 9 tokens, .*=\[1, 3\]; raise sampl"):
        probed(9, 3)


def test_of_layouts_that_are_alike_the_fastest_is_tried():
    def predicted(pipeline, placement, shape, ranks=1):
        return Prediction(Layout(ranks, pipeline, placement, shape), 3, 1.0, 1.0, 1.0, None, 0.5, 0.5, "target")

    tensor = Shape("tensor", 2)
    predictions = [
        predicted("sync", "separate", Shape()),
        predicted("sync", "separate", Shape(), ranks=2),
        predicted("sync", "separate", tensor),
        predicted("sync", "separate", Shape("tensor", 4)),
        predicted("sync", "colocated", Shape()),
        predicted("tree", "separate", Shape()),
        predicted("sync", "separate", Shape(threads=1)),
        predicted("plain", "separate", None),
        predicted("plain", "separate", None, ranks=2),
    ]
    kept = [predictions[i] for i in (0, 2, 4, 5, 6, 7)]
    assert trials.worth_trying(predictions, 99) == kept
    assert trials.worth_trying(predictions, 2) == kept[:2] and trials.worth_trying(predictions, 0) == []
