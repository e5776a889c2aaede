"""Every method that is trained, and every published layout, has a module that reads and opens its checkpoints."""

from __future__ import annotations

from importlib import import_module

import pytest

from parallel.speculators.eagle.config import METHODS
from parallel.speculators.exits.layouts import METHODS as EXITS
from parallel.speculators.heads.cells import CELLS
from parallel.speculators.layout import CheckpointLayout
from parallel.speculators.published import PUBLISHED
from parallel.speculators.registry import OWN

PLACES = [*((module, "OWN") for module in sorted({*OWN.values()})), *(place for _, place in PUBLISHED.values())]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_the_module_of_a_row_has_its_layout(place):
    module, name = place
    assert isinstance(getattr(import_module(f"parallel.speculators.{module}"), name), CheckpointLayout)


def test_every_method_of_a_family_has_a_row():
    assert {*METHODS, *EXITS, *CELLS} <= OWN.keys()
