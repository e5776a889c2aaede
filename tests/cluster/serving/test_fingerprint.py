"""`system_fingerprint`: one name for the same weights in the same version, another for all others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.serving.fingerprint import WeightNames
from tests.cluster.serving.conftest import serving

SETTINGS = ("float32", "auto")


def test_weights_have_the_same_name_wherever_they_are(chat_checkpoint, tmp_path):
    shutil.copytree(chat_checkpoint, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    os.utime(file, (1, 1))
    name = WeightNames(chat_checkpoint, SETTINGS).of(None)
    assert name == WeightNames(tmp_path / "copy", SETTINGS).of(0) and name.startswith("fp_")
    tensors = load_file(file)
    for changed in tensors:
        save_file(tensors | {changed: tensors[changed] + torch.ones_like(tensors[changed])}, file)
        assert WeightNames(tmp_path / "copy", SETTINGS).of(0) != name, changed
    assert WeightNames(chat_checkpoint, ("bfloat16", "auto")).of(0) != name


@pytest.mark.parametrize("file", ["pytorch_model.bin", "other.safetensors", "config.json"])
def test_every_file_of_weights_counts(chat_checkpoint, tmp_path, file):
    shutil.copytree(chat_checkpoint, tmp_path / "copy")
    path, names = tmp_path / "copy" / file, set()
    for value in (1.0, 2.0):
        if file == "config.json":
            path.write_text(f'{{"a": {value}}}')
        elif file == "pytorch_model.bin":
            path.write_bytes(bytes(100_000) + str(value).encode() + bytes(3))
        else:
            save_file({"a": torch.full((2000,), value)}, path)
        names.add(WeightNames(tmp_path / "copy", SETTINGS).of(0))
    assert len(names) == 2


def test_each_version_has_a_name_and_the_latest_is_that_of_what_has_no_tokens(chat_checkpoint: Path):
    names = WeightNames(chat_checkpoint, SETTINGS)
    assert len({names.of(version) for version in (0, 1, 2)}) == 3
    assert names.of(None) == names.of(2) == WeightNames(chat_checkpoint, SETTINGS).of(2)


def test_replies_and_all_chunks_name_the_weights_that_made_them(chat_checkpoint, half_agreeing_drafter, tmp_path):
    shutil.copytree(chat_checkpoint, tmp_path / "next")
    with serving(chat_checkpoint, half_agreeing_drafter) as running, running.client() as client:
        messages = [{"role": "user", "content": "q"}]

        def names():
            usage = {"include_usage": True}
            text = {"model": "tiny-chat", "prompt": "a", "max_tokens": 4}
            chat = {"model": "tiny-chat", "messages": messages, "max_tokens": 4}
            return [
                client.completions.create(**text).system_fingerprint,
                client.chat.completions.create(**chat).system_fingerprint,
                *[
                    one.system_fingerprint
                    for one in client.completions.create(**text, stream=True, stream_options=usage)
                ],
                *[one.system_fingerprint for one in client.chat.completions.create(**chat, stream=True)],
                client.completions.create(**text | {"max_tokens": 0}, extra_body={"echo": True}).system_fingerprint,
            ]

        (first,) = set(names())
        running.engine.update_weights(tmp_path / "next", 7)
        later = names()
        assert {*later} == {later[0]} and later[0] != first
