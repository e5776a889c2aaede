"""The draft model: its KV after any verdict, its batches, and what it does when pool or context end."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.config import DraftRows, ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.options import SchedulerConfig
from actors.protocol.messages import Commit, SamplingKind, SamplingParams
from parallel.kv.row_limits import RowLimits
from parallel.runtime.row_policies import StreamingRows
from parallel.runtime.runner import Span, open_model
from tests.matrices import in_turn

EOS = 1
VOCAB_SIZE = 97
MAX_LEN = 256
SHAPES = {
    "chain": ModelDrafterConfig(num_draft_tokens=4),
    "tree": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=9, depth=4, width=3),
    "beam": ModelDrafterConfig(strategy=Strategy.beam, num_draft_tokens=12, depth=4, width=3),
    "merged": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=22, branching=[4, 2, 1, 1], merge_ngram=1),
    "cape": ModelDrafterConfig(strategy=Strategy.cape, num_draft_tokens=9, depth=4),
    "best_first": ModelDrafterConfig(strategy=Strategy.best_first, num_draft_tokens=7, depth=4, width=3),
}
DEPTH = 4


@pytest.fixture
def open_drafter(models):
    def open_(shape="chain", *, rule="coupled", num_slots=2000, prefill_chunk=512):
        runner = open_model(models["drafter"], num_slots=num_slots)
        drafter = ModelDrafter(runner, SHAPES[shape], ModelOptions(rule, 8, (EOS,), prefill_chunk))
        return drafter, runner

    return open_


def context_of(request_id, length, **sampling) -> Context:
    choose = random.Random(100 * request_id + length)
    token_ids = [choose.randrange(2, VOCAB_SIZE) for _ in range(length)]
    return Context(request_id, 0, token_ids, length, SamplingParams(seed=request_id, **sampling))


def opened(drafter, *contexts):
    for context in contexts:
        drafter.open(context)
    return list(contexts)


def budget_of(shape) -> int:
    return SHAPES[shape].num_draft_tokens


def judge(drafter, context, tree, num_accepted, next_token) -> None:
    """A verdict that accepts some path of this length, or of the longest there is."""
    depths = tree.depths()
    num_accepted = min(num_accepted, max(depths))
    last = random.Random(len(context.token_ids)).choice([i for i, depth in enumerate(depths) if depth == num_accepted])
    path = tuple(tree.path_to(last))
    tokens = (*(tree.token_ids[node] for node in path), next_token)
    drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), path, tokens))
    context.token_ids += tokens


@cache
def reading_anew(path):
    return open_model(path, num_slots=MAX_LEN)


def check_kv(runner, path, context) -> None:
    """The rows that are kept are those of reading the text from scratch."""
    cached_len = runner.cached_len(context.request_id)
    assert runner.pool.pending_len(context.request_id) == 0
    fresh = reading_anew(path)
    fresh.open("fresh")
    fresh.forward([Span("fresh", cached_len)], context.token_ids[:cached_len])
    ours, theirs = runner.pool.slots(context.request_id)[:cached_len], fresh.pool.slots("fresh")
    for kept, read in ((runner.pool.keys, fresh.pool.keys), (runner.pool.values, fresh.pool.values)):
        torch.testing.assert_close(kept[:, ours], read[:, theirs], atol=2e-5, rtol=1e-4)
    fresh.close("fresh")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "rule", "temperature"),
    list(in_turn(itertools.product(SHAPES, ["coupled", "rejection"]), [0.0, 0.1, 1.0])),
)
def test_kv_after_any_verdict_is_that_of_the_text(open_drafter, models, shape, temperature, rule):
    """T7: every accepted length, in any order."""
    drafter, runner = open_drafter(shape, rule=rule)
    (context,) = opened(drafter, context_of(1, 9, temperature=temperature))
    lengths = [*range(DEPTH + 1)]
    random.Random(shape + rule).shuffle(lengths)
    for num_accepted in lengths:
        (draft,) = drafter.propose([context], [budget_of(shape)])
        text_len = len(context.token_ids)
        judge(drafter, context, draft.tree, num_accepted, 5 + num_accepted)
        runner.pool.check()
        depth = max(draft.tree.depths())
        accepted = len(context.token_ids) - text_len - 1
        assert accepted == min(num_accepted, depth)
        # All but the root is cached, and the last accepted token where it was never fed: the deepest of a draft is not.
        missing = text_len + accepted - runner.cached_len(1)
        if shape == "merged":  # nothing after a node that has another's row
            assert 0 <= missing <= accepted
        else:
            assert missing == 0 or (missing == 1 and (accepted == depth or shape in ("best_first", "cape")))
        check_kv(runner, models["drafter"], context)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "rule", "temperature"),
    list(in_turn(itertools.product(SHAPES, ["coupled", "rejection", "kseq"]), [0.0, 1.0])),
)
def test_a_row_drafts_the_same_alone_and_in_company(open_drafter, shape, rule, temperature):
    """T8: whatever was accepted of its neighbours, and however long they are."""

    def drafts_of(together):
        drafter, _ = open_drafter(shape, rule=rule)
        contexts = opened(drafter, *(context_of(i, 3 + 8 * i, temperature=temperature) for i in range(3)))
        groups = [contexts] if together else [[context] for context in contexts]
        drafted = []
        for step in range(3):
            drafts = list(
                itertools.chain(
                    *(drafter.propose(g, [max(1, budget_of(shape) - c.request_id) for c in g]) for g in groups)
                )
            )
            drafted.append(
                [
                    (
                        draft.tree,
                        draft.sampling_kinds,
                        [distribution and distribution.token_ids for distribution in draft.distributions],
                    )
                    for draft in drafts
                ]
            )
            for context, draft in zip(contexts, drafts, strict=True):
                judge(drafter, context, draft.tree, (step + context.request_id) % (DEPTH + 1), 5 + step)
        return drafted

    assert drafts_of(together=True) == drafts_of(together=False)


def test_greedy_and_plain_rows_of_one_batch_draft_as_they_do_alone(open_drafter):
    """Rows with processors take the longer loop, and pull the others along."""
    samplings = [{}, dict(temperature=1.0), dict(temperature=1.0, top_k=3), dict(repetition_penalty=1.5)]
    contexts = [context_of(i, 6, **sampling) for i, sampling in enumerate(samplings)]
    drafter, _ = open_drafter()
    together = drafter.propose(opened(drafter, *contexts), [4] * 4)
    for context, draft in zip(contexts, together, strict=True):
        alone, _ = open_drafter()
        assert alone.propose(opened(alone, context), [4]) == [draft]


IMPOSSIBLE = {
    "all banned": dict(bad_words=tuple((token,) for token in range(VOCAB_SIZE))),
    "no end allowed": dict(min_tokens=99, stop_token_ids=tuple(range(VOCAB_SIZE))),
    "logits": dict(repetition_penalty=1.1),
}


@pytest.mark.parametrize(
    ("shape", "rule", "what", "temperature"),
    list(in_turn(itertools.product(SHAPES, ["coupled", "rejection", "kseq"]), IMPOSSIBLE, [0.0, 1.0])),
)
def test_an_impossible_distribution_drafts_nothing_and_leaves_the_others(
    open_drafter, monkeypatch, shape, rule, temperature, what
):
    drafter, runner = open_drafter(shape, rule=rule)
    good = context_of(1, 9, temperature=temperature, top_k=5)
    bad = context_of(2, 9, temperature=temperature, top_p=0.9, max_tokens=99, **IMPOSSIBLE[what])
    forward = runner.forward

    def poisoned(spans, tokens, **options):
        output, start = forward(spans, tokens, **options), 0
        logits = output.logits.clone()
        for span in spans:
            if span.seq_id == 2 and what == "logits":
                logits[start : start + span.num_logits] = torch.nan
            start += span.num_logits
        return replace(output, logits=logits)

    monkeypatch.setattr(runner, "forward", poisoned)
    budget = budget_of(shape)
    expected, nothing = drafter.propose(opened(drafter, good, bad), [budget] * 2)
    assert nothing.tree.num_draft_tokens == 0 and expected.tree.num_draft_tokens > 0
    assert all(distribution is None for distribution in nothing.distributions)


@pytest.mark.parametrize(
    ("shape", "rule", "temperature"),
    list(in_turn(itertools.product(SHAPES, ["coupled", "rejection"]), [0.0, 1.0])),
)
def test_tokens_that_are_ruled_out_are_in_no_draft(open_drafter, shape, rule, temperature):
    """All but two, fewer than a tree is wide: the tree is narrower instead."""
    ruled_out = tuple((token,) for token in range(VOCAB_SIZE) if token not in (20, 30))
    drafter, _ = open_drafter(shape, rule=rule)
    (context,) = opened(drafter, context_of(1, 9, temperature=temperature, bad_words=ruled_out))
    (draft,) = drafter.propose([context], [budget_of(shape)])
    assert draft.tree.num_draft_tokens > 0 and set(draft.tree.token_ids[1:]) <= {20, 30}


def test_a_greedy_chain_is_the_models_own_continuation(open_drafter, models):
    from transformers import AutoModelForCausalLM

    drafter, _ = open_drafter()
    (context,) = opened(drafter, context_of(1, 9))
    (draft,) = drafter.propose([context], [4])
    model = AutoModelForCausalLM.from_pretrained(models["drafter"]).eval()
    expected = model.generate(torch.tensor([context.token_ids]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert list(draft.tree.token_ids[1:]) == expected[0, 9:].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_text_is_caught_up_with_in_chunks_of_any_size(open_drafter, shape):
    expected = None
    for prefill_chunk, prepared in ((512, False), (512, True), (9, False), (1, True)):
        drafter, runner = open_drafter(shape, prefill_chunk=prefill_chunk)
        (context,) = opened(drafter, context_of(1, 23))
        fed = []
        forward = runner.forward
        runner.forward = lambda spans, tokens, forward=forward, fed=fed, **options: (
            fed.append(max(s.num_tokens for s in spans)),
            forward(spans, tokens, **options),
        )[1]
        if prepared:
            drafter.prefill([context])
            assert runner.cached_len(1) == 22 and runner.pool.pending_len(1) == 0
        drafts = drafter.propose([context], [budget_of(shape)])
        expected = expected or drafts
        assert drafts == expected and max(fed) <= max(prefill_chunk, 8)


def test_a_chain_costs_one_pass_per_token(open_drafter):
    drafter, runner = open_drafter()
    (context,) = opened(drafter, context_of(1, 9))
    passes = []
    forward = runner.forward
    runner.forward = lambda spans, tokens, **options: (passes.append(len(tokens)), forward(spans, tokens))[1]
    drafter.propose([context], [4])
    assert passes == [9, 1, 1, 1], "the text, and every draft token but the last"


@pytest.mark.parametrize(
    ("shape", "rule", "draw"),
    [
        *((shape, "rejection", SamplingKind.WITHOUT_REPLACEMENT) for shape in ("chain", "tree", "beam")),
        *((shape, rule, SamplingKind.IID) for shape in ("chain", "tree") for rule in ("kseq", "transport")),
    ],
)
def test_sampled_drafts_show_the_laws_they_were_drawn_from(open_drafter, shape, rule, draw):
    drafter, _ = open_drafter(shape, rule=rule)
    (context,) = opened(drafter, context_of(1, 9, temperature=1.0))
    (draft,) = drafter.propose([context], [budget_of(shape)])
    tree = draft.tree
    assert tree.num_draft_tokens > 0 and set(draft.sampling_kinds[1:]) == {draw}
    for parent, children in enumerate(tree.children()):
        if not children:
            continue
        distribution = draft.distributions[parent]
        assert (
            len(distribution.token_ids) == len(set(distribution.token_ids)) <= 8
            and abs(sum(distribution.probs) - 1) < 1e-6
        )
        drawn = [tree.token_ids[child] for child in children]
        assert set(drawn) <= set(distribution.token_ids)
        assert draw is SamplingKind.IID or len(set(drawn)) == len(drawn)


class TestPoolAndContext:
    """Running out of either costs drafts, never an error."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_pool_too_small_for_all_serves_whom_it_can(self, open_drafter, shape):
        drafter, runner = open_drafter(shape, num_slots=45)
        contexts = opened(drafter, *(context_of(i, 10) for i in range(5)))
        budgets = [budget_of(shape)] * 5
        drafts = drafter.propose(contexts, budgets)
        served = [draft.tree.num_draft_tokens > 0 for draft in drafts]
        assert served[0] and not served[-1] and served == sorted(served, reverse=True)
        runner.pool.check()
        for context, draft in zip(contexts, drafts, strict=True):
            assert draft.tree.token_ids[0] == context.token_ids[-1]
            judge(drafter, context, draft.tree, 1, 7)
        for request_id in range(4):
            drafter.release(request_id)
        (draft,) = drafter.propose(contexts[4:], budgets[4:])
        assert draft.tree.num_draft_tokens > 0, "there is room now"

    @pytest.mark.extended
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("num_slots", [1, 8, 30, 60])
    def test_no_pool_is_small_enough_for_an_error(self, open_drafter, shape, num_slots):
        drafter, runner = open_drafter(shape, num_slots=num_slots, prefill_chunk=4)
        contexts = opened(drafter, *(context_of(i, 12) for i in range(3)))
        drafter.prefill(contexts)
        for step in range(3):
            drafts = drafter.propose(contexts, [budget_of(shape)] * 3)
            for context, draft in zip(contexts, drafts, strict=True):
                judge(drafter, context, draft.tree, step % 3, 7)
            runner.pool.check()
        for context in contexts:
            drafter.release(context.request_id)
        assert runner.pool.num_free == num_slots

    @pytest.mark.parametrize("shape", SHAPES)
    def test_drafts_end_where_the_context_does(self, open_drafter, shape):
        for length, drafts in ((MAX_LEN - DEPTH, True), (MAX_LEN - DEPTH + 1, False), (MAX_LEN, False)):
            drafter, _ = open_drafter(shape, num_slots=400)
            (context,) = opened(drafter, context_of(1, length))
            (draft,) = drafter.propose([context], [budget_of(shape)])
            assert (draft.tree.num_draft_tokens > 0) == drafts
            assert length + max(draft.tree.depths()) <= MAX_LEN

    def test_a_shorter_draft_still_fits(self, open_drafter):
        drafter, _ = open_drafter(num_slots=400)
        (context,) = opened(drafter, context_of(1, MAX_LEN - 2))
        assert drafter.propose([context], [2])[0].tree.num_draft_tokens == 2

    def test_a_text_beyond_the_context_is_read_no_further(self, open_drafter):
        """The target's context may be the longer one."""
        drafter, runner = open_drafter(num_slots=600)
        (context,) = opened(drafter, context_of(1, MAX_LEN + 40))
        drafter.prefill([context])
        assert runner.cached_len(1) <= MAX_LEN
        assert drafter.propose([context], [4])[0].tree.num_draft_tokens == 0


def test_sampled_trees_grow_where_the_noise_of_the_target_leads(open_room, make_requests, models):
    """Paths compete by their probability given the noise, which decides what a target that thinks alike will draw."""

    def without_noise(drafter):
        drafter._ranks_given_noise = False
        return drafter

    requests = make_requests(3, max_tokens=30, temperature=1.0)
    rounds = []
    for wrap in (None, without_noise):
        room = open_room(SHAPES["best_first"], path=models["target"], wrap=wrap).serve(requests)
        rounds.append(sum(room.stats.acceptance_histogram))
    assert rounds[0] < 0.9 * rounds[1], "the same tokens in fewer rounds"


@pytest.mark.parametrize("shape", ["chain", "best_first"])
def test_a_window_of_rows_drafts_behind_a_text_beyond_pool_and_positions(open_drafter, shape):
    """It has the least room that the record asks for, and verdicts are any."""
    config = replace(SHAPES[shape], rows=DraftRows.streaming, sinks=2, window=24, ahead_width=1, depth=4)
    num_slots = config.most_rows(SchedulerConfig(prefill_chunk=16))
    drafter, runner = open_drafter(shape, num_slots=num_slots, prefill_chunk=16)
    assert drafter.propose(opened(drafter, context_of(1, 2 * MAX_LEN)), [4])[0].tree.num_draft_tokens == 0
    drafter.release(1)
    runner.keep_rows_by(StreamingRows(runner.decoder, runner.pool, RowLimits(2, 24)))
    (context,) = opened(drafter, context_of(1, 2 * MAX_LEN))
    for round_ in range(12):
        (draft,) = drafter.propose([context], [4])
        assert draft.tree.num_draft_tokens >= 4
        judge(drafter, context, draft.tree, round_ % 5, 7)
        runner.pool.check()
    drafter.truncate(context)
    drafter.release(1)
    assert runner.pool.num_free == num_slots
