"""Languages and scenarios at the bounds of what makes sense, and the defaults that closed forms rely on."""

from __future__ import annotations

from typing import Any

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation.language import Language, power_law
from cluster.tools.simulation.simulator import Scenario
from parallel.pass_cost import PassCost


@pytest.mark.parametrize(
    ("accepted", "refused", "field"),
    [
        (dict(acceptance=(0.0, 1.0)), dict(acceptance=(-0.1,)), "acceptance"),
        (dict(runners_up=(0.5, 0.5)), dict(runners_up=(0.5, 0.51)), "runners_up"),
        (dict(acceptance=(0.75,), unevenness=3.0), dict(acceptance=(0.75,), unevenness=3.1), "unevenness"),
        (dict(acceptance=(0.0,), unevenness=0.0), dict(acceptance=(0.9, 0.4), unevenness=1.0), "unevenness"),
        (dict(runners_up=(0.5,), vocab_size=3), dict(runners_up=(0.5,), vocab_size=2), "vocab_size"),
    ],
)
def test_a_language_is_accepted_at_the_bound_and_refused_beyond(accepted: Any, refused: Any, field: str):
    Language(**accepted)
    with pytest.raises(ValueError, match=f"^language.{field}="):
        Language(**refused)


def test_the_default_language_lists_eight_runners_up_of_the_first_power():
    assert Language().runners_up == pytest.approx([1 / rank - 1 / (rank + 1) for rank in range(1, 9)])
    assert len(power_law(0.5)) == 8 and Language().acceptance == (0.8,)


def scenario(**fields: Any) -> Scenario:
    return Scenario("sync", PassCost.flat(1.0), drafter=ModelDrafterConfig(num_draft_tokens=4), **fields)


def test_a_scenario_has_room_for_two_proposals():
    scenario(max_tokens=11)
    with pytest.raises(ValueError, match="^scenario.max_tokens=10: must exceed two proposals of 4 tokens"):
        scenario(max_tokens=10)
    for field, value in (("num_requests", 0), ("prompt_len", 0), ("target_link_s", -1.0), ("interference", -0.1)):
        with pytest.raises(ValueError, match=rf"^scenario\.{field}="):
            scenario(**{field: value})


def test_prompts_of_requests_differ_and_texts_begin_with_them():
    one = scenario(prompt_len=3)
    assert (one.prompt(0), one.prompt(5)) == ((0, 1, 2), (5, 6, 7))
    text = one.text(5)
    assert [text.token(position) for position in range(3)] == [5, 6, 7]
    assert (scenario().prompt_len, scenario().max_tokens, scenario().num_requests) == (8, 2000, 1)
