"""The contract of cascades: whatever the levels, the tails, the rule and the pipeline, plain decoding's tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from actors.drafters.adjacency.config import RecyclingDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.cascade.level import CascadeDrafter
from actors.drafters.draft_ahead.tree import AHEAD
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import DraftRows, ModelDrafterConfig, Strategy
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.options import INDEPENDENT_ONLY, SchedulerConfig
from parallel.runtime.runner import Span, open_model
from tests import matrices
from tests.matrices import in_turn

NGRAM = NgramDrafterConfig(num_draft_tokens=3, min_ngram=1)
MAXGRAM = MaxgramDrafterConfig(num_draft_tokens=3)
TREE = ModelDrafterConfig(path="small", strategy=Strategy.tree, num_draft_tokens=6, depth=3, width=2)
PROCESSED = dict(top_k=40, top_p=0.95, repetition_penalty=1.2, bad_words=((11,), (12, 13)), min_tokens=6)
SAMPLINGS = {"greedy": {}, "T=1": dict(temperature=1.0), "processed": dict(temperature=0.7, **PROCESSED)}


def model(path, length):
    return ModelDrafterConfig(path=path, num_draft_tokens=length)


def tree_of(path, nodes):
    return ModelDrafterConfig(path=path, num_draft_tokens=nodes, strategy=Strategy.tree, width=2)


def cascade(*levels, tails=(), length=0, merge=0):
    tails = tails or (0,) * len(levels)
    return CascadeDrafterConfig(
        levels=levels,
        tails=tails,
        num_draft_tokens=length or levels[-1].num_draft_tokens + tails[-1] + merge,
        merge=merge,
    )


CASCADES = {
    "ngram-model": cascade(NGRAM, model("drafter", 5)),
    "model-model": cascade(model("small", 3), model("drafter", 6)),
    "maxgram-model-model": cascade(MAXGRAM, model("small", 3), model("drafter", 5)),
    "tree-model": cascade(TREE, model("drafter", 5)),
    "four": cascade(NGRAM, model("tiny", 2), model("small", 4), model("drafter", 6)),
    "horizontal": cascade(MAXGRAM, model("small", 2), model("drafter", 3), tails=(0, 2, 4)),
    "suffix-model-model": cascade(SuffixDrafterConfig(min_match=1), model("small", 3), model("drafter", 4)),
    "merged": cascade(TREE, model("drafter", 4), tails=(0, 2), merge=5),
    "deepest-first": cascade(model("drafter", 4), model("tiny", 4)),
    "middle-passes-on": cascade(MAXGRAM, model("small", 0), model("drafter", 4)),
    "recycling-model": cascade(RecyclingDrafterConfig(num_draft_tokens=6), model("drafter", 5)),
    "trees": cascade(NGRAM, tree_of("small", 6), tree_of("drafter", 8)),
    "last-passes-on": cascade(NGRAM, model("small", 4), model("drafter", 0), length=4),
}
SELVES = {
    "skip": cascade(NGRAM, SelfDrafterConfig(skip=["1m"], num_draft_tokens=5)),
    "exit-tree": cascade(
        SuffixDrafterConfig(min_match=1),
        SelfDrafterConfig(exit=1, strategy=Strategy.tree, width=2, num_draft_tokens=8),
    ),
    "tails": cascade(MAXGRAM, SelfDrafterConfig(skip=["0m"], num_draft_tokens=4), tails=(0, 3)),
}
"""Lookups under the target with fewer layers, on its ranks (CAS-Spec)."""
TRIFORCE = cascade(
    ModelDrafterConfig(path="small", num_draft_tokens=2, rows=DraftRows.streaming, sinks=1, window=12),
    SelfDrafterConfig(num_draft_tokens=5, rows=DraftRows.chunks, chunk_size=2, num_chunks=4, choose_every=6),
)
QUICK = [
    ("ngram-model", "processed", "sync"),
    ("maxgram-model-model", "T=1", "sync"),
    ("tree-model", "T=1", "branches"),
    ("four", "greedy", "tree"),
    ("horizontal", "T=1", "pearl"),
    ("middle-passes-on", "greedy", "branches"),
    ("last-passes-on", "T=1", "sync"),
    ("suffix-model-model", "greedy", "branches"),
    ("recycling-model", "T=1", "sync"),
    ("merged", "T=1", "sync"),
    ("deepest-first", "T=1", "pingpong"),
]
PIPELINES = ("sync", "pearl", "branches", "tree", "pingpong")
REST = [
    pytest.param(levels, sampling, pipeline, marks=pytest.mark.slow)
    for levels in CASCADES
    for sampling in SAMPLINGS
    for pipeline in PIPELINES
    if (levels, sampling, pipeline) not in QUICK and not (levels == "last-passes-on" and pipeline in AHEAD)
]


@pytest.fixture(scope="module")
def plain_tokens():
    """Plain decoding's answer per sampling, computed once."""
    return {}


@pytest.mark.parametrize("levels, sampling, pipeline", QUICK + REST)
def test_tokens_are_those_of_plain_decoding(open_room, make_requests, plain_tokens, levels, sampling, pipeline):
    count, max_tokens = (4, 24) if matrices.is_whole else (3, 14)
    requests = make_requests(count, max_tokens=max_tokens, **SAMPLINGS[sampling])
    if sampling not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens[sampling] = plain.tokens, plain.ends
    config = CASCADES[levels]
    room = open_room(config, pipeline=pipeline).serve(requests)
    assert (room.tokens, room.ends) == plain_tokens[sampling]
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"
    work = room.stats.levels
    assert sorted(work) == [f"{i}-{level.name}" for i, level in enumerate(config.levels) if level.num_draft_tokens]
    assert all(count["num_passes"] and count["num_drafts"] for count in work.values())
    assert all(count["num_accepted_tokens"] <= count["num_draft_tokens"] for count in work.values())
    # The verdict that ends a request is not sent to its drafter.
    assert 0 < work[max(work)]["num_accepted_tokens"] <= room.stats.num_accepted_tokens


@pytest.mark.extended
@pytest.mark.parametrize(
    ("levels", "sampling", "rule"),
    list(in_turn([*zip(SELVES, SAMPLINGS, strict=True), ("triforce", "T=1")], ["coupled", "rejection"])),
)
def test_the_target_with_fewer_layers_is_a_level(open_room, make_requests, plain_tokens, levels, sampling, rule):
    """It borrows rows of the pool, which may be short."""
    config = TRIFORCE if levels == "triforce" else SELVES[levels]
    count, max_tokens, slots = (5, 30, 130) if matrices.is_whole else (5, 20, 105)
    requests = make_requests(count, max_tokens=max_tokens, **SAMPLINGS[sampling])
    if levels not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens[levels] = plain.tokens, plain.ends
    for limits, num_slots in ((None, 4096), (SchedulerConfig(3, 40, 16), slots)):
        room = open_room(config, attached=True, rule=rule, limits=limits, slots=num_slots).serve(requests)
        if rule == "coupled" or sampling == "greedy":
            assert (room.tokens, room.ends) == plain_tokens[levels]
        assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"
        assert sorted(room.stats.levels) == [f"{i}-{level.name}" for i, level in enumerate(config.levels)]
    assert room.stats.num_preemptions > 0, "the pool was never short: the test shows nothing"


@pytest.mark.extended
@pytest.mark.parametrize(
    "levels, temperature",
    [
        ("horizontal", 1.0),
        pytest.param("horizontal", 0.0, marks=pytest.mark.slow),
        pytest.param("four", 0.0, marks=pytest.mark.slow),
        pytest.param("four", 1.0, marks=pytest.mark.slow),
    ],
)
def test_preemption_and_chunked_prefill_change_no_token(open_room, make_requests, levels, temperature):
    count, max_tokens, slots = (6, 40, 150) if matrices.is_whole else (5, 30, 130)
    requests = make_requests(count, max_tokens=max_tokens, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(CASCADES[levels], limits=SchedulerConfig(3, 40, 16), slots=slots, pipeline="branches")
    room.serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    assert room.stats.num_preemptions > 0, "the pool was never short: the test shows nothing"


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule",
    [
        "traversal",
        "kseq",
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("rejection", "block", "transport")),
    ],
)
@pytest.mark.parametrize("levels", ["horizontal", pytest.param("maxgram-model-model", marks=pytest.mark.slow)])
def test_ratio_rules_are_greedy_at_zero_temperature(open_room, make_requests, rule, levels):
    requests = make_requests(3, max_tokens=20) if matrices.is_whole else make_requests(2, max_tokens=12)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(CASCADES[levels], rule=rule, pipeline="branches").serve(requests)
    assert room.tokens == plain.tokens and room.stats.num_accepted_tokens > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule",
    [
        "rejection",
        "traversal",
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("block", "kseq", "transport")),
    ],
)
def test_ratio_rules_serve_sampled_requests(open_room, make_requests, rule):
    """The law is certified by enumeration; here, that every pipeline keeps draws and laws together."""
    for pipeline in ("sync", "branches"):
        levels = "maxgram-model-model" if rule in INDEPENDENT_ONLY else "horizontal"
        room = open_room(CASCADES[levels], rule=rule, pipeline=pipeline)
        count, max_tokens = (3, 20) if matrices.is_whole else (2, 10)
        room.serve(make_requests(count, max_tokens=max_tokens, temperature=0.3, ignore_eos=True))
        assert all(len(tokens) == max_tokens for tokens in room.tokens.values())
        assert room.stats.num_accepted_tokens > 0 or pipeline == "branches", "ahead, a miss may not be worth the wait"


def test_the_target_as_a_level_is_always_right(open_room, make_requests, models):
    """A level accepts its child's tokens only where they agree with its own: a perfect upper level hides any child."""
    requests = make_requests(2, max_tokens=25)
    room = open_room(cascade(model("tiny", 3), model("drafter", 4)), path=models["target"]).serve(requests)
    histogram = room.stats.acceptance_histogram
    assert histogram[4] >= 6 and sum(histogram[:4]) <= 4, "only the last, shortened proposals may fall short"


def test_a_better_base_saves_passes(open_room, make_requests, models):
    """The level above a perfect child reviews once per draft instead of once per token."""
    requests = make_requests(2, max_tokens=25)
    passes = {}
    useless = NgramDrafterConfig(num_draft_tokens=5, max_ngram=9, min_ngram=9)
    for name, base in (("perfect", model("drafter", 5)), ("useless", useless)):
        room = open_room(cascade(base, model("drafter", 6))).serve(requests)
        passes[name] = room.stats.levels["1-model"]["num_passes"] / room.stats.num_rounds
    assert passes["perfect"] < 2 and passes["useless"] > 4


@pytest.mark.extended
def test_merged_guesses_are_accepted_where_the_last_level_was_wrong(open_room, make_requests, models):
    """A useless last level rejects the guesses of its child, the target's model; merged, they reach the target."""
    requests = make_requests(3, max_tokens=30)
    lengths = {}
    for merge in (0, 4):
        config = cascade(model("target", 4), model("tiny", 4), merge=merge)
        stats = open_room(config).serve(requests).stats
        lengths[merge] = stats.num_accepted_tokens / stats.num_spec_steps
    assert lengths[4] > lengths[0] + 1


@pytest.mark.extended
@pytest.mark.parametrize(
    "levels, pipeline",
    [("horizontal", "sync"), ("four", "branches"), pytest.param("merged", "tree", marks=pytest.mark.slow)],
)
def test_kv_of_every_level_is_that_of_its_text(open_room, make_requests, models, levels, pipeline):
    """The rows that a level keeps after any round are those of reading its text, committed and drafted, from
    scratch."""
    fresh = {path: open_model(models[path], num_slots=256) for path in ("tiny", "small", "drafter")}
    checked = Counter()

    def compare(room):
        level = room.draft.drafter
        while isinstance(level, CascadeDrafter):
            name = CASCADES[levels].levels[level._spec.number].path
            for request_id, state in level._states.items():
                runner, read = level.runner, fresh[name]
                cached_len = runner.cached_len(request_id)
                if cached_len < 2 or checked[name] >= 12:
                    continue
                assert cached_len <= len(state.text)
                read.open("x")
                read.forward([Span("x", cached_len)], state.text[:cached_len])
                ours, theirs = runner.pool.slots(request_id)[:cached_len], read.pool.slots("x")
                for kept, anew in ((runner.pool.keys, read.pool.keys), (runner.pool.values, read.pool.values)):
                    torch.testing.assert_close(kept[:, ours], anew[:, theirs], atol=2e-5, rtol=1e-4)
                read.close("x")
                checked[name] += 1
            level = level._child._port._role.drafter

    open_room(CASCADES[levels], pipeline=pipeline).serve(make_requests(3, max_tokens=20), compare)
    models_above = [level.path for level in CASCADES[levels].levels[1:]]
    assert all(checked[name] == 12 for name in models_above)


def test_chunks_that_hold_the_whole_text_are_accepted_whole(open_room, make_requests):
    """TriForce's middle level is the target itself then: every token that it has verified is the target's."""
    whole = SelfDrafterConfig(num_draft_tokens=5, rows=DraftRows.chunks, chunk_size=8, num_chunks=64)
    config = cascade(TRIFORCE.levels[0], whole)
    for sampling in ({}, {"temperature": 1.0}):
        room = open_room(config, attached=True).serve(make_requests(3, max_tokens=18, **sampling))
        work = room.stats.levels["1-self"]
        assert work["num_accepted_tokens"] == work["num_draft_tokens"] > 20
        below = room.stats.levels["0-model"]
        assert 0 < below["num_accepted_tokens"] < below["num_draft_tokens"]
