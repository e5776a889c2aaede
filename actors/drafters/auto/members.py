"""What several drafters in one place can do besides the required verbs: each call goes to those that it concerns.

`Member` is one drafter and what it costs. Nothing here chooses among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import Context, Drafter, DraftsAhead, FeatureRows, ReadsFeatures, SharesRows
from actors.policy.estimators import Ewma, LinearFit
from actors.protocol.messages import DraftPreview
from parallel.runtime.decoder_runner import DecoderRunner

_READ_STIFFNESS = 4.0
"""Variance of the tokens to read at which their measured cost and none weigh the same."""


@dataclass(slots=True)
class Member:
    """One of the drafters, and what it costs: seconds per drafting pass against the few tokens to read with it, and
    seconds per token of longer text."""

    name: str
    drafter: Drafter
    longest: int
    is_shown: bool
    """It drafts in every round, before the choice."""
    is_chain: bool
    pass_s: LinearFit = field(default_factory=LinearFit)
    read_s: Ewma = field(default_factory=Ewma)

    @property
    def reads_text(self) -> bool:
        """Whether it has to read text before it can draft; the target's own layers do not."""
        return not self.is_shown and self.drafter.capabilities.shares_rows is None

    def draft_s(self, longest: int, unread: float) -> float:
        """Seconds of one call; none for what was drafted before the choice."""
        if self.is_shown:
            return 0.0
        return longest * max(0.0, self.pass_s.at(unread, self.pass_s.slope(0.0, _READ_STIFFNESS)))


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
