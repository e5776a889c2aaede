"""Verification rules: which draft tokens are accepted, so that the output distribution stays exactly the target's.

Losslessness is a property of the *pair* of drafting scheme and rule. A wrong pair raises no error, it biases silently;
so `ALLOWED` lists the draws that each rule is exact for, and `check_scheme` refuses the others before a model is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.distributions import TargetRow
from actors.verification.kseq import verify_kseq
from actors.verification.random_source import RandomSource
from actors.verification.rejection import verify_rejection
from actors.verification.traversal import verify_traversal

Rule = Callable[
    [TokenTree, Sequence[int], Sequence[SparseDistribution | None], TargetRow, RandomSource],
    tuple[tuple[int, ...], int],
]
"""(tree, sampling kinds, distributions, target row of a node, randomness) -> accepted path and next token."""

RULES: dict[str, Rule] = {
    "rejection": verify_rejection,
    "traversal": verify_traversal,
    "kseq": verify_kseq,
}
"""Ratio tests, which need draft distributions and randomness. `verify_coupled` needs only the target's own draws."""

_ANY = frozenset(SamplingKind) - {SamplingKind.ROOT}

ALLOWED: dict[str, frozenset[SamplingKind]] = {
    "coupled": _ANY,
    "rejection": _ANY,
    "traversal": _ANY,
    "kseq": frozenset({SamplingKind.IID}),
}
"""Draws that a rule is exact for, in any mixture. Ratio tests treat DETERMINISTIC and COUPLED tokens as one-hot."""


def check_scheme(rule: str, sampling_kinds: Iterable[SamplingKind]) -> None:
    """Raise ValueError unless `rule` is exact for a drafter that draws in all of these ways."""
    if rule not in ALLOWED:
        raise ValueError(f"verify.rule={rule!r} is not one of {', '.join(ALLOWED)}")
    wrong = sorted(set(sampling_kinds) - ALLOWED[rule] - {SamplingKind.ROOT})
    if wrong:
        drawn = ", ".join(SamplingKind(draw).name for draw in wrong)
        exact = ", ".join(name for name, allowed in ALLOWED.items() if allowed.issuperset(wrong))
        raise ValueError(f"verify.rule={rule} would bias the output of a drafter that draws {drawn}; use {exact}")
