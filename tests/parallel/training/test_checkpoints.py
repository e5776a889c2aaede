"""What training writes is whole or as it was."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from parallel.training.checkpoints import save_whole, write_checkpoint
from parallel.whole_files import WriteError
from tests.full_disk import full_disk


def test_a_full_disk_leaves_the_old_state(tmp_path):
    path = tmp_path / "work" / "state.pt"
    save_whole({"a": torch.ones(3)}, path)
    with full_disk(4096), pytest.raises(WriteError, match=rf"^{path}: cannot be written \(File too large"):
        save_whole({"a": torch.ones(100_000)}, path)
    assert torch.load(path, weights_only=True)["a"].tolist() == [1, 1, 1] and [*path.parent.iterdir()] == [path]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "best", {"a": torch.ones(3)}, {"step": 1})
    with full_disk(4096), pytest.raises(WriteError, match=rf"^{tmp_path}/best/model.safetensors: cannot be written"):
        write_checkpoint(tmp_path / "best", {"a": torch.ones(100_000)}, {"step": 2})
    assert load_file(tmp_path / "best" / "model.safetensors")["a"].tolist() == [1, 1, 1]
    assert json.loads((tmp_path / "best" / "config.json").read_text()) == {"step": 1}
