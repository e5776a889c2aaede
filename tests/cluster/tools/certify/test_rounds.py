"""Rounds of a cascade, counted: random numbers are used once, and both ways of using them twice are found."""

from __future__ import annotations

from dataclasses import replace

from actors.coordinator.outbox import Outbox
from cluster.tools.certify.levels import fit_rounds, repeats_every_verification


def test_coins_that_are_met_once_pass_and_those_that_every_review_meets_do_not():
    assert fit_rounds("rejection").p_value > 1e-3
    assert fit_rounds("rejection", repeats_every_verification).p_value < 1e-6


def test_random_numbers_that_repeat_when_a_request_is_sent_again_are_found(monkeypatch):
    right = Outbox.admit

    def admit(self, sequence):
        right(self, sequence)
        self._admits[-1] = replace(self._admits[-1], admission=0)

    monkeypatch.setattr(Outbox, "admit", admit)
    assert fit_rounds("rejection").p_value < 1e-6
