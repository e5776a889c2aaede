"""Drafted chains as graphs, with a stand-in for CUDA's (`cuda_twin.py`): the tokens and the KV rows of eager passes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.loading import _sampled_chains, graph_list
from actors.options import SchedulerConfig
from actors.protocol.messages import Commit, SamplingParams
from actors.sampling.logits import ChoicesAhead, choose_plain
from parallel.runtime.runner import ModelRunner, captured_facts, open_model
from tests.parallel.cuda_twin import CudaTwin, capture_passes

LENGTH = 6
CONFIG = ModelDrafterConfig(num_draft_tokens=LENGTH)
SCHEDULER = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64)
CHAIN = [SamplingParams(), SamplingParams(temperature=0.7, seed=2), SamplingParams(temperature=1.0, seed=3)]
CUT = [
    SamplingParams(top_k=3),
    SamplingParams(temperature=0.7, seed=2, top_p=0.8),
    SamplingParams(temperature=1.0, seed=3, top_k=5, min_p=0.1),
]


@pytest.fixture
def twin(monkeypatch) -> CudaTwin:
    return CudaTwin().install(monkeypatch)


def open_drafter(models, *, graphs: bool, device="cpu", scheduler=SCHEDULER):
    """Eagerly it makes passes of the same buckets."""
    runner = open_model(models["drafter"], device=device, num_slots=600)
    if device == "cpu":
        capture_passes(runner)
    facts = {}
    if graphs:
        listed = graph_list(CONFIG, scheduler, "sync")
        facts = captured_facts(runner, listed, choices=lambda *shape: _sampled_chains(runner.decoder.device, *shape))
    else:
        runner.run_eagerly()
    return ModelDrafter(runner, CONFIG, ModelOptions("coupled", 8, (1,), 512)), runner, facts


def rounds(drafter, budgets_of_rounds, sampling):
    """The drafts of rounds with random verdicts."""
    draw, found = random.Random(0), []
    contexts = [Context(i, 0, [*range(2, 9 + 20 * i)], 4, params) for i, params in enumerate(sampling)]
    for context in contexts:
        drafter.open(context)
    for budgets in budgets_of_rounds:
        drafts = drafter.propose(contexts, budgets)
        found.append([draft.tree for draft in drafts])
        for context, draft in zip(contexts, drafts, strict=True):
            path = tuple(range(1, 1 + draw.randint(0, draft.tree.num_draft_tokens)))
            tokens = (*(draft.tree.token_ids[node] for node in path), 11)
            drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), path, tokens))
            context.token_ids += tokens
    return found


@pytest.mark.extended
@pytest.mark.parametrize(
    "sampling", [CHAIN, *(pytest.param(one, marks=pytest.mark.slow) for one in (CHAIN[1:2], [SamplingParams()] * 2))]
)
def test_a_chain_is_one_graph_and_drafts_what_single_passes_draft(models, twin, sampling):
    budgets = [[LENGTH] * len(sampling)] * 2 + [[2, 5, 6][: len(sampling)], [1] * len(sampling), [4] * len(sampling)]
    eager, eager_runner, _ = open_drafter(models, graphs=False)
    expected = rounds(eager, budgets, sampling)
    captured, runner, facts = open_drafter(models, graphs=True)
    assert facts["graphs"].endswith("4x1*5 4x1*4 4x1*2 4x1*1 2x1*5 2x1*4 2x1*2 2x1*1 1x1*5 1x1*4 1x1*2 1x1*1")
    assert rounds(captured, budgets, sampling) == expected
    for seq_id in range(len(sampling)):
        ours, theirs = runner.pool.slots(seq_id), eager_runner.pool.slots(seq_id)
        for part in ("keys", "values"):
            assert torch.equal(getattr(runner.pool, part)[:, ours], getattr(eager_runner.pool, part)[:, theirs])


@pytest.mark.gpu
def test_chains_on_a_gpu_are_those_of_single_passes(models):
    budgets = [[LENGTH] * 3, [2, 5, 6], [LENGTH] * 3]
    found = [rounds(open_drafter(models, graphs=graphs, device="cuda")[0], budgets, CHAIN) for graphs in (True, False)]
    assert found[0] == found[1]


@pytest.mark.extended
def test_a_draft_is_two_replays(models, twin):
    drafter, _, _ = open_drafter(models, graphs=True, scheduler=replace(SCHEDULER, max_num_seqs=2))
    contexts = [Context(i, 0, [5, 6, 7, 8], 4, params) for i, params in enumerate(CHAIN[1:])]
    for context in contexts:
        drafter.open(context)
    before = twin.num_replays
    drafter.propose(contexts, [LENGTH] * 2)
    assert twin.num_replays == before + 2, "the text, and the chain behind it"


def test_truncated_chains_are_those_drafted_level_by_level(models, twin, monkeypatch):
    """A chain that stays on the device truncates as the logit processors do, request by request."""
    budgets, found = [[LENGTH] * 3, [2, 5, 6], [LENGTH] * 3], []
    for stays in (True, False):
        drafter = open_drafter(models, graphs=False)
        contexts = [(Context(i, 0, [5, 6, 7, 8], 4, one), 3) for i, one in enumerate(CUT)]
        assert drafter[0]._keeps_tokens_on_device(contexts) is stays
        found.append(rounds(drafter[0], budgets, CUT))
        monkeypatch.setattr(ModelDrafter, "_keeps_tokens_on_device", lambda *_: False)
    assert found[0] == found[1]


def test_a_gpu_without_the_kernel_drafts_truncated_rows_level_by_level(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for has in (True, False):
        monkeypatch.setattr("actors.sampling.logits.has_triton", lambda has=has: has)
        assert [ChoicesAhead.can_choose(params, gpu) for params in (*CHAIN, *CUT)] == [True] * 4 + [has] * 2
        assert all(ChoicesAhead.can_choose(params, cpu) for params in (*CHAIN, *CUT))
        assert not ChoicesAhead.can_choose(SamplingParams(presence_penalty=1.0), cpu), "it follows the text"


def test_choices_that_are_laid_out_ahead_are_the_same_choices():
    logits = torch.randn(4, 3, 50)
    logits[1, 1, 7] = torch.nan
    for params in (CHAIN, CUT):
        ahead = ChoicesAhead.of(params, [5, 9, 20], 4, logits.device)
        assert len(ahead.tensors()) == 3 + 3 * (params is CUT)
        for step in range(4):
            expected = choose_plain(logits[step], params, [5 + step, 9 + step, 20 + step])
            assert torch.equal(ahead.choose(logits[step], step), expected)
            assert torch.equal(ahead.part(step, 4).choose(logits[step], 0), expected)
            assert torch.equal(ahead.like().choose(logits[step], step), expected)
    ahead = ChoicesAhead.of(CHAIN, [5, 9, 20], 4, logits.device)
    assert ahead.key() != ChoicesAhead.of(CUT, [5, 9, 20], 4, logits.device).key(), "graphs of their own"
    assert len({tuple(ahead.keys[:, row].flatten().tolist()) for row in (1, 2)}) == 2


def test_only_drafters_of_plain_chains_capture_them():
    def listed(pipeline="sync", **changes):
        return graph_list(ModelDrafterConfig(num_draft_tokens=4, **changes), SCHEDULER, pipeline)

    assert listed().chains and not listed().of_every_row
    tree = listed(strategy=Strategy.tree)
    for other in (tree, listed("branches"), listed(length_rule="thompson")):
        assert not other.chains and other.of_every_row and other.of_last_rows
    assert not listed(prefixes=[2]).chains


@pytest.mark.extended
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_tokens_of_graphs_are_the_engines(open_room, make_requests, twin, monkeypatch, temperature):
    """Target and drafter, with several requests that come and go."""
    requests = make_requests(4, max_tokens=10, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    eager = open_room(CONFIG).serve(requests)
    init, opened = ModelRunner.__init__, []

    def captured_init(self, *arguments, **options):
        init(self, *arguments, **options)
        opened.append(capture_passes(self))

    monkeypatch.setattr(ModelRunner, "__init__", captured_init)
    room = open_room(CONFIG, limits=SchedulerConfig(max_num_seqs=3)).serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends) == (eager.tokens, eager.ends)
    assert len(opened) == 2 and all(len(passes) for passes in opened) and twin.num_replays > 20
    assert room.stats.num_accepted_tokens > 0
