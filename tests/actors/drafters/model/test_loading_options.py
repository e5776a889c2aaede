"""What a draft model's record becomes: each key reaches what sizes, opens and captures it; and what it may draft."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.drafters.model import loading
from actors.drafters.model.config import (
    CalibrationPolicy,
    DraftRows,
    LengthRule,
    ModelDrafterConfig,
    Parallel,
    Strategy,
    Translation,
)
from actors.drafters.model.loading import graph_list, head_rows, open_draft_model
from actors.drafters.vocabulary import token_list, token_pieces
from actors.options import SchedulerConfig, TargetConfig
from parallel.comm.group import SINGLE
from parallel.model.config import HeadRows
from parallel.runtime import nested_runner
from parallel.runtime.graph_list import GraphList, chain_shapes, graph_shapes
from parallel.runtime.kv_sizing import DeviceShare
from parallel.speculators import pard

LIMITS = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=40)
MODEL = ModelDrafterConfig(path="draft", num_draft_tokens=5)
SHAPES = graph_shapes(3, 6, 40)
EVERY = GraphList(SHAPES, of_last_rows=True)
CHAINS = GraphList(SHAPES, chain_shapes(3, 4), of_every_row=False, of_last_rows=True)
PLAIN = GraphList(SHAPES, [], of_every_row=False, of_last_rows=True)


@pytest.mark.parametrize(
    ("changes", "pipeline", "expected"),
    [
        ({}, "sync", CHAINS),
        ({}, "pingpong", CHAINS),
        ({}, "tree", EVERY),
        ({"strategy": Strategy.tree}, "sync", EVERY),
        ({"length_rule": LengthRule.gap}, "sync", EVERY),
        ({"parallel": Parallel.layer}, "sync", PLAIN),
        ({"prefixes": [1, 2]}, "sync", PLAIN),
        ({"tokenizer": "target"}, "sync", PLAIN),
    ],
)
def test_chains_of_one_plain_model_are_captured_whole(changes, pipeline, expected):
    assert graph_list(replace(MODEL, **changes), LIMITS, pipeline) == expected


@pytest.fixture
def opened(monkeypatch):
    """What the functions were given that open a model."""
    seen: Any = SimpleNamespace(fit=None, model=None, captured=None, pace=None, head=None)
    fit = SimpleNamespace(
        dtype=torch.float16,
        num_slots=77,
        weights=torch.int8,
        kv_dtype=torch.float8_e4m3fn,
        facts=lambda: {"kv_slots": 77},
    )
    runner = SimpleNamespace(
        decoder=SimpleNamespace(device="cpu", pass_bytes=lambda: 33), pool="pool", attention="sdpa"
    )

    def fit_slots(*place, **options):
        seen.fit = place, options
        return fit

    def open_model(*place, **options):
        seen.model = place, options
        return runner

    def captured_facts(one, graphs, **options):
        seen.captured = one, graphs, sorted(options)
        return {"graphs": "some"}

    monkeypatch.setattr(loading, "fit_slots", fit_slots)
    monkeypatch.setattr(loading, "open_model", open_model)
    monkeypatch.setattr(loading, "captured_facts", captured_facts)
    monkeypatch.setattr(loading, "head_rows", lambda config: seen.head)
    monkeypatch.setattr(loading, "_fills_masks", lambda config: config.mask_drafts > 1)
    monkeypatch.setattr(pard, "filling_masks", lambda *given: SimpleNamespace(made_of=given, num_steps=given[2]))
    monkeypatch.setattr(loading, "pace", lambda one, ms: setattr(seen, "pace", (one, ms)))
    monkeypatch.setattr(
        nested_runner,
        "NestedRunner",
        lambda *place, **options: SimpleNamespace(decoder=runner.decoder, made_of=(place, options)),
    )
    seen.runner = runner
    return seen


def test_every_key_reaches_what_sizes_and_opens_the_model(opened):
    config = replace(
        *(MODEL,),
        mask_steps=3,
        mask_drafts=2,
        dtype="float32",
        kv_slots=9,
        weights="int8",
        kv_dtype="fp8",
        attention="padded",
        pace_ms=[2.0, 0.5],
    )
    runner, facts = open_draft_model(config, LIMITS, SINGLE, "cpu", "sync", DeviceShare(5, 0.5), 77)
    assert opened.fit == (
        ("draft", SINGLE, "cpu", "float32"),
        dict(
            *(),
            max_num_seqs=3,
            max_model_len=0,
            num_slots=9,
            layout=None,
            weights="int8",
            rounds=True,
            kv_dtype="fp8",
            head=None,
            max_num_batched_tokens=40,
            graphs=CHAINS,
            agreed_slots=77,
            sharing=DeviceShare(5, 0.5),
        ),
    )
    options = {
        "layout": None,
        "weights": torch.int8,
        "head": None,
        "backend": "padded",
        "kv_dtype": torch.float8_e4m3fn,
    }
    assert opened.model == (("draft", SINGLE, "cpu", torch.float16, 77), options)
    assert opened.captured == (opened.runner, CHAINS, ["choices"])
    filling: Any = runner
    assert filling.made_of == (opened.runner, "draft", 3, 2) and opened.pace == (runner, [2.0, 0.5])
    assert facts == {"kv_slots": 77, "graphs": "some", "pass_bytes": 33, "passes_per_draft": 3}


def test_a_window_of_rows_is_all_that_the_pool_is_sized_for(models):
    limits = SchedulerConfig(max_num_seqs=3, prefill_chunk=100)
    shape = dict(sinks=4, window=80, num_draft_tokens=5, ahead_width=2, depth=3)
    config = replace(MODEL, path=str(models["drafter"]), rows=DraftRows.streaming, **shape)
    rows = 4 + 80 + 9 + 100 + 6  # and an eighth of the window before its oldest leave, a chunk of text, and drafts
    assert config.most_rows(limits) == config.most_rows(limits, 100_000) == rows
    assert config.most_rows(limits, 50) == 50 and MODEL.most_rows(limits, 100_000) == 100_000
    beside = config.memory_beside(TargetConfig(), 1, "cpu", limits)
    weights, per_slot = config.memory(1, "cpu")
    assert beside == (weights + 3 * rows * per_slot, 0)
    given = replace(config, kv_slots=7).memory_beside(TargetConfig(), 1, "cpu", limits)
    assert given == (weights + 7 * per_slot, 0)


@pytest.mark.parametrize(
    ("online", "weights", "device", "expected"),
    [
        (True, "auto", "cuda:0", "bfloat16"),
        (False, "auto", "cuda:0", "auto"),
        (True, "auto", "cpu", "auto"),
        (True, "float16", "cuda:0", "float16"),
    ],
)
def test_matrices_that_are_learned_are_no_codes(opened, online, weights, device, expected):
    open_draft_model(replace(MODEL, online=online, weights=weights), LIMITS, SINGLE, device)
    assert opened.fit[1]["weights"] == expected


def test_prefixes_are_runs_of_one_model(opened):
    runner, _ = open_draft_model(replace(MODEL, prefixes=[1, 2], prefix_confidence=0.7), LIMITS, SINGLE, "cpu")
    assert runner.made_of == ((opened.runner.decoder, "pool", [1, 2], 0.7), {"backend": "sdpa"})
    assert opened.captured[0] is runner and opened.pace[0] is runner


def test_a_list_of_tokens_is_in_the_facts(opened):
    opened.head = HeadRows((1, 2, 3), (1, 2, 3), 9)
    _, facts = open_draft_model(MODEL, LIMITS, SINGLE, "cpu")
    assert facts["draft_vocabulary"] == 3 and opened.fit[1]["head"] is opened.model[1]["head"] is opened.head


@pytest.fixture
def tokens(monkeypatch):
    """Vocabularies of 10 (draft) and 20 tokens (target); pairs of shared tokens; a list."""
    sizes = {"draft": 10, "target": 20}
    monkeypatch.setattr(loading, "resolve_checkpoint", lambda path: path)
    monkeypatch.setattr(loading, "read_config", lambda path: SimpleNamespace(vocab_size=sizes[path]))
    monkeypatch.setattr(loading, "_token_pieces", lambda config: ("ours", "theirs"))
    monkeypatch.setattr(token_pieces, "shared_tokens", lambda *_: [(0, 5), (3, 9), (4, 10), (19, 0), (20, 1)])
    monkeypatch.setattr(token_list, "read_token_list", lambda path: [19, 3, 9, 0, 10])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"tokenizer": "target"}, HeadRows((5, 9, 0), (0, 3, 19), 20)),
        ({"tokenizer": "target", "translate": Translation.strings}, None),
        ({"vocabulary": "list"}, HeadRows((0, 3, 9), (0, 3, 9), 10)),
        ({"vocabulary": "list", "vocabulary_size": 3}, HeadRows((3, 9), (3, 9), 10)),
        ({"tokenizer": "target", "vocabulary": "list"}, HeadRows((5, 9, 0), (0, 3, 19), 20)),
        ({"tokenizer": "target", "vocabulary": "list", "vocabulary_size": 2}, HeadRows((9, 0), (3, 19), 20)),
    ],
)
def test_tokens_that_may_be_drafted(tokens, changes, expected):
    assert head_rows(replace(MODEL, **changes)) == expected


def test_a_drafter_of_one_token_is_refused(tokens):
    with pytest.raises(ValueError, match="draft can draft 1 of the target's tokens"):
        head_rows(replace(MODEL, vocabulary="list", vocabulary_size=2))


def test_policies_of_calibration_are_words():
    assert [str(one) for one in CalibrationPolicy] == ["every", "mismatch", "never"]
