"""The procedure of a certificate: which checks are made of the outputs, in which order, and what they are about.

Runs after the engine that gave the outputs was closed. Writes no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineName, SamplingConfig, VerifyRule
from actors.protocol.messages import SamplingKind, SamplingParams
from actors.sampling.logits import is_greedy
from cluster.config.jobs import CertifyConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Bar
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.tools.certify.certificate import Check
from cluster.tools.certify.checks import (
    check_distribution,
    check_identity,
    check_rounding,
    draw_fits,
    notes_of,
    schemes_of,
)
from cluster.tools.certify.draws import CHUNK, DraftScheme
from cluster.tools.certify.identity import OutputPair
from cluster.tools.certify.scoring import OutputScorer, TextReader, fit_ranks


def check_outputs(
    config: LaunchConfig, outputs: list[OutputPair], params: list[SamplingParams], bar: Bar
) -> tuple[list[Check], list[str]]:
    """All checks of the outputs, after the engine was closed; the second list holds notes."""
    job: CertifyConfig = config.job
    rule, checkpoint = config.verify.rule, Path(config.target.path)
    eos_token_ids, tokenizer = read_eos_token_ids(checkpoint), load_tokenizer(checkpoint)
    longest = max(len(output.prompt_ids) + max(len(output.plain), len(output.speculative)) for output in outputs)
    num_slots = longest + config.verify.law_size + 1
    target = TextReader(config.target, num_slots)
    bar.say("rounding")
    scorer = OutputScorer(target, rule, eos_token_ids)
    movement = scorer.movement([output for output in outputs if output.sampling == params[0]])
    rounding = check_rounding(movement, outputs, scorer, target)
    bar.advance()
    checks = [check_identity(outputs, rule, scorer, tokenizer, movement.tie_below)]
    sampled = _sampled_settings(params)
    draft = _draft_reader(config, num_slots) if sampled else None
    if sampled:
        bar.say("drawing")
        texts = list(dict.fromkeys(output.prompt_ids for output in outputs))[: job.contexts]
        readers = (target, draft)
        fits = draw_fits(texts, sampled, _schemes(config), eos_token_ids, readers, job.draws, bar.advance)
        checks.append(check_distribution([*fits, *fit_ranks(scorer, outputs)], job.significance, job.power))
    return [*checks, rounding], notes_of(outputs, rule, (draft or target).vocab_size, target.vocab_size)


def _schemes(config: LaunchConfig) -> list[DraftScheme]:
    verify, pipeline = config.verify, config.pipeline.name
    schemes = [
        scheme
        for one in _drafters(config)
        for scheme in schemes_of(verify, one, one.sampling_kinds(verify.rule, pipeline))
    ]
    return list(dict.fromkeys(schemes))


def _drafters(config: LaunchConfig) -> Sequence[DrafterConfig]:
    """The drafter, or those that it chooses among."""
    return config.drafter.drafters if isinstance(config.drafter, AutoDrafterConfig) else [config.drafter]


def _sampled_settings(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """One setting for every temperature above zero."""
    return list({sampling.temperature: sampling for sampling in params if not is_greedy(sampling)}.values())


def _draft_reader(config: LaunchConfig, num_slots: int) -> TextReader | None:
    """The draft model whose tokens the target reads, that of the last level or drafter; None without a model."""
    drafter = config.drafter
    if isinstance(drafter, AutoDrafterConfig):
        drafter = next(iter(drafter.draft_models[-1:]), drafter)
    if isinstance(drafter, CascadeDrafterConfig):
        drafter = drafter.levels[-1]
    if not isinstance(drafter, ModelDrafterConfig) or drafter.tokenizer:  # whose own tokens are not the target's
        return None
    return TextReader(drafter, num_slots)


def num_steps(config: LaunchConfig, params: Sequence[SamplingParams], num_prompts: int) -> int:
    job: CertifyConfig = config.job
    num_texts = min(job.contexts, num_prompts) * len(_sampled_settings(params)) * len(_schemes(config))
    return 2 * num_prompts * len(params) + 1 + -(-job.draws // CHUNK) * num_texts


def describe_subject(config: LaunchConfig) -> dict[str, str]:
    """The configuration that is certified."""
    job, usual = config.job, SamplingConfig()
    own = {"temperature", "seed", "max_tokens"}
    changed = {
        item.name: getattr(config.sampling, item.name)
        for item in fields(usual)
        if item.name not in own and getattr(config.sampling, item.name) != getattr(usual, item.name)
    }
    return {
        "target": f"{config.target.path}, tp={config.target.tp}",
        "drafter": _drafter(config.drafter),
        "rule": f"{config.verify.rule}, law_size={config.verify.law_size}",
        "drafts": f"{_draws(config)}, which is exact under this rule by the enumerations of the tests",
        "pipeline": f"{config.pipeline.name}, {_when_drafted(config)}",
        "temperatures": ", ".join(f"{temperature:g}" for temperature in job.temperatures),
        "seeds": ", ".join(str(seed) for seed in job.seeds),
        "sampling": ", ".join(f"{name}={value}" for name, value in changed.items()) or "no further processors",
        "prompts": f"{job.prompts}, {config.sampling.max_tokens} tokens each at most",
    }


def _when_drafted(config: LaunchConfig) -> str:
    """How much of the output the certificate can be about."""
    pipeline = config.pipeline
    if pipeline.name is PipelineName.plain or not config.drafter.num_draft_tokens:
        return "no drafts"
    if pipeline.adaptive and not pipeline.min_draft_tokens:
        return "drafts while they measure faster than plain decoding"
    return "a draft is asked for in every round"


def _draws(config: LaunchConfig) -> str:
    """How draft tokens are drawn, which decides whether a ratio rule is exact."""
    rule = config.verify.rule
    if rule is VerifyRule.coupled:
        return "any draft tokens"
    kinds = sorted(config.drafter.sampling_kinds(rule, config.pipeline.name)) or [SamplingKind.DETERMINISTIC]
    return "draft tokens drawn as " + ", ".join(SamplingKind(kind).name for kind in kinds)


def _drafter(drafter: DrafterConfig) -> str:
    """Family, model and shape; of a cascade those of every level, the cheapest first; of a choice those of each."""
    if isinstance(drafter, AutoDrafterConfig):
        return f"{drafter.name} of {'; '.join(map(_drafter, drafter.drafters))}"
    if not isinstance(drafter, CascadeDrafterConfig):
        model = f" {drafter.path} {drafter.strategy}" if isinstance(drafter, ModelDrafterConfig) else ""
        return drafter.name + model + f", {drafter.num_draft_tokens} draft tokens" * bool(drafter.num_draft_tokens)
    levels = "; ".join(f"{number}: {_drafter(level)}" for number, level in enumerate(drafter.levels))
    tails = "/".join(str(tail) for tail in drafter.tails) or "none"
    return (
        f"cascade of {len(drafter.levels)} levels ({levels}), tails {tails}, merge {drafter.merge}, "
        f"lengths {drafter.lengths}, {drafter.placement}, {drafter.num_draft_tokens} draft tokens"
    )
