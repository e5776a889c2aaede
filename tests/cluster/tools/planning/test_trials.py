"""Trials of a layout: what is run, and the figures that are compared with its prediction."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from cluster.config.compose import load_config
from cluster.run_prompts import WARMUP_TOKENS
from cluster.tools.planning import trials
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.prediction import Prediction


@pytest.mark.parametrize("speculates", [True, False])
def test_a_trial_is_the_median_of_its_repeats_beside_its_prediction(monkeypatch, speculates):
    runs = [
        dict(ms=ms, round_ms=ms * 3, mean_acceptance_length=ms / 2, target_busy=busy, draft_busy=busy and 0.9)
        for ms, busy in ((10.0, 0.4), (5.0, None), (20.0, 0.8))
    ]
    served, configured = [], []

    class Engine:
        tokenizer = SimpleNamespace()

        def __init__(self, config):
            configured.append(config)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *exception: None  # noqa: E731

    def serve(engine, prompts, sampling, *, speculate, concurrency):
        served.append((len(prompts), sampling.max_tokens, speculate, concurrency))
        run = runs[max(0, len(served) - 2)]
        return SimpleNamespace(completed=run, figures=run)

    monkeypatch.setattr(trials, "Engine", Engine)
    monkeypatch.setattr(trials, "serve_prompts", serve)
    monkeypatch.setattr(trials, "all_completed", lambda run: None)
    monkeypatch.setattr(trials, "figures", lambda run: run.figures)
    monkeypatch.setattr(trials, "decode_ms_per_token", lambda run: run["ms"])
    shape = Shape() if speculates else None
    layout = Layout(1, "sync" if speculates else "plain", "separate", shape)
    prediction = Prediction(layout, 5, 240.0, 33.0, 3.0, None, 0.5, 0.5, "target")
    config = load_config(["job=plan", "job.batch=2", "job.repeats=3", "sampling.max_tokens=100"])
    found = trials.try_out(prediction, config, ["a", "b", "c"])
    assert served == [(2, WARMUP_TOKENS, True, 2)] + [(3, 100, True, 2)] * 3
    (used,) = configured
    assert not used.pipeline.adaptive and used.pipeline.min_draft_tokens == 0
    if speculates:
        assert isinstance(used.drafter, ModelDrafterConfig) and used.drafter.num_draft_tokens == 5
    round_ms = 30.0 if speculates else 10.0
    assert found == pytest.approx(
        {
            "tokens_per_s": 1000 * 2 / 10,
            "tokens_per_s_off": 240 / 200 - 1,
            "round_ms": round_ms,
            "round_ms_off": 33 / round_ms - 1,
            "tokens_per_round": median([5.0, 2.5, 10.0]) if speculates else 1.0,
            "target_busy": 0.4,
            "draft_busy": 0.9,
        }
    )
