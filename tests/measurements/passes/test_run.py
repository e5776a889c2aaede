"""The timing of passes from the command's side: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from docs.measurements.passes import run as passes
from docs.measurements.passes.config import PassesConfig
from docs.measurements.passes.table import SIZES, read_model
from parallel.model.families.registry import read_config
from parallel.runtime.model_bytes import weight_bytes

EXACT = ["single", "tensor x2", "layer x2, 2 side by side, replicated MLPs", "layer x2, 2 side by side, tensor MLPs"]


@pytest.mark.slow
def test_a_table_of_every_way_to_share_a_checkpoints_shape(tiny_checkpoint, tmp_path, capsys):
    path = tiny_checkpoint("Llama", num_hidden_layers=6)
    job = PassesConfig(models=[str(path)], rows=[2], repeats=2, context=4, device="cpu")
    passes.run(job, tmp_path)
    report = json.loads((tmp_path / "passes.json").read_text())
    entries = report["models"][str(path)]
    assert [entry["sharing"] for entry in entries if entry["pass"] == "exact"] == EXACT
    assert [entry["sharing"] for entry in entries if entry["pass"] == "fuzzy"] == EXACT[2:]
    assert entries[0]["over_single"] == 1 and entries[0]["communication_share"] == 0
    assert "tensor x2" in capsys.readouterr().out


def test_a_model_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"passes.models: .*no such file.*; known sizes are 5M, 30M"):
        passes.run(PassesConfig(models=[str(tmp_path)], device="cpu"), tmp_path)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_what_their_names_say(name):
    assert read_model(name) == read_config(SIZES[name])
    count = weight_bytes(read_model(name), 1, 4) / 4e6
    assert count == pytest.approx(float(name[:-1]), rel=0.1)
