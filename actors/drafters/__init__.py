"""The families of drafters: one file each, and the one list of them. Adding a family means adding a row here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.branches import AHEAD
from actors.drafter import Drafter
from actors.drafters.ahead import AheadDrafter
from actors.drafters.corpus import read_corpus
from actors.drafters.loading import open_draft_model
from actors.drafters.model import ModelDrafter
from actors.drafters.ngram import NgramDrafter
from actors.drafters.suffix import SuffixDrafter
from actors.options import DrafterConfig, SchedulerConfig, VerifyConfig
from parallel.mesh import Group


def build_drafter(
    config: DrafterConfig,
    verify: VerifyConfig,
    pipeline: str,
    scheduler: SchedulerConfig,
    group: Group,
    device: str,
    eos_token_ids: Sequence[int],
) -> tuple[Drafter, dict[str, object]]:
    """The drafter the user chose, on this rank, and the facts it reports."""
    return DRAFTERS[config.name](config, verify, pipeline, scheduler, group, device, eos_token_ids)


def _ngram(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    return NgramDrafter(config), {}


def _suffix(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    corpus = read_corpus(Path(config.corpus), Path(config.tokenizer)) if config.corpus else ()
    drafter = SuffixDrafter(config, corpus)
    return drafter, drafter.facts()


def _model(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    runner, facts = open_draft_model(config, scheduler, group, device)
    options = {
        "rule": verify.rule,
        "law_size": verify.law_size,
        "eos_token_ids": eos_token_ids,
        "prefill_chunk": scheduler.prefill_chunk,
    }
    if pipeline in AHEAD:
        return AheadDrafter(runner, config, policy=pipeline, **options), facts
    return ModelDrafter(runner, config, **options), facts


DRAFTERS = {"ngram": _ngram, "suffix": _suffix, "model": _model}
