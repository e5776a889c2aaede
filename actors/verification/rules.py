"""Verification rules: which drafted tokens stand, so that the output law stays exactly the target's.

Losslessness belongs to the *pair* of drafting scheme and rule. A wrong pair does not crash, it biases silently, so
`ALLOWED` says which draws every rule is exact for, and `check_scheme` refuses the rest before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actors.protocol.messages import SamplingKind
from actors.verification.kseq import verify_kseq
from actors.verification.rejection import verify_rejection
from actors.verification.traversal import verify_traversal

RULES: dict[str, Callable[..., tuple[tuple[int, ...], int]]] = {
    "rejection": verify_rejection,
    "traversal": verify_traversal,
    "kseq": verify_kseq,
}
"""Ratio tests, which need the draft laws and coins. `coupled.verify_coupled` needs the target's own draws only."""

_ANY = frozenset(SamplingKind) - {SamplingKind.ROOT}

ALLOWED: dict[str, frozenset[SamplingKind]] = {
    "coupled": _ANY,
    "rejection": _ANY,
    "traversal": _ANY,
    "kseq": frozenset({SamplingKind.IID}),
}
"""Draws that a rule is exact for, in any mixture. Ratio tests read DETERMINISTIC and COUPLED tokens as one-hot."""


def check_scheme(rule: str, sampling_kinds: Iterable[SamplingKind]) -> None:
    """Raise ValueError unless `rule` is exact for a drafter that draws in all of these ways."""
    if rule not in ALLOWED:
        raise ValueError(f"verify.rule={rule!r} is not one of {', '.join(ALLOWED)}")
    wrong = sorted(set(sampling_kinds) - ALLOWED[rule] - {SamplingKind.ROOT})
    if wrong:
        drawn = ", ".join(SamplingKind(draw).name for draw in wrong)
        exact = ", ".join(name for name, allowed in ALLOWED.items() if allowed.issuperset(wrong))
        raise ValueError(f"verify.rule={rule} would bias the output of a drafter that draws {drawn}; use {exact}")
