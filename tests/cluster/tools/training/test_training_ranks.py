"""Training on several ranks. Ray starts here and not beside the other runs, which need no place among its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.jobs import train
from tests.cluster.tools.training.test_speculator_runs import small
from tests.cluster.tools.training.test_speculator_runs import target as target  # noqa: PLC0414 (a fixture)
from tests.cluster.tools.training.test_speculator_runs import text as text  # noqa: PLC0414 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_two_ranks_train_a_prefix_each(target: Path, text: Path, tmp_path: Path):
    """The second one has a layer less, whose gradients are the first one's alone."""
    options = "{start: '', prefixes: [1]}"
    both = train.run(small(target, text, recipe="sorted", options=options, ranks=2, average="participants"), tmp_path)
    before, after = both["held_out_before"], both["held_out"]
    assert both["ranks"] == 2 and after["loss"] < before["loss"]


def test_two_ranks_share_the_batches_of_one(target: Path, text: Path, tmp_path: Path):
    alone = train.run(small(target, text), tmp_path / "alone")
    both = train.run(small(target, text, ranks=2), tmp_path / "both")
    assert both["ranks"] == 2
    assert both["training"]["steps"] == alone["training"]["steps"] == 8
    assert both["training"]["tokens"] == alone["training"]["tokens"]
    # The same rows in every step; a rank's mean is over its own labels, of which rows have different numbers.
    assert both["held_out"]["loss"] == pytest.approx(alone["held_out"]["loss"], rel=0.02)
    assert both["held_out"]["loss"] != pytest.approx(both["held_out_before"]["loss"], rel=0.05)
