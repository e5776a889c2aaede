"""Which role runs which levels of a drafter."""

from __future__ import annotations

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.topology import child_role, is_draft_role, parent_role, role_name

MODEL, LOOKUP = ModelDrafterConfig(path="x"), NgramDrafterConfig()


@pytest.mark.parametrize(
    ("levels", "apart"),
    [
        ([MODEL, MODEL], {"draft": range(1, 2), "draft2": range(1)}),
        ([LOOKUP, MODEL], {"draft": range(2)}),
        ([MODEL, MODEL, MODEL], {"draft": range(2, 3), "draft2": range(1, 2), "draft3": range(1)}),
        ([LOOKUP, MODEL, MODEL], {"draft": range(2, 3), "draft2": range(2)}),
    ],
)
def test_a_level_with_a_model_is_a_role_and_takes_the_lookups_below_it(levels, apart):
    cascade = CascadeDrafterConfig(levels=levels, placement=LevelsPlacement.separate)
    assert cascade.roles() == apart and list(cascade.roles()) == list(apart)
    together = CascadeDrafterConfig(levels=levels, placement=LevelsPlacement.together)
    assert together.roles() == {"draft": range(len(levels))}


def test_a_drafter_without_levels_is_one_role():
    assert MODEL.roles() == LOOKUP.roles() == {"draft": range(1)}


def test_each_role_drafts_for_the_one_above_it():
    names = [role_name(depth) for depth in range(4)]
    assert names == ["draft", "draft2", "draft3", "draft4"]
    assert [child_role(name) for name in names[:-1]] == names[1:]
    assert [parent_role(name) for name in names] == [None, *names[:-1]]
    assert all(map(is_draft_role, [*names, "draft-0", "draft2-1"])) and not is_draft_role("target-0")
