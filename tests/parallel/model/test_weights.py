from __future__ import annotations

import json
import math
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.kv.pass_plan import Span
from parallel.model.checkpoint import checkpoint_name, find_tensors, resolve_checkpoint, tensor_shapes
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.weights import load_shards
from parallel.runtime.runner import open_model
from tests.families import FAMILIES

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


def test_several_threads_load_the_same_weights_and_report_the_same_damage(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint("Llama", shard_size="20KB")
    config = read_config(checkpoint.path)
    decoders = [Decoder(config) for _ in range(2)]
    for decoder, num_threads in zip(decoders, (1, 3), strict=True):
        for shard in decoder.shards():
            shard.destination.fill_(7)
        load_shards(decoder.shards(), tensor_shapes(config), checkpoint.path, num_threads)
    ours, theirs = ([shard.destination for shard in decoder.shards()] for decoder in decoders)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    shutil.copytree(checkpoint.path, tmp_path / "damaged")
    file = sorted((tmp_path / "damaged").glob("*.safetensors"))[-1]
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] = math.inf
    save_file(tensors, file)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        load_shards(decoders[0].shards(), tensor_shapes(config), tmp_path / "damaged", 3)


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
    checkpoint = make_checkpoint(shard_size="20KB", vocab_size=208)  # whole panels: no padding
    logits(checkpoint.path)
    largest = max(parameter.nbytes for parameter in checkpoint.model.parameters())
    ((transient, fused),) = peaks
    assert 0 < transient <= max(largest, fused), "loading held more than one tensor of the checkpoint"


def read_headers(path):
    """What a launch does before it starts a process."""
    find_tensors(path, tensor_shapes(read_config(path)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_looked_for_are_those_that_a_decoder_reads(make_checkpoint, family):
    path = make_checkpoint(family, **FAMILIES[family]).path
    decoder = Decoder(read_config(path), device="meta")
    shapes = tensor_shapes(decoder.config)
    assert set(shapes) == {shard.name for shard in decoder.shards()}
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(path / "model.safetensors").items()}
    assert shapes.items() <= saved.items()


@pytest.fixture
def copy(make_checkpoint, tmp_path):
    """A checkpoint to break."""
    return shutil.copytree(make_checkpoint(shard_size="20KB").path, tmp_path / "copy")


def first_shard(path):
    return sorted(path.glob("*.safetensors"))[0]


def edit_index(path, edit):
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(edit(content)))


def without_weights(path):
    for file in path.glob("*.safetensors*"):
        file.unlink()


def cut_short(path, num_bytes):
    shard = first_shard(path)
    shard.write_bytes(shard.read_bytes()[:num_bytes])


def names_another_file(content):
    names = content["weight_map"]
    name, file = next(iter(names.items()))
    return {"weight_map": names | {name: next(other for other in names.values() if other != file)}}


def of_another_size(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))


def of_whole_numbers(path):
    shard = first_shard(path)
    weights = load_file(shard)
    save_file({name: tensor.to(torch.int64) for name, tensor in weights.items()}, shard, metadata={"format": "pt"})


DAMAGES = {
    "no weights": (without_weights, "copy: holds neither model.safetensors nor model.safetensors.index.json; "),
    "an empty file": (lambda path: cut_short(path, 0), "not a whole safetensors file"),
    "cut in the header": (lambda path: cut_short(path, 40), "not a whole safetensors file"),
    "cut in a tensor": (lambda path: cut_short(path, -100), "not a whole safetensors file .*; fetch it again"),
    "another file": (
        lambda path: first_shard(path).write_bytes(b"\3" + bytes(7) + b"[1]" * 9),
        "not a whole safetensors",
    ),
    "a missing file": (lambda path: first_shard(path).unlink(), "no such file, though the index names it; fetch it"),
    "a missing tensor": (
        lambda path: edit_index(path, lambda index: index["weight_map"].pop("model.norm.weight") and index),
        "tensor model.norm.weight is missing from the checkpoint",
    ),
    "an index that lies": (lambda path: edit_index(path, names_another_file), "is missing, though the index promises"),
    "an index of another form": (lambda path: edit_index(path, lambda _: []), "holds no JSON object"),
    "another shape": (of_another_size, r"tensor model\.layers\.\d\.mlp.* is \[.*\], config.json asks \[.*64.*\]"),
    "another type": (of_whole_numbers, r"tensor .*\.weight is of type I64, no floating-point one; fetch it again"),
}


@pytest.mark.parametrize("read", [read_headers, open_model])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_the_launch_and_by_a_rank(copy, damage, read):
    break_, line = DAMAGES[damage]
    break_(copy)
    with pytest.raises(ValueError, match=line) as caught:
        read(copy)
    assert "\n" not in str(caught.value) and str(copy) in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_that_are_no_numbers_are_refused_as_they_are_loaded(make_checkpoint, tmp_path, value):
    path = shutil.copytree(make_checkpoint().path, tmp_path / "copy")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = value
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        open_model(path, num_slots=8, dtype=torch.float16)  # which 1e30 does not fit
    if not math.isfinite(value):
        with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
            open_model(path, num_slots=8, weights=torch.int8)


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        open_model(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name the checkpoint's directory"):
        open_model(tmp_path / "file")


HUB = {
    "org/both": ["config.json", "model.safetensors", "pytorch_model.bin", "README.md"],
    "org/pickled": ["config.json", "pytorch_model.bin", "training_args.bin", "optimizer.pt"],
    "org/heads": ["config.json", "medusa_lm_head.pt"],
}


@pytest.mark.parametrize(
    ("repository", "fetched"),
    [
        ("org/both", ["config.json", "model.safetensors"]),
        ("org/pickled", ["config.json", "pytorch_model.bin"]),
        ("org/heads", ["config.json", "medusa_lm_head.pt"]),
    ],
)
def test_of_the_hub_weights_are_fetched_pickled_only_where_there_are_no_others(
    monkeypatch, tmp_path, repository, fetched
):
    import huggingface_hub

    def snapshot(repo_id, allow_patterns):
        for file in HUB[repo_id]:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_checkpoint(repository) == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == fetched


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("cache/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64", "Qwen/Qwen3-8B"),
        ("cache/hub/models--gpt2/snapshots/607a30d7", "gpt2"),
        ("home/snapshots/mine", "mine"),
        ("home/models--mine", "models--mine"),
    ],
)
def test_a_checkpoint_in_the_hubs_cache_has_the_name_of_its_repository_not_of_a_commit(directory, name):
    assert checkpoint_name(Path(directory)) == name


def test_what_the_hub_does_not_give_is_said_in_a_line(monkeypatch):
    import huggingface_hub

    def snapshot(repo_id, **options):
        raise OSError("offline\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match=r"org/gone: neither a directory nor available .* \(offline\)$"):
        resolve_checkpoint("org/gone")
