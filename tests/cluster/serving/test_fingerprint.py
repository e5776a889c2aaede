"""`system_fingerprint`: one name for the same weights in the same version, another for all others."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from actors.protocol.messages import Request, SamplingParams, Tokens
from cluster.completion import Completion
from cluster.serving.fingerprint import WeightNames
from cluster.serving.generation import RequestedText
from cluster.serving.replies import CompletionForm, ReplyWriter
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
    assert names.of(1) != names.of(None) == names.of(2), "an older reply may end later"


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


@pytest.mark.extended
@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "echo"])
def test_no_chunk_names_weights_that_are_gone_before_the_first_token(
    chat_checkpoint, half_agreeing_drafter, tmp_path, is_chat
):
    """The stream waits for a seat while the weights change."""
    shutil.copytree(chat_checkpoint, tmp_path / "next")
    body = {"model": "tiny-chat", "stream": True, "extra_body": {"ignore_eos": True}}
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=20) as running, running.client() as client:
        seats = [client.completions.create(prompt="a", max_tokens=400, **body) for _ in range(4)]
        old = {next(iter(one)).system_fingerprint for one in seats}
        with ThreadPoolExecutor(1) as pool:
            if is_chat:
                ask = partial(client.chat.completions.create, messages=[{"role": "user", "content": "q"}])
            else:
                ask = partial(client.completions.create, prompt="b")
                body["extra_body"] = {"echo": True}
            names = pool.submit(lambda: [one.system_fingerprint for one in ask(max_tokens=4, **body)])
            while running.num_running() < 5:
                time.sleep(0.01)
            running.engine.update_weights(tmp_path / "next", 7)
            for one in seats:
                one.close()
            found = names.result(60)
        assert len(old) == len({*found}) == 1 and not old & {*found} and len(found) > 2


def test_a_chunk_names_the_weights_of_its_own_tokens(chat_checkpoint: Path):
    """Whatever has arrived until it is written."""
    names = WeightNames(chat_checkpoint, SETTINGS)
    request = Request(1, (65,), SamplingParams(max_tokens=8))
    tokenizer = Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json"))
    completion = Completion(request, "a", tokenizer, lambda _: None)
    choice, writer = RequestedText(0, completion, 0), ReplyWriter(CompletionForm(), "tiny-chat", "id", 0, names)
    for place, version in ((0, 3), (2, 5)):
        completion.append(Tokens(1, place, (66,), versions=((place, version),)))
        piece, *_ = completion.piece_since(place, place)
        completion.append(Tokens(1, place + 1, (67,), versions=((place + 1, version + 1),)))
        chunk = json.loads(writer.chunk(choice, piece, None).removeprefix(b"data: "))
        assert chunk["system_fingerprint"] == names.of(version)
        assert completion.version == version + 1
