"""The bounds of what a record may say: at a bound it is taken, one beyond it is refused by name."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from actors.protocol.messages import (
    HASH_SEED,
    FeatureExport,
    Proposal,
    Request,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    TopTokens,
    check_tokens,
    extend_hash,
)
from actors.topology import child_role, is_draft_role, parent_role, role_name


def is_refused(check, *arguments) -> bool:
    try:
        check(*arguments)
    except ValueError as error:
        return "\n" not in str(error)
    return False


SAMPLING = [
    ("temperature", 1e-5, 1000.0, 1e-6),
    ("top_k", 0, 2**31 - 1, 1),
    ("top_p", 1e-9, 1.0, 1e-9),
    ("min_p", 0.0, 1.0, 1e-9),
    ("repetition_penalty", 0.01, 100.0, 1e-6),
    ("presence_penalty", -2.0, 2.0, 1e-9),
    ("frequency_penalty", -2.0, 2.0, 1e-9),
    ("max_tokens", 1, 2**31 - 1, 1),
    ("seed", -(2**63), 2**64 - 1, 1),
]


@pytest.mark.parametrize(("name", "least", "most", "step"), SAMPLING)
def test_sampling(name, least, most, step):
    values = least - step, least, most, most + step
    assert [is_refused(SamplingParams(**{name: value}).check) for value in values] == [True, False, False, True]


@pytest.mark.parametrize(
    ("name", "most", "beyond"),
    [
        ("logit_bias", ((3, 100.0),) * 300, ((3, 1.0),) * 301),
        ("logit_bias", ((3, -100.0),), ((3, -100.1),)),
        ("logit_bias", ((3, 100.0),), ((3, 100.1),)),
        ("bad_words", ((3,),) * 300, ((3,),) * 301),
        ("bad_words", ((3,) * 8192,), ((3,) * 8192, (3,))),
        ("allowed_token_ids", (3,) * 1024, (3,) * 1025),
        ("stop", ("x",) * 64, ("x",) * 65),
        ("stop", ("x" * 8192,), ("x" * 8192, "y")),
        ("stop_token_ids", (3,) * 128, (3,) * 129),
        ("min_tokens", 128, 129),
    ],
)
def test_lists_of_sampling(name, most, beyond):
    assert not is_refused(SamplingParams(**{name: most}).check) and is_refused(SamplingParams(**{name: beyond}).check)


@pytest.mark.parametrize(
    ("request_", "good"),
    [
        (Request(0, (0, 9)), True),
        (Request(2**63 - 1, (3,)), True),
        (Request(2**63, (3,)), False),
        (Request(-1, (3,)), False),
        (Request(1, (10,)), False),
        (Request(1, (3,) * 19), True),
        (Request(1, (3,) * 20), False),
        (Request(1, (3,) * 15, generated=(3,) * 5), True),
        (Request(1, (3,) * 15, generated=(3,) * 6), False),
        (Request(1, (3,), SamplingParams(max_tokens=2), generated=(3, 3)), True),
        (Request(1, (3,), SamplingParams(max_tokens=2), generated=(3, 3, 3)), False),
        (Request(1, (3,), drafter="ngram"), True),
        (Request(1, (3,), drafter="none"), True),
        (Request(1, (3,), drafter="model"), False),
        (Request(1, (3,), expected_tokens=10**6), True),
        (Request(1, (3,), expected_tokens=-1), False),
        (Request(1, (3,), expected_tokens=2**62), False),
        (Request(1, (3,), logprobs=0, prompt_logprobs=0), True),
        (Request(1, (3,), logprobs=20, prompt_logprobs=20), True),
        (Request(1, (3,), logprobs=21), False),
        (Request(1, (3,), logprobs=-1), False),
        (Request(1, (3,), prompt_logprobs=21), False),
        (Request(1, (3,), prompt_logprobs=-1), False),
    ],
)
def test_a_request_of_a_vocabulary_of_10_and_a_context_of_20(request_, good):
    assert is_refused(request_.check, 10, 20, ("ngram",)) != good
    assert request_.drafter != "none" or not request_.speculates
    assert is_refused(Request(1, (3,), drafter="model").check, 10) is False, "any drafter, where none are named"


EXPORT = FeatureExport(1, 1, 8, "float32", ((1, 0, 2), (None, 5, 1)))


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"number": 0}, False),
        ({"size": 1}, True),
        ({"size": 0}, False),
        ({"size": 2**20}, True),
        ({"size": 2**20 + 1}, False),
        ({"dtype": "int8"}, False),
        ({"dtype": "bfloat16"}, True),
        ({"spans": ((1, 0, 1),)}, True),
        ({"spans": ((1, 0, 0),)}, False),
        ({"spans": ((1, -1, 1),)}, False),
        ({"spans": ((1, 0, 2), (2, 0, 2))}, False),
        ({"spans": ()}, False),
    ],
)
def test_tensors_of_a_pass_of_three_rows(changes, good):
    assert is_refused(replace(EXPORT, **changes).check, 3) != good


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 96), ("bfloat16", 48), ("float16", 48)])
def test_bytes_of_a_tensor(dtype, num_bytes):
    assert replace(EXPORT, dtype=dtype).num_rows == 3 and replace(EXPORT, dtype=dtype).num_bytes == num_bytes


CHAIN = TokenTree.chain(4, (5, 9))


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"tree": TokenTree.chain(0, (9,))}, True),
        ({"tree": TokenTree.chain(4, (10,))}, False),
        ({"tree": TokenTree.chain(4, (-1,))}, False),
        ({"sampling_kinds": (0, 4, 4)}, True),
        ({"sampling_kinds": (0, 5, 4)}, False),
        ({"sampling_kinds": (0, 4)}, False),
        ({"distributions": (None, None)}, False),
        ({"distributions": (SparseDistribution((9,), (1.001,)), None, None)}, True),
        ({"distributions": (SparseDistribution((9,), (1.0011,)), None, None)}, False),
        ({"distributions": (SparseDistribution((9,), (0.0,)), None, None)}, True),
        ({"distributions": (SparseDistribution((9,), (-0.001,)), None, None)}, False),
        ({"distributions": (SparseDistribution((9, 1), (1.0,)), None, None)}, False),
        ({"distributions": (SparseDistribution((10,), (1.0,)), None, None)}, False),
    ],
)
def test_proposals_of_a_vocabulary_of_10(changes, good):
    assert is_refused(replace(Proposal(1, 0, 2, 0, CHAIN), **changes).check, 10) != good


def test_a_prepared_tree_was_chosen_at_every_node():
    made = Proposal.deterministic(1, 2, 3, 4, CHAIN)
    assert made == Proposal(1, 2, 3, 4, CHAIN, (0, 1, 1), (None, None, None), prepared=True)


def top_tokens(contexts=((-1, 3), (3, 9)), token_ids=((9, 0), (1, 2)), probs=((0.5, 0.25), (1.0009, 0.0)), **changes):
    packed = [
        struct.pack(f"<4{kind}", *(one for row in rows for one in row))
        for kind, rows in zip("iif", (contexts, token_ids, probs), strict=True)
    ]
    return replace(TopTokens(2, *packed, spans=((7, 2, 1), (8, 5, 1))), **changes)


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (top_tokens(), True),
        (top_tokens(scopes=(1, 2)), True),
        (top_tokens(scopes=(1,)), False),
        (top_tokens(spans=((7, 2, 2),)), True),
        (top_tokens(spans=((7, 2, 1),)), False),
        (top_tokens(spans=((7, 2, 3), (8, 1, -1))), False),
        (top_tokens(spans=((7, 2, 0), (8, 1, 2))), True),
        (top_tokens(k=1), False),
        (top_tokens(k=0), False),
        (top_tokens(contexts=((-1, 3), (3, 10))), False),
        (top_tokens(contexts=((-2, 3), (3, 9))), False),
        (top_tokens(contexts=((3, -1), (3, 9))), False),
        (top_tokens(contexts=((9, 3), (3, 9))), True),
        (top_tokens(contexts=((10, 3), (3, 9))), False),
        (top_tokens(token_ids=((10, 0), (1, 2))), False),
        (top_tokens(token_ids=((-1, 0), (1, 2))), False),
        (top_tokens(probs=((0.5, 0.25), (1.0011, 0.0))), False),
        (top_tokens(probs=((0.5, 0.25), (-0.001, 0.0))), False),
        (top_tokens(probs=((0.5, float("nan")), (0.5, 0.0))), False),
        (TopTokens(1, b"", b"", b"", ()), True),
    ],
)
def test_likely_tokens_of_a_vocabulary_of_10(one, good):
    assert is_refused(one.check, 10) != good


def test_likely_tokens_are_divided_among_clients():
    both = top_tokens(scopes=(5, 6))
    (first, one), (second, other) = both.by_scope()
    assert (first, second) == (5, 6) and (one.spans, other.spans) == (((7, 2, 1),), ((8, 5, 1),))
    for name, cell in (("contexts", 8), ("token_ids", 8), ("probs", 8)):
        whole = getattr(both, name)
        assert (getattr(one, name), getattr(other, name)) == (whole[:cell], whole[cell:])
    assert one.k == other.k == 2 and one.scopes == ()
    assert top_tokens().by_scope() == [(0, top_tokens())] and top_tokens(scopes=(5, 5)).by_scope()[0][0] == 5


def test_the_digest_is_fnv_1a_over_tokens_plus_one():
    digest = 14695981039346656037
    for token in (0, 7, 2**31):
        digest = (digest ^ (token + 1)) * 1099511628211 % 2**64
    assert extend_hash(HASH_SEED, [0, 7, 2**31]) == digest and HASH_SEED == 14695981039346656037


@pytest.mark.parametrize(
    ("tree", "text", "depth"),
    [
        (TokenTree((4, 5, 6, 7), (-1, 0, 1, 0)), (5, 6), 2),
        (TokenTree((4, 5, 6, 7), (-1, 0, 1, 0)), (7, 6), 1),
        (TokenTree((4, 5, 6, 7), (-1, 0, 1, 0)), (6,), 0),
        (TokenTree((4, 5, 6, 7), (-1, 0, 1, 0)), (5, 6, 7), 2),
        (TokenTree((4,), (-1,)), (), 0),
    ],
)
def test_a_tree_agrees_with_a_text_as_deep_as_a_path_goes(tree, text, depth):
    assert tree.agreed_depth(text) == depth


@pytest.mark.parametrize(
    ("path", "is_path"),
    [
        ((), True),
        ((1, 2), True),
        ((3,), True),
        ((2,), False),
        ((0,), False),
        ((1, 3), False),
        ((4,), False),
        ((1, 2, 4), False),
    ],
)
def test_a_path_goes_from_the_root_down(path, is_path):
    assert TokenTree((4, 5, 6, 7), (-1, 0, 1, 0)).has_path(path) == is_path


def test_roles_of_levels():
    names = [role_name(depth) for depth in range(3)]
    assert names == ["draft", "draft2", "draft3"]
    assert [child_role(name) for name in names] == ["draft2", "draft3", "draft4"]
    assert [parent_role(name) for name in names] == [None, "draft", "draft2"]
    assert is_draft_role("draft2-1") and not is_draft_role("target-0")


@pytest.mark.parametrize(
    ("token_ids", "named"),
    [([], None), ([0, 9], None), ([0, 10], 10), ([0, -1], -1), ([9, 12, 11], 12)],
)
def test_the_first_token_that_the_target_lacks_is_named(token_ids, named):
    if named is None:
        check_tokens("prompt", token_ids, 10)
        return
    with pytest.raises(ValueError, match=f"^prompt: names token {named}, but the target has 10 tokens$"):
        check_tokens("prompt", token_ids, 10)
