"""The coupled rule: exact for any tree, and the same tokens as plain decoding, with any drafter."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from actors.protocol.messages import SamplingKind, SamplingParams, TokenTree
from actors.sampling.logits import LogitRows, choose_batch, process_logits, top_children
from actors.verification.coupled import verify_coupled
from tests.actors.verification.rule_enumeration import (
    Emission,
    coupled_outcomes,
    emission,
    enumerate_drafts,
    total_variation,
)
from tests.matrices import in_turn

VOCAB = 16
EOS = (0,)


# --- the walk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree, choices, path, next_token",
    [
        (TokenTree.root(9), [4], (), 4),
        (TokenTree.chain(9, (1, 2, 3)), [1, 2, 3, 7], (1, 2, 3), 7),
        (TokenTree.chain(9, (1, 2, 3)), [1, 5, 3, 7], (1,), 5),
        (TokenTree.chain(9, (1, 2, 3)), [0, 2, 3, 7], (), 0),
        (TokenTree((9, 1, 2, 5, 6), (-1, 0, 0, 1, 2)), [2, 5, 6, 0, 8], (2, 4), 8),
        (TokenTree((9, 1, 1, 5, 6), (-1, 0, 0, 1, 2)), [1, 6, 6, 0, 8], (2, 4), 8),  # the twin that gets further
        (TokenTree((9, 1, 1), (-1, 0, 0)), [1, 4, 4], (1,), 4),  # the first twin on a tie
    ],
)
def test_walk(tree, choices, path, next_token):
    assert verify_coupled(tree, choices) == (path, next_token)


def random_tree(rng: random.Random, root: int, vocab_size: int, size: int) -> TokenTree:
    return TokenTree(
        (root, *rng.choices(range(vocab_size), k=size - 1)), (-1, *(rng.randrange(i) for i in range(1, size)))
    )


def test_the_path_is_the_longest_that_agrees_with_the_target():
    rng = random.Random(0)
    for _ in range(300):
        tree = random_tree(rng, 0, 3, rng.randrange(1, 9))
        choices = rng.choices(range(3), k=len(tree.parents))
        agreeing = [
            path
            for path in map(tree.path_to, range(len(tree.parents)))
            if all(tree.token_ids[node] == choices[tree.parents[node]] for node in path)
        ]
        path, next_token = verify_coupled(tree, choices)
        assert list(path) in agreeing
        assert len(path) == max(map(len, agreeing))
        assert next_token == choices[path[-1] if path else 0]


@pytest.mark.parametrize(
    ("kind", "pruned"),
    list(
        in_turn(
            [SamplingKind.DETERMINISTIC, SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT],
            [True, False],
            times={SamplingKind.DETERMINISTIC: 2},
            extended=[SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT],
        )
    ),
)
def test_the_emitted_law_is_exact_for_any_tree_even_one_pruned_after_the_draw(random_law, kind, pruned):
    """Marginalised over the noise: the draws after nodes of one context agree, others are independent."""
    p, q = random_law(3, seed=1), random_law(3, seed=2)
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for draft in enumerate_drafts(q, [(kind, kind), (kind,)]):
        tree = draft.tree
        if pruned:  # drop the last node, and sort by token what is left of the first level
            first, second = sorted(tree.token_ids[1:3])
            tree = TokenTree((0, first, second, tree.token_ids[3]), (-1, 0, 0, 1))
        contexts = [tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(len(tree.parents))]
        distinct = sorted(set(contexts))
        for drawn in itertools.product(range(3), repeat=len(distinct)):
            y = dict(zip(distinct, drawn, strict=False))
            weight = draft.weight * float(np.prod([p(context)[token] for context, token in y.items()]))
            path, next_token = verify_coupled(tree, [y[context] for context in contexts])
            emitted = (*(tree.token_ids[node] for node in path), next_token)
            for rest in itertools.product(range(3), repeat=3 - len(emitted)):
                whole = emitted + rest
                joint[whole] += weight * float(np.prod([p(whole[:i])[whole[i]] for i in range(len(emitted), 3)]))
    assert total_variation(Emission(dict(joint), 0.0), p, 3) < 1e-12


def accept_first_child(tree: TokenTree, choices) -> tuple[tuple[int, ...], int]:
    children, path = tree.children(), [0]
    while children[path[-1]]:
        path.append(children[path[-1]][0])
    return tuple(path[1:]), choices[path[-1]]


def repeat_first_choice(tree: TokenTree, choices) -> tuple[tuple[int, ...], int]:
    return verify_coupled(tree, choices)[0], choices[0]


def keep_one_token_more(tree: TokenTree, choices) -> tuple[tuple[int, ...], int]:
    path, next_token = verify_coupled(tree, choices)
    below = tree.children()[path[-1] if path else 0]
    return ((*path, below[0]), choices[below[0]]) if below else (path, next_token)


@pytest.mark.parametrize("mistake", [None, accept_first_child, repeat_first_choice, keep_one_token_more])
def test_a_walk_that_keeps_what_the_target_did_not_choose_is_found(random_law, mistake):
    p, q = random_law(3, seed=1), random_law(3, seed=2)
    drafts = enumerate_drafts(q, [(SamplingKind.IID,), (SamplingKind.IID,)])
    distance = total_variation(emission(mistake or verify_coupled, drafts, p, 3, coupled_outcomes), p, 3)
    assert distance > 0.1 if mistake else distance < 1e-12


# --- decoding with and without drafts --------------------------------------------------------------------------------


def toy_logits(token_ids: list[int]) -> torch.Tensor:
    """Logits of a model that looks at the last three tokens, [V]."""
    state = np.random.default_rng(token_ids[-3:])
    return torch.from_numpy(state.normal(size=VOCAB)).float() * 1.5


def rows_behind(context: list[int], tree: TokenTree) -> torch.Tensor:
    return torch.stack(
        [toy_logits(context + [tree.token_ids[i] for i in tree.path_to(n)]) for n in range(len(tree.parents))]
    )


def decode(params: SamplingParams, propose, length: int = 40) -> tuple[list[int], float]:
    """Tokens, and accepted drafts per round."""
    prompt = [3, 1, 4]
    context, rounds, accepted = list(prompt), 0, 0
    while len(context) < len(prompt) + length:
        tree = propose(context)
        rows = LogitRows(params, len(prompt), context, tree)
        choices = choose_batch(rows_behind(context, tree), [rows], EOS).tolist()
        path, next_token = verify_coupled(tree, choices)
        context = context + [tree.token_ids[node] for node in path] + [next_token]
        rounds, accepted = rounds + 1, accepted + len(path)
    return context[: len(prompt) + length], accepted / rounds


def plain(context: list[int]) -> TokenTree:
    return TokenTree.root(context[-1])


def coupled_chain(params: SamplingParams, blur: float, shift: int = 0):
    """A drafter with the target's noise and its logits blurred; `shift` is a mistake in the position of the noise."""

    def propose(context: list[int]) -> TokenTree:
        tokens = list(context)
        for _ in range(4):
            logits = (
                toy_logits(tokens)[None]
                + blur * torch.from_numpy(np.random.default_rng([99, *tokens[-3:]]).normal(size=(1, VOCAB))).float()
            )
            scores = process_logits(logits, LogitRows(params, 3, tokens, TokenTree.root(tokens[-1])), EOS)
            ids, _ = top_children(scores, [params], [len(tokens) + shift], 1)
            tokens.append(int(ids))
        return TokenTree.chain(context[-1], tokens[len(context) :])

    return propose


PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=0.8, top_p=0.8),
    "history": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.3, min_tokens=20, bad_words=((5, 6), (7,))
    ),
}


@pytest.mark.parametrize(("case", "seed"), list(in_turn(PARAMS, range(3))))
def test_any_drafter_yields_the_tokens_of_plain_decoding(case, seed):
    params = SamplingParams(**{f: getattr(PARAMS[case], f) for f in PARAMS[case].__slots__ if f != "seed"}, seed=seed)
    expected, _ = decode(params, plain)
    rng = random.Random(seed)

    def guess(context: list[int]) -> TokenTree:
        return random_tree(rng, context[-1], VOCAB, rng.randrange(1, 12))

    def lucky(context: list[int]) -> TokenTree:
        """What will really come, among twins and rubbish."""
        future = expected[len(context) : len(context) + rng.randrange(1, 6)]
        chain = TokenTree.chain(context[-1], future)
        extra = rng.choices(range(VOCAB), k=4) + future[:1]
        parents = [rng.randrange(len(chain.parents)) for _ in range(4)] + [0] * len(future[:1])
        return TokenTree((*chain.token_ids, *extra), (*chain.parents, *parents))

    for propose in (guess, lucky, coupled_chain(params, 0.7), coupled_chain(params, 0.0)):
        assert decode(params, propose)[0] == expected
    assert decode(params, coupled_chain(params, 0.0))[1] == 4.0  # the target drafting for itself is always right


def test_shared_noise_is_what_makes_sampled_drafts_match():
    """Noise of the wrong position stays lossless, but acceptance collapses."""
    params = SamplingParams(temperature=1.0, seed=7)
    right, matched = decode(params, coupled_chain(params, 0.5), length=80)
    shifted, unmatched = decode(params, coupled_chain(params, 0.5, shift=1), length=80)
    assert right == shifted
    assert matched > 1.0 and unmatched < 0.5
