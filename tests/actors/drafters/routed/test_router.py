"""The router keeps a member for each kind of prompt, whatever the order in which they come."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from actors.drafters.routed.router import KEPT_PROMPTS, PromptRouter
from cluster import pocket
from cluster.io.text import load_tokenizer

PROMPTS = Path(__file__).parents[4] / "docs" / "prompts" / "domain_switch.jsonl"
KINDS = {"a": range(3, 60), "b": range(200, 260), "c": range(700, 760)}


def prompt(kind: str, source: random.Random) -> list[int]:
    """Tokens of which a third is common to all kinds."""
    return [source.choice(KINDS[kind] if source.random() < 0.67 else range(900, 930)) for _ in range(60)]


def members(router: PromptRouter, kinds: str, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [router.route(prompt(kind, source)) for kind in kinds]


@pytest.mark.parametrize("order", ["ab" * 20, "a" * 20 + "b" * 20, "aab" * 14, "b" * 3 + "a" * 30 + "b" * 5])
def test_each_kind_has_its_member(order: str) -> None:
    found = list(zip(order, members(PromptRouter(2), order), strict=True))[4:]
    late = [one for one in found if one[0] == order[0]][-3:] + [one for one in found if one[0] != order[0]][-3:]
    assert len({member for kind, member in late if kind == "a"}) == 1
    assert dict(late)["a"] != dict(late)["b"]


def test_a_kind_keeps_its_member_while_others_come_and_go() -> None:
    order = "a" * 10 + "b" * 10 + "ab" * 10 + "b" * KEPT_PROMPTS + "b" * 10
    found = list(zip(order, members(PromptRouter(2), order), strict=True))
    assert len({member for kind, member in found[14:50] if kind == "b"}) == 1


def test_three_kinds_have_three_members() -> None:
    order = "abc" * 12
    last = list(zip(order, members(PromptRouter(3), order), strict=True))[-9:]
    assert len(set(last)) == 3 and {member for _, member in last} == {0, 1, 2}


def test_short_and_empty_prompts_have_members_too() -> None:
    router = PromptRouter(3)
    assert {router.route(tokens) for tokens in ([], [5], [], [5, 5], [10**6])} <= {0, 1, 2}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_code_and_sql_have_members_of_their_own(seed: int) -> None:
    """The prompts of `docs/online.md`; the first ten may go anywhere."""
    tokenizer, source = load_tokenizer(pocket.TARGET), random.Random(seed)
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    source.shuffle(rows)
    router = PromptRouter(2)
    found = [(row["category"], router.route(tokenizer.encode(row["prompt"]).ids)) for row in rows][10:]
    assert len(set(found)) == 2 and len({member for _, member in found}) == 2
