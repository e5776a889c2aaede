"""Every figure of a plan is in its column, in its row, in its unit."""

from __future__ import annotations

from cluster.io.console import ABSENT
from cluster.tools.planning.tables import (
    SHOWN,
    TRIAL_COLUMNS,
    fidelity_rows,
    fidelity_table,
    layout_rows,
    parts_table,
    plan_table,
    shown,
    trial_table,
)


def entry(i, *, measured=None, length=3):
    return {
        "layout": f"layout {i}",
        "num_draft_tokens": length,
        "tokens_per_s": 100.0 - i,
        "over_plain": 2.0,
        "round_ms": 30.0,
        "tokens_per_round": 4.0,
        "branch_hit_rate": 0.5,
        "target_busy": 0.6,
        "draft_busy": 0.7,
        "binding": "target",
        "measured": measured,
        "overrides": ["a=1", "b=2"],
    }


MEASURED = {
    "tokens_per_s": 50.0,
    "tokens_per_s_off": 0.5,
    "round_ms": 20.0,
    "round_ms_off": -0.25,
    "tokens_per_round": 3.0,
    "target_busy": 0.4,
    "draft_busy": 0.3,
}


def only(table):
    """The one row of a table by its columns; of columns with one name the last."""
    columns, (row,) = table
    return dict(zip(columns, row, strict=True))


def test_a_plan_shows_the_fastest_and_plain_decoding():
    entries = [entry(i, length=3 * (i != 15)) for i in range(20)]
    assert shown(entries) == [*entries[:SHOWN], entries[15]]
    _columns, rows = plan_table(entries)
    assert [row[0] for row in rows] == [one["layout"] for one in shown(entries)] and rows[-1][1] == ABSENT
    assert only(plan_table(entries[:1])) == {
        "layout": "layout 0",
        "draft": "3",
        "tokens/s": "100.0",
        "over plain": "2.00x",
        "round ms": "30.00",
        "a round": "4.00",
        "hits": "50%",
        "target": "60%",
        "drafter": "70%",
        "binds": "target",
    }


def test_trials_are_beside_their_predictions():
    columns, (row,) = trial_table([entry(0), entry(1, measured=MEASURED)])
    assert row == ["layout 1", "3", "99.0", "50.0", "+50%", "30.00", "20.00", "-25%", "OFF by more than 15%"]
    assert len(columns) == len(row) and columns[2:8] == ["tokens/s", "measured", "off", "round ms", "measured", "off"]
    near = MEASURED | {"round_ms_off": 0.15}
    assert trial_table([entry(1, measured=near)])[1][0][-1] == "as predicted"


def test_rows_of_the_csv_have_the_same_columns_with_and_without_a_trial():
    plain, tried = layout_rows([entry(0), entry(1, measured=MEASURED)])
    assert list(plain) == list(tried) and plain["overrides"] == "a=1 b=2"
    assert {name: tried[f"measured {name}"] for name in TRIAL_COLUMNS} == MEASURED
    assert {plain[f"measured {name}"] for name in TRIAL_COLUMNS} == {None} and "measured" not in plain


def test_the_parts_of_a_pass_are_shares_of_it():
    part = {
        "role": "target",
        "subject": "4 rows",
        "cores": 0,
        "pass_ms": 8.0,
        "parts_ms": {"attention": 1.0, "mlp": 5.0, "rest": 2.0},
        "block_ms": {"attention": 0.25, "mlp": 0.5},
        "collective_ms": {"all_gather": 0.75, "all_reduce": 1.0},
    }
    assert list(only(parts_table([part])).values()) == [
        *("target: 4 rows", ABSENT, "8.00", "12%", "62%", "0%", "25%", "0.250", "0.500", "0.750", "1.000")
    ]


def fidelity(partition, calibration, rate):
    return {
        "layer_group": max(partition),
        "partition": partition,
        "calibration": calibration,
        "acceptance_length": 1 + rate,
        "length_kept": 0.1,
        "accepted_kept": 0.2,
        "top1_agreement": 0.3,
        "cosine": 0.4,
        "divergence": 0.5,
        "logit_distance": 0.6,
        "acceptance": [rate, rate / 2],
    }


FIDELITY = [fidelity((1, 1), "every", 1.5), fidelity((1, 2), "every", 1.25), fidelity((1, 2), "never", 1.0)]


def test_fidelity_is_a_row_for_each_partition_and_calibration():
    columns, rows = fidelity_table(FIDELITY)
    assert dict(zip(columns, rows[1], strict=False)) | {"kept": "10%"} == {
        "layers side by side": "2",
        "as": "1 2",
        "calibrated": "every",
        "accepted + 1": "2.25",
        "accepted": "1.25",
        "kept": "10%",
        "top-1 equal": "30%",
        "cosine": "0.400",
        "KL, nats": "0.500",
        "logits off": "60%",
    }
    assert len(columns) == len(rows[1]) and rows[1][4:7:2] == ["10%", "20%"] and len(rows) == 3
    assert fidelity_table(FIDELITY[:1])[1] == [], "one row compares nothing"
    row = fidelity_rows(FIDELITY)[2]
    assert (row["partition"], row["acceptance 1"], row["acceptance 2"]) == ("1 2", 1.0, 0.5)
