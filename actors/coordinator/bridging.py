"""The bridge between target and drafter: when its two ends are to meet, and when it stands.

A pure state machine over the memberships of the two roles. A bridge belongs to one epoch of each: whatever ends it, the
drafter gathers for its next epoch, since the hidden states that it was sent until then may have a gap; a target that
works is not disturbed. An order is repeated until heartbeats show its effect.

    both roles serve: Bridge to their leads --(both heartbeats show its number)--> stands
    a new epoch of the target, an end that was lost, or no meeting in time: the drafter starts a new epoch
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.coordinator.membership import REPEAT_S, RoleMembership
from actors.protocol.membership import Bridge

MEETING_LIMIT_S = 25.0
"""Longer than a rank tries (`actors/roles/bridge.py`), which begins after the pass that it works on."""


@dataclass(slots=True)
class Bridging:
    """Times are on the clock of the memberships."""

    target: RoleMembership
    draft: RoleMembership
    _epochs: tuple[int, int] = (0, 0)  # of target and drafter, between which the present bridge is
    _since: float = 0.0
    _ordered_at: float = 0.0
    _has_stood: bool = False

    @property
    def stands(self) -> bool:
        """Whether hidden states can be sent."""
        return self._has_stood and self._epochs == (self.target.epoch, self.draft.epoch)

    def follow(self, store: tuple[str, int], now: float) -> list[tuple[list[str], Bridge]]:
        """Orders that are due, and the links they are for; may start a new epoch of the drafter."""
        epochs = self.target.epoch, self.draft.epoch
        number = self.draft.epoch
        if epochs[1] == self._epochs[1] and (epochs != self._epochs or self._is_broken(now)):
            self.draft.start_new_epoch(now)
            return []
        if not (self.target.serving and self.draft.serving):
            return []
        if epochs != self._epochs:
            self._epochs, self._has_stood, self._since, self._ordered_at = epochs, False, now, now - REPEAT_S
        self._has_stood |= self.target.bridge == self.draft.bridge == number
        if self._has_stood or now - self._ordered_at < REPEAT_S:
            return []
        self._ordered_at = now
        leads = [*self.target.links_of([0]), *self.draft.links_of([0])]
        return [(leads, Bridge(number, store, by_nccl=self._have_own_gpus()))]

    def _is_broken(self, now: float) -> bool:
        if self._has_stood:
            return not self.target.bridge == self.draft.bridge == self.draft.epoch
        return now - self._since > MEETING_LIMIT_S

    def _have_own_gpus(self) -> bool:
        leads = [ready for role in (self.target, self.draft) for ready in role.ready() if ready.rank == 0]
        gpus = [lead.facts.get("gpu") for lead in leads]  # what identifies each; None without one
        return all(gpus) and len(set(gpus)) == len(gpus)
