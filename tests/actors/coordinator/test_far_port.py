"""A far drafter is never waited for: what it prepared is read where the verdicts are by then, or a lookup drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from actors.coordinator import far_port
from actors.coordinator.far_port import MOST_UNANSWERED, FarPort
from actors.coordinator.local_drafts import LocalDrafts
from actors.coordinator.port import open_port
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.sequence import Sequence
from actors.drafters.draft_ahead.tree import AHEAD
from actors.options import SchedulerConfig
from actors.policy.policy import Policy
from actors.protocol.messages import (
    HASH_SEED,
    DraftBatch,
    DraftPreview,
    DraftPreviewBatch,
    Request,
    SamplingParams,
    TokenTree,
    VerifyBatch,
    extend_hash,
)
from tests.actors.scripted_roles import World
from tests.actors.small_language import next_word, oracle

REQUEST = Request(1, (3, 4), SamplingParams(max_tokens=40, ignore_eos=True))


class Apart(World):
    """The drafter's answers stay on their way until they are asked for."""

    def begin(self, request: Request = REQUEST) -> None:
        self.deliver(request)
        self.verify()

    def verify(self) -> VerifyBatch:
        """The target answers; the pass that this starts."""
        self.deliver(self.answers["target"].popleft())
        return next(one for one in reversed(self.sent) if isinstance(one, VerifyBatch))

    def text(self) -> list[int]:
        return [*REQUEST.prompt, *self.tokens[1]]

    def show(self, text: list[int], draft: list[int], epoch: int = 0, digest: int = HASH_SEED) -> None:
        """A preview of this chain arrives, made when `text` was all that was committed."""
        tree = TokenTree.chain(text[-1], draft)
        shown = DraftPreview(1, epoch, len(text), extend_hash(digest, text), tree)
        self.deliver(DraftPreviewBatch((shown,)))


def following(text: list[int], count: int) -> list[int]:
    """The words that follow."""
    written = list(text)
    for _ in range(count):
        written.append(next_word(written))
    return written[len(text) :]


def drafted(batch: VerifyBatch) -> tuple[list[int], bool | None]:
    """The draft of the only request, and whether the drafter had prepared it."""
    proposal = batch.items[0].proposal
    return ([], None) if proposal is None else (list(proposal.tree.token_ids[1:]), proposal.prepared)


@pytest.mark.parametrize("pipeline", AHEAD)
def test_a_lookup_drafts_for_every_pass_while_the_drafter_is_silent(pipeline):
    """The target never waits; without the lookup it would be still waiting for the first draft."""
    world = Apart(random.Random(0), pipeline, answers=("right",), far=True)
    world.begin()
    proposers: list[str] = []
    while not world.ends:
        batch = world.verify()
        assert world.coordinator.wait_until is None
        proposal = batch.items[0].proposal
        proposers += [name for name, _ in proposal.parts] if proposal is not None else []
    assert world.tokens[1] == oracle(REQUEST)
    assert proposers.count("lookup") > 3 and set(proposers) == {"lookup"}
    waiting = Apart(random.Random(0), pipeline, answers=("right",))
    waiting.begin()
    assert waiting.coordinator.wait_until is not None, "a negative control"


class Weighing(Policy):
    """Texts are sent in chunks."""

    weighs_waiting = True


def test_a_text_is_read_to_its_end_while_the_lookup_drafts():
    """No chunk of it is left out, though the request has drafts before the drafter knows it."""
    chunks = SchedulerConfig(prefill_chunk=6)
    request = replace(REQUEST, prompt=tuple(range(2, 11)) * 2, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    world = Apart(random.Random(0), "tree", answers=("right",), far=True, limits=chunks, policy=Weighing("tree", 4))
    world.begin(request)
    while not world.tokens.get(1):
        world.verify()
    read = []
    while len(world.tokens[1]) < 15:
        world.verify()
        if world.answers["draft"]:
            world.deliver(world.answers["draft"].popleft())
        read.append(len(world.drafter.knows.texts[1]))
    assert read[0] < 18 < read[-1], "it was never behind: the test shows nothing"
    assert any(isinstance(one, DraftBatch) and one.orders[0].num_draft_tokens for one in world.sent)
    world.settle()
    assert world.tokens[1] == oracle(request)


def test_a_preview_is_read_where_the_verdicts_have_come_to():
    world = Apart(random.Random(1), "tree", answers=("right",), far=True)
    world.begin()
    before = world.text()
    while len(world.text()) < len(before) + 3:
        world.verify()
    rest = following(before, 20)
    world.show(before, rest)
    batch = world.verify()
    known = len(world.text()) - len(before)
    assert drafted(batch) == (rest[known : known + 4], True)
    known += 5  # all four are right, and so is the target's own
    assert drafted(world.verify()) == (rest[known : known + 4], True), "the rest of the tree is kept"


@pytest.mark.parametrize("mistake", ["path", "epoch", "digest"])
def test_a_preview_that_the_verdicts_have_left_is_dropped(mistake):
    world = Apart(random.Random(1), "tree", answers=("right",), far=True)
    world.begin()
    before = world.text()
    while len(world.text()) < len(before) + 3:
        world.verify()
    rest = following(before, 20)
    if mistake == "path":
        rest[1] += 1
    wrong: dict[str, dict[str, int]] = {"epoch": {"epoch": 1}, "digest": {"digest": HASH_SEED + 1}}
    world.show(before, rest, **wrong.get(mistake, {}))
    for _ in range(3):
        assert not drafted(world.verify())[1]


def test_a_later_preview_takes_the_place_of_an_earlier_one_unless_it_was_left():
    world = Apart(random.Random(1), "tree", answers=("right",), far=True)
    world.begin()
    before = world.text()
    rest = following(before, 30)
    world.show(before, rest[:8])
    world.verify()
    world.show(before, [rest[0] + 1])
    world.verify()
    known = len(world.text()) - len(before)
    assert known < 8 and rest[:known] == world.text()[len(before) :]
    world.show(before, rest)
    batch = world.verify()
    known = len(world.text()) - len(before)
    assert drafted(batch) == (rest[known : known + 4], True)


def test_drafts_are_counted_by_who_made_them():
    world = Apart(random.Random(2), "tree", answers=("right",), far=True)
    world.begin()
    while not world.ends:
        if len(world.text()) in range(12, 20):
            world.show(world.text(), following(world.text(), 20))
        world.verify()
    counted: dict[str, list[int]] = {}
    for draft, was_prepared in [drafted(batch) for batch in world.sent if isinstance(batch, VerifyBatch)]:
        if draft:
            counted.setdefault("far" if was_prepared else "local", []).append(len(draft))
    stats = world.coordinator.stats
    assert {source: counts["num_spec_steps"] for source, counts in stats.drafts_by_source.items()} == {
        source: len(lengths) for source, lengths in counted.items()
    }
    assert {*counted} == {"far", "local"}
    for source, lengths in counted.items():
        assert stats.drafts_by_source[source]["num_draft_tokens"] == sum(lengths)
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(counts[name] for counts in stats.drafts_by_source.values()) == getattr(stats, name)
    near = World(random.Random(2), "tree", answers=("right",))
    near.deliver(REQUEST)
    near.settle()
    assert near.coordinator.stats.num_spec_steps and not near.coordinator.stats.drafts_by_source


def test_a_lost_drafter_leaves_the_lookup():
    world = Apart(random.Random(3), "branches", answers=("right",), far=True)
    world.begin()
    world.lose("draft")
    found = [drafted(world.verify()) for _ in range(6)]
    assert any(draft for draft, _ in found) and not any(prepared for _, prepared in found)
    world.bring_back("draft")
    world.settle()
    assert world.tokens[1] == oracle(REQUEST)


def test_every_verdict_leaves_for_the_drafter_at_once_until_too_many_are_unanswered(monkeypatch):
    assert MOST_UNANSWERED > 10
    monkeypatch.setattr(far_port, "MOST_UNANSWERED", 4)
    world = Apart(random.Random(0), "tree", answers=("right",), far=True)
    world.begin()
    for _ in range(3):
        num_before = sum(isinstance(one, DraftBatch) for one in world.sent)
        world.verify()
        assert sum(isinstance(one, DraftBatch) for one in world.sent) == num_before + (num_before < 4)
    for _ in range(4):
        world.verify()
    batches = [one for one in world.sent if isinstance(one, DraftBatch)]
    assert len(batches) == 4 and world.coordinator.awaits("draft")
    assert all(batch.streams and batch.works_ahead for batch in batches)
    world.settle()
    assert world.tokens[1] == oracle(REQUEST) and not world.coordinator.awaits("draft")


@pytest.mark.parametrize("name", ["model", None])
def test_a_request_that_names_the_drafter_gets_its_drafts_alone(name):
    world = Apart(random.Random(0), "tree", answers=("right",), far=True)
    world.begin(Request(1, (3, 4), REQUEST.sampling, drafter=name))
    found = [drafted(world.verify())[0] for _ in range(6)]
    assert any(found) is (name is None)


def test_a_lookup_beside_the_coordinator_copies_from_what_the_request_brings():
    """The text of an encoder or a reference, as it would on ranks of its own."""
    source, reference = (11, 12, 13, 14), (21, 22, 23)
    sequences = [
        Sequence.start(Request(1, (3,), source=source), 50),
        Sequence.start(Request(2, (3, 4), reference=reference), 50),
    ]
    LocalDrafts.of("copy").draft([(sequence, 3) for sequence in sequences])
    found: list[Any] = [sequence.draft.proposal for sequence in sequences]
    assert [proposal.tree.token_ids for proposal in found] == [(3, 11, 12, 13), (4, 21, 22, 23)]


def test_the_port_is_that_of_a_drafter_on_ranks_of_its_own():
    policy: Any = Policy("tree", 4)
    local = LocalDrafts.of("ngram")
    assert type(open_port(policy, 8, drafts=True, local_drafter=local)) is FarPort
    assert type(open_port(policy, 8, drafts=True, local_drafter="suffix")) is FarPort
    assert type(open_port(policy, 8, drafts=True)) is SeparatePort
    assert not open_port(policy, 8, drafts=False, local_drafter="suffix").is_present
