"""Drafts that no pass verifies: each is compared with the tokens that the target generates behind its prefix.

While decoding is plain, a drafter that needs no pass of a model shows in this way what its drafts would bring, for no
row of the target's passes. What a draft of chosen tokens would have had accepted is what agrees with the text: exactly
where the text does not depend on drafts, else in the mean. Knows texts and trees; neither when drafts are made nor what
follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actors.coordinator.sequence import Sequence
from actors.policy.acceptance import DraftOutcome
from actors.protocol.messages import Proposal, TokenTree


@dataclass(slots=True)
class _Draft:
    """A draft of `num_ordered` tokens for the first `start` tokens of a text; `tree` is None until it is there."""

    start: int
    num_ordered: int
    tree: TokenTree | None = None


class ScoredDrafts:
    """One draft of each request at a time: an order for another one waits until the text has decided it."""

    def __init__(self) -> None:
        self.drafts: dict[int, _Draft] = {}

    def order(self, sequence: Sequence, num_ordered: int) -> None:
        """A draft for its present text is ordered."""
        self.drafts[sequence.request_id] = _Draft(sequence.prefix_len, num_ordered)

    def answer(self, proposals: Iterable[Proposal], sequences: Mapping[int, Sequence], *, is_last: bool = True) -> None:
        """Drafts that were ordered; after the last of them a request without a proposal has an empty one."""
        found = {proposal.request_id: proposal for proposal in proposals}
        for request_id, draft in self.drafts.items():
            if draft.tree is not None or (sequence := sequences.get(request_id)) is None:
                continue
            proposal = found.get(request_id)
            if proposal is None and not is_last:
                continue
            draft.tree = TokenTree.root(sequence.token_ids[draft.start - 1])
            if proposal is not None and proposal.prefix_len == draft.start:
                draft.tree = proposal.tree

    def lose(self) -> None:
        """The drafter is lost: what it has not answered will not be."""
        self.drafts = {request_id: draft for request_id, draft in self.drafts.items() if draft.tree is not None}

    def take(self, sequences: Mapping[int, Sequence]) -> list[DraftOutcome]:
        """What would have been accepted of the drafts that the texts decide by now; those of requests that have ended
        are dropped."""
        decided = []
        for request_id, draft in list(self.drafts.items()):
            if (sequence := sequences.get(request_id)) is None:
                del self.drafts[request_id]
            elif (outcome := _outcome(request_id, draft, sequence.token_ids[draft.start :])) is not None:
                del self.drafts[request_id]
                decided.append(outcome)
        return decided


def _outcome(request_id: int, draft: _Draft, text: list[int]) -> DraftOutcome | None:
    """None until the draft is there, and while the whole text behind its prefix agrees with a branch that goes on."""
    if (tree := draft.tree) is None:
        return None
    path = tree.agreed_path(text)
    if len(path) == len(text) and (path[-1] if path else 0) in tree.parents:
        return None
    if not (size := tree.num_draft_tokens):
        return DraftOutcome(request_id, draft.num_ordered, ())
    return DraftOutcome(request_id, draft.num_ordered, path, len(path) + 1, max(0, draft.num_ordered - size))
