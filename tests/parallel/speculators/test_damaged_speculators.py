"""Damaged checkpoints of every layout of speculators: one line before anything is loaded, or a module that drafts."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.families.registry import read_config
from parallel.runtime.runner import open_model
from parallel.speculators.config import STREAMS
from parallel.speculators.opening import open_speculator, with_streams
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import check_speculator, read_speculator
from tests.actors.small_speculators import TRAINED, train_speculator
from tests.damage import damaged_bytes, damaged_json
from tests.parallel.speculators import test_eagle_layouts, test_head_layouts

SLOTS = 256


@pytest.fixture(scope="module")
def target(make_checkpoint):
    return make_checkpoint("Llama")


@pytest.fixture(scope="module")
def speculators(target, tmp_path_factory):
    """Layout -> a folder with an untrained checkpoint of it, made once."""
    folder = tmp_path_factory.mktemp("speculators")

    def make(layout):
        path = folder / layout
        if path.exists():
            return path
        if layout in TRAINED:
            return train_speculator(layout, target.model, target.path, path, steps=0)
        path.mkdir()
        if layout in test_head_layouts.LAYOUTS:
            test_head_layouts.LAYOUTS[layout](path)
        else:
            method, translate = test_eagle_layouts.LAYOUTS[layout]
            tensors = load_file(make(method) / "model.safetensors")
            test_eagle_layouts.write(path, *translate(tensors))
        return path

    return make


PUBLISHED = [*test_head_layouts.LAYOUTS, "EAGLE-1", "MiMo MTP", "speculators MTP"]


def every_second(layouts, first):
    """The others are slow: by default a layout has one of the two kinds of damages."""
    return [pytest.param(one, marks=[pytest.mark.slow] * ((i + first) % 2)) for i, one in enumerate(layouts)]


@pytest.fixture
def copied(speculators, tmp_path):
    return lambda layout: shutil.copytree(speculators(layout), tmp_path / layout)


def refusal(path, target):
    """The line with which the checkpoint is refused from its headers; empty if it is not."""
    try:
        check_speculator(path, read_config(target.path))
    except ValueError as error:
        return str(error)
    return ""


def still_drafts(path, target):
    """Whether it gives logits after a text of three tokens, or says in a line why not."""
    runner = open_model(target.path, num_slots=SLOTS)
    config = read_speculator(path, runner.config.num_layers)
    if STREAMS in config.taps:
        runner = with_streams(path, runner)
    place = SpeculatorPlace(
        runner.decoder, SINGLE, "cpu", torch.float32, SLOTS, target_layers=runner.config.num_layers, target=runner
    )
    speculator = open_speculator(path, place)
    runner.open("a")
    runner.forward([Span("a", 3)], torch.tensor([1, 2, 3]), config.taps if STREAMS in config.taps else ())
    runner.commit("a", range(3))
    speculator.open("a")
    speculator.read_features("a", 0, torch.randn(3, config.feature_size))
    text = [1, 2, 3, 4][speculator.cached_len("a") :]
    logits = speculator.forward([Span("a", len(text))], torch.tensor(text)).logits
    return logits.shape == (1, runner.config.vocab_size) and not logits.isnan().any()


def try_damages(path, target, rng, num_damages):
    """How many of the damages of config.json were refused."""
    file, num_refused = path / "config.json", 0
    good, content = read_speculator(path, 2), file.read_text()
    for _ in range(num_damages):
        kind, damaged = damaged_json(content, rng)
        file.write_bytes(damaged)
        if line := refusal(path, target):
            num_refused += 1
            assert "\n" not in line, kind
        elif read_speculator(path, 2) != good:
            assert still_drafts(path, target), kind
    return num_refused


@pytest.mark.extended
@pytest.mark.parametrize("layout", every_second(TRAINED + PUBLISHED, 0))
def test_a_damaged_config_is_one_line_or_drafts(copied, target, layout):
    path = copied(layout)
    assert not refusal(path, target)
    assert still_drafts(path, target)
    assert try_damages(path, target, random.Random(layout), 8) > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", TRAINED + PUBLISHED)
def test_many_damaged_configs(copied, target, layout):
    assert try_damages(copied(layout), target, random.Random(f"many {layout}"), 300) > 50


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout", [one for one in every_second(TRAINED + PUBLISHED, 1) if one.values != ("Medusa, pickled",)]
)
def test_what_loading_would_refuse_is_refused_before(copied, target, layout):
    path = copied(layout)
    (file,) = path.glob("*.safetensors")
    tensors, rng, num_refused = load_file(file), random.Random(layout), 0
    for name in rng.sample([*tensors], min(2, len(tensors))):
        others = {key: tensor for key, tensor in tensors.items() if key != name}
        wider = torch.cat((tensors[name], tensors[name]), -1) if tensors[name].dim() else tensors[name][None]
        for damaged in (others | {name: wider}, others):
            save_file(damaged, file)
            if line := refusal(path, target):
                num_refused += 1
                assert "\n" not in line
                with pytest.raises(ValueError, match="tensor|made for"):
                    still_drafts(path, target)
            else:  # a tensor that the module does not read
                assert still_drafts(path, target)
    assert num_refused


def test_a_damaged_file_of_tensors_is_one_line(copied, target):
    path = copied("eagle3")
    file = path / "model.safetensors"
    content, rng = file.read_bytes(), random.Random(0)
    start = content[:4096]  # the header, mostly: what is wrong behind it shows in no name or shape
    for _ in range(60):
        kind, damaged = damaged_bytes(start, rng)
        file.write_bytes(damaged + content[4096:])
        line = refusal(path, target)
        assert "\n" not in line, kind
    file.write_bytes(content[:-1])
    assert "not a whole safetensors file" in refusal(path, target)


@pytest.mark.parametrize(
    ("weight_map", "line"),
    [
        ({}, "missing from the checkpoint"),
        ([], "weight_map=[]: must be object"),
        ({"norm.weight": 7}, "must be str"),
        ({"norm.weight": "../nowhere.safetensors"}, "missing from the checkpoint"),
        (None, "no such file, though the index names it"),
    ],
)
def test_an_index_of_missing_files_is_one_line(copied, target, weight_map, line):
    path = copied("eagle3")
    names = dict.fromkeys(load_file(path / "model.safetensors"), "model-00001-of-00002.safetensors")
    content = {"weight_map": names if weight_map is None else weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert line in refusal(path, target)


def test_a_window_is_a_number_of_rows(copied, target):
    """A fraction would reach the kernels."""
    path = copied("longspec")
    content = json.loads((path / "config.json").read_text())
    for window in (1e-300, 0, -1, "512"):
        damaged = content | {"speculator": content["speculator"] | {"window": window}}
        (path / "config.json").write_text(json.dumps(damaged))
        assert "window" in refusal(path, target)
