"""The words: trees and what follows from their parents, the prefix digest, and refusals that name the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.membership import Death
from actors.protocol.messages import HASH_SEED, Request, SamplingParams, TokenTree, extend_hash, retract_hash

TOKENS = st.lists(st.integers(0, 2**31), max_size=12)


@st.composite
def trees(draw):
    size = draw(st.integers(1, 12))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, size)))
    return TokenTree(tuple(draw(st.integers(0, 9)) for _ in range(size)), parents)


@given(trees())
def test_depths_children_and_paths_agree_with_the_parents(tree):
    tree.check()
    depths, children = tree.depths(), tree.children()
    for node, parent in enumerate(tree.parents):
        path = tree.path_to(node)
        assert len(path) == depths[node]
        if node:
            assert path == [*tree.path_to(parent), node] and node in children[parent]
    assert sum(map(len, children)) == tree.num_draft_tokens == len(tree.parents) - 1
    assert all(siblings == sorted(siblings) for siblings in children), "siblings stand in test order"
    assert tree.is_chain == (max(depths) == tree.num_draft_tokens and tree.parents == tuple(sorted(tree.parents)))


def test_a_chain_is_the_degenerate_tree_and_the_root_its_shortest():
    assert TokenTree.chain(7, [8, 9]) == TokenTree((7, 8, 9), (-1, 0, 1))
    assert TokenTree.chain(7, []) == TokenTree.root(7) and TokenTree.root(7).is_chain
    assert not TokenTree((7, 8, 9), (-1, 0, 0)).is_chain


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree((), ()),
        TokenTree((1, 2), (-1,)),
        TokenTree((1,), (0,)),
        TokenTree((1, 2), (-1, 1)),
        TokenTree((1, 2, 3), (-1, 2, 0)),
        TokenTree((1, 2), (-1, -1)),
    ],
    ids=["empty", "lengths", "no-root", "own-parent", "parent-behind", "two-roots"],
)
def test_what_is_no_tree_is_refused(tree):
    with pytest.raises(ValueError, match="token tree"):
        tree.check()


@given(TOKENS, TOKENS)
def test_the_digest_rolls(first, second):
    assert extend_hash(extend_hash(HASH_SEED, first), second) == extend_hash(HASH_SEED, first + second)


@given(TOKENS, TOKENS)
def test_the_digest_tells_texts_apart(first, second):
    assert (extend_hash(HASH_SEED, first) == extend_hash(HASH_SEED, second)) == (first == second)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(top_k=-1),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(min_p=1.5),
        dict(repetition_penalty=0.0),
        dict(presence_penalty=2.5),
        dict(frequency_penalty=-3.0),
        dict(max_tokens=0),
        dict(min_tokens=-1),
        dict(min_tokens=200),
        dict(stop=("end", "")),
        dict(seed=2**64),
        dict(temperature=1e-300),
        dict(temperature=1e300),
        dict(temperature=float("inf")),
        dict(repetition_penalty=1e-300),
        dict(repetition_penalty=1e300),
        dict(repetition_penalty=float("nan")),
        dict(frequency_penalty=float("nan")),
        dict(top_k=2**40),
        dict(max_tokens=2**40),
        dict(logit_bias=((3, float("nan")),)),
        dict(logit_bias=((3, 1e308),)),
        dict(logit_bias=((3, float("-inf")),)),
        dict(logit_bias=((3, 1.0),) * 301),
        dict(bad_words=((),)),
        dict(bad_words=((3,), ())),
        dict(bad_words=((3,),) * 301),
        dict(bad_words=((3,) * 8193,)),
        dict(stop=("x",) * 65),
        dict(stop=("x" * 8193,)),
        dict(stop_token_ids=(3,) * 129),
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_sampling_that_makes_no_sense_is_refused_by_name(wrong):
    (field,) = wrong
    with pytest.raises(ValueError, match=rf"^sampling\.{field}[=:]") as refused:
        SamplingParams(**wrong).check()
    assert len(str(refused.value)) < 150 and "\n" not in str(refused.value), "a line, however much was given"


def test_sampling_at_its_bounds_is_fine():
    SamplingParams().check()
    SamplingParams(temperature=0.0, top_p=1.0, min_p=1.0, min_tokens=128, seed=2**64 - 1, presence_penalty=-2).check()
    words, biases = ((3,) * 27,) * 300, ((3, -100.0), (4, 100.0)) * 150
    SamplingParams(bad_words=words, logit_bias=biases, stop=("x" * 128,) * 64, stop_token_ids=(3,) * 128).check()


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", Request(1, (3, 10))),
        ("prompt", Request(1, (-1,))),
        ("sampling.logit_bias", Request(1, (3,), SamplingParams(logit_bias=((10, 1.0),)))),
        ("sampling.bad_words", Request(1, (3,), SamplingParams(bad_words=((1,), (2, 11))))),
        ("sampling.allowed_token_ids", Request(1, (3,), SamplingParams(allowed_token_ids=(4, 10)))),
        ("sampling.stop_token_ids", Request(1, (3,), SamplingParams(stop_token_ids=(-2,)))),
        ("sampling.top_k", Request(1, (3,), SamplingParams(top_k=-1))),
        ("request_id", Request(-1, (3,))),
        ("request_id", Request(2**63, (3,))),
        ("generated", Request(1, (3,), SamplingParams(max_tokens=2), generated=(3, 3, 3))),
        ("generated", Request(1, (3,) * 30, generated=(3,) * 21)),
        ("prompt", Request(1, ())),
        ("prompt", Request(1, (3,) * 50)),
        ("source", Request(1, (3,), source=(10,))),
        ("prompt_logprobs", Request(1, (3,), source=(4,), prompt_logprobs=0)),
    ],
)
def test_a_request_that_names_no_token_of_the_target_is_refused(field, request_):
    with pytest.raises(ValueError, match=f"^{field}"):
        request_.check(vocab_size=10, max_model_len=50)


@pytest.mark.parametrize(
    ("source", "max_source_len", "refusal"),
    [
        ((), 0, None),
        ((4, 5), 2, None),
        ((4, 5), None, None),
        ((4, 5), 0, "source: this target has no encoder"),
        ((), 2, "source: is empty"),
        ((4, 5, 6), 2, "source: 3 tokens do not fit the encoder's 2"),
    ],
)
def test_a_source_is_what_the_target_s_encoder_can_read(source, max_source_len, refusal):
    said = Request(1, (3,), source=source).misfit(50, max_source_len)
    assert said is None if refusal is None else said is not None and said.startswith(refusal)


def test_what_is_too_long_is_refused_before_it_is_looked_through():
    class Unread(tuple):
        def __iter__(self):
            raise AssertionError("looked through")

    for request in (Request(1, Unread((3,) * 50)), Request(1, (3,), generated=Unread((3,) * 129))):
        with pytest.raises(ValueError, match="tokens"):
            request.check(vocab_size=10, max_model_len=50)
    with pytest.raises(ValueError, match="at most 300"):
        SamplingParams(bad_words=Unread(((3,),) * 301)).check()


def test_a_request_within_the_vocabulary_is_fine():
    Request(1, (0, 9), SamplingParams(logit_bias=((9, 1.0),), stop_token_ids=(0,))).check(vocab_size=10)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("target.path: no such file; give another\nand more"), "target.path: no such file; give another"),
        (RuntimeError("out of memory\nat line 3"), "RuntimeError: out of memory"),
        (AssertionError(), "AssertionError"),
        (ValueError(), "ValueError"),
        (KeyError(7), "KeyError: 7"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_death_is_one_line(error, line):
    death = Death.by("target-1", error)
    assert (death.identity, death.text, str(death)) == ("target-1", line, f"target-1: {line}")
    assert type(error).__name__ in death.trace, "the log gets the whole of it"


def test_records_are_frozen():
    tree = TokenTree.root(1)
    with pytest.raises(AttributeError):
        tree.token_ids = (2,)  # pyright: ignore[reportAttributeAccessIssue] (frozen)
    assert replace(tree, token_ids=(2,)) == TokenTree.root(2)


@given(TOKENS, TOKENS)
def test_the_digest_of_a_text_that_was_cut_is_that_of_what_is_left(kept, cut):
    digest = extend_hash(HASH_SEED, kept)
    assert retract_hash(extend_hash(digest, cut), cut) == digest
