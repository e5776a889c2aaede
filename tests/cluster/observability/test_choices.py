"""What a run says that it chose, against the configuration and figures made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.observability.choices import describe_choices
from tests.cluster.config.quick_loading import load_quickly

TURNS = "since the two work in turn (pipeline=sync) and each has all devices so"
GUARD = {"gain": 1.994}


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["drafter=model"], f"on the target's ranks, {TURNS}"),
        (
            ["drafter=model", "drafter.ranks=2", "drafter.parallel=tensor"],
            "on ranks of its own, since the drafter's keys ask for them",
        ),
        (
            ["drafter=model", "pipeline=branches"],
            "on ranks of its own, since it drafts beside the target (pipeline=branches)",
        ),
        (
            ["drafter=model", "drafter.placement=separate"],
            "on ranks of its own, as drafter.placement=separate says",
        ),
        (["drafter=cascade", "drafter.levels=[ngram,model]"], "on ranks of its own"),
    ],
)
def test_the_place_is_said_with_its_reason(overrides, place):
    run: Any = {"levels": None, "guard": None, "fallback_s": 0.0, "wall_s": 1.0, "num_spec_steps": 3}
    assert describe_choices(load_quickly(["cluster=inprocess", *overrides]), run) == place


def test_a_pool_that_lent_nothing_is_not_said_to_have_lent():
    pools = ["drafter=pool", "drafter.pools=[tcp://h:1]", f"drafter.key_files=[{__file__}]"]
    config = load_quickly(["cluster=inprocess", "pipeline=branches", *pools])
    run: Any = {"levels": None, "guard": {"gain": None}, "fallback_s": 0.0, "wall_s": 1.0, "num_spec_steps": 0}
    assert describe_choices(config, run) == "no draft verified of tcp://h:1; decoding was plain"
    run |= {"num_spec_steps": 3, "guard": None}
    assert describe_choices(config, run) == "lent by the pool tcp://h:1"
    config = load_quickly(["cluster=inprocess", "pipeline=branches", *pools, "drafter.pools=[tcp://h:1,tcp://h:2]"])
    assert describe_choices(config, run) == "lent by the pool whose drafts come soonest, of tcp://h:1, tcp://h:2"


@pytest.mark.parametrize("overrides", [["drafter=none", "pipeline=plain"], ["drafter=model", "pipeline=plain"]])
def test_nothing_is_said_where_nothing_is_drafted(overrides):
    run: Any = {"levels": None, "guard": GUARD, "fallback_s": 0.0, "wall_s": 1.0}
    assert describe_choices(load_quickly(overrides), run) is None


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (GUARD, "measured at 1.99x of plain rounds, plain decoding for 25% of the time"),
        ({"gain": None}, "never measured against plain decoding, plain decoding for 25% of the time"),
    ],
)
def test_drafters_are_named_by_their_share_and_decoding_by_its_measurement(guard, words):
    levels = {"model": {"num_drafts": 77}, "suffix": {"num_drafts": 135}}
    run: Any = {"levels": levels, "guard": guard, "fallback_s": 0.5, "wall_s": 2.0, "num_spec_steps": 3}
    by_share = "drafts by tokens per second: suffix 64%, model 36%"
    assert describe_choices(load_quickly([]), run) == f"on the target's ranks, {TURNS}; {by_share}; {words}"
    run["levels"] = {"model": {"num_drafts": 0}, "suffix": {"num_drafts": None}}
    assert describe_choices(load_quickly([]), run) == f"on the target's ranks, {TURNS}; {words}", "before any draft"
