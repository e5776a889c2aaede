"""A policy without reason: modes and lengths change at random, so that everything that may follow is tried."""

from __future__ import annotations

import random

from actors.policy.decision import Mode
from actors.policy.policy import Policy, RoundObservation


class MoodyPolicy(Policy):
    """Stays in a mode for a few rounds; lengths from 0 to the most that is allowed. Mostly weighs whether to wait."""

    def __init__(self, choose: random.Random, pipeline: str, num_draft_tokens: int = 4) -> None:
        self.weighs_waiting = choose.random() < 0.7
        super().__init__(pipeline, num_draft_tokens)
        self.mode = Mode.speculate
        self.rounds_in = dict.fromkeys(Mode, 0)
        self._choose = choose
        self._lengths: dict[int, int] = {}
        self.works_ahead, self.most_unlearned = True, 0

    def draft_length(self, request_id: int, most: int) -> int:
        if self.mode not in (Mode.speculate, Mode.trial):
            return 0
        return min(longest := super().draft_length(request_id, most), self._lengths.get(request_id, longest))

    def num_followed(self, num_requests: int) -> int:
        return 0 if self.mode is Mode.rest else num_requests

    def update(self, *rounds: RoundObservation) -> None:
        super().update(*rounds)
        verified = [seen for seen in rounds if seen.outcomes]
        if not verified:
            return
        self.rounds_in[self.mode] += len(verified)
        self._lengths = {outcome.request_id: self._choose.randrange(6) for outcome in verified[-1].outcomes}
        self.works_ahead = self._choose.random() < 0.5
        self.most_unlearned = 1 - self.most_unlearned
        if self.mode is not Mode.catch_up and self._choose.random() < 0.6:
            self.mode = self._choose.choice([mode for mode in Mode if mode is not Mode.trial])

    def caught_up(self) -> None:
        assert self.mode is Mode.catch_up, "only then the drafter reads what it missed"
        self.mode = Mode.trial

    def release(self, request_id: int) -> None:
        self._lengths.pop(request_id, None)
