"""A pass that takes draft rows over gives what a pass from the start gives, to the bit where kernels do."""

from __future__ import annotations

import random

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from parallel.self_speculation.resuming import KeptRows
from parallel.self_speculation.runner import SelfDraftRunner
from tests.families import FAMILIES
from tests.parallel.backends import BACKENDS

NUM_LAYERS, VOCAB = 4, 97
PLANS = {"exit": LayerPlan.prefix(2), "skip": LayerPlan.skipping(NUM_LAYERS, attention=[3], mlp=[1])}
"""The second runs one layer whole before it leaves something out."""


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint("Llama", num_hidden_layers=NUM_LAYERS)


class Round:
    """A target that has read some texts, drafts for them, and random proposals, more or less from the drafts."""

    def __init__(self, path, plan, seed, *, exact=True, **options):
        self.choose = random.Random(seed)
        self.target = open_model(path, num_slots=120, **options)
        self.draft = SelfDraftRunner(self.target, plan, resumes=True)
        self.resuming = self.draft.verifying(self.target) if exact else self.target
        self.texts = {name: self.tokens(self.choose.randrange(2, 20)) for name in "abcd"}
        for name, text in self.texts.items():
            self.target.open(name)
            for token in text[:-1]:  # one by one, so that the sequences' slots lie in each other's way
                self.target.forward([Span(name, 1)], [token])
                self.target.commit(name, [0])
        self.fed = {name: ([text[-1]], [-1]) for name, text in self.texts.items()}

    def tokens(self, count):
        return [self.choose.randrange(VOCAB) for _ in range(count)]

    def run_draft(self):
        """Chains for a and c, a tree for b, none for d; one pass of roots, and two more."""
        self.draft.forward([Span(name, 1) for name in "abc"], [self.texts[name][-1] for name in "abc"])
        for level in range(2):
            spans, tokens = [], []
            for name in "abc"[: 3 - level]:
                parents = [0, 0, 0] if name == "b" and not level else [1, 1, 3] if name == "b" else [level]
                fed = self.tokens(len(parents))
                spans.append(Span(name, len(parents), parents, 1))
                tokens += fed
                self.fed[name][0].extend(fed)
                self.fed[name][1].extend(parents)
            self.draft.forward(spans, torch.tensor(tokens))
        self.draft.release_rows()

    def proposals(self):
        """Spans and tokens: nodes of the drafts in any order, some missing, some with other tokens, some new."""
        spans, tokens = [], []
        for name in self.choose.sample("abcd", 4):
            all_tokens, all_parents = self.fed[name]
            place, fed, parents = {-1: -1}, [], []
            for row in range(len(all_tokens)):
                if row and (all_parents[row] not in place or self.choose.random() < 0.2):
                    continue
                place[row] = len(fed)
                fed.append(all_tokens[row] if not row or self.choose.random() < 0.8 else self.choose.randrange(VOCAB))
                parents.append(place[all_parents[row]])
                if self.choose.random() < 0.4:
                    fed.append(self.choose.randrange(VOCAB))
                    parents.append(self.choose.randrange(len(parents)))
            spans.append(Span(name, len(fed), parents, len(fed) if name != "d" else 0))
            tokens += fed
        return spans, tokens


def rows_of(runner, spans):
    slots = torch.cat([torch.from_numpy(runner.pool.slots(span.seq_id).copy()) for span in spans])
    return runner.pool.keys[:, slots], runner.pool.values[:, slots]


def check_equal(path, plan, seed, *, to_the_bit, **options):
    ours, theirs = (Round(path, plan, seed, exact=exact, **options) for exact in (True, False))
    ours.run_draft()
    theirs.run_draft()
    spans, tokens = ours.proposals()
    assert theirs.proposals() == (spans, tokens)
    taps = (plan.exact_stop, NUM_LAYERS)
    outputs = [one.resuming.forward(spans, tokens, taps) for one in (ours, theirs)]
    ours.target.pool.check()
    pairs = [
        *zip(outputs[0].features, outputs[1].features, strict=True),
        (outputs[0].logits, outputs[1].logits),
        (outputs[0].hidden, outputs[1].hidden),
        *zip(rows_of(ours.target, spans), rows_of(theirs.target, spans), strict=True),
    ]
    for found, expected in pairs:
        if to_the_bit:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_pass_is_a_pass_from_the_start(checkpoint, name, backend):
    for seed in range(2):
        check_equal(checkpoint.path, PLANS[name], seed, to_the_bit=backend == "ragged", backend=backend)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Gemma2", "Mixtral", "OPT"])
def test_of_other_families_too(make_checkpoint, family):
    one = make_checkpoint(family, **FAMILIES[family] | {"num_hidden_layers": NUM_LAYERS})
    check_equal(one.path, PLANS["exit"], 0, to_the_bit=False)


@pytest.mark.slow
def test_on_two_ranks(checkpoint, on_ranks):
    def work(group):
        for seed in range(2):
            check_equal(checkpoint.path, PLANS["exit"], seed, to_the_bit=False, group=group)

    on_ranks(2, work)


def counted(runner):
    """Rows that each layer ran, from now on."""
    runner.run_eagerly()  # a recorded pass shows nothing of its layers
    rows, right = [0] * NUM_LAYERS, runner.decoder.run_layers

    def run_layers(hidden, plan, layers=None, taps=()):
        for layer, _, _ in (layers or LayerPlan.whole(NUM_LAYERS)).steps():
            rows[layer] += len(hidden)
        return right(hidden, plan, layers, taps)

    runner.decoder.run_layers = run_layers
    return rows


def test_only_rows_without_a_draft_run_the_first_layers(checkpoint):
    one = Round(checkpoint.path, PLANS["exit"], 1)
    rows = counted(one.target)
    one.run_draft()
    assert rows == [3 + 5 + 4, 3 + 5 + 4, 0, 0]
    rows[:] = [0] * NUM_LAYERS
    tokens, parents = one.fed["b"]
    one.resuming.forward([Span("b", len(tokens) + 1, [*parents, 0])], [*tokens, 5])
    assert rows == [1, 1, len(tokens) + 1, len(tokens) + 1]
    one.resuming.truncate("b", one.target.cached_len("b"))
    rows[:] = [0] * NUM_LAYERS
    one.resuming.forward([Span("b", len(tokens), parents)], tokens)
    assert rows == [len(tokens)] * NUM_LAYERS, "rows are kept for one pass"
    one.run_draft()
    one.resuming.close("a")
    one.resuming.open("a")
    rows[:] = [0] * NUM_LAYERS
    one.resuming.forward([Span("a", 2), Span("c", 1)], [*one.fed["a"][0][:1], 7, *one.fed["c"][0][:1]])
    assert rows == [2, 2, 3, 3], "of a sequence that was closed nothing is kept"


def test_taps_below_the_exit_need_a_whole_pass(checkpoint):
    ours, theirs = (Round(checkpoint.path, PLANS["exit"], 2, exact=exact) for exact in (True, False))
    ours.run_draft()
    theirs.run_draft()
    spans, tokens = ours.proposals()
    assert torch.equal(
        ours.resuming.forward(spans, tokens, (1,)).features[0], theirs.resuming.forward(spans, tokens, (1,)).features[0]
    )


def test_a_row_is_found_by_the_tokens_of_its_path():
    kept = KeptRows(3, 2, [5, 6, 7, 6, 8], [-1, 0, 0, 2, 1], torch.zeros(5).numpy(), torch.zeros(5, 1))
    assert kept.sources([5, 7, 6, 6, 8, 8], [-1, 0, 1, 0, 3, 2]) == [0, 2, 3, 1, 4, -1]
    assert kept.sources([4, 6], [-1, 0]) == [-1, -1], "another root, nothing below it"


def test_rows_behind_pending_ones_are_computed_from_the_start(checkpoint):
    """Draft rows hang on the text, the pass's rows on a row that is pending already: the same tokens, other rows."""
    rounds = [Round(checkpoint.path, PLANS["exit"], 3, exact=exact) for exact in (True, False)]
    outputs = []
    for one in rounds:
        one.run_draft()
        tokens = one.fed["a"][0]
        one.target.forward([Span("a", 1)], [5])
        outputs.append(one.resuming.forward([Span("a", 2, [0, 1], 2)], tokens[:2]))
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=2e-4, rtol=1e-4)
