"""The shares of the hub's thread that clients may take are those that the documentation gives."""

from __future__ import annotations

from pathlib import Path

from actors.transport.work_meter import KEY_SHARE, PORT_SHARE


def test_the_shares_are_the_documented_ones_and_one_key_has_half():
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert f"All clients together have {100 * PORT_SHARE:g} % of the time of the coordinator's thread" in page
    assert f"records that take more than {100 * KEY_SHARE:g} % of that time" in page
    assert KEY_SHARE * 2 == PORT_SHARE
