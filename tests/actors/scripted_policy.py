"""A control without reason: modes and lengths change at random, so that everything that may follow is tried."""

from __future__ import annotations

from actors.policy.speculation_switch import Mode


class MoodyControl:
    """Stays in a mode for a few rounds; lengths from 0 up to what is asked for. Mostly weighs whether to wait."""

    def __init__(self, choose) -> None:
        self.mode = Mode.speculate
        self.guard = None
        self.weighs_waiting = choose.random() < 0.7
        self.seen = dict.fromkeys(Mode, 0)
        self._choose = choose
        self._lengths: dict[int, int] = {}

    def length(self, request_id: int, most: int) -> int:
        if self.mode not in (Mode.speculate, Mode.trial):
            return 0
        return min(most, self._lengths.get(request_id, most))

    def approach(self, num_running: int, mean_len: float) -> None:
        pass

    def update(self, seen) -> None:
        self.seen[self.mode] += 1
        self._lengths = {offer.request_id: self._choose.randrange(6) for offer in seen.offers}
        if self.mode is not Mode.catch_up and self._choose.random() < 0.6:
            self.mode = self._choose.choice([mode for mode in Mode if mode is not Mode.trial])

    def caught_up(self) -> None:
        assert self.mode is Mode.catch_up
        self.mode = Mode.trial

    def forget(self, request_id: int) -> None:
        self._lengths.pop(request_id, None)
