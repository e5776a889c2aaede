"""Acceptance length of draft trees at equal numbers of nodes: `python -m docs.measurements.trees [--out FILE.json]`.

Counts tokens on the bundled pair and its held-out prompts, with the production drafter and rules and without an engine:
no clock enters. A third of the prompts measures acceptance by rank, from which every scheme with a shape to choose
takes its best one; the others are completed. Intervals are 95 %, by bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from actors.drafters.config import ModelOptions
from actors.drafters.model.config import Draws, ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.fixed_trees import best_trees, expected_accepted, write_trees
from actors.drafters.model.tree_growth import Candidate, GrowingTree, StaticGrowth
from actors.options import VerifyRule
from actors.protocol.messages import SamplingParams, TokenTree
from actors.verification.verifier import Verifier
from cluster import pocket
from cluster.io.console import Terminal
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.observability.report import versions, write_json
from cluster.tools.bench.rounds import CountedRound, acceptance_by_rank, complete
from docs.measurements import lines
from parallel.runtime.runner import open_model

LAW_SIZE = 64
WIDEST = 8
"""Ranks whose acceptance is measured."""
DEEPEST = 8
BUDGETS = (7, 15, 31)
TEMPERATURES = (0.6, 1.0)
NUM_SLOTS = 40_000
BEAMS = {7: (2, 4), 15: (3, 5), 31: (5, 6)}
"""Width and depth of beams: no model of acceptance by rank chooses them."""


class Acceptance(NamedTuple):
    """Acceptance by rank, of children drawn in each way at one temperature."""

    without_replacement: list[float]
    independent: list[float]
    coupled: list[float]


Make = Callable[[int, Acceptance, Path], ModelDrafterConfig]
"""The drafter for a number of nodes and for acceptance by rank; files go into the folder."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to draft and to verify."""

    name: str
    rule: VerifyRule
    make: Make


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell of the table, and what the drafter was."""

    scheme: str
    rule: str
    temperature: float
    num_nodes: int
    length: float
    low: float
    high: float
    num_rounds: int
    mean_nodes: float
    fed_per_round: float
    merged_per_round: float
    mergeable_per_round: float
    """Nodes that GSD would not have drafted (`num_mergeable`)."""
    shape: str


def branchings(num_nodes: int, *, stars: bool) -> list[list[int]]:
    """Children by depth, never more than above; `stars`: paths that part at the root."""
    found: list[list[int]] = []

    def extend(begun: list[int], nodes: int, leaves: int) -> None:
        if nodes >= num_nodes or len(begun) == DEEPEST:
            found.append(begun)
            return
        most = WIDEST if not begun else 1 if stars else begun[-1]
        for width in range(1, most + 1):
            extend([*begun, width], nodes + leaves * width, leaves * width)

    extend([], 0, 1)
    return found


def shape_of(branching: Sequence[int], num_nodes: int) -> tuple[int, ...]:
    """The parents of the tree that is grown."""
    growth, tree, frontier = StaticGrowth(branching), GrowingTree(0), [0]
    for level in range(growth.depth):
        children = [Candidate(node, 0, 0.0) for node in frontier for _ in range(growth.width(level))]
        frontier = growth.extend(tree, children, num_nodes) if frontier else []
    return tuple(tree.parents)


@cache
def _shapes(num_nodes: int, stars: bool) -> list[tuple[list[int], tuple[int, ...]]]:
    return [(branching, shape_of(branching, num_nodes)) for branching in branchings(num_nodes, stars=stars)]


def best_branching(num_nodes: int, acceptance: Sequence[float], *, stars: bool = False) -> list[int]:
    """The children by depth of the tree of most accepted tokens, by acceptance by rank."""
    return max(_shapes(num_nodes, stars), key=lambda one: expected_accepted(one[1], acceptance))[0]


def fixed(acceptance: str, *, stars: bool = False, **options: Any) -> Make:
    """A tree of the best branching for the acceptance measured with this kind of draws."""

    def make(num_nodes: int, measured: Acceptance, _folder: Path) -> ModelDrafterConfig:
        branching = best_branching(num_nodes, getattr(measured, acceptance), stars=stars)
        return ModelDrafterConfig(strategy=Strategy.tree, branching=branching, num_draft_tokens=num_nodes, **options)

    return make


def sequoia(acceptance: str) -> Make:
    """The best tree of all, from a file."""

    def make(num_nodes: int, measured: Acceptance, folder: Path) -> ModelDrafterConfig:
        by_rank = getattr(measured, acceptance)
        path = folder / f"{acceptance}-{num_nodes}.json"
        write_trees(path, best_trees(by_rank, num_nodes, DEEPEST)[-1:], {"acceptance": by_rank})
        return ModelDrafterConfig(strategy=Strategy.tree, tree=str(path), num_draft_tokens=num_nodes)

    return make


def beam(num_nodes: int, _measured: Acceptance, _folder: Path) -> ModelDrafterConfig:
    width, depth = BEAMS[num_nodes]
    return ModelDrafterConfig(strategy=Strategy.beam, width=width, depth=depth, num_draft_tokens=num_nodes)


def grown(strategy: Strategy, **options: Any) -> Make:
    """Trees that grow where they are likely."""

    def make(num_nodes: int, _measured: Acceptance, _folder: Path) -> ModelDrafterConfig:
        depth = min(DEEPEST, num_nodes)
        return ModelDrafterConfig(strategy=strategy, width=4, depth=depth, num_draft_tokens=num_nodes, **options)

    return make


def chain(num_nodes: int, _measured: Acceptance, _folder: Path) -> ModelDrafterConfig:
    return ModelDrafterConfig(num_draft_tokens=num_nodes)


SCHEMES = (
    Scheme("chain", VerifyRule.rejection, chain),
    Scheme("chain", VerifyRule.traversal, chain),
    Scheme("MCSD", VerifyRule.rejection, fixed("independent", draws=Draws.independent)),
    Scheme("SpecTr (K-SEQ), paths", VerifyRule.kseq, fixed("independent", stars=True)),
    Scheme("K-SEQ, tree", VerifyRule.kseq, fixed("independent")),
    Scheme("SpecTr (optimum), paths", VerifyRule.transport, fixed("independent", stars=True)),
    Scheme("SpecTr (optimum), tree", VerifyRule.transport, fixed("independent")),
    Scheme("RSD-C", VerifyRule.rejection, fixed("without_replacement")),
    Scheme("RSD-C", VerifyRule.traversal, fixed("without_replacement")),
    Scheme("RSD-S", VerifyRule.rejection, beam),
    Scheme("RSD-S", VerifyRule.traversal, beam),
    Scheme("Sequoia", VerifyRule.rejection, sequoia("without_replacement")),
    Scheme("GSD", VerifyRule.rejection, fixed("without_replacement", merge_ngram=1)),
    Scheme("coupled, fixed tree", VerifyRule.coupled, fixed("coupled")),
    Scheme("coupled, Sequoia", VerifyRule.coupled, sequoia("coupled")),
    Scheme("coupled, beam", VerifyRule.coupled, beam),
    Scheme("coupled, best_first", VerifyRule.coupled, grown(Strategy.best_first)),
    Scheme("coupled, best_first, merged", VerifyRule.coupled, grown(Strategy.best_first, merge_ngram=1)),
    Scheme("coupled, CaPE", VerifyRule.coupled, grown(Strategy.cape)),
)


class Pair:
    """The bundled models, opened once."""

    def __init__(self, num_prompts: int, num_tokens: int) -> None:
        tokenizer = load_tokenizer(pocket.TARGET)
        prompts = read_prompts(pocket.PROMPTS)
        texts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in prompts]
        self.tuning, self.prompts = texts[::3], [text for i, text in enumerate(texts) if i % 3][:num_prompts]
        self._num_tokens = num_tokens
        self._eos = tuple(read_eos_token_ids(pocket.TARGET))
        self._target = open_model(str(pocket.TARGET), num_slots=NUM_SLOTS)
        self._draft = open_model(str(pocket.DRAFTER), num_slots=NUM_SLOTS)

    def run(
        self, config: ModelDrafterConfig, rule: VerifyRule, temperature: float, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[list[CountedRound], ModelDrafter]:
        options = ModelOptions(str(rule), LAW_SIZE, self._eos, 512)
        drafter = ModelDrafter(self._draft, replace(config, path=str(pocket.DRAFTER)), options)
        verifier = Verifier(self._target, str(rule), self._eos)
        sampling = SamplingParams(temperature=temperature, seed=1)
        return [*complete(verifier, drafter, prompts, sampling, config.num_draft_tokens, self._num_tokens)], drafter

    def acceptance(self, temperature: float) -> Acceptance:
        """Acceptance by rank, on the prompts for tuning."""
        found = []
        for rule, draws in (
            (VerifyRule.rejection, Draws.without_replacement),
            (VerifyRule.rejection, Draws.independent),
            (VerifyRule.coupled, Draws.auto),
        ):
            star = ModelDrafterConfig(strategy=Strategy.tree, branching=[WIDEST], num_draft_tokens=WIDEST, draws=draws)
            found.append(acceptance_by_rank(self.run(star, rule, temperature, self.tuning)[0], WIDEST))
        return Acceptance(*found)


def interval(rounds: Sequence[CountedRound]) -> tuple[float, float, float]:
    """Mean tokens of a round, and the 95 % interval by bootstrap over prompts."""
    by_prompt = groupby(sorted(rounds, key=lambda one: one.prompt), key=lambda one: one.prompt)
    sums = np.array([(sum(one.num_tokens for one in own), len(own)) for own in (list(own) for _, own in by_prompt)])
    picked = np.random.default_rng(0).integers(0, len(sums), (2000, len(sums)))
    totals = sums[picked].sum(axis=1)
    low, high = np.quantile(totals[:, 0] / totals[:, 1], (0.025, 0.975))
    return float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high)


def num_mergeable(tree: TokenTree) -> int:
    """Draft nodes that GSD (arXiv 2407.16207, `repeat_threshold=0`) would not draft: the same token was drafted before,
    at whatever depth, off the node's own path, or the node is behind such a one."""
    merged: set[int] = set()
    earlier: dict[int, set[int]] = {}
    for node in range(1, len(tree.token_ids)):
        path, twins = tree.path_to(node), earlier.setdefault(tree.token_ids[node], set())
        if tree.parents[node] in merged or twins.difference(path):
            merged.add(node)
        else:
            twins.add(node)
    return len(merged)


def measure(pair: Pair, scheme: Scheme, config: ModelDrafterConfig, temperature: float) -> Measured:
    rounds, drafter = pair.run(config, scheme.rule, temperature, pair.prompts)
    shape = str(config.branching) if config.branching else f"{config.width} x {config.depth}"
    sizes = [one.tree.num_draft_tokens for one in rounds]
    return Measured(
        scheme.name,
        str(scheme.rule),
        temperature,
        config.num_draft_tokens,
        *interval(rounds),
        len(rounds),
        float(np.mean(sizes)),
        drafter.num_fed_nodes / len(rounds),
        drafter.num_merged_nodes / len(rounds),
        float(np.mean([num_mergeable(one.tree) for one in rounds])),
        shape,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write every figure, after each cell")
    parser.add_argument("--prompts", type=int, default=32, help="prompts to complete, at most")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--only", default="", help="schemes whose name contains this")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), choices=BUDGETS, help="nodes")
    options = parser.parse_args(arguments)
    terminal, cells = Terminal(), []
    pair = Pair(options.prompts, options.tokens)
    schemes = [scheme for scheme in SCHEMES if options.only in scheme.name]
    about: dict[str, object] = {}
    with (
        TemporaryDirectory() as folder,
        terminal.counting("drafting", len(TEMPERATURES) * len(options.budgets) * len(schemes)) as bar,
    ):
        for temperature in TEMPERATURES:
            acceptance = pair.acceptance(temperature)
            about[f"acceptance by rank, T={temperature:g}"] = acceptance._asdict()
            for scheme in schemes:
                for num_nodes in options.budgets:
                    config = scheme.make(num_nodes, acceptance, Path(folder))
                    cells.append(measure(pair, scheme, config, temperature))
                    bar.advance()
                    if options.out:
                        table = [asdict(cell) for cell in cells]
                        write_json(options.out, {**about, "cells": table, "versions": versions()})
    for temperature in TEMPERATURES:
        rows = [
            [scheme.name, str(scheme.rule)]
            + [
                f"{cell.length:.2f} ({cell.low:.2f} to {cell.high:.2f})"
                for cell in cells
                if (cell.scheme, cell.rule, cell.temperature) == (scheme.name, scheme.rule, temperature)
            ]
            for scheme in schemes
        ]
        columns = ("scheme", "verify", *(f"{num_nodes} nodes" for num_nodes in options.budgets))
        terminal.table(f"Tokens per target pass, temperature {temperature:g}", columns, rows)


if __name__ == "__main__":
    main()
