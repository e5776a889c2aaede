"""The program that measures attacks serves rounds beside one, and beside an ordinary client."""

from __future__ import annotations

import re
import sys

import pytest

from docs.measurements import attacks
from tests.cluster.engine.test_attacks import ATTACKS


@pytest.mark.extended
def test_an_attack_is_compared_with_none_and_with_an_ordinary_client(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attacks.py", "never_reading", "--rounds", "2"])
    attacks.main()
    times = r"\d+\.\d\d times the time and \d+\.\d\d times the CPU of "
    assert re.fullmatch(f"never_reading: {times}no attack; {times}an ordinary client\n", capsys.readouterr().out)
    assert attacks.ORDINARY.keys() <= ATTACKS.keys()
