"""Rules for the length of a chain, compared on the same drafts.

A drafter proposes the longest chain after every token of texts that the target wrote. Since verification changes no
token, every rule meets the same text; where it ends a chain, and how many tokens of it the text has, follows from the
recorded drafts, and the time from passes measured once. So rules differ by nothing but their decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.drafters.interface import Context
from actors.drafters.model.chain_rules import ChainRule
from actors.drafters.model.drafter import ModelDrafter
from actors.policy.acceptance import DraftOutcome
from actors.policy.policy import AdaptivePolicy, RoundObservation
from actors.protocol.messages import Commit


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """The chain after one token of a text: how many tokens of it the text has, and what rules may read of each."""

    num_right: int
    log_probs: tuple[float, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds: of a draft pass, and of the target's pass over 0, 1, 2, ... draft tokens."""

    draft_s: float
    verify_s: tuple[float, ...]

    def round_s(self, length: int) -> float:
        return length * self.draft_s + self.verify_s[length]


class Recorder(ChainRule):
    """Ends no chain; keeps what it was shown last of each request."""

    def __init__(self, *, reads_gaps: bool) -> None:
        self.reads_gaps = reads_gaps
        self.seen: dict[int, tuple[float, ...]] = {}

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:  # noqa: ARG002  of rules
        self.seen[request_id] = tuple(log_probs)
        return True

    def update(self, request_id: int, num_accepted: int) -> None:
        """It learns nothing."""

    def release(self, request_id: int) -> None:
        self.seen.pop(request_id, None)


def record_drafts(
    drafter: ModelDrafter,
    contexts: Sequence[Context],
    texts: Sequence[Sequence[int]],
    longest: int,
    read_next: Callable[[Sequence[Context]], None],
    *,
    reads_gaps: bool,
) -> list[list[tuple[int, tuple[float, ...]]]]:
    """Drafts after each token of a text from the context's last on: how many of their tokens the text has, and what a
    rule reads. `contexts` grow to the texts; `read_next` lets the target read the roots, after the drafts."""
    recorder = Recorder(reads_gaps=reads_gaps)
    drafter.end_chains_by(recorder)
    found: list[list[tuple[int, tuple[float, ...]]]] = [[] for _ in contexts]
    for context in contexts:
        drafter.open(context)
    for _ in range(len(texts[0]) - len(contexts[0].token_ids) - longest):  # all texts are as much longer
        drafts = drafter.propose(contexts, [longest] * len(contexts))
        for context, draft, text, of_text in zip(contexts, drafts, texts, found, strict=True):
            tokens, start = draft.tree.token_ids[1:], len(context.token_ids)
            right = [a == b for a, b in zip(tokens, text[start:], strict=False)]
            of_text.append((right.index(False) if False in right else len(right), recorder.seen[context.request_id]))
        read_next(contexts)
        for context, text in zip(contexts, texts, strict=True):
            token = text[len(context.token_ids)]
            drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), (), (token,)))
            context.extend([token])
    for context in contexts:
        drafter.release(context.request_id)
    return found


@dataclass(slots=True)
class Outcome:
    """What a rule did over all texts."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)

    def add(self, length: int, accepted: int, seconds: float) -> None:
        self.tokens += accepted + 1
        self.rounds += 1
        self.drafted += length
        self.accepted += accepted
        self.seconds += seconds
        self.lengths[length] = self.lengths.get(length, 0) + 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def replay_fixed(texts: Sequence[Sequence[RecordedDraft]], times: PassTimes, length: int) -> Outcome:
    """Every draft has this length; 0 is plain decoding."""
    return _replay(texts, times, lambda *_: length, lambda *_: None)


def replay_rule(texts: Sequence[Sequence[RecordedDraft]], times: PassTimes, rule: ChainRule, longest: int) -> Outcome:
    """A rule ends the drafts."""

    def length(request_id: int, step: int, draft: RecordedDraft) -> int:
        seen = draft.gaps if rule.reads_gaps else draft.log_probs
        ends = (i for i in range(1, longest) if not rule.continues(request_id, step, seen[:i]))
        return next(ends, longest)

    return _replay(texts, times, length, lambda request_id, _, accepted: rule.update(request_id, accepted))


def replay_ordered(texts: Sequence[Sequence[RecordedDraft]], times: PassTimes, longest: int) -> Outcome:
    """Value per cost: the coordinator's lengths, from acceptance and costs as they are measured."""
    policy = AdaptivePolicy("sync", 1, longest)

    def update(request_id: int, length: int, accepted: int) -> None:
        outcome = DraftOutcome(request_id, length, range(1, accepted + 1), accepted + 1)
        drafted_s, verify_s = length * times.draft_s, times.verify_s[length]
        policy.update(RoundObservation(drafted_s + verify_s, verify_s, drafted_s, 1, 1.0, 1, 0, [outcome]))

    return _replay(texts, times, lambda request_id, *_: policy.draft_length(request_id, longest + 1), update)


def _replay(
    texts: Sequence[Sequence[RecordedDraft]],
    times: PassTimes,
    length_of: Callable[[int, int, RecordedDraft], int],
    update: Callable[[int, int, int], None],
) -> Outcome:
    """Rounds through every text, one request after the other."""
    outcome = Outcome()
    for request_id, drafts in enumerate(texts):
        place = 0
        while place < len(drafts):
            length = length_of(request_id, place, drafts[place])
            accepted = min(length, drafts[place].num_right)
            outcome.add(length, accepted, times.round_s(length))
            update(request_id, length, accepted)
            place += accepted + 1
    return outcome


def replay_known(texts: Sequence[Sequence[RecordedDraft]], times: PassTimes, longest: int) -> Outcome:
    """Each draft ends where the text leaves it, and none is begun that does not pay by itself: no rule knows that."""

    def length(_request: int, _step: int, draft: RecordedDraft) -> int:
        right = min(draft.num_right, longest)
        pays = right and (right + 1) / times.round_s(right) > 1 / times.verify_s[0]
        return right if pays else 0

    return _replay(texts, times, length, lambda *_: None)
