"""Ratio rules with a far drafter and a lookup beside the coordinator: the distribution of whole texts, enumerated.

The real coordinator, port and lookup run once for every sequence of the target's random decisions. Trees of the far
drafter come in between, made for texts that are up to two verdicts old. Which of the two drafts must not depend on what
is still to be drawn, and a verdict must be read in the draft that the target has seen.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest

from actors.coordinator.far_port import FarPort
from actors.coordinator.local_drafts import LocalDrafts
from actors.protocol.draft_tree import PreviewTree
from actors.protocol.messages import (
    HASH_SEED,
    DraftPreview,
    DraftPreviewBatch,
    Proposal,
    Request,
    SamplingKind,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    extend_hash,
)
from actors.verification.distributions import DrawnTree
from actors.verification.rules import RULES
from tests.actors.scripted_roles import ScriptedTarget, World
from tests.actors.verification.conftest import random_law
from tests.actors.verification.rule_enumeration import Emission, Tape, TapeSource, all_runs, total_variation

VOCAB, LENGTH, EXACT = 3, 4, 1e-12
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
"""It repeats itself, so that the lookup drafts."""
REQUEST = Request(1, PROMPT, SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True))
TARGET, DRAFTER = random_law(VOCAB, 5), random_law(VOCAB, 505)


class DrawnTarget(ScriptedTarget):
    """Judges drafts by a ratio rule; `tape` takes its decisions, by the keys of the production."""

    def __init__(self, rule: str, tape: Tape) -> None:
        super().__init__(num_slots=200)
        self.rule, self.tape = RULES[rule], tape

    def answer(self, batch: VerifyBatch) -> VerdictBatch:
        self.knows.learn(batch, has_last=True)
        verdicts = []
        for item in batch.items:
            text, proposal = self.knows.texts[item.request_id], item.proposal
            drawn = DrawnTree(TokenTree.root(text[-1]), (SamplingKind.ROOT,), (None,))
            if proposal is not None:
                drawn = DrawnTree(proposal.tree, proposal.sampling_kinds, proposal.distributions)
            path, token = self.rule(drawn, partial(_row, text, drawn.tree), TapeSource(self.tape, len(text)))
            epoch = self.knows.epochs[item.request_id]
            verdicts.append(Verdict(item.request_id, epoch, len(text), tuple(path), (token,)))
        num_rows = sum(item.num_tokens for item in batch.items)
        return VerdictBatch(batch.round, tuple(verdicts), 0.0, 0.5, num_rows)


def _row(text: list[int], tree: TokenTree, node: int) -> np.ndarray:
    """The target's distribution behind a node."""
    return TARGET((*text[len(PROMPT) :], *[tree.token_ids[one] for one in tree.path_to(node)]))


class Far(World):
    """The drafter shows trees before verdicts, and answers nothing else."""

    def __init__(self, rule: str, tape: Tape, *, branches: bool) -> None:
        super().__init__(random.Random(0), "tree" if branches else "pearl", answers=("right",), far=True)
        self.target, self.branches = DrawnTarget(rule, tape), branches
        port: Any = self.coordinator._drafter
        port._local = LocalDrafts.of("ngram")

    def text(self) -> tuple[int, ...]:
        return tuple(self.tokens.get(1, ()))

    def show(self, text: tuple[int, ...]) -> None:
        """A tree of two levels that the drafter has made for this text, likeliest first."""
        first = np.argsort(-DRAFTER(text))[: 1 + self.branches].tolist()
        below = [int(np.argmax(DRAFTER((*text, token)))) for token in first]
        last = (*PROMPT, *text)[-1]
        tree = TokenTree((last, *first, *below), (-1, *[0] * len(first), *range(1, len(first) + 1)))
        values = (0.0, -0.5, -1.0, -0.75, -1.5) if self.branches else ()
        known = [*PROMPT, *text]
        shown = DraftPreview(1, 0, len(known), extend_hash(HASH_SEED, known), tree, values)
        self.deliver(DraftPreviewBatch((shown,)))


def emitted(rule: str, *, branches: bool, sources: dict[str, int] | None = None) -> Emission:
    """The distribution of the first tokens; `sources` counts the drafts of each drafter."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)

    def run(tape: Tape) -> tuple[int, ...]:
        world = Far(rule, tape, branches=branches)
        world.deliver(REQUEST)
        before: list[tuple[int, ...]] = [()]
        while not world.ends:
            age = sum(world.text()) % 3  # depends on the committed text alone
            if len(before) > age and age < 2:
                world.show(before[-1 - age])
            world.deliver(world.answers["target"].popleft())
            before.append(world.text())
        for source, counts in world.coordinator.stats.drafts_by_source.items():
            if sources is not None:
                sources[source] = sources.get(source, 0) + counts["num_spec_steps"]
        return world.text()

    for weight, text in all_runs(run):
        joint[text] += weight
    return Emission(dict(joint), 0.0)


def distance(rule: str, *, branches: bool, **more: Any) -> float:
    return total_variation(emitted(rule, branches=branches, **more), TARGET, LENGTH)


@pytest.mark.extended
@pytest.mark.parametrize(("rule", "branches"), [("rejection", True), ("block", False), ("traversal", True)])
def test_texts_have_the_distribution_of_the_target(rule, branches):
    sources: dict[str, int] = {}
    assert distance(rule, branches=branches, sources=sources) < EXACT
    assert min(sources["far"], sources["local"]) > 10, "both have drafted"


def test_a_verdict_that_is_read_in_a_later_draft_is_found(monkeypatch):
    """A tree that arrives while the target works takes the place of the draft that it verifies."""
    keep = FarPort.receive_previews

    def replaces(port: FarPort, batch: DraftPreviewBatch, sequences: Any) -> None:
        keep(port, batch, sequences)
        for request_id, proposal in verifying().items():
            if proposal is not None:
                sequence = sequences[request_id]
                tree = PreviewTree.read(batch.previews[0]).best(proposal.tree.num_draft_tokens)
                known = request_id, sequence.epoch, sequence.prefix_len, sequence.prefix_hash
                verifying()[request_id] = Proposal.deterministic(*known, tree)

    worlds: list[Far] = []
    begin = Far.__init__
    monkeypatch.setattr(
        Far, "__init__", lambda world, *of, **more: (begin(world, *of, **more), worlds.append(world))[0]
    )

    def verifying() -> dict[int, Proposal | None]:
        round_ = worlds[-1].coordinator._round
        proposals: Any = round_.proposals if round_.verifying is not None else {}
        return proposals

    monkeypatch.setattr(FarPort, "receive_previews", replaces)
    assert distance("rejection", branches=False) > 0.01


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_chosen_tokens_that_are_said_to_be_drawn_are_found(monkeypatch, rule):
    """What a far drafter shows is chosen; a rule that tests it against a distribution is biased."""
    make = Proposal.deterministic
    even = SparseDistribution(tuple(range(VOCAB)), (1 / VOCAB,) * VOCAB)

    def as_drawn(*of: Any) -> Proposal:
        made = make(*of)
        size = len(made.tree.token_ids)
        kinds = (SamplingKind.ROOT, *[SamplingKind.IID] * (size - 1))
        return Proposal(*of, kinds, (even,) * size, prepared=True)

    monkeypatch.setattr(Proposal, "deterministic", staticmethod(as_drawn))
    assert distance(rule, branches=False) > 0.01
