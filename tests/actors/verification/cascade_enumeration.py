# toy runners and sources take the arguments of the real ones
"""Exact enumeration of a cascade: all its proposals over toy models, each with its probability.

`CascadeDrafter` runs unchanged; its random source and the draws of its child level read their decisions from a tape,
and every tape is run. The proposals go through the target's rule as in `rule_enumeration`. The cost is exponential: for
three tokens and short drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from actors.drafters.cascade.child import ChildLevel, LocalChild
from actors.drafters.cascade.draft_lengths import PassedLengths
from actors.drafters.cascade.level import CascadeDrafter, LevelSpec
from actors.drafters.config import ModelOptions
from actors.drafters.interface import Capabilities, Context, Draft, Drafter
from actors.protocol.messages import Commit, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.verification.random_source import RandomSource
from actors.verification.rules import RULES
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import PassOutput
from tests.actors.verification.rule_enumeration import (
    ConditionalDistribution,
    Tape,
    TapeSource,
    WeightedDraft,
    all_runs,
    emission,
    total_variation,
)

if TYPE_CHECKING:
    from parallel.runtime.interface import Runner

VOCAB, PROMPT = 3, (0, 0)
_LONGEST = 99


class ToyRunner:
    """A model runner of one sequence: the logits after a row are the logarithm of a toy model's distribution there."""

    decoder = SimpleNamespace(group=SimpleNamespace(size=1))
    longest_text = _LONGEST
    reads_drafts = True
    drops_rows = False

    def __init__(self, distribution: ConditionalDistribution, vocab_size: int, prompt_len: int) -> None:
        self.config = SimpleNamespace(max_positions=_LONGEST, vocab_size=vocab_size)
        self.scored: list[np.ndarray] = []
        """Distributions after the nodes of the last pass."""
        self._distribution = distribution
        self._prompt_len = prompt_len
        self._kept: list[int] = []
        self._pending: list[tuple[int, int]] = []

    def as_runner(self) -> Runner:
        """It has the part of a runner that a level uses."""
        return cast("Runner", self)

    def open(self, seq_id: int, text: object = None) -> None:
        self._kept, self._pending = [], []

    def close(self, seq_id: int) -> None:
        self._kept, self._pending = [], []

    def can_reserve(self, num_rows: int) -> bool:
        return True

    def cached_len(self, seq_id: int) -> int:
        return len(self._kept)

    def truncate(self, seq_id: int, length: int) -> None:
        assert length <= len(self._kept)
        self._kept, self._pending = self._kept[:length], []

    def commit(self, seq_id: int, keep: Sequence[int]) -> None:
        self._kept += [self._pending[row][0] for row in keep]
        self._pending = []

    def forward(self, spans: Sequence[Span], token_ids: Sequence[int]) -> PassOutput:
        (span,) = spans
        parents = span.parents if span.parents is not None else range(-1, span.num_tokens - 1)
        self._pending = list(zip(token_ids, parents, strict=True))
        rows = [self._distribution(tuple(self._text(row)[self._prompt_len :])) for row in range(len(token_ids))]
        self.scored = rows[len(rows) - span.num_logits :]
        logits = torch.tensor(np.log(np.maximum(rows, 1e-300)), dtype=torch.float64)
        return PassOutput(logits[len(rows) - span.num_logits :], logits, ())

    def _text(self, row: int) -> list[int]:
        path = []
        while row >= 0:
            token, row = self._pending[row]
            path.append(token)
        return self._kept + path[::-1]


class ToyChild:
    """The child level: a chain drawn from `distribution` by the tape, or, deterministic, its likeliest tokens."""

    def __init__(
        self, distribution: ConditionalDistribution, tape: Tape, kind: SamplingKind = SamplingKind.IID
    ) -> None:
        self.capabilities = Capabilities()
        self._distribution, self._tape, self._kind = distribution, tape, kind

    def open(self, context: Context) -> None:
        """Keeps no state."""

    def observe(self, context: Context, commit: Commit) -> None:
        """Keeps no state."""

    def release(self, request_id: int) -> None:
        """Keeps no state."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        (context,), (budget,) = contexts, budgets
        token_ids: list[int] = []
        distributions: list[SparseDistribution | None] = []
        for _ in range(budget):
            row = self._distribution((*context.token_ids[len(PROMPT) :], *token_ids))
            distributions.append(SparseDistribution(tuple(range(VOCAB)), tuple(row)))
            token_ids.append(int(row.argmax()) if self._kind is SamplingKind.DETERMINISTIC else self._tape.draw(row))
        tree = TokenTree.chain(context.token_ids[-1], token_ids)
        if self._kind is SamplingKind.DETERMINISTIC:
            return [Draft.chosen(tree)]
        return [Draft(tree, (SamplingKind.ROOT, *[self._kind] * budget), (*distributions, None))]


SourceOf = Callable[[RandomSource, ToyRunner], RandomSource]
"""The random source of a level whose model is this runner, made of the right one."""


def toy_level(
    distribution: ConditionalDistribution,
    child: Drafter,
    tape: Tape,
    lengths: tuple[int, ...],
    number: int,
    rule: str,
    tail: int = 0,
    law_size: int = VOCAB,
    source_of: SourceOf = lambda source, _runner: source,
    make_random_source: Callable[[int, int], RandomSource] | None = None,
    works_ahead: bool = False,
    widths: tuple[int, ...] = (),
) -> CascadeDrafter:
    """Level `number` of a cascade whose level i proposes `lengths[i]` tokens, 0 to forward its child's, `widths[i]` of
    them beside each other.

    Its random source is `source_of(source, runner)`, where `source` reads the tape by the production's keys, or the
    production one that `make_random_source` makes.
    """
    runner = ToyRunner(distribution, VOCAB, len(PROMPT))
    child_width, width = widths[number - 1 : number + 1] if widths else (1, 1)
    return CascadeDrafter(
        runner.as_runner(),
        ChildLevel(LocalChild(child), str(number - 1), max(lengths[:number])),
        LevelSpec(number, str(number), tail, width=width, child_width=child_width, works_ahead=works_ahead),
        ModelOptions(rule, law_size, (), _LONGEST),
        PassedLengths(lengths),
        make_random_source or (lambda seed, step: source_of(TapeSource(tape, (seed, step)), runner)),
    )


def enumerate_proposals(
    distributions: Sequence[ConditionalDistribution],
    lengths: tuple[int, ...],
    rule: str,
    tail: int = 0,
    law_size: int = VOCAB,
    kind: SamplingKind = SamplingKind.IID,
    source_of: SourceOf = lambda source, _runner: source,
    widths: tuple[int, ...] = (),
) -> list[tuple[float, Draft]]:
    """All proposals of a cascade over these models, the cheapest first; the first level draws by `kind`."""

    def run(tape: Tape) -> Draft:
        drafter: Drafter = ToyChild(distributions[0], tape, kind)
        for number, distribution in enumerate(distributions[1:], 1):
            drafter = toy_level(
                distribution, drafter, tape, lengths, number, rule, tail, law_size, source_of, widths=widths
            )
        context = Context(1, 0, list(PROMPT), len(PROMPT), SamplingParams(temperature=1.0))
        drafter.open(context)
        return drafter.propose([context], [lengths[-1] or max(lengths)])[0]

    return list(all_runs(run))


def distance(p: ConditionalDistribution, proposed: Sequence[tuple[float, Draft]], rule: str) -> float:
    """Total variation between the output of `rule` on these drafts and the target's distribution."""
    drafts = (
        WeightedDraft(weight, draft.tree, draft.sampling_kinds, draft.distributions) for weight, draft in proposed
    )
    length = max(draft.tree.num_draft_tokens for _, draft in proposed) + 1
    return total_variation(emission(RULES[rule], drafts, p, length), p, length)
