from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.kv.pass_plan import Span
from parallel.model.weights import resolve_checkpoint
from parallel.runtime.runner import open_model

TOKENS = list(range(20))


class LargestAllocation(TorchDispatchMode):
    """The largest tensor storage any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.nbytes if result.is_mkldnn else result.untyped_storage().nbytes())
        return result


def logits(path, **options):
    model = open_model(path, num_slots=32, **options)
    model.open(0)
    return model.forward([Span(0, 20, num_logits=20)], TOKENS).logits


def test_a_sharded_checkpoint_is_the_same_model(make_checkpoint, on_ranks):
    whole, sharded = make_checkpoint(), make_checkpoint(shard_size="20KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    expected = logits(whole.path)
    assert torch.equal(logits(sharded.path), expected)
    for split in on_ranks(2, lambda group: logits(sharded.path, group=group)):
        torch.testing.assert_close(split, expected, atol=1e-4, rtol=0)


def test_loading_needs_one_tensor_above_the_model(make_checkpoint, monkeypatch):
    from parallel.model.weights import load_weights
    from parallel.runtime import runner

    peaks = []

    def watched(decoder, path):
        with LargestAllocation() as largest:
            load_weights(decoder, path)
        fused = decoder.layers[0].mlp.gate_up.weight.nbytes() // 2
        peaks.append((largest.nbytes, fused))

    monkeypatch.setattr(runner, "load_weights", watched)
    checkpoint = make_checkpoint(shard_size="20KB", vocab_size=200)
    logits(checkpoint.path)
    largest = max(parameter.nbytes for parameter in checkpoint.model.parameters())
    ((transient, fused),) = peaks
    assert 0 < transient <= max(largest, fused), "loading held more than one tensor of the checkpoint"


@pytest.fixture
def copy(make_checkpoint, tmp_path):
    """A checkpoint to break."""
    return shutil.copytree(make_checkpoint(shard_size="20KB").path, tmp_path / "copy")


def first_shard(path):
    return sorted(path.glob("*.safetensors"))[0]


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        open_model(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name the checkpoint's directory"):
        open_model(tmp_path / "file")


def test_a_directory_without_weights(copy):
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        open_model(copy)


def test_a_truncated_file(copy):
    shard = first_shard(copy)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard.name}: not a whole safetensors file"):
        open_model(copy)


def test_a_missing_file(copy):
    shard = first_shard(copy)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}: no such file, though the index names it"):
        open_model(copy)


def test_a_missing_tensor(copy):
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="tensor model.norm.weight is missing"):
        open_model(copy)


def test_an_index_that_lies(copy):
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    name, file = next(iter(content["weight_map"].items()))
    content["weight_map"][name] = next(other for other in files if other != file)
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"tensor {name} is missing, though the index promises it"):
        open_model(copy)
    index.write_text("[]")
    with pytest.raises(ValueError, match="not a safetensors index"):
        open_model(copy)


def test_a_tensor_of_another_shape(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.\d\.mlp.* is \[.*\], config.json asks \[.*64.*\]"):
        open_model(copy)


def test_a_hub_id_goes_to_the_hub(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def snapshot(repo_id, **options):
        asked.append(repo_id)
        if repo_id == "org/gone":
            raise OSError("offline\nsecond line")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_checkpoint("org/model") == tmp_path
    with pytest.raises(ValueError, match=r"org/gone: neither a directory nor available .* \(offline\)$"):
        resolve_checkpoint("org/gone")
    assert asked == ["org/model", "org/gone"]
