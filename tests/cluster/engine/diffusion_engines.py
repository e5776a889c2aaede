"""Engines of targets that fill masks, and what they answer."""

from __future__ import annotations

from actors.options import PipelineConfig, PipelineName, SchedulerConfig, TargetConfig
from actors.protocol.messages import SamplingParams

PROMPTS = ["def median(values):", "return", "class Stack:\n    pass", "a"]
MAX_TOKENS = 11


def open_target(open_engine, diffusion, *, tp=1, scheduler=None, **options):
    target = TargetConfig(path=str(diffusion.path), device="cpu", **options)
    plain = PipelineConfig(PipelineName.plain)
    return open_engine("none", tp=tp, target=target, pipeline=plain, scheduler=scheduler or SchedulerConfig())


def tokens_of(engine, prompts=PROMPTS):
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(prompts, params)]
