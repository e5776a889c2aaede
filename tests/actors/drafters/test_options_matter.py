"""Every option of a drafter without a model changes drafts: one that is read nowhere, or not handed on, is found."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig, TreeConstruction
from actors.drafters.config import DrafterConfig, DraftSetup
from actors.drafters.interface import Context
from actors.drafters.jacobi.config import JacobiDrafterConfig, LookaheadDrafterConfig
from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.retrieval.config import RestDrafterConfig
from actors.drafters.scoped import Share
from actors.options import SchedulerConfig, VerifyConfig, VerifyRule
from actors.protocol.messages import Commit, SamplingParams, TopTokens
from actors.verification.coupled import verify_coupled
from parallel.comm.group import SINGLE
from tests.actors.drafters.retrieval.small_store import small_store

BUDGET = 40
PLACED = {"name", "placement"}
"""Where a drafter runs is no matter of what it drafts."""
OF_FILES = {"corpus", "tokenizer", "datastore"}
"""Files, whose own tests read them."""

OPTIONS: dict[DrafterConfig, dict[str, Any]] = {
    NgramDrafterConfig(): {"min_ngram": 1},
    NgramDrafterConfig(min_ngram=1): {"max_ngram": 1},
    MaxgramDrafterConfig(): {"max_places": 1, "shared_bigrams": False, "share": Share.all},
    SuffixDrafterConfig(): {
        "min_match": 4,
        "tokens_per_match": 0.5,
        "min_probability": 0.7,
        "width": 2,
        "shared_tokens": 0,
        "share": Share.all,
    },
    CopyDrafterConfig(): {"trigger_len": 1},
    RecyclingDrafterConfig(): {"width": 2, "reads_prompts": False},
    RecyclingDrafterConfig(reads_prompts=False): {"share": Share.all},
    AdedDrafterConfig(): {
        "construction": TreeConstruction.search,
        "min_probability": 0.3,
        "width": 2,
        "max_pairs": 5,
        "learns": False,
        "reads_prompts": False,
        "share": Share.all,
    },
    AdedDrafterConfig(construction=TreeConstruction.search): {"iterations": 7},
    RestDrafterConfig(datastore=small_store()): {
        "longest_match": 1,
        "shortest_match": 1,
        "depth": 2,
        "max_matches": 2,
    },
    JacobiDrafterConfig(num_draft_tokens=12): {"width": 1},
    LookaheadDrafterConfig(): {"window": 3, "ngram": 3, "guesses": 1, "reads_text": False},
}
CASES = [(config, {name: value}) for config, changes in OPTIONS.items() for name, value in changes.items()]


def next_token(text: list[int], rank: int = 0) -> int:
    """A target that repeats itself at times, over twelve tokens."""
    return (text[-1] * 5 + text[-2] * text[-1] % 3 + len(text) // 40 + 4 * rank) % 12


def rows_of(context: Context, tokens: list[int], paths: list[list[int]], k: int) -> TopTokens:
    """The target's `k` likeliest tokens at rows of a text, each the end of its path."""
    contexts = np.array([[path[-2] if len(path) > 1 else -1, path[-1]] for path in paths], np.int32)
    candidates = np.array([[next_token([0, *path], rank) for rank in range(k)] for path in paths], np.int32)
    probs = np.tile(np.float32(0.6) ** np.arange(1, k + 1, dtype=np.float32), (len(paths), 1))
    spans = ((context.request_id, len(context.token_ids), len(paths)),)
    arrays = contexts.tobytes(), candidates.tobytes(), probs.tobytes()
    return TopTokens(k, *arrays, spans, (context.scope,))


def drafts_of(config: DrafterConfig) -> list[Any]:
    """All drafts for four requests of two clients, one after the other, sampled and with rows of their prompts."""
    setup = DraftSetup(VerifyConfig(VerifyRule.coupled), "sync", SchedulerConfig(), SINGLE, "cpu", (11,))
    drafter, _ = config.build(setup)
    can, found, choose = drafter.capabilities, [], random.Random(4)
    for number in range(4):
        prompt = [choose.randrange(12) for _ in range(30)]
        context = Context(number, 0, prompt, len(prompt), SamplingParams(temperature=1.0, seed=3), scope=number % 2)
        drafter.open(context)
        if can.prefills is not None:
            can.prefills.prefill([context])
        if config.target_top_k and config.reads_prompts and can.reads_top_tokens is not None:
            paths = [prompt[: i + 1] for i in range(len(prompt))]
            can.reads_top_tokens.read_top_tokens(rows_of(context, prompt, paths, config.target_top_k))
        for _ in range(12):
            (draft,) = drafter.propose([context], [BUDGET])
            found.append(draft)
            tree, text = draft.tree, context.token_ids
            paths = [[*text, *(tree.token_ids[i] for i in tree.path_to(n))] for n in range(len(tree.token_ids))]
            answers = [next_token(one) for one in paths]
            path, last = verify_coupled(tree, answers)
            if config.target_top_k and can.reads_top_tokens is not None:
                can.reads_top_tokens.read_top_tokens(rows_of(context, text, paths, config.target_top_k))
            tokens = (*(tree.token_ids[node] for node in path), last)
            drafter.observe(context, Commit(number, 0, len(text), path, tokens))
            context.extend(tokens)
            context.settled_len = len(context.token_ids)
        drafter.release(number)
    return found


def test_every_option_is_tried():
    for config in OPTIONS:
        tried = {name for one, changes in OPTIONS.items() if type(one) is type(config) for name in changes}
        named = {field.name for field in fields(config)} - PLACED - OF_FILES - {"num_draft_tokens"}
        assert tried == named, type(config).__name__


@cache
def plain_drafts_of(config: DrafterConfig) -> list[Any]:
    return drafts_of(config)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("config", "change"), CASES, ids=lambda one: one.name if isinstance(one, DrafterConfig) else ""
)
def test_an_option_changes_drafts(config, change):
    assert drafts_of(replace(config, **change)) != plain_drafts_of(config), change


@pytest.mark.extended
@pytest.mark.parametrize("config", OPTIONS, ids=lambda one: one.name)
def test_drafts_follow_from_the_texts(config):
    """So a difference is the option's."""
    assert drafts_of(config) == plain_drafts_of(config)
