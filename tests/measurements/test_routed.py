"""The measurement of draft models that learn while the domain changes: its parts, its shares, a small run."""

from __future__ import annotations

import pytest

from cluster import pocket
from cluster.config import load_config
from cluster.io.prompts import Prompt
from cluster.io.text import load_tokenizer
from docs.measurements import routed
from docs.measurements.routed import Served, followed, halves_of, in_order, parts_of
from parallel.runtime.runner import open_model

DOMAINS = [*["code"] * 2, *["sql"] * 33, "code"]


def test_parts_are_domains_in_their_order_and_long_ones_are_thirds():
    parts = parts_of(DOMAINS)
    assert list(parts) == ["code", "sql 1 of 3", "sql 2 of 3", "sql 3 of 3", "code again"]
    assert [place for places in parts.values() for place in places] == list(range(36))
    assert len(parts["sql 2 of 3"]) == 11 and parts["code again"] == [35]
    halves = halves_of(["a", "b", "a", "b", "b", "b"])
    assert halves == {"a, first half": [0], "a, second half": [2], "b, first half": [1, 3], "b, second half": [4, 5]}


def test_a_router_has_followed_where_prompts_went_to_their_domains_member():
    served = [Served(1, 1, member) for member in "0010111"]
    domains = [*"aaaabbb"]
    assert followed(served, domains, range(7)) == pytest.approx(6 / 7)
    assert followed(served, domains, [2, 3]) == 0.5 and followed(served, domains, [4, 5, 6]) == 1.0


def test_shuffled_prompts_are_the_same_ones():
    prompts = [Prompt(str(i)) for i in range(9)]
    assert in_order(prompts, "file", 0) == prompts
    assert in_order(prompts, "shuffled", 0) == in_order(prompts, "shuffled", 0) != in_order(prompts, "shuffled", 1)
    assert sorted(one.text for one in in_order(prompts, "shuffled", 1)) == [one.text for one in prompts]


@pytest.mark.extended
def test_what_was_learned_is_drafted_with():
    """A text that comes again, with a rate at which a few steps show."""
    target, tokenizer = open_model(str(pocket.TARGET), num_slots=1024), load_tokenizer(pocket.TARGET)
    prompts = 4 * [tuple(tokenizer.encode("SELECT name FROM customers WHERE").ids)]
    found = {}
    for name, changes in (
        ("drafter=model", []),
        ("drafter=model", ["drafter.online=true", "drafter.online_rate=3e-3"]),
    ):
        config = load_config([name, *changes])
        drafter = routed.built(config, (0,))
        found[bool(changes)] = [*routed.serve(target, drafter, config, prompts, 48)]
    assert len({one.num_rounds for one in found[False]}) == 1, "it learns nothing"
    assert found[True][-1].num_rounds < found[False][-1].num_rounds


@pytest.mark.slow
def test_a_small_run(capsys):
    routed.main(["--every", "25", "--tokens", "8", "--orders", "file", "shuffled"])
    printed = capsys.readouterr().out
    assert printed.count("two that learn, routed") == printed.count("to the domain's member") == 2
