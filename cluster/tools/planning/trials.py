"""Runs the engine for real: once to learn what cannot be had from parts, then to see whether predictions hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from actors.protocol.messages import SamplingParams
from cluster.config.jobs import PlanConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine, EngineError
from cluster.io.prompts import Prompt
from cluster.observability.report import decode_ms_per_token, figures
from cluster.observability.results import Run
from cluster.run_prompts import serve_prompts
from cluster.tools.planning.layouts import Layout
from cluster.tools.planning.prediction import Prediction
from cluster.tools.planning.rounds import Text

WARMUP_TOKENS = 16
HOPS = 4
"""Messages of a synchronous round: order, proposal, batch, verdict."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What the target wrote for the prompts, and what a message costs, the coordinator's part in it."""

    texts: tuple[Text, ...]
    hop_s: float
    sampling: SamplingParams


def _at_length(layout: Layout, config: LaunchConfig, num_draft_tokens: int) -> LaunchConfig:
    """The layout with every draft of just this length, which is what a prediction is about."""
    placed = layout.configure(config, num_draft_tokens)
    return replace(placed, pipeline=replace(placed.pipeline, adaptive=False, min_draft_tokens=0))


def probe(config: LaunchConfig, layout: Layout, prompts: Sequence[Prompt], say: Callable[[str], None]) -> Probe:
    """One short synchronous run. Raises EngineError if a request failed, KeyboardInterrupt."""
    engine_config = _at_length(layout, config, max(config.job.draft_lengths))
    with Engine(engine_config, progress=say) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        run = _warmed(engine, prompts, sampling, config.job.batch)
        texts = []
        for served in run.completed:
            prompt = served.prompt.token_ids or tuple(engine.tokenizer.encode(served.prompt.text).ids)
            texts.append(Text((*prompt, *served.token_ids), len(prompt)))
    longest = max(config.job.draft_lengths)
    texts = [text for text in texts if len(text.token_ids) - text.prompt_len >= 2 * longest + 4]
    if not texts:
        raise ValueError(
            f"job.prompts: no answer is longer than {2 * longest + 3} tokens, too short to measure "
            f"job.draft_lengths={config.job.draft_lengths}; raise sampling.max_tokens or set sampling.ignore_eos=true"
        )
    return Probe(tuple(texts), figures(run)["round_overhead_ms"] / 1e3 / HOPS, sampling)


def try_out(
    prediction: Prediction, config: LaunchConfig, prompts: Sequence[Prompt], say: Callable[[str], None]
) -> dict[str, float | None]:
    """Medians over the repeats, and by how much the prediction exceeds them."""
    job: PlanConfig = config.job
    engine_config = _at_length(prediction.layout, config, max(1, prediction.num_draft_tokens))
    with Engine(engine_config, progress=say) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        runs = [_warmed(engine, prompts, sampling, job.batch)]
        runs += [_served(engine, prompts, sampling, job.batch) for _ in range(job.repeats - 1)]
    ms_per_token = [decode_ms_per_token(run.completed) for run in runs]
    each = [figures(run) for run in runs]
    speculates = prediction.layout.shape is not None
    round_ms = median([one["round_ms"] for one in each] if speculates else ms_per_token)
    tokens_per_s = median([1e3 * job.batch / ms for ms in ms_per_token])
    tokens_per_round = median([one["mean_acceptance_length"] for one in each]) if speculates else 1.0
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_off": prediction.tokens_per_s / tokens_per_s - 1,
        "round_ms": round_ms,
        "round_ms_off": prediction.round_ms / round_ms - 1,
        "tokens_per_round": tokens_per_round,
        "target_busy": median([one["target_busy"] for one in each]),
        "draft_busy": median([one["draft_busy"] or 0.0 for one in each]),
    }


def worth_trying(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """The best of every pipeline, placement and way to share the drafter, its threads included, fastest first:
    neighbours of the best would teach little."""
    best: dict[tuple[object, ...], Prediction] = {}
    for prediction in predictions:
        layout = prediction.layout
        shared = (layout.shape.parallel, layout.shape.threads) if layout.shape else ()
        best.setdefault((layout.pipeline, layout.placement, *shared), prediction)
    return list(best.values())[:count]


def _warmed(engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams, batch: int) -> Run:
    short = replace(sampling, min_tokens=0, max_tokens=min(WARMUP_TOKENS, sampling.max_tokens))
    _served(engine, prompts[:batch], short, batch)
    return _served(engine, prompts, sampling, batch)


def _served(engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams, batch: int) -> Run:
    run = serve_prompts(engine, prompts, sampling, speculate=True, concurrency=batch)
    if run.interrupted:
        raise KeyboardInterrupt
    if run.failed:
        raise EngineError(f"prompt {run.failed[0].index + 1}: {run.failed[0].error}")
    return run
