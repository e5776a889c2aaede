"""Lengths of drafts compared, and rules that run through recorded drafts."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from actors.drafters.model.chain_rules import GapRule, ThompsonRule
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.options import SamplingConfig
from cluster.config.jobs import GenerateConfig
from docs.measurements.lengths import run as lengths
from docs.measurements.lengths.chain_lengths import (
    PassTimes,
    RecordedDraft,
    replay_fixed,
    replay_known,
    replay_ordered,
    replay_rule,
)
from tests.cluster.config.quick_loading import load_quickly
from tests.cluster.conftest import one_free_thread as one_free_thread  # noqa: PLC0414 (a fixture)
from tests.cluster.conftest import tiny_launch as tiny_launch  # noqa: PLC0414 (a fixture)
from tests.cluster.conftest import write_prompts as write_prompts  # noqa: PLC0414 (a fixture)

LONGEST = 4
TIMES = PassTimes(0.2, (1.0,) * (LONGEST + 1))


def drafts(seed, num_right):
    """300 places of a text, each with a draft of which so many tokens are right; gaps say where it ends."""
    draw, found = random.Random(seed), []
    for _ in range(300):
        right = num_right(draw)
        gaps = tuple(0.95 if i < right else 0.05 for i in range(LONGEST))
        found.append(RecordedDraft(right, (-0.1,) * LONGEST, gaps))
    return [found]


def test_time_and_tokens_of_fixed_lengths_are_those_of_arithmetic():
    right, wrong = drafts(0, lambda _: LONGEST), drafts(0, lambda _: 0)
    for length in range(LONGEST + 1):
        assert replay_fixed(right, TIMES, length).tokens_per_s == pytest.approx((length + 1) / (1 + 0.2 * length))
        assert replay_fixed(wrong, TIMES, length).tokens_per_s == pytest.approx(1 / (1 + 0.2 * length))
    assert replay_known(right, TIMES, LONGEST).tokens_per_s == pytest.approx(5 / 1.8)
    assert replay_known(wrong, TIMES, LONGEST).tokens_per_s == 1.0, "no draft is begun"


def test_value_per_cost_finds_the_length_that_pays():
    right, wrong = (replay_ordered(drafts(0, lambda _, n=n: n), TIMES, LONGEST) for n in (LONGEST, 0))
    assert right.drafted / right.rounds > 3.5 and wrong.drafted / wrong.rounds < 1.4


def test_rules_differ_by_their_decisions_alone():
    """Gaps that say where a draft goes wrong are worth more than any fixed length and than chance."""
    mixed = drafts(1, lambda draw: draw.choice((0, LONGEST)))
    fixed = max(replay_fixed(mixed, TIMES, length).tokens_per_s for length in range(LONGEST + 1))
    by_gap = replay_rule(mixed, TIMES, GapRule(0.5), LONGEST).tokens_per_s
    assert replay_known(mixed, TIMES, LONGEST).tokens_per_s > by_gap > fixed
    assert by_gap > replay_rule(mixed, TIMES, ThompsonRule(), LONGEST).tokens_per_s


@pytest.mark.extended
@pytest.mark.parametrize("drafter", ["model", "self"])
def test_a_drafter_is_measured_after_every_token(
    tiny_launch, write_prompts, tmp_path, one_free_thread, capsys, drafter
):
    """The draft model is the target itself, and so are all layers but stretched ones: everything is accepted."""
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"})
    config = tiny_launch(GenerateConfig(prompts=prompts), sampling=SamplingConfig(max_tokens=16, temperature=1.0))
    if drafter == "self":
        record = SelfDrafterConfig(skip=["2"], num_draft_tokens=3)
        config = replace(config, drafter=record, target=replace(config.target, stretch=1))
    lengths.run(config, tmp_path)
    report = json.loads((tmp_path / "lengths.json").read_text())
    rules, draft_s, verify_s = report["rules"], report["draft_pass_s"], report["verify_s"]
    assert report["config"]["sampling"]["max_tokens"] == 16
    longest = len(verify_s) - 1
    for length in range(1, longest + 1):
        fixed, round_s = rules[f"fixed {length}"], length * draft_s + verify_s[length]
        assert fixed["mean_length"] == length and fixed["tokens_per_round"] == length + 1
        assert fixed["speedup"] == pytest.approx((length + 1) * verify_s[0] / round_s), "all is accepted"
    fastest = max(rules[f"fixed {length}"]["speedup"] for length in range(1, longest + 1))
    assert rules["known"]["speedup"] >= min(1.0, 0.99 * fastest)
    shown = capsys.readouterr().out
    num_drafts = 2 * (16 - longest)
    assert f"{num_drafts:,} drafts; a draft pass takes {draft_s / verify_s[0]:.2f} of a pass of the target" in shown
    assert f"a pass over {longest} draft tokens {verify_s[-1] / verify_s[0]:.2f}" in shown
    rows = {cells[0]: cells[1:] for line in shown.splitlines() if len(cells := re.split(r"\s{2,}", line.strip())) == 5}
    for name, one in rules.items():
        numbers = one["speedup"], one["tokens_per_round"], one["mean_length"], one["accepted"]
        assert [float(cell) for cell in rows[name]] == pytest.approx(numbers, abs=0.0051), name
    assert rules["fixed 3"]["tokens_per_round"] == 4.0 and rules["fixed 2"]["accepted"] == 1.0
    assert {"known", "ordered", "thompson", "probability", "probability 0.6", "threshold 0.5", "gap 0.6"} < set(rules)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["drafter=ngram"], "take drafter=model or self"),
        (["drafter=model", "drafter.strategy=tree"], "has no length"),
        (["drafter=model", "verify=rejection"], "with verify=coupled"),
        (["drafter=model", "drafter.translate=strings"], "^drafter.translate=strings: drafts strings"),
        (["drafter=model", "drafter.online=true", "drafter.placement=separate"], "^drafter.online=True: drafts change"),
    ],
)
def test_what_has_no_length_is_refused(keys, error):
    with pytest.raises(ValueError, match=error):
        lengths.check(load_quickly(keys))
