"""The comparison of draft trees: which shapes compete, the interval, and a small run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.drafters.model.config import Draws, ModelDrafterConfig, Strategy
from actors.drafters.model.fixed_trees import best_trees, expected_accepted, read_trees
from actors.options import PipelineName
from actors.protocol.messages import TokenTree
from actors.verification.compatibility import check_scheme
from cluster.tools.bench.rounds import CountedRound
from docs.measurements import trees


def test_the_best_branching_is_that_of_most_accepted_tokens():
    assert trees.best_branching(4, [0.9, *[0.01] * 7]) == [1, 1, 1, 1]
    assert trees.best_branching(4, [0.12] * 8)[0] >= 4
    for stars in (False, True):
        for branching in trees.branchings(7, stars=stars):
            assert branching == sorted(branching, reverse=True) and (not stars or set(branching[1:]) <= {1})
            assert len(trees.shape_of(branching, 7)) - 1 == 7 or len(branching) == trees.DEEPEST
    measured = [0.6, 0.2, 0.1, *[0.0] * 5]
    best = trees.shape_of(trees.best_branching(7, measured), 7)
    assert all(
        expected_accepted(trees.shape_of(one, 7), measured) <= expected_accepted(best, measured) + 1e-12
        for one in trees.branchings(7, stars=False)
    )


def rounds_of(*lengths: list[int]) -> list[CountedRound]:
    chain = TokenTree.chain(0, [1] * 9)
    return [CountedRound(i, chain, tuple(range(1, n))) for i, own in enumerate(lengths) for n in own]


def test_the_interval_is_over_prompts():
    assert trees.interval(rounds_of([3, 3], [3], [3, 3, 3])) == (3.0, 3.0, 3.0)
    mean, low, high = trees.interval(rounds_of([1, 1, 1, 1], [5, 5], [2]))
    assert mean == pytest.approx(16 / 7) and low == pytest.approx(1.0) and high == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("tokens", "parents", "merged"),
    [
        ([0, 7, 7, 7], [-1, 0, 1, 2], 0),  # on one path
        ([0, 7, 8, 7, 9], [-1, 0, 0, 2, 3], 2),  # 7 again, a level below, and what is behind it
        ([0, 7, 8, 9, 9], [-1, 0, 0, 1, 2], 1),  # at one depth
        ([0, 7, 8, 8, 7], [-1, 0, 0, 1, 2], 2),  # each behind the other: the graph of GSD has a cycle here
    ],
)
def test_gsd_would_not_draft_a_token_again_off_its_path(tokens, parents, merged):
    assert trees.num_mergeable(TokenTree(tuple(tokens), tuple(parents))) == merged


SHAPES = {
    "chain": dict(strategy=Strategy.chain),
    "MCSD": dict(strategy=Strategy.tree, draws=Draws.independent, acceptance=1),
    "SpecTr (K-SEQ), paths": dict(strategy=Strategy.tree, acceptance=1, stars=True),
    "K-SEQ, tree": dict(strategy=Strategy.tree, acceptance=1),
    "SpecTr (optimum), paths": dict(strategy=Strategy.tree, acceptance=1, stars=True),
    "SpecTr (optimum), tree": dict(strategy=Strategy.tree, acceptance=1),
    "RSD-C": dict(strategy=Strategy.tree, acceptance=0),
    "RSD-S": dict(strategy=Strategy.beam, width=3, depth=5),
    "Sequoia": dict(strategy=Strategy.tree, file=0),
    "GSD": dict(strategy=Strategy.tree, acceptance=0, merge_ngram=1),
    "coupled, fixed tree": dict(strategy=Strategy.tree, acceptance=2),
    "coupled, Sequoia": dict(strategy=Strategy.tree, file=2),
    "coupled, beam": dict(strategy=Strategy.beam, width=3, depth=5),
    "coupled, best_first": dict(strategy=Strategy.best_first, width=4, depth=8),
    "coupled, best_first, merged": dict(strategy=Strategy.best_first, width=4, depth=8, merge_ngram=1),
    "coupled, CaPE": dict(strategy=Strategy.cape, width=4, depth=8),
}
"""What a scheme of 15 nodes is; `acceptance` and `file`: whose acceptance by rank its tree is the best for."""
BY_RANK = trees.Acceptance(
    [0.5, 0.3, 0.1, *[0.0] * 5], [0.55, 0.4, *[0.0] * 6], [0.25, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05]
)


@pytest.mark.parametrize("scheme", trees.SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.rule}")
def test_a_scheme_drafts_as_it_is_named_with_all_its_nodes(scheme, tmp_path):
    config, expected = scheme.make(15, BY_RANK, tmp_path), dict(SHAPES[scheme.name])
    assert config.num_draft_tokens == 15
    default = ModelDrafterConfig()
    if (of := expected.pop("acceptance", None)) is not None:
        expected["branching"] = trees.best_branching(15, BY_RANK[of], stars=expected.pop("stars", False))
    if (of := expected.pop("file", None)) is not None:
        (best,) = best_trees(BY_RANK[of], 15, trees.DEEPEST)[-1:]
        assert read_trees(Path(config.tree)) == [best] and len(best) == 16
        expected["tree"] = config.tree
    assert config == replace(default, num_draft_tokens=15, **expected)
    is_exact_for = config.sampling_kinds(scheme.rule, PipelineName.sync)
    check_scheme(scheme.rule, is_exact_for, config.draft_traits)


def test_best_branchings_differ_by_what_is_accepted():
    """Otherwise no scheme could show whose acceptance it was made for."""
    found = [tuple(trees.best_branching(15, one)) for one in BY_RANK]
    assert len(set(found)) == 3 and trees.best_branching(15, BY_RANK[1], stars=True) != list(found[1])


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    out = tmp_path / "trees.json"
    trees.main(["--prompts", "2", "--tokens", "8", "--only", "RSD-C", "--budgets", "7", "--out", str(out)])
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["rule"], cell["temperature"]) for cell in cells] == [
        (rule, temperature) for temperature in trees.TEMPERATURES for rule in ("rejection", "traversal")
    ]
    assert all(1 <= cell["low"] <= cell["length"] <= cell["high"] and cell["mean_nodes"] == 7 for cell in cells)
    assert "Tokens per target pass, temperature 1" in capsys.readouterr().out
