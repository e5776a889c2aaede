"""State dictionaries that `torch.save` wrote are read as safetensors are, and what could harm is refused in a line."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.kv.pass_plan import Span
from parallel.model.checkpoint import holds_bfloat16, tensor_headers
from parallel.model.tensor_files import LONGEST_PICKLE, open_tensors
from parallel.runtime.runner import open_model
from tests.parallel.conftest import Checkpoint


def repacked(source: Path, folder: Path, *, shards: int) -> Path:
    """The checkpoint with its tensors pickled, in one file or in several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-0000{i % shards + 1}-of-0000{shards}.bin" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_pickled_checkpoint_gives_the_same_logits(llama: Checkpoint, tmp_path: Path, shards: int) -> None:
    pickled = repacked(llama.path, tmp_path / "pickled", shards=shards)
    assert tensor_headers(pickled) == tensor_headers(llama.path)
    tokens, logits = list(range(3, 12)), []
    for path in (llama.path, pickled):
        runner = open_model(path)
        runner.open("a")
        logits.append(runner.forward([Span("a", len(tokens))], tokens).logits)
    assert torch.equal(*logits)


def test_safetensors_are_read_where_there_are_both(tmp_path: Path) -> None:
    save_file({"plain": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"pickled": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert tensor_headers(tmp_path) == {"plain": (2,)}


def test_modules_in_files_of_their_own_stand_under_their_names(tmp_path: Path) -> None:
    for module in ("trimlp", "chimera_head"):
        torch.save({"0.weight": torch.ones(2)}, tmp_path / f"{module}.pt")
    assert tensor_headers(tmp_path) == {"trimlp.0.weight": (2,), "chimera_head.0.weight": (2,)}


@pytest.mark.parametrize(("dtype", "is_bfloat16"), [(torch.bfloat16, True), (torch.float16, False)])
def test_types_of_numbers_are_known(tmp_path: Path, dtype: torch.dtype, is_bfloat16: bool) -> None:
    torch.save({"table": torch.ones(2, 3, dtype=dtype), "ids": torch.arange(3)}, tmp_path / "pytorch_model.bin")
    assert holds_bfloat16(tmp_path) == is_bfloat16


def test_a_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    table = torch.randn(6, 4)
    torch.save({"table": table}, tmp_path / "pytorch_model.bin")
    with open_tensors(tmp_path / "pytorch_model.bin") as tensors:
        assert torch.equal(tensors.get_slice("table")[2:4, 1:], table[2:4, 1:])
        assert torch.equal(tensors.get_tensor("table"), table)


class _Program:
    """What a pickle that runs a command is made of."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def _compressed(file: Path) -> None:
    torch.save({"w": torch.zeros(10_000)}, file)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def _long_pickle(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(LONGEST_PICKLE + 1))


def _cut(file: Path) -> None:
    torch.save({"w": torch.zeros(10_000)}, file)
    file.write_bytes(file.read_bytes()[:20_000])


def _before_archives(file: Path) -> None:
    torch.save({"w": torch.zeros(3)}, file, _use_new_zipfile_serialization=False)


def _saving(content: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda file: torch.save(content(), file)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a program": (_saving(lambda: {"w": _Program("touch ran")}), "holds more than tensors"),
    "compressed": (_compressed, "compressed parts"),
    "a long pickle": (_long_pickle, "pickle is longer than 16 MiB"),
    "cut off": (_cut, "is not whole"),
    "before PyTorch 1.6": (_before_archives, "saved before PyTorch 1.6"),
    "text": (lambda file: file.write_text("no tensors") and None, "is not whole"),
    "a tensor alone": (_saving(lambda: torch.zeros(3)), "no state dictionary"),
    "nested": (_saving(lambda: {"model": {"w": torch.zeros(3)}}), "no state dictionary"),
    "numbers for names": (_saving(lambda: {3: torch.zeros(3)}), "no state dictionary"),
    "sparse": (_saving(lambda: {"w": torch.eye(3).to_sparse()}), "no state dictionary"),
    "more numbers than stored": (_saving(lambda: {"w": torch.zeros(1).expand(1 << 40)}), "no state dictionary"),
    "without numbers": (_saving(lambda: {"w": torch.zeros(3, device="meta")}), "no state dictionary"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_harm_is_refused_in_a_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write, reason = REFUSED[kind]
    write(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=reason) as refusal:
        tensor_headers(tmp_path)
    assert str(tmp_path / "pytorch_model.bin") in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()
