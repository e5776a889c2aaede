"""Everything a cascade can propose, with its probability: production levels over toy models, played to the last coin.

`CascadeDrafter` runs as it is; its coins and the draws of the level beneath read their decisions from a tape, and every
tape is played. What comes out goes through the rule of the target as in `cluster.tools.certify.rule_enumeration`. Slow by
nature: for three tokens and short drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import torch

from actors.drafters.cascade.child import ChildLevel, LocalChild
from actors.drafters.cascade.draft_lengths import FixedLengths
from actors.drafters.cascade.level import CascadeDrafter
from actors.drafters.interface import Context, Draft, IdleDrafter
from actors.protocol.messages import Commit, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.verification.random_source import RandomSource
from actors.verification.rules import RULES
from cluster.tools.certify import rule_enumeration
from cluster.tools.certify.rule_enumeration import Law, emission, total_variation
from parallel.runtime.runner import PassOutput, Span

VOCAB, PROMPT = 3, (0, 0)
_LONGEST = 99
_Result = TypeVar("_Result")


class Tape:
    """The decisions of one run: those of `script`, and the first possible one behind its end. Serves as coins."""

    def __init__(self, script: list[int]) -> None:
        self.weight = 1.0
        self._script = script
        self._laws: list[np.ndarray] = []

    def draw(self, weights: Sequence[float] | np.ndarray) -> int:
        distribution = np.asarray(weights, dtype=float) / np.sum(weights)
        if len(self._laws) == len(self._script):
            self._script.append(int(np.flatnonzero(distribution)[0]))
        choice = self._script[len(self._laws)]
        self._laws.append(distribution)
        self.weight *= distribution[choice]
        return choice

    def accept(self, probability: float, node: int) -> bool:
        return bool(self.draw([1 - probability, probability]))

    def sample(self, weights: np.ndarray, node: int) -> int:
        return self.draw(weights)

    def successor(self) -> list[int] | None:
        """The script of the next run, None after the last."""
        script = self._script[: len(self._laws)]
        while script:
            later = [i for i in np.flatnonzero(self._laws[len(script) - 1]) if i > script[-1]]
            if later:
                return [*script[:-1], int(later[0])]
            script.pop()
        return None


def every_run(run: Callable[[Tape], _Result]) -> Iterator[tuple[float, _Result]]:
    """(probability, what came of it) for every way the decisions can fall."""
    script: list[int] | None = []
    while script is not None:
        tape = Tape(script)
        result = run(tape)
        yield tape.weight, result
        script = tape.successor()


class ToyRunner:
    """Rows are tokens of one sequence; the logits behind a row are the logarithm of a law of the text up to it."""

    decoder = SimpleNamespace(group=SimpleNamespace(size=1))

    def __init__(self, distribution: Law, vocab_size: int, prompt_len: int) -> None:
        self.config = SimpleNamespace(max_positions=_LONGEST, vocab_size=vocab_size)
        self.scored: list[np.ndarray] = []
        """The laws behind the nodes of the last pass that was asked for logits."""
        self._distribution = distribution
        self._prompt_len = prompt_len
        self._kept: list[int] = []
        self._pending: list[tuple[int, int]] = []

    def open(self, seq_id: int) -> None:
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


class Sampler(IdleDrafter):
    """The level beneath: a chain drawn from `distribution` as the tape says, or its likeliest tokens, which nobody drew."""

    def __init__(self, distribution: Law, tape: Tape, kind: SamplingKind = SamplingKind.IID) -> None:
        self._distribution, self._tape, self._kind = distribution, tape, kind

    def open(self, context: Context) -> None:
        """It remembers nothing."""

    def prepare(self, contexts: Sequence[Context]) -> None:
        """It remembers nothing."""

    def observe(self, context: Context, commit: Commit) -> None:
        """It remembers nothing."""

    def release(self, request_id: int) -> None:
        """It remembers nothing."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        (context,), (budget,) = contexts, budgets
        drawn: list[int] = []
        distributions: list[SparseDistribution | None] = []
        for _ in range(budget):
            row = self._distribution((*context.token_ids[len(PROMPT) :], *drawn))
            distributions.append(SparseDistribution(tuple(range(VOCAB)), tuple(row)))
            drawn.append(int(row.argmax()) if self._kind is SamplingKind.DETERMINISTIC else self._tape.draw(row))
        tree = TokenTree.chain(context.token_ids[-1], drawn)
        if self._kind is SamplingKind.DETERMINISTIC:
            return [Draft.chosen(tree)]
        return [Draft(tree, (SamplingKind.ROOT, *[self._kind] * budget), (*distributions, None))]


CoinsOf = Callable[[Tape, ToyRunner], RandomSource]
"""The coins of a level whose model is this runner."""


def honest(tape: Tape, runner: ToyRunner) -> RandomSource:
    return tape


def level(
    distribution: Law,
    below: IdleDrafter | CascadeDrafter,
    tape: Tape,
    lengths: tuple[int, ...],
    number: int,
    rule: str,
    tail: int = 0,
    law_size: int = VOCAB,
    coins_of: CoinsOf = honest,
    make_coins: Callable[[int, int], RandomSource] | None = None,
) -> CascadeDrafter:
    """The level `number` of a cascade in which level i hands up `lengths[i]` tokens, 0 to pass on others.

    Its coins are the tape's, as `coins_of` hands them out, or the production ones that `make_coins` makes.
    """
    runner = ToyRunner(distribution, VOCAB, len(PROMPT))
    return CascadeDrafter(
        runner,
        ChildLevel(LocalChild(below), str(number - 1), max(lengths[:number])),
        level=number,
        name=str(number),
        rule=rule,
        law_size=law_size,
        eos_token_ids=(),
        prefill_chunk=_LONGEST,
        lengths=FixedLengths(lengths),
        tail=tail,
        make_coins=make_coins or (lambda seed, step: coins_of(tape, runner)),
    )


def guesses(
    distributions: Sequence[Law],
    lengths: tuple[int, ...],
    rule: str,
    tail: int = 0,
    law_size: int = VOCAB,
    kind: SamplingKind = SamplingKind.IID,
    coins_of: CoinsOf = honest,
) -> list[tuple[float, Draft]]:
    """Everything a cascade over these laws, the cheapest first, can propose; the first level draws as `kind` says."""

    def run(tape: Tape) -> Draft:
        drafter: IdleDrafter | CascadeDrafter = Sampler(distributions[0], tape, kind)
        for number, distribution in enumerate(distributions[1:], 1):
            drafter = level(distribution, drafter, tape, lengths, number, rule, tail, law_size, coins_of)
        context = Context(1, 0, list(PROMPT), len(PROMPT), SamplingParams(temperature=1.0))
        drafter.open(context)
        return drafter.propose([context], [lengths[-1] or max(lengths)])[0]

    return list(every_run(run))


def distance(p: Law, proposed: Sequence[tuple[float, Draft]], rule: str) -> float:
    """Total variation between what `rule` emits for these drafts and the target's law."""
    drafts = (
        rule_enumeration.Draft(weight, guess.tree, guess.sampling_kinds, guess.distributions)
        for weight, guess in proposed
    )
    length = max(guess.tree.num_draft_tokens for _, guess in proposed) + 1
    return total_variation(emission(RULES[rule], drafts, p, length), p, length)
