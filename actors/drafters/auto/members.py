"""Several drafters in one role, whichever of them drafts for a request: each call goes to those that it concerns.

`Member` is one drafter and what it costs, `Members` what all roles of several drafters have in common. Nothing here
chooses among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from actors.drafters.config import PARTS, DraftSetup, measured_facts
from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import (
    Capabilities,
    Context,
    Draft,
    Drafter,
    DraftsAhead,
    FeatureRows,
    HasLevels,
    ReadsFeatures,
    SharesRows,
)
from actors.policy.estimators import BySize, Ewma, LinearFit
from actors.protocol.messages import Commit, DraftPreview, LevelWork, TokenTree, TopTokens
from parallel.runtime.decoder_runner import DecoderRunner

if TYPE_CHECKING:
    from actors.drafters.auto.config import AutoDrafterConfig

SUMMED = ("weight_bytes", "kv_bytes", "corpus_tokens")
"""Facts of several drafters on one rank that are sums; others are those of the last drafter that has them."""
_READ_STIFFNESS = 4.0
"""Variance of the tokens to read at which their measured cost and none weigh the same."""
_LENGTH_STIFFNESS = 0.1
"""Variance of draft lengths at which the measured cost of a token more and the one that is assumed weigh the same."""
_ASSUMED_SHARE = 0.5
"""What grows with the length of a draft's seconds, as long as lengths did not vary: all in a drafter that is bound by
its passes, hardly any where what surrounds them takes longer."""


@dataclass(slots=True)
class Member:
    """One of the drafters, and what it costs: seconds of drafts for so many requests, and per token of longer text."""

    name: str
    drafter: Drafter
    longest: int
    is_shown: bool
    """It drafts in every round, before the choice."""
    is_chain: bool
    draft_times: BySize[DraftTimes] = field(default_factory=lambda: BySize(DraftTimes, DraftTimes.borrowed))
    """What calls take, by the number of requests that it drafts for."""
    read_s: Ewma = field(default_factory=Ewma)

    @property
    def reads_text(self) -> bool:
        """Whether it has to read text before it can draft; the target's own layers do not."""
        return not self.is_shown and self.drafter.capabilities.shares_rows is None

    def draft_s(self, longest: int, unread: float, num_requests: int) -> float:
        """Seconds of one call for so many requests; none for what was drafted before the choice."""
        first_s, token_s = self.draft_line(unread, num_requests)
        return max(0.0, first_s + longest * token_s)

    def draft_line(self, unread: float, num_requests: int) -> tuple[float, float]:
        """Seconds of one call less those of its draft tokens, and those of a token more for every request."""
        return (0.0, 0.0) if self.is_shown else self.draft_times.known(num_requests).line(unread)

    def drafted(self, longest: int, unread: float, num_requests: int, seconds: float) -> None:
        """A call took so long."""
        self.draft_times.measured(num_requests).update(longest, unread, seconds)


@dataclass(slots=True)
class DraftTimes:
    """Seconds of a call of a drafter against the length of its drafts and the few tokens to read with them."""

    length_s: LinearFit = field(default_factory=LinearFit)
    """Seconds of a draft with the mean number of tokens to read, against its length."""
    unread_s: LinearFit = field(default_factory=LinearFit)
    """Seconds of a draft of the mean length, against the tokens to read."""

    def borrowed(self, num_known: float, num_requests: float) -> DraftTimes:
        """The same for another number of requests, to be corrected soon: passes of a small model are far from linear
        in their rows."""
        return DraftTimes(*[replace(one, weight=min(one.weight, 1.0)) for one in (self.length_s, self.unread_s)])

    def line(self, unread: float) -> tuple[float, float]:
        """Seconds of a draft behind so many tokens to read, less those of its own tokens, and those of a token."""
        fit, slope = self.length_s, self._token_s()
        return fit.mean_y - slope * fit.mean_x + self._for_reading(unread), slope

    def update(self, longest: int, unread: float, seconds: float) -> None:
        fit, for_reading = self.length_s, self._for_reading(unread)
        for_length = self._token_s() * (longest - fit.mean_x)
        fit.update(longest, seconds - for_reading)
        self.unread_s.update(unread, seconds - for_length)

    def _token_s(self) -> float:
        """Seconds that a token more takes."""
        fit = self.length_s
        if not fit.weight:
            return 0.0
        proportional = fit.mean_y / fit.mean_x
        return min(fit.slope(_ASSUMED_SHARE * proportional, _LENGTH_STIFFNESS), proportional)

    def _for_reading(self, unread: float) -> float:
        """Seconds that a draft takes beyond one with the mean number of tokens to read."""
        return self.unread_s.slope(0.0, _READ_STIFFNESS) * (unread - self.unread_s.mean_x)


@dataclass(slots=True)
class _MemberWork:
    """What `LevelWork` counts of one member."""

    num_passes: int = 0
    busy_s: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class MembersFeatures:
    """`ReadsFeatures` of several drafters, whose features stand side by side in a row."""

    def __init__(self, readers: Sequence[ReadsFeatures]) -> None:
        self._readers = readers

    @property
    def feature_size(self) -> int:
        return sum(one.feature_size for one in self._readers)

    def read_features(self, features: FeatureRows) -> None:
        if len(self._readers) == 1:  # which may be sent them fused, in another size
            self._readers[0].read_features(features)
            return
        parts = features.rows.split([one.feature_size for one in self._readers], 1)
        for one, rows in zip(self._readers, parts, strict=True):
            one.read_features(FeatureRows(features.request_id, features.start, rows))


class MembersRows:
    """`SharesRows` of several drafters."""

    def __init__(self, sharing: Sequence[SharesRows]) -> None:
        self._sharing = sharing

    def verifying(self, target: DecoderRunner) -> DecoderRunner:
        for one in self._sharing:
            target = one.verifying(target)
        return target

    def release_rows(self) -> None:
        for one in self._sharing:
            one.release_rows()


class MembersAhead:
    """`DraftsAhead` and previews of several drafters: each prepares what follows its own drafts."""

    def __init__(self, members: Sequence[Member]) -> None:
        can = [one.drafter.capabilities for one in members]
        self._ahead = {i: one.works_ahead for i, one in enumerate(can) if one.works_ahead is not None}
        self._previews = [one.sends_previews for one in can if one.sends_previews is not None]

    @property
    def may_work_ahead(self) -> bool:
        return any(one.may_work_ahead for one in self._ahead.values())

    @may_work_ahead.setter
    def may_work_ahead(self, may: bool) -> None:
        for one in self._ahead.values():
            one.may_work_ahead = may

    def _next(self) -> DraftsAhead | None:
        return next((one for one in self._ahead.values() if one.wants_work), None)

    @property
    def wants_work(self) -> bool:
        return self._next() is not None

    @property
    def waits_for_child(self) -> bool:
        following = self._next()
        return following is not None and following.waits_for_child

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        following = self._next()
        return 0 if following is None else following.width(width_chooser, time_s)

    def work(self, width: int = 0, num_passes: int = 1) -> Step:
        """One step of one of them."""
        following = self._next()
        assert following is not None, "asked for before"
        return following.work(width, num_passes)

    def prepared_by(self, context: Context) -> int | None:
        """The number of the member that has prepared a draft for this context."""
        return next((i for i, one in self._ahead.items() if one.prepared(context)), None)

    def prepared(self, context: Context) -> bool:
        return self.prepared_by(context) is not None

    def previews(self) -> list[DraftPreview]:
        return [preview for one in self._previews for preview in one.previews()]


class Members(ABC):
    """The drafters of one role; `ahead` is their draft-ahead. Counts what each of them did and brought."""

    def __init__(self, members: Sequence[Member], ahead: MembersAhead) -> None:
        self.members = members
        self._ahead = ahead
        self._work = [_MemberWork() for _ in members]
        can = [one.drafter.capabilities for one in members]
        self._with_levels: list[HasLevels] = [one.has_levels for one in can if one.has_levels is not None]
        self.capabilities = Capabilities(
            min((one.vocab_size for one in can if one.vocab_size is not None), default=None),
            prefills=self,
            works_ahead=ahead if any(one.works_ahead is not None for one in can) else None,
            sends_previews=self if any(one.sends_previews is not None for one in can) else None,
            has_levels=self,
            reads_top_tokens=self if any(one.reads_top_tokens is not None for one in can) else None,
        )

    @abstractmethod
    def prefill(self, contexts: Sequence[Context]) -> None: ...

    @abstractmethod
    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None: ...

    def previews(self) -> list[DraftPreview]:
        return self._ahead.previews()

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        """All members are shown all of them; each keeps what it needs."""
        for one in self.members:
            if (reader := one.drafter.capabilities.reads_top_tokens) is not None:
                reader.read_top_tokens(top_tokens)

    def forget(self) -> None:
        for one in self._with_levels:
            one.forget()

    def level_stats(self) -> tuple[LevelWork, ...]:
        """Work of the drafters, and acceptance of the drafts that were used; of a cascade also that of its levels."""
        own = []
        for number, (one, work) in enumerate(zip(self.members, self._work, strict=True)):
            if work.num_passes or work.num_accepted_tokens:
                counts = work.num_drafts, work.num_draft_tokens, work.num_accepted_tokens
                own.append(LevelWork(one.name, work.num_passes, work.busy_s, *counts))
                self._work[number] = _MemberWork()
        return (*own, *(level for one in self._with_levels for level in one.level_stats()))

    def _count_call(self, number: int, seconds: float) -> None:
        """One call of this member, whose drafts may be used or not."""
        work = self._work[number]
        work.num_passes += 1
        work.busy_s += seconds

    def _count_used(self, number: int, tree: TokenTree) -> None:
        """A draft of this member goes to the target. Only these are counted: the verdict is on them."""
        work, size = self._work[number], len(tree.token_ids) - 1
        work.num_drafts += size > 0
        work.num_draft_tokens += size

    def _count_accepted(self, number: int, commit: Commit) -> None:
        """The verdict on a draft of this member."""
        self._work[number].num_accepted_tokens += min(len(commit.path), len(commit.token_ids))


def named_parts(name: str, draft: Draft) -> Draft:
    """The draft with this name as that of the drafter which made it, unless its levels are named."""
    size = len(draft.tree.token_ids) - 1
    if draft.parts or not size:
        return draft
    return Draft(draft.tree, draft.sampling_kinds, draft.distributions, ((name, size),))


def build_members(config: AutoDrafterConfig, setup: DraftSetup) -> tuple[list[Member], dict[str, object]]:
    """All drafters on this rank, and their facts."""
    members, facts, sums = [], dict[str, object](), dict.fromkeys(SUMMED, 0)
    parts = dict[str, dict[str, object]]()
    for name, record in zip(config.member_names, config.placed(setup.pipeline), strict=True):
        drafter, held = record.build(setup)
        facts |= held
        parts[str(len(members))] = measured_facts(held)
        for key in SUMMED:
            if isinstance(value := held.get(key), int):
                sums[key] += value
        longest = min(record.num_draft_tokens, config.num_draft_tokens)
        members.append(Member(name, drafter, longest, is_shown=not record.runs_passes, is_chain=record.is_chain))
    facts |= {key: value for key, value in sums.items() if value}
    return members, facts | ({PARTS: parts} if setup.group.size > 1 else {})
