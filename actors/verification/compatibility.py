"""Which rule is exact for which drafts, as one static table, and the rule that `verify.rule=auto` takes.

Losslessness is a property of the *pair* of drafting scheme and rule. A wrong pair raises no error, it biases silently;
so `check_scheme` refuses, before a model is loaded, whatever `EXACT_FOR` does not list. Every entry and every gap of
the table is enumerated in `tests/actors/verification/test_compatibility.py`. Knows names only: no tensor, no drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind

RANDOM = frozenset({SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT})
"""Kinds whose tokens are tested against a distribution; the others are compared with a draw of the target."""


class DraftTrait(StrEnum):
    """What a rule must know of a proposal beside the kinds of its draws; the values complete "drafts that ..."."""

    BRANCHES = "branch"
    """A node may have several children."""
    EDITED = "lose or re-sort tokens after the draw"
    """Tokens that were drawn are dropped, replaced or re-sorted because of which tokens they are."""
    SHARED = "use one draw at several nodes"
    """A draft graph, unrolled: nodes of equal depth repeat one draw, or are drawn with one vector of noise."""
    REPEATED = "repeat the draws of an earlier round"
    """Noise keyed by position and not by round: a position that is drafted again gets the same noise."""


_KINDS = frozenset(SamplingKind) - {SamplingKind.ROOT}
_IN_WORDS = {
    SamplingKind.DETERMINISTIC: "chooses its tokens and draws none",
    SamplingKind.COUPLED: "draws with the target's noise",
    SamplingKind.IID: "draws siblings independently",
    SamplingKind.WITHOUT_REPLACEMENT: "draws siblings without replacement",
}
"""Kind: what a drafter of it does, for error lines."""

EXACT_FOR: Mapping[VerifyRule, tuple[frozenset[SamplingKind], frozenset[DraftTrait]]] = {
    VerifyRule.coupled: (_KINDS, frozenset(DraftTrait)),
    VerifyRule.rejection: (_KINDS, frozenset({DraftTrait.BRANCHES, DraftTrait.SHARED, DraftTrait.REPEATED})),
    VerifyRule.block: (_KINDS, frozenset()),
    VerifyRule.traversal: (_KINDS, frozenset({DraftTrait.BRANCHES})),
    VerifyRule.kseq: (
        frozenset({SamplingKind.IID}),
        frozenset({DraftTrait.BRANCHES, DraftTrait.SHARED, DraftTrait.REPEATED}),
    ),
    VerifyRule.transport: (
        frozenset({SamplingKind.IID}),
        frozenset({DraftTrait.BRANCHES, DraftTrait.SHARED, DraftTrait.REPEATED}),
    ),
}
"""Rule: the kinds it is exact for, in any mixture, and the traits that tokens of random kinds may have."""


def is_exact(rule: VerifyRule, kinds: Iterable[SamplingKind], traits: Iterable[DraftTrait] = ()) -> bool:
    """Whether the rule keeps the target's distribution for drafts of all these kinds and traits."""
    return not _wrong(rule, frozenset(kinds), frozenset(traits))


def _wrong(rule: VerifyRule, kinds: frozenset[SamplingKind], traits: frozenset[DraftTrait]) -> str:
    """What the rule is not exact for, in words; empty if nothing."""
    good_kinds, good_traits = EXACT_FOR[rule]
    if wrong := sorted(kinds - good_kinds - {SamplingKind.ROOT}):
        return f"a drafter that {' and '.join(_IN_WORDS[SamplingKind(kind)] for kind in wrong)}"
    # A token that was not drawn at random is compared with the target's draw, which knows no draft: it may have any
    # trait. Only the shape remains: block verification has no second child to try.
    concerned = traits if kinds & RANDOM else traits & {DraftTrait.BRANCHES}
    if wrong := sorted(concerned - good_traits):
        return f"drafts that {' and '.join(wrong)}"
    return ""


def choose_rule(kinds: Iterable[SamplingKind], traits: Iterable[DraftTrait], *, is_greedy: bool) -> VerifyRule:
    """The rule that accepts the most of drafts which, under a ratio rule, are of these kinds and traits.

    Of a chain drawn at random block verification accepts more than any other rule (it is optimal among those that
    follow one path). Of trees the coupled rule accepts as many as traversal or more, measured, and its tokens are those
    of plain decoding; the two are alike for chosen tokens and greedy decoding, where coupled reads no distribution.
    """
    drawn, marks = frozenset(kinds), frozenset(traits)
    is_drawn_chain = bool(drawn & RANDOM) and is_exact(VerifyRule.block, drawn, marks)
    return VerifyRule.block if is_drawn_chain and not is_greedy else VerifyRule.coupled


def check_scheme(rule: str, kinds: Iterable[SamplingKind], traits: Iterable[DraftTrait] = ()) -> None:
    """Raise ValueError unless `rule` is exact for drafts of all these kinds and traits."""
    names = [str(name) for name in EXACT_FOR]
    if rule not in names:
        raise ValueError(f"verify.rule={rule!r} is not one of {', '.join(names)}")
    drawn, marks = frozenset(kinds), frozenset(traits)
    if wrong := _wrong(VerifyRule(rule), drawn, marks):
        exact = ", ".join(name for name in EXACT_FOR if is_exact(name, drawn, marks))
        problem = (
            "is for chains, not for" if wrong == f"drafts that {DraftTrait.BRANCHES}" else "would bias the output of"
        )
        raise ValueError(f"verify.rule={rule} {problem} {wrong}; use {exact}")
