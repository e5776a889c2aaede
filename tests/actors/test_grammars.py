"""Requests with a grammar beside others: whatever is drafted, tokens are those of plain decoding under the masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.grammars.masks import TextMatcher
from actors.options import SchedulerConfig
from actors.protocol.grammar import Grammar
from actors.protocol.messages import PLAIN_DECODING, TokenTree
from actors.sampling.logits import LogitRows, choose_batch
from tests import matrices
from tests.actors.test_contract import DRAFTED, DRAFTERS, ON_TARGET, SPECULATORS
from tests.matrices import in_turn

EOS, VOCAB_SIZE = 1, 97
LEAST = 4
MOST, MAX_TOKENS, NUM_REQUESTS = (14, 30, 6) if matrices.is_whole else (8, 18, 4)
UNIT = r"([!#-`n-~]|[a-m][!#-@\[-~])"
GRAMMAR, LONG = (Grammar("regex", f"{UNIT}{{{LEAST},{most}}}") for most in (MOST, 14))
"""Over tokens of one character, the first of which is "!": a letter up to m is not followed by a capital one."""
EARLY, CAPITALS = [ord(c) - 33 for c in "abcdefghijklm"], [token for token in range(97) if 65 <= token + 33 <= 90]
SAMPLINGS = {"greedy": {}, "T=1": dict(temperature=1.0), "T=1-processed": dict(temperature=1.0, top_k=30, min_p=0.02)}


def allowed_after(generated):
    """The grammar by hand: a number of units, the last of which may be half of one."""
    num_units, is_open = 0, False
    for token in generated:
        is_open = not is_open and token in EARLY
        num_units += not is_open
    printable = set(range(94)) - {EOS}
    if is_open:
        return printable - set(CAPITALS)
    return (printable if num_units < MOST else set()) | ({EOS} if num_units >= LEAST else set())


@pytest.fixture
def mixed(make_requests):
    """Requests of which every third has no grammar."""

    def make(count=NUM_REQUESTS, max_tokens=MAX_TOKENS, **sampling):
        requests = make_requests(count, max_tokens=max_tokens, **sampling)
        return [replace(one, grammar=GRAMMAR if i % 3 else None) for i, one in enumerate(requests)]

    return make


@pytest.fixture(scope="module")
def plain_tokens():
    return {}


def plain(open_room, plain_tokens, requests, key, **options):
    if key not in plain_tokens:
        room = open_room(pipeline="plain", **options).serve(requests)
        plain_tokens[key] = room.tokens, room.ends
    return plain_tokens[key]


@pytest.mark.extended
@pytest.mark.parametrize("sampling", ["greedy", pytest.param("T=1", marks=pytest.mark.slow), "T=1-processed"])
def test_plain_decoding_draws_from_the_masked_distribution(open_room, mixed, models, sampling):
    """Tokens are compared, one by one, with transformers and the grammar by hand; a request that ends does so with the
    end token."""
    requests = mixed(**SAMPLINGS[sampling])
    room = open_room(pipeline="plain").serve(requests)
    for request in requests:
        text = list(request.prompt)
        while (generated := text[len(request.prompt) :])[-1:] != [EOS] and len(generated) < MAX_TOKENS:
            with torch.no_grad():
                logits = models["reference"](torch.tensor([text])).logits[:, -1]
            if request.grammar is not None:
                banned = sorted(set(range(VOCAB_SIZE)) - allowed_after(generated))
                logits[:, banned] = -torch.inf
            rows = LogitRows(request.sampling, len(request.prompt), text, TokenTree.root(text[-1]))
            text.append(int(choose_batch(logits, [rows], (EOS,))))
        assert room.tokens[request.request_id] == generated
        assert room.ends[request.request_id] == ("stop" if generated[-1] == EOS else "length")
    ended = [one for one in requests if one.grammar is not None and room.ends[one.request_id] == "stop"]
    assert ended, "no text under the grammar ended"


FEW = dict.fromkeys([*DRAFTERS, *ON_TARGET], 0) | dict.fromkeys(
    ["ngram", "chain", "tree", "eagle", "exit", "every-kind"], 1
)
"""By default, since masks are the target's; `test_equality_table.py` has them for a method of each kind."""


@pytest.mark.parametrize(
    ("drafter", "pipeline", "sampling"),
    list(in_turn(DRAFTERS, DRAFTED, SAMPLINGS, times=FEW | {"chain": 2})),
)
def test_tokens_are_those_of_plain_decoding(open_room, mixed, plain_tokens, drafter, pipeline, sampling):
    requests = mixed(**SAMPLINGS[sampling])
    expected = plain(open_room, plain_tokens, requests, sampling)
    room = open_room(DRAFTERS[drafter], pipeline=pipeline).serve(requests)
    assert (room.tokens, room.ends) == expected
    if isinstance(DRAFTERS[drafter], ModelDrafterConfig):
        assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    list(in_turn([*DRAFTERS, *ON_TARGET], SAMPLINGS, times=FEW | {"ngram": 0, "chain": 0, "exit": 0})),
)
def test_tokens_with_an_attached_drafter(open_room, mixed, plain_tokens, drafter, sampling):
    requests = mixed(**SAMPLINGS[sampling])
    expected = plain(open_room, plain_tokens, requests, sampling)
    room = open_room((DRAFTERS | ON_TARGET)[drafter], attached=True).serve(requests)
    assert (room.tokens, room.ends) == expected


@pytest.mark.parametrize("drafter", [pytest.param("eagle3", marks=pytest.mark.slow), "eagle3-tree"])
def test_tokens_with_a_separate_speculator(open_room, mixed, plain_tokens, drafter):
    requests = mixed(temperature=1.0)
    expected = plain(open_room, plain_tokens, requests, "T=1")
    room = open_room(SPECULATORS[drafter], pipeline="branches").serve(requests)
    assert (room.tokens, room.ends) == expected


RIGID = Grammar("regex", "[a-m]NOPQRSTUV[a-m]WXYZ[a-m]?")
"""Between its choices stands text that it forces: 9 and 4 tokens of one character."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline", "attached"),
    [
        pytest.param("ngram", "sync", False, marks=pytest.mark.slow),
        ("ngram", "sync", True),
        pytest.param("chain", "sync", True, marks=pytest.mark.slow),
        ("chain", "branches", False),
    ],
)
def test_what_a_grammar_forces_is_the_draft(open_room, make_requests, drafter, pipeline, attached, monkeypatch):
    """It is accepted whole, in drafts of at most four tokens here, and a request that decodes plainly gets none."""
    requests = [replace(one, grammar=RIGID) for one in make_requests(4, temperature=1.0)]
    requests[3] = replace(requests[3], drafter=PLAIN_DECODING)
    expected = open_room(pipeline="plain").serve(requests)
    room = open_room(DRAFTERS[drafter], pipeline=pipeline, attached=attached).serve(requests)
    assert (room.tokens, room.ends) == (expected.tokens, expected.ends) and {*room.ends.values()} == {"stop"}
    assert room.stats.num_accepted_tokens >= 3 * (4 + 4 + 4)
    monkeypatch.setattr(TextMatcher, "forced", lambda *_: ())
    unforced = open_room(DRAFTERS[drafter], pipeline=pipeline, attached=attached).serve(requests)
    assert unforced.tokens == expected.tokens
    assert unforced.stats.num_accepted_tokens < room.stats.num_accepted_tokens, "the control"


def test_nothing_is_forced_without_a_drafter(open_room, make_requests):
    requests = [replace(one, grammar=RIGID) for one in make_requests(2)]
    assert open_room(pipeline="plain").serve(requests).stats.num_draft_tokens == 0


@pytest.mark.extended
@pytest.mark.parametrize("attached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_request_that_comes_back_goes_on_where_its_grammar_stood(open_room, mixed, plain_tokens, attached):
    requests = [replace(one, grammar=LONG) for one in mixed(6, max_tokens=26, temperature=1.0)]
    expected = plain(open_room, plain_tokens, requests, "preempted")
    limits = SchedulerConfig(3, 40, 16)
    room = open_room(DRAFTERS["tree"], limits=limits, slots=100, attached=attached).serve(requests)
    assert (room.tokens, room.ends) == expected
    assert room.stats.num_preemptions > 0, "the pool was never short: the test shows nothing"


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "traversal"])
def test_greedy_tokens_are_the_same_ones_under_ratio_rules(open_room, mixed, plain_tokens, rule):
    requests = mixed()
    expected = plain(open_room, plain_tokens, requests, "greedy")
    room = open_room(DRAFTERS["tree"], rule=rule).serve(requests)
    assert (room.tokens, room.ends) == expected


@pytest.mark.extended
@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_masks_one_node_off_are_noticed(open_room, mixed, plain_tokens, drafter, monkeypatch):
    """A negative control: each node has the mask of its parent, the root its own."""
    requests, right = mixed(temperature=1.0), TextMatcher.masks
    expected = plain(open_room, plain_tokens, requests, "T=1")

    def shifted(self, generated, tree):
        masks = right(self, generated, tree)
        return [masks[max(0, parent)] if masks[node] else None for node, parent in enumerate(tree.parents)]

    monkeypatch.setattr(TextMatcher, "masks", shifted)
    room = open_room(DRAFTERS[drafter], path=None).serve(requests)
    assert room.tokens != expected[0]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(open_room, mixed):
    requests = mixed()
    expected = open_room(pipeline="plain").serve(requests)
    requests[1] = replace(requests[1], grammar=Grammar("regex", "(("))
    room = open_room(NgramDrafterConfig(min_ngram=1)).serve(requests)
    assert room.ends.pop(1) == "error" and "grammar" in room.errors[1]
    room.tokens.pop(1), expected.tokens.pop(1), expected.ends.pop(1)
    assert (room.tokens, room.ends) == (expected.tokens, expected.ends)
