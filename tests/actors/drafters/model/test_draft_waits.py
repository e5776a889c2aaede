"""What drafts cost a GPU: waits of the host, and launches beside the passes, which are replays of graphs there.

Counted on `fake_accelerator.py`, with stand-ins for the kernels of sampling; docs/gpu/sampling.md has the numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.protocol.messages import Admit, Commit, DraftBatch, DraftOrder, SamplingParams
from actors.worker.factory import build_role
from parallel.comm.group import SINGLE
from tests.matrices import in_turn
from tests.parallel import counted_kernels, host_kernels
from tests.parallel.fake_accelerator import FakeAccelerator

PROMPT = (3, 4, 5, 3, 4)
LENGTH = 5
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9)
CUT = replace(SAMPLED, top_k=20, top_p=0.9)
EDITED = replace(SAMPLED, presence_penalty=0.5)


class Counted:
    """A draft role on the accelerator, and what its calls cost."""

    def __init__(self, accelerator: FakeAccelerator, spec, pipeline: str) -> None:
        drafter = replace(spec.drafter, kv_slots=600, num_draft_tokens=LENGTH)
        spec = replace(spec, role="draft", pipeline=pipeline, device=str(accelerator.device), drafter=drafter)
        self.accelerator, (self.role, _) = accelerator, build_role(spec, SINGLE)
        self.num_passes = 0
        runner = self.role.drafter.runner
        forward = runner.forward

        def counted(*arguments, **options):
            before = accelerator.launches.copy()
            output = forward(*arguments, **options)
            accelerator.launches.clear()
            accelerator.launches.update(before)
            self.num_passes += 1
            return output

        runner.forward = counted

    def costs(self, call) -> tuple[int, int, int]:
        """Waits, passes, and launches beside them."""
        self.accelerator.forget()
        self.num_passes = 0
        call()
        assert not self.accelerator.blocking_uploads, self.accelerator.blocking_uploads
        return self.accelerator.num_syncs, self.num_passes, self.accelerator.launches.total()

    def draft(self, *sampling: SamplingParams) -> tuple[int, int, int]:
        return self.costs(lambda: list(self.role.answer(ordered(*sampling))))


def ordered(*sampling: SamplingParams) -> DraftBatch:
    params = [replace(one, seed=i) for i, one in enumerate(sampling)]
    admits = tuple(Admit(i, 0, PROMPT, len(PROMPT), one) for i, one in enumerate(params))
    return DraftBatch(1, admits=admits, orders=tuple(DraftOrder(i, LENGTH) for i in range(len(sampling))))


@pytest.fixture
def goes_on(monkeypatch):
    """Draft-ahead, although the untrained model is sure of nothing."""
    monkeypatch.setattr("actors.drafters.model.ahead_drafter.AHEAD_WORTH", 0.0)
    monkeypatch.setattr("actors.drafters.draft_ahead.tree.REDRAFT_WORTH", 0.0)


@pytest.fixture
def accelerator(monkeypatch, goes_on):
    host_kernels.use_none(monkeypatch)
    with FakeAccelerator() as accelerator:
        counted_kernels.install(monkeypatch, accelerator)
        yield accelerator


@pytest.mark.parametrize(
    "sampling", [*(pytest.param(one, marks=pytest.mark.slow) for one in ((GREEDY,), (CUT,))), (GREEDY, CUT, SAMPLED)]
)
def test_a_chain_is_one_wait_for_any_sampling(accelerator, spec, sampling):
    waits, num_passes, _ = Counted(accelerator, spec, "sync").draft(*sampling)
    assert (waits, num_passes) == (1, LENGTH)


LAUNCHES = {"sync": (18, 18, 23), "pearl": (30, 55, 61), "branches": (22, 43, 47), "tree": (8, 14, 15)}
"""Launches of a chain in turn, and of the longest step of draft-ahead: greedy, with a temperature, with top-k and
top-p."""
AFTER_A_MISS = dict.fromkeys(("pearl", "branches", "tree"), (40, 65, 70))
NUM_PASSES = {"sync": LENGTH, "pearl": LENGTH + 1, "branches": LENGTH - 1, "tree": 1}


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", list(in_turn(LAUNCHES, times={"pearl": 0, "tree": 0})))
def test_truncation_adds_no_wait_and_one_launch_a_pass(accelerator, spec, pipeline):
    found = []
    for one in (GREEDY, SAMPLED, CUT):
        counted, steps = Counted(accelerator, spec, pipeline), []
        steps.append(counted.draft(one, one))
        while counted.role.wants_work and len(steps) < 3:
            steps.append(counted.costs(lambda: counted.role.work(4, 9)))  # noqa: B023  called at once
        assert all(waits == 1 for waits, num_passes, _ in steps[1:] if num_passes), "one a step, of however many passes"
        longest = max(steps[pipeline != "sync" :], key=lambda step: step[1])
        assert longest[:2] == (1, NUM_PASSES[pipeline])
        found.append((steps[0], longest[2]))
    assert tuple(launches for _, launches in found) == LAUNCHES[pipeline]
    missed = tuple(first for first, _ in found)
    each = 1 if pipeline == "sync" else LENGTH
    assert missed == tuple((each, LENGTH, launches) for launches in AFTER_A_MISS.get(pipeline, LAUNCHES["sync"]))


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", [pytest.param("sync", marks=pytest.mark.slow), "branches"])
def test_launches_do_not_grow_with_requests_each_cut_by_its_own_limits(accelerator, spec, pipeline):
    found = []
    for sampling in ((CUT,), (CUT, replace(CUT, top_k=3), GREEDY, SAMPLED)):
        counted = Counted(accelerator, spec, pipeline)
        steps = [counted.draft(*sampling)]
        while counted.role.wants_work and len(steps) < 3:
            steps.append(counted.costs(lambda: counted.role.work(4, 9)))  # noqa: B023
        found.append(steps)
    (alone, together), few = found, 3  # rows that share noise, or are not sampled, are gathered and added apart
    for one, all_ in zip(alone, together, strict=True):
        assert one[:2] == all_[:2] and 0 <= all_[2] - one[2] <= few * one[1]


def test_what_follows_the_text_is_chosen_pass_by_pass(accelerator, spec):
    counted = Counted(accelerator, spec, "pearl")
    counted.draft(EDITED, CUT)
    assert counted.costs(lambda: counted.role.work(4, 9))[:2] == (1, 1)


def paths(role) -> dict[tuple[int, tuple[int, ...]], float]:
    """Every path of the draft trees, and its value; of nodes that were fed, by one more token."""
    found = {}
    for request_id, state in role.drafter._states.items():
        nodes = state.tree.nodes
        for i, node in enumerate(nodes):
            path, above = [-1] * (node.row >= 0), i
            while above > 0:
                path, above = [nodes[above].token, *path], nodes[above].parent
            found[request_id, tuple(path)] = node.value
    return found


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", ["pearl", "branches"])
def test_passes_without_the_host_make_the_trees_of_single_ones(goes_on, spec, pipeline):
    """And find their KV rows: drafts after a verdict are the same."""
    roles = []
    for most in (1, 9):
        drafter = replace(spec.drafter, kv_slots=600, num_draft_tokens=LENGTH)
        role, _ = build_role(replace(spec, role="draft", pipeline=pipeline, drafter=drafter), SINGLE)
        list(role.answer(ordered(CUT, GREEDY)))
        while role.wants_work:
            role.work(4, most)
        roles.append(role)
    one_by_one, at_once = map(paths, roles)
    assert at_once == pytest.approx(one_by_one, abs=1e-4)
    drafts = []
    for role in roles:
        commits = []
        for request_id, state in role.drafter._states.items():
            chain = [state.tree.nodes[node] for node in state.tree.best_chain(LENGTH + 1)]
            path = tuple(range(1, 1 + sum(node.offered for node in chain)))
            tokens = tuple(node.token for node in chain[: len(path) + 1])
            commits.append(Commit(request_id, 0, len(PROMPT), path, tokens))
        orders = tuple(DraftOrder(i, LENGTH) for i in range(2))
        answers = list(role.answer(DraftBatch(2, commits=tuple(commits), orders=orders)))
        assert [len(answer.proposals) for answer in answers] == [2], "both were prepared"
        drafts.append([proposal.tree for answer in answers for proposal in answer.proposals])
        while role.wants_work:
            role.work(4, 1)
    assert drafts[0] == drafts[1] and all(tree.num_draft_tokens == LENGTH for tree in drafts[0])
    assert paths(roles[1]) == pytest.approx(paths(roles[0]), abs=1e-4)
