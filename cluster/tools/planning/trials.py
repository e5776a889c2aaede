"""Runs the engine: a probe for the texts and the seconds of a message, and trials to compare with predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from actors.protocol.messages import SamplingParams
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.observability.report import decode_ms_per_token, figures
from cluster.observability.results import Run
from cluster.run_prompts import all_completed, serve_prompts, warming
from cluster.tools.planning.layouts import Layout
from cluster.tools.planning.prediction import Prediction
from cluster.tools.planning.rounds import KnownText

HOPS = 4
"""Messages of a synchronous round: order, proposal, batch, verdict."""


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """The target's texts for the prompts, and seconds of a message, the coordinator's time included."""

    texts: tuple[KnownText, ...]
    hop_s: float
    sampling: SamplingParams


def probe(config: LaunchConfig, layout: Layout, prompts: Sequence[Prompt], progress: Callable[[str], None]) -> ProbeRun:
    """One short synchronous run. Raises EngineError if a request failed, ValueError if answers are too short."""
    longest = max(config.job.draft_lengths)
    with Engine(_at_length(layout, config, longest), progress=progress) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        _serve(engine, prompts[: config.job.batch], warming(sampling), config.job.batch)
        run = _serve(engine, prompts, sampling, config.job.batch)
        texts = []
        for served in run.completed:
            prompt = served.prompt.token_ids or tuple(engine.tokenizer.encode(served.prompt.text).ids)
            if len(served.token_ids) >= 2 * longest + 4:
                texts.append(KnownText((*prompt, *served.token_ids), len(prompt)))
    if not texts:
        raise ValueError(
            f"job.prompts: no answer is longer than {2 * longest + 3} tokens, too short to measure "
            f"job.draft_lengths={config.job.draft_lengths}; raise sampling.max_tokens or set sampling.ignore_eos=true"
        )
    overhead_ms = figures(run)["round_overhead_ms"] or 0.0
    return ProbeRun(tuple(texts), overhead_ms / 1e3 / HOPS, sampling)


def try_out(prediction: Prediction, config: LaunchConfig, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Medians over the repeats, and by how much the prediction exceeds them."""
    job = config.job
    with Engine(_at_length(prediction.layout, config, max(1, prediction.num_draft_tokens))) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        _serve(engine, prompts[: job.batch], warming(sampling), job.batch)
        runs = [_serve(engine, prompts, sampling, job.batch) for _ in range(job.repeats)]
    ms_per_token = [decode_ms_per_token(run.completed) or 0.0 for run in runs]
    each = [figures(run) for run in runs]
    speculates = prediction.layout.shape is not None
    round_ms = median([one["round_ms"] or 0.0 for one in each] if speculates else ms_per_token)
    tokens_per_s = median([1e3 * job.batch / ms for ms in ms_per_token])
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_off": prediction.tokens_per_s / tokens_per_s - 1,
        "round_ms": round_ms,
        "round_ms_off": prediction.round_ms / round_ms - 1,
        "tokens_per_round": median([one["mean_acceptance_length"] or 1.0 for one in each]) if speculates else 1.0,
        "target_busy": median([one["target_busy"] or 0.0 for one in each]),
        "draft_busy": median([one["draft_busy"] or 0.0 for one in each]),
    }


def worth_trying(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """The best of every pipeline, placement and way to share the drafter, threads included, fastest first: neighbours
    of the best would add little."""
    best: dict[tuple[object, ...], Prediction] = {}
    for prediction in predictions:
        layout = prediction.layout
        shared = (layout.shape.parallel, layout.shape.threads) if layout.shape else ()
        best.setdefault((layout.pipeline, layout.placement, *shared), prediction)
    return list(best.values())[:count]


def _at_length(layout: Layout, config: LaunchConfig, num_draft_tokens: int) -> LaunchConfig:
    """The layout with drafts of exactly this length, as in a prediction."""
    placed = layout.configure(config, num_draft_tokens)
    return replace(placed, pipeline=replace(placed.pipeline, adaptive=False, min_draft_tokens=0))


def _serve(engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams, batch: int) -> Run:
    run = serve_prompts(engine, prompts, sampling, speculate=True, concurrency=batch)
    all_completed(run)
    return run
