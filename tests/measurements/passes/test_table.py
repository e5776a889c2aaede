"""The ways to share a draft model, and every figure and cell of a timed pass."""

from __future__ import annotations

import pytest

from docs.measurements.passes import table as passes_table
from docs.measurements.passes.config import PassesConfig
from docs.measurements.passes.measuring import PassTime, Sharing
from docs.measurements.passes.table import SIZES, device_for, entry_of, read_model, sharings, table_of

SINGLE = PassTime(
    Sharing(), False, 8, 0.25, 0.125, {"attention": 0.0625, "mlp": 0.125, "communication": 0.0, "rest": 0.0625}
)
KNOWN = PassTime(
    Sharing(2, 3, "tensor"),
    True,
    8,
    0.5,
    0.0625,
    {"attention": 0.125, "mlp": 0.0, "communication": 0.375, "rest": 0.25},
    4 * 10**9,
    2e10,
)


def test_an_entry_compares_a_pass_with_that_of_one_rank():
    assert entry_of(KNOWN, SINGLE) == {
        "sharing": "layer x2, 3 side by side, tensor MLPs",
        "pass": "fuzzy",
        "rows": 8,
        "ms": 500.0,
        "over_single": 0.5,
        "undisturbed_ms": 62.5,
        "undisturbed_over_single": 2.0,
        "communication_share": 0.5,
        "bytes_read": 4 * 10**9,
        "read_gb_per_s": 20.0,
        "bandwidth_share": pytest.approx(0.4),
        "split_ms": {"attention": 125.0, "mlp": 0.0, "communication": 375.0, "rest": 250.0},
    }
    alone = entry_of(SINGLE, SINGLE)
    assert (alone["sharing"], alone["pass"], alone["over_single"], alone["undisturbed_over_single"]) == (
        *("single", "exact"),
        *(1.0, 1.0),
    )
    assert (alone["bytes_read"], alone["read_gb_per_s"], alone["bandwidth_share"]) == (None, None, None)


def test_a_row_of_the_table_has_the_figures_of_its_entry():
    columns, rows = table_of([entry_of(SINGLE, SINGLE), entry_of(KNOWN, SINGLE)])
    assert list(columns[:3]) == ["shared", "pass", "rows"] and len(columns) == 9
    assert rows == [
        ["single", "exact", "8", "250.00", "1.00x", "125.00", "1.00x", "0%", ""],
        ["layer x2, 3 side by side, tensor MLPs", "fuzzy", "8", "500.00", "0.50x", "62.50", "2.00x", "50%", "40%"],
    ]


def test_a_model_is_shared_in_every_way_that_the_job_names():
    model = read_model("5M")
    assert sharings(model, PassesConfig(ranks=1)) == (Sharing(),)
    layers = [Sharing(2, group, mlp) for group in (2, 1) for mlp in ("replicated", "tensor")]
    assert sharings(model, PassesConfig(layer_groups=[2, 1])) == (Sharing(), Sharing(2), *layers)
    with pytest.raises(ValueError):
        sharings(model, PassesConfig(ranks=3))


def test_models_of_known_sizes_differ_in_their_layers():
    found = {name: (read_model(name).num_layers, read_model(name).hidden_size) for name in SIZES}
    assert found == {"5M": (8, 256), "30M": (10, 512)}


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "device"),
    [("auto", 0, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")],
)
def test_gpus_are_used_if_there_is_one_for_each_rank(monkeypatch, wanted, num_gpus, device):
    monkeypatch.setattr(passes_table.torch.cuda, "device_count", lambda: num_gpus)
    assert device_for(wanted, 2) == device
    if num_gpus < 2:
        with pytest.raises(ValueError, match=f"^passes.ranks=2: {num_gpus} GPUs here; lower it$"):
            device_for("cuda", 2)
