"""Several drafts of a model that fills masks, as branches of one tree: what ratio rules emit has the target's law.

The law of a draft token depends on the masks that were filled before, which follow from the text and from likeliest
tokens, never from draws. Laws of another branch, and a choice among drafts by what was drawn, are found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context, Draft
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.protocol.messages import SamplingParams, TokenTree
from actors.verification.distributions import DrawnTree
from actors.verification.random_source import HashRandomSource
from actors.verification.rules import RULES
from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.specdiff import SpecdiffDrafter, SpecdiffOptions
from parallel.runtime.runner import open_model
from parallel.speculators.pard import filling_masks
from tests import matrices

VOCAB, DEPTH, TEXT, COUNT = 5, 3, [1, 3, 0, 2, 1], 1500 if matrices.is_whole else 700
TARGET = np.random.default_rng(0).dirichlet(np.full(VOCAB, 2.0), VOCAB)
"""The target's law after each token."""


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Drafts of three branches, of which two have a draft of their own, drawn as a rule needs them."""
    path = tmp_path_factory.mktemp("specdiff")
    config = drafter_config(VOCAB)
    config.initializer_range = 0.3
    options = SpecdiffOptions(depth=DEPTH, mask_token=VOCAB - 1, steps=2)
    SpecdiffDrafter(initialised(config, 0, "cpu"), options).save(path)

    @functools.cache
    def drawn(rule: str) -> list[Draft]:
        runner = filling_masks(open_model(path, num_slots=COUNT * 8 * len(TEXT)), path, 2, num_drafts=2)
        shape = ModelDrafterConfig(
            strategy=Strategy.tree, num_draft_tokens=9, depth=DEPTH, width=3, mask_steps=2, mask_drafts=2
        )
        drafter = ModelDrafter(runner, shape, ModelOptions(rule, VOCAB, (), 512))
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(COUNT)]
        contexts = [Context(seed, 0, [*TEXT], len(TEXT), one) for seed, one in enumerate(params)]
        for context in contexts:
            drafter.open(context)
        return drafter.propose(contexts, [9] * COUNT)

    return drawn


def excess(rule: str, drafts: list[Draft], mistake: Callable[[Draft], Draft] = lambda draft: draft) -> float:
    """Chi-square of the first two tokens, in standard deviations above its mean."""
    counts, after = np.zeros((VOCAB, VOCAB)), np.random.default_rng(1)
    for seed, draft in enumerate(map(mistake, drafts)):
        tree, coins = draft.tree, HashRandomSource(seed, len(TEXT))
        row = lambda node, tree=tree: TARGET[tree.token_ids[node]]  # noqa: E731
        path, token = RULES[rule](DrawnTree(tree, draft.sampling_kinds, draft.distributions), row, coins)
        tokens = [*(tree.token_ids[node] for node in path), token]
        second = tokens[1] if len(tokens) > 1 else after.choice(VOCAB, p=TARGET[token])
        counts[tokens[0], second] += 1
    expected = len(drafts) * TARGET[TEXT[-1]][:, None] * TARGET
    degrees = expected.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


def laws_of_the_first_draft(draft: Draft) -> Draft:
    """All branches have the laws of the first one."""
    branches = [draft.tree.path_to(node) for node in range(len(draft.tree.parents))]
    first = {len(path): draft.distributions[path[-1]] for path in branches if path and path[0] == 1}
    laws = [first.get(len(path), law) if law else None for path, law in zip(branches, draft.distributions, strict=True)]
    return replace(draft, distributions=tuple(laws))


def likeliest_of_the_drafts(draft: Draft) -> Draft:
    """One branch is verified, that whose tokens the draft model finds likeliest."""

    def chance(node: int) -> float:
        law = draft.distributions[draft.tree.parents[node]]
        assert law is not None
        return law.probs[law.token_ids.index(draft.tree.token_ids[node])]

    paths = [list(draft.tree.path_to(node)) for node in range(1, len(draft.tree.parents))]
    path = max([one for one in paths if len(one) == DEPTH], key=lambda one: np.prod([chance(node) for node in one]))
    chain = TokenTree.chain(draft.tree.token_ids[0], [draft.tree.token_ids[node] for node in path])
    kept = [0, *path]
    kinds = tuple(draft.sampling_kinds[node] for node in kept)
    return replace(draft, tree=chain, sampling_kinds=kinds, distributions=tuple(draft.distributions[n] for n in kept))


SLOW = [pytest.param(rule, marks=pytest.mark.slow) for rule in ("traversal", "transport", "kseq")]


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["rejection", *SLOW])
def test_branches_emit_the_targets_law(drafts, rule):
    assert abs(excess(rule, drafts(rule))) < 4


@pytest.mark.extended
@pytest.mark.parametrize("mistake", [laws_of_the_first_draft, likeliest_of_the_drafts])
@pytest.mark.parametrize("rule", ["rejection", *SLOW[:1]])
def test_mistakes_are_found(drafts, rule, mistake):
    assert excess(rule, drafts(rule), mistake) > 5


@pytest.mark.extended
def test_branches_follow_drafts_of_their_own(drafts):
    """The law of a second token is that of its branch's first one; two of these have a draft, and the others follow the
    likeliest one's."""
    laws = dict[int, set[tuple[tuple[int, float], ...]]]()
    for draft in drafts("rejection"):
        for child in (1, 2, 3):
            law = draft.distributions[child]
            pairs = sorted(zip(law.token_ids, [round(one, 4) for one in law.probs], strict=True))
            laws.setdefault(draft.tree.token_ids[child], set()).add(tuple(pairs))
    assert len(laws) == VOCAB and {len(one) for one in laws.values()} == {1}, "a token's law depends on draws"
    assert len(set.union(*laws.values())) == 2
