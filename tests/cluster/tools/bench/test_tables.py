"""Every cell of the tables and files of a bench, from an entry in which no two figures are equal."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.io.console import ABSENT
from cluster.tools.bench.tables import (
    category_table,
    choices,
    comparisons,
    csv_row,
    drafter_table,
    peer_table,
    round_table,
    speed_table,
    write_markdown,
)


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": median - 0.25, "max": median + 0.5}


def side(first: float) -> dict[str, Any]:
    times = {
        name: spread(first + i) for i, name in enumerate(("tokens_per_s", "decode_ms_per_token", "ttft_s"), start=1)
    }
    return {**times, "tokens": 40, "num_unequal_requests": 0, "num_different_tokens": 0, "equal_share": 1.0}


def entry(**changes: Any) -> Any:
    setting = {"drafter": "model", "pipeline": "sync", "temperature": 0.0, "batch": 1, "context": None, "workload": ""}
    return {
        "name": "model k=3",
        "setting": setting,
        "num_requests": 6,
        "tokens": 123,
        "wall_s": 7.5,
        "tokens_per_s": 11.0,
        "plain_tokens_per_s": 12.0,
        "speedup_vs_ar": 1.3,
        "mean_acceptance_length": 2.4,
        "draft_acceptance_rate": 0.15,
        "decode_ms_per_token": 1.6,
        "draft_busy": 0.17,
        "target_busy": 0.18,
        "round_ms": 20.0,
        "round_overhead_ms": 5.0,
        "preemptions": 21,
        "stale": 22,
        "num_unequal_requests": 2,
        "repeats": 23,
        "ms_per_draft": 2.5,
        "draft_share": 0.26,
        "verify_ms": 27.0,
        "decode_tokens_per_s": 28.0,
        "predicted_tokens_per_s": 29.0,
        "prediction_error": -0.03,
        "first_prediction": 31.0,
        "num_threads": {"target": 3, "plain": 6, "peers": 4},
        "resident_bytes": {"target-0": 32 << 20, "draft-0": 4 << 20},
        "mbsu": 1.5,
        "drafter_bytes": {"weights": 33 << 20, "kv": 34 << 20},
        "sides": {
            "plain": side(40.0) | {"num_unequal_requests": 2},
            "speculative": side(50.0),
            "other": side(60.0) | {"num_unequal_requests": 5, "num_different_tokens": 9, "equal_share": 0.25},
        },
        "ratios": {
            "speculative / plain": spread(1.75),
            "speculative / other": spread(71.0),
            "plain / other": spread(72.0),
        },
        "categories": {"qa": {"speculative / plain": 1.9, "mean_acceptance_length": 2.9, "num_requests": 3}},
    } | changes


def row_of(table: Any) -> list[tuple[str, str]]:
    columns, (row, *_) = table
    return list(zip(columns, row, strict=True))


def test_the_table_of_speed():
    assert row_of(speed_table([entry()])) == [
        ("setting", "model k=3"),
        ("tokens/s", "11.0"),
        ("plain", "12.0"),
        ("speed-up", "1.75x"),
        ("range", "1.50-2.25"),
        ("accepted + 1", "2.40"),
        ("ms/token", "1.60"),
        ("plain", "42.00"),
        ("first ms", "53,000.0"),
        ("tokens", "2 of 6 differ"),
    ]
    same = entry()
    same["sides"]["plain"]["num_unequal_requests"] = 0
    assert row_of(speed_table([same]))[-1] == ("tokens", "all equal")


def test_the_table_of_rounds():
    assert row_of(round_table([entry()])) == [
        ("setting", "model k=3"),
        ("round ms", "20.00"),
        ("of it overhead", "5.00"),
        ("", "25%"),
        ("target busy", "18%"),
        ("drafter busy", "17%"),
        ("target threads", "3"),
        ("plain", "6"),
        ("memory", "36 MiB"),
    ]
    silent = dict(row_of(round_table([entry(round_ms=None, round_overhead_ms=None)])))
    assert silent["round ms"] == silent[""] == ABSENT


def test_the_table_of_drafters():
    assert row_of(drafter_table([entry()])) == [
        ("setting", "model k=3"),
        ("accepted + 1", "2.40"),
        ("ms/draft", "2.50"),
        ("of a round", "26%"),
        ("ms/verify", "27.0"),
        ("tokens/s decoding", "28.0"),
        ("predicted", "29.0"),
        ("error", "-3 %"),
        ("speed-up", "1.30x"),
        ("weights MiB", "33.0"),
        ("KV MiB", "34.0"),
    ]
    assert dict(row_of(drafter_table([entry(prediction_error=None)])))["error"] == ABSENT


def test_the_table_of_peers():
    assert row_of(peer_table([entry()])) == [
        ("setting", "model k=3"),
        ("peer", "other"),
        ("tokens/s", "61.0"),
        ("ms/token", "62.00"),
        ("speculation over it", "71.00x"),
        ("plain over it", "72.00x"),
        ("equal", "25%"),
        ("tokens", "5 of 6 differ, in 9 tokens"),
    ]
    sampled = entry()
    sampled["sides"]["other"] |= {"num_unequal_requests": None, "num_different_tokens": None, "equal_share": None}
    assert row_of(peer_table([sampled]))[-2:] == [("equal", ABSENT), ("tokens", ABSENT)]


def test_the_table_of_categories_has_a_row_for_each_and_a_column_for_each_setting_that_has_any():
    figures = {"speculative / plain": 0.5, "mean_acceptance_length": None, "num_requests": 1}
    others = [entry(name="none", categories={}), entry(name="b", categories={"math": figures})]
    assert category_table([entry(), *others]) == (
        ["category", "model k=3", "b"],
        [["qa", "1.90x  2.90", ""], ["math", "", f"0.50x  {ABSENT}"]],
    )
    assert category_table([entry(categories={})]) is None


def test_a_row_of_the_csv_file():
    expected = entry()
    plain = [
        *("tokens", "wall_s", "tokens_per_s", "plain_tokens_per_s", "speedup_vs_ar", "mean_acceptance_length"),
        *("draft_acceptance_rate", "decode_ms_per_token", "draft_busy", "target_busy", "round_ms"),
        *("round_overhead_ms", "preemptions", "stale", "num_unequal_requests", "repeats", "ms_per_draft"),
        *("draft_share", "verify_ms", "decode_tokens_per_s", "predicted_tokens_per_s", "prediction_error", "mbsu"),
    ]
    sides = {"plain": 40.0, "speculative": 50.0, "other": 60.0}
    ratios = {"speculative / plain": 1.75, "speculative / other": 71.0, "plain / other": 72.0}
    assert csv_row(expected) == {
        "name": "model k=3",
        **expected["setting"],
        **{name: expected[name] for name in plain},
        "resident_bytes": 36 << 20,
        "drafter_weights_bytes": 33 << 20,
        "drafter_kv_bytes": 34 << 20,
        **{f"{name} tokens_per_s": first + 1 for name, first in sides.items()},
        **{f"{name} decode_ms_per_token": first + 2 for name, first in sides.items()},
        **{f"{name} ttft_s": first + 3 for name, first in sides.items()},
        **ratios,
        **{f"{name} min": value - 0.25 for name, value in ratios.items()},
        **{f"{name} max": value + 0.5 for name, value in ratios.items()},
        "qa: speculative / plain": 1.9,
        "qa: mean_acceptance_length": 2.9,
        "qa: num_requests": 3,
        "plain equal_share": 1.0,
        "speculative equal_share": 1.0,
        "other equal_share": 0.25,
    }


@pytest.mark.parametrize(
    ("key", "value"), [("pipeline", "tree"), ("temperature", 1.0), ("batch", 2), ("context", 64), ("workload", "x")]
)
def test_settings_are_compared_that_differ_in_the_drafter_alone(key, value):
    other = entry(name="other")
    other["setting"] = other["setting"] | {key: value}
    lookup = entry(name="lookup")
    lookup["setting"] = lookup["setting"] | {"drafter": "ngram", "num_draft_tokens": 9}
    silent = entry(name="silent", decode_tokens_per_s=None)
    groups = comparisons([entry(), other, lookup, silent])
    assert [[one["name"] for one in group] for group in groups] == [["model k=3", "lookup"], ["other"]]


def test_the_formula_s_choice_and_its_distance_from_the_fastest():
    def choice(*entries):
        return [
            line.partition("formula chooses ")[2]
            for line in choices(
                [
                    entry(name=name, first_prediction=first, decode_tokens_per_s=speed, predicted_tokens_per_s=later)
                    for name, first, later, speed in entries
                ]
            )
        ]

    assert choice(("a", 9.0, 1.0, 20.0), ("b", 8.0, 10.0, 25.0)) == ["a; b is 25 % faster"]
    assert choice(("a", 8.0, 1.0, 20.0), ("b", 9.0, 1.0, 25.0)) == ["b; nothing is faster"]
    assert choice(("a", 8.0, 1.0, 20.0), ("b", None, 9.0, 25.0)) == [], "one prediction is no choice"
    assert choice(("a", 9.0, 1.0, 20.0), ("b", 8.0, 1.0, 10.0), ("c", None, 1.0, 30.0)) == ["a; c is 50 % faster"]


def test_the_fastest_of_each_comparison_is_in_bold(tmp_path):
    other = entry(name="c")
    other["setting"] = other["setting"] | {"batch": 2}
    entries = [entry(name="a", decode_tokens_per_s=1.0), entry(name="b", decode_tokens_per_s=2.0), other]
    write_markdown(tmp_path / "bench.md", entries)
    columns, rows = drafter_table(entries)
    bold = [rows[0], [f"**{cell}**" for cell in rows[1]], [f"**{cell}**" for cell in rows[2]]]
    lines = [columns, ["---"] * len(columns), *bold]
    assert (tmp_path / "bench.md").read_text() == "".join(f"| {' | '.join(line)} |\n" for line in lines)
