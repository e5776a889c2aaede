"""Medians, ratios, categories, rows and pictures from trials made by hand."""

from __future__ import annotations

import csv

import pytest

from actors.protocol.messages import RequestStats
from cluster.io.prompts import Prompt
from cluster.observability.report import write_csv
from cluster.observability.results import Run, Served
from cluster.tools.bench.figures import DraftingFigures, ratios, spread, summarise
from cluster.tools.bench.plots import draw_acceptance, draw_speed
from cluster.tools.bench.tables import category_table, csv_row, peer_table, round_table, speed_table
from cluster.tools.bench.tasks import PLAIN, SPECULATIVE

TRANSFORMERS, ASSISTED = "transformers", "transformers draft model"

COUNTERS = {
    "num_spec_steps": 2,
    "num_draft_tokens": 6,
    "num_accepted_tokens": 4,
    "num_accepted_per_pos": (2, 1, 1),
    "num_drafted_per_pos": (2, 2, 2),
    "acceptance_histogram": (0, 1, 0, 1),
    "active_s": 1.0,
    "draft_busy_s": 0.25,
    "target_busy_s": 0.5,
    "num_spec_rounds": 2,
    "spec_round_s": 0.2,
    "spec_round_overhead_s": 0.01,
    "wait_for_draft_s": 0.05,
    "wait_for_messages_s": 0.01,
}


def run(wall_s: float, tokens: tuple[int, ...] = (1, 2, 3, 4), counters: dict | None = None) -> Run:
    stats = RequestStats(1, 3, 2, (0, 0, 1))
    requests = [
        Served(0, Prompt("a", "qa"), tokens, stats=stats, finish_reason="length", ttft_s=0.1, latency_s=wall_s * 0.25),
        Served(
            1, Prompt("b", "math"), tokens, stats=stats, finish_reason="length", ttft_s=0.1, latency_s=wall_s * 0.75
        ),
    ]
    return Run(requests, wall_s, counters or {})


def trial(speculative: float, plain: float, transformers: float, assisted: float) -> dict[str, Run]:
    return {
        PLAIN: run(plain),
        SPECULATIVE: run(speculative, counters=COUNTERS),
        TRANSFORMERS: run(transformers),
        ASSISTED: run(assisted, tokens=(1, 2, 3, 5)),
    }


TRIALS = [trial(1.0, 2.0, 4.0, 3.0), trial(2.0, 3.0, 8.0, 4.0), trial(4.0, 16.0, 8.0, 8.0)]


def entry(name: str = "model k=3", trials=TRIALS) -> dict[str, object]:
    return {
        "name": name,
        "setting": {"drafter": "model", "batch": 1},
        "num_threads": {"target": 1, "plain": 1, "peers": 1},
        "resident_bytes": {"target-0": 2**20, "draft-0": 2**20},
        "mbsu": 1.5,
        "drafter_bytes": {"weights": 2**20, "kv": 2**21},
        **summarise(trials, greedy=True),
        **dict.fromkeys(DraftingFigures.__annotations__),
    }


def test_ratios_are_taken_within_a_repeat():
    found = ratios(TRIALS)
    assert found["speculative / plain"] == {"median": 2.0, "min": 1.5, "max": 4.0}
    assert found["speculative / transformers"] == {"median": 4.0, "min": 2.0, "max": 4.0}
    assert found["plain / transformers"]["median"] == 2.0
    assert set(found) == {
        f"{side} / {other}" for side in (SPECULATIVE, PLAIN) for other in (TRANSFORMERS, ASSISTED)
    } | {"speculative / plain"}


def test_figures_are_medians_with_their_spread():
    summary = summarise(TRIALS, greedy=True)
    assert summary["tokens_per_s"] == 4.0 and summary["speedup_vs_ar"] == 2.0
    assert summary["spread"]["tokens_per_s"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    assert summary["plain_tokens_per_s"] == pytest.approx(8 / 3)
    assert summary["mean_acceptance_length"] == 3.0 and summary["num_spec_steps"] == 2
    assert summary["round_overhead_ms"] == pytest.approx(5.0) and summary["repeats"] == 3
    assert summary["tokens_equal_plain"] is True


def test_sides_say_whose_tokens_differ():
    sides = summarise(TRIALS, greedy=True)["sides"]
    assert {side: figures["num_unequal_requests"] for side, figures in sides.items()} == {
        PLAIN: 0,
        SPECULATIVE: 0,
        TRANSFORMERS: 0,
        ASSISTED: 2,
    }
    assert sides[PLAIN]["equal_share"] == 1.0 and sides[ASSISTED]["equal_share"] == 0.0
    sampled = summarise(TRIALS, greedy=False)["sides"]
    assert sampled[ASSISTED]["equal_share"] is None
    assert sampled[ASSISTED]["num_unequal_requests"] is None and sampled[PLAIN]["num_unequal_requests"] == 0


def test_spread_skips_what_was_not_measured():
    assert spread([None, 2.0, 4.0]) == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert spread([None]) is None


def test_categories_take_their_speed_from_their_own_requests():
    categories = summarise(TRIALS[:1], greedy=True)["categories"]
    assert categories["qa"]["tokens_per_s"] == pytest.approx(16.0)
    assert categories["math"]["tokens_per_s"] == pytest.approx(4 / 0.75)
    assert categories["qa"]["speculative / plain"] == pytest.approx(2.0)
    assert categories["math"]["mean_acceptance_length"] == 3.0 and categories["math"]["num_requests"] == 1


def test_tables_name_baselines_and_mismatches():
    columns, rows = speed_table([entry()])
    cells = dict(zip(columns, rows[0], strict=True))
    assert (cells["speed-up"], cells["range"], cells["accepted + 1"]) == ("2.00x", "1.50-4.00", "3.00")
    assert cells["tokens"] == "all equal"
    columns, rows = round_table([entry()])
    assert rows[0] == ["model k=3", "100.00", "5.00", "5%", "50%", "25%", "1", "1", "2 MiB"]
    columns, rows = peer_table([entry()])
    assert [row[1] for row in rows] == [TRANSFORMERS, ASSISTED]
    assert dict(zip(columns, rows[1], strict=True))["tokens"] == "2 of 2 differ, in 2 tokens"
    columns, rows = category_table([entry()])
    assert rows[0] == ["qa", "3.00x  3.00"]


def test_tables_that_have_nothing_to_say_are_left_out():
    plain_only = [{side: one[side] for side in (PLAIN, SPECULATIVE)} for one in TRIALS]
    for one in plain_only:
        for side in one.values():
            side.requests = [
                Served(r.index, Prompt("p"), r.token_ids, latency_s=1.0, ttft_s=0.1) for r in side.requests
            ]
    made = entry(trials=plain_only)
    assert peer_table([made]) is None and category_table([made]) is None


def test_csv_has_a_column_for_everything_any_setting_has(tmp_path):
    without_peers = entry("alone", trials=[{side: one[side] for side in (PLAIN, SPECULATIVE)} for one in TRIALS])
    write_csv(tmp_path / "bench.csv", [csv_row(without_peers), csv_row(entry())])
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [row["name"] for row in rows] == ["alone", "model k=3"]
    assert rows[0]["speculative / transformers"] == "" and rows[1]["speculative / transformers"] == "4.0"
    assert float(csv_row(entry())["speculative / plain max"]) == 4.0
    assert (rows[1]["drafter_weights_bytes"], rows[1]["drafter_kv_bytes"]) == (str(2**20), str(2**21))
    medians = {
        name: float(rows[1][f"speculative {name}"]) for name in ("ttft_s", "decode_ms_per_token", "tokens_per_s")
    }
    sides = entry()["sides"][SPECULATIVE]
    assert medians == {name: pytest.approx(sides[name]["median"]) for name in medians}
    assert rows[1]["resident_bytes"] == str(2**21) and rows[1]["drafter"] == "model"


def test_pictures_are_drawn_with_and_without_speculation(tmp_path):
    silent = entry("none", trials=[{**one, SPECULATIVE: one[PLAIN]} for one in TRIALS])
    assert silent["per_position_acceptance"] is None
    for draw in (draw_speed, draw_acceptance):
        path = tmp_path / f"{draw.__name__}.png"
        draw(path, [entry(), silent])
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
