"""Training on a frozen target: what it hands over, a run that is killed and resumed, and ranks of Ray Train."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cluster import pocket
from cluster.config.schema import LaunchConfig
from cluster.io.text import load_tokenizer
from cluster.jobs import train
from cluster.tools.training import corpus, trainer
from cluster.tools.training.continuations import TextRows, written_rows
from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators import run as training
from cluster.tools.training.speculators.distill import DistilledDrafter
from cluster.tools.training.speculators.frozen_target import FrozenTarget, load_target, shape_of
from cluster.tools.training.speculators.recipes import RECIPES
from cluster.tools.training.trainer import Ranks, Recipe
from docs.measurements.pocket.models import save_model
from parallel.speculators.config import FINAL
from tests.cluster.config.quick_loading import load_quickly

LIBRARY = "ast.py", "inspect.py", "os.py", "pickletools.py", "shutil.py"
TOKENS = torch.randint(1, 4096, (6, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_target(tmp_path_factory.mktemp("target"), 2)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model to begin with that is much smaller than the bundled one."""
    return small_target(tmp_path_factory.mktemp("start"), 2, 0.02)


def small_target(folder: Path, num_layers: int, initializer_range: float = 0.15) -> Path:
    """A tiny target of the bundled tokenizer whose text varies."""
    config = drafter_config(4096, num_layers)
    config.hidden_size, config.intermediate_size, config.initializer_range = 48, 64, initializer_range
    save_model(initialised(config, 0, "cpu"), folder)
    shutil.copyfile(pocket.TARGET / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def combine_{n}(first, second): # {'very ' * (n % 7)}long"}) for n in range(24)]
    file.write_text("\n".join(lines))
    return file


def small(target: Path, text: Path | str, **options: Any) -> LaunchConfig:
    """A run of seconds; no limit but the steps can end it."""
    words = [f"target.path={target}", f"job.text={text}", "job=train", "job.recipe=distill", "job.threads=1"]
    words += ["job.minutes=60", "job.steps=8", "job.batch_tokens=128", "job.continuation_length=16", "job.rate=4"]
    return load_quickly([*words, *(f"job.{name}={value}" for name, value in options.items())])


def taps_of(folder: Path, rows: TextRows, taps: list[int], cache_bytes: int) -> FrozenTarget:
    return FrozenTarget(load_target(folder, "cpu"), rows, taps, [1], cache_bytes)


def test_taps_are_the_streams_between_blocks_and_the_last_is_behind_the_norm(target: Path):
    rows = written_rows(TOKENS, 4, [])
    batch = taps_of(target, rows, [0, 1, 2], 0).batch(torch.tensor([4, 1]))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(TOKENS[[4, 1]], output_hidden_states=True, past_key_values=cache, use_cache=True)
    states = output.hidden_states
    assert len(states) == 3  # embedding, first block, and the second behind the final norm: raw only by a hook
    expected = {0: states[0], 1: states[1], FINAL: states[2]}
    assert set(batch.taps) == {0, 1, 2, FINAL}
    for tap, state in expected.items():
        assert (batch.taps[tap].float() - state).abs().max() < 0.05 * state.abs().max()
    raw = batch.taps[2].float()
    assert (model.model.norm(raw) - states[2]).abs().max() < 0.05 * states[2].abs().max()
    assert (raw - states[2]).abs().max() > 0.2 * states[2].abs().max()
    layer: Any = cache.layers[1]
    for ours, theirs in zip(batch.kv[1], (layer.keys, layer.values), strict=True):
        assert (ours.float() - theirs).abs().max() < 0.05 * theirs.abs().max()
    assert torch.equal(batch.tokens, TOKENS[[4, 1]])
    assert batch.loss_mask[:, 4:].all() and not batch.loss_mask[:, :4].any()
    assert (batch.target_logits().float() - output.logits).abs().max() < 0.05 * output.logits.abs().max()


def test_moved_positions_are_those_of_the_target_too(target: Path):
    """Keys of the later tokens are turned by the offset, and the batch says so."""
    model = load_target(target, "cpu")
    rows, reach = written_rows(TOKENS, 4, []), model.config.max_position_embeddings
    moved = FrozenTarget(model, rows, [], [0], reach=reach).batch(torch.tensor([2]))
    assert moved.positions is not None and moved.positions.max() > TOKENS.shape[1]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(TOKENS[[2]], position_ids=moved.positions, past_key_values=cache, use_cache=True)
    expected: Any = cache.layers[0]
    for ours, theirs in zip(moved.kv[0], (expected.keys, expected.values), strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 0.05 * theirs.abs().max()
    still = FrozenTarget(model, rows, [], [0]).batch(torch.tensor([2]))
    assert still.positions is None
    assert (moved.kv[0][0].float() - still.kv[0][0].float()).abs().max() > 0.2 * still.kv[0][0].abs().max()


def test_what_was_computed_is_kept_up_to_a_bound(target: Path, monkeypatch: pytest.MonkeyPatch):
    rows = written_rows(TOKENS, 4, [])
    one_row = 24 * (48 * 2 + 2 * 2 * 48) * 2  # taps 1 and FINAL, keys and values of two KV heads, bfloat16
    bounded = taps_of(target, rows, [1], 2 * one_row)
    computed: list[int] = []
    states = bounded._states
    monkeypatch.setattr(bounded, "_states", lambda tokens, moved: computed.append(len(tokens)) or states(tokens, moved))
    every = torch.arange(6)
    first, second = bounded.batch(every), bounded.batch(every.flip(0))
    assert computed == [6, 4]
    assert torch.equal(first.taps[1], second.taps[1].flip(0))


def source_of(target: Path, text: Path, num_rows: int, ranks: Ranks) -> Any:
    """The batches of two rows of a rank."""
    config = replace(small(target, text).job, batch_tokens=2 * 24 * ranks.count, continuation_length=24)
    course = training.Course(config, str(target), "", "")
    rows = written_rows(torch.randint(1, 4096, (num_rows, 24), generator=torch.Generator().manual_seed(0)), 4, [])
    model = load_target(target, "cpu")
    net = RECIPES["medusa"].build(RECIPES["medusa"].options, shape_of(model, rows))
    return training._Source(course, training.Texts(rows, {}, [[1, 2]]), model, net, ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_epoch_gives_every_row_to_one_rank_and_the_next_one_in_another_order(
    target: Path, text: Path, num_ranks: int
):
    sources = [source_of(target, text, 8, Ranks(rank, num_ranks)) for rank in range(num_ranks)]
    steps = 8 // (2 * num_ranks)
    epochs = [
        [
            row
            for step in range(epoch * steps, (epoch + 1) * steps)
            for one in sources
            for row in one._shuffled(step).tolist()
        ]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_held_out_text_is_not_trained_on(target: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    """No held-out prompts are given, or the bundled ones, in a library of some modules."""
    monkeypatch.setattr(corpus, "library_paths", lambda root: [*LIBRARY, *corpus.HELD_OUT])
    tokenizer = load_tokenizer(target)
    for words in ({}, {"text": "''", "continuation_prompts": 40}):
        config = small(target, **{"text": text} | words).job
        course = training.Course(config, str(target), "", "")
        prompts, held_out = training._prompts(course, tokenizer)
        assert prompts and held_out
        assert not {tuple(prompt) for prompt in prompts} & {tuple(prompt) for prompt in held_out}
    assert len(prompts) == 40


def test_fixed_text_has_as_many_rows_as_the_target_would_write(target: Path, tmp_path: Path):
    """One for each prompt and temperature, spread over the text; all tokens but a row's first are labels."""
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"line {n} of {n * n} words" for n in range(600)))
    config = small(target, file, data="fixed", continuation_prompts=20, temperatures="[0.0,0.5,1.0]").job
    course = training.Course(config, str(target), "", str(tmp_path / "work"))
    texts = training.prepare(course, lambda _: None)
    assert len(texts.training) == 3 * len(texts.prompts) > 30
    assert texts.training.mask().sum(1).tolist() == [config.continuation_length - 1] * len(texts.training)
    assert len({tuple(row) for row in texts.training.tokens.tolist()}) == len(texts.training)


def test_the_rates_of_a_run_are_scaled(target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(trainer, "fit", lambda *a, **_: seen.append(a[2]) or (_ for _ in ()).throw(Killed))
    recipe = RECIPES["layerskip"]
    with pytest.raises(Killed):
        train.run(small(small_target(tmp_path / "three", 3), text, recipe="layerskip", rate=3), tmp_path)
    rates = seen[0].matrix_learning_rate, seen[0].other_learning_rate
    assert rates == pytest.approx([3 * rate for rate in recipe.rates])


def test_the_judge_weighs_rows_alike_and_names_temperatures(target: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    """Ten rows in passes of eight and two, of a net whose loss is the first token of the pass's first row."""
    tokens = torch.arange(1, 11)[:, None].expand(-1, 24).contiguous()
    rows, heats = written_rows(tokens, 4, []), []

    class Net:
        taps, kv_layers = (FINAL,), ()

        def loss(self, batch: Any, _: Any) -> Any:
            heats.append(batch.temperature)
            return batch.tokens[0, 0].float(), {"accept_1": batch.tokens[0, 0].float() / 10}

    judge = training._Judge(load_target(target, "cpu"), Net(), {0.0: rows, 0.8: rows}, small(target, text).job)  # pyright: ignore
    mean = (8 * 1 + 2 * 9) / 10
    assert judge() == pytest.approx(
        {"loss": mean, "accept_1": mean / 10, "loss_at_0.8": mean, "accept_1_at_0.8": mean / 10}, abs=1e-4
    )
    assert heats == [0.0, 0.0, 0.8, 0.8]


class Killed(BaseException):
    """Passes every handler, as a kill does."""


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run draws, `test_distillation_brings_the_drafter_nearer` sees."""
    monkeypatch.setattr(training, "draw_curves", lambda folder, path: None)


@pytest.mark.extended
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    target: Path, text: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_picture: None
):
    monkeypatch.setattr(trainer, "Recipe", partial(Recipe, checkpoint_minutes=0.0, log_steps=1))
    monkeypatch.setattr(training, "REFRESH_STEPS", 4)
    loss, steps = DistilledDrafter.loss, 0

    def dies_at_step_six(self: DistilledDrafter, *arguments: Any) -> Any:
        nonlocal steps
        steps += self.training
        if steps == 6:
            raise Killed
        return loss(self, *arguments)

    config = small(target, text, data="mixed", options=f"{{start: {start}}}")
    whole = train.run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(DistilledDrafter, "loss", dies_at_step_six)
        with pytest.raises(Killed):
            train.run(config, tmp_path / "killed")
    log = tmp_path / "killed" / "work" / "distill" / "loss.jsonl"
    with log.open("a") as file:
        file.write('{"step": 6, "loss": 0.1}\n{"st')  # lines behind the state, the last one cut
    steps = 0
    resumed = replace(config, job=replace(config.job, resume=True))
    outcome = train.run(resumed, tmp_path / "killed")
    assert outcome["held_out"] | {"seconds": 0} == whole["held_out"] | {"seconds": 0}
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in (log, whole_log(tmp_path))]
    assert [line["step"] for line in lines[0]] == list(range(1, 9))
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    files = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    again = train.run(resumed, tmp_path / "killed")
    assert again["training"]["steps"] == 8, "a finished run has nothing to go on with"


def whole_log(folder: Path) -> Path:
    return folder / "whole" / "work" / "distill" / "loss.jsonl"


@pytest.mark.extended
def test_a_tuned_target_is_a_target(text: Path, tmp_path: Path, no_picture: None):
    """LayerSkip: its exit agrees more with its last layer, and the target it came from is as it was."""
    target = small_target(tmp_path / "untuned", 3)
    before = (target / "model.safetensors").read_bytes()
    config = small(target, text, recipe="layerskip", options="{interval: 1}")
    outcome = train.run(replace(config, job=replace(config.job, steps=10)), tmp_path)
    assert outcome["held_out"]["loss"] < outcome["held_out_before"]["loss"]
    assert outcome["held_out_before"]["agreement"] > 0.9  # with itself, but for bfloat16
    assert outcome["held_out"]["length_at_0.8"] > outcome["held_out_before"]["length_at_0.8"]
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert tuned.config.num_hidden_layers == 3 and (tmp_path / "target" / "tokenizer.json").exists()
    assert (target / "model.safetensors").read_bytes() == before


@pytest.mark.extended
def test_prefixes_of_a_draft_model_learn_together(
    target: Path, text: Path, start: Path, tmp_path: Path, no_picture: None
):
    config = small(target, text, recipe="sorted", options=f"{{start: {start}, prefixes: [1]}}", rate=10)
    outcome = train.run(replace(config, job=replace(config.job, steps=10)), tmp_path)
    before, after = outcome["held_out_before"], outcome["held_out"]
    assert after["loss"] < before["loss"]
    assert {"length", "length_of_1", "length_at_0.8", "length_of_1_at_0.8"} <= set(after)


SLOW = [pytest.param(data, marks=pytest.mark.slow) for data in ("fixed", "on_policy")]


@pytest.mark.parametrize("data", ["target", *SLOW])
def test_distillation_brings_the_drafter_nearer(target: Path, text: Path, start: Path, tmp_path: Path, data: str):
    config = small(target, text, data=data, options=f"{{start: {start}, divergence: jsd}}", rate=10)
    config = replace(config, job=replace(config.job, steps=10))
    outcome = train.run(config, tmp_path)
    before, after = outcome["held_out_before"], outcome["held_out"]
    assert after["loss"] < before["loss"] and after["loss_at_0.8"] < before["loss_at_0.8"]
    assert 1.0 <= before["length"] <= 6.0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text()) == outcome
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter")
    assert saved.dtype == torch.bfloat16 and saved.config.vocab_size == 4096


@pytest.mark.extended
def test_every_recipe_is_tried_on_the_target_before_the_text_is_written(text: Path, tmp_path: Path):
    target = small_target(tmp_path, 6)
    model, config = load_target(target, "cpu", torch.bfloat16), small(target, text).job
    for recipe in RECIPES:
        training.check_recipe(training.Course(replace(config, recipe=recipe), str(target), "", ""), model)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("named", "line"),
    [
        ({"recipe": "magic"}, "job.recipe=magic: is unknown; choose one of eagle, "),
        ({"options": "{divergance: fkl}"}, "job.options.divergance"),
        ({"options": "{divergence: l2}"}, "job.options.divergence=l2"),
        ({"options": "{start: /nowhere}"}, "job.options.start=/nowhere: is no checkpoint"),
        ({"data": "magic"}, "job.data=magic"),
        ({"average": "participants"}, "job.average=participants: is for several job.ranks"),
        ({"recipe": "layerskip", "options": "{exit: 2}"}, "job.options.exit=2: the target has 2 layers"),
        ({"recipe": "kangaroo", "options": "{exit: 2}"}, "job.options.exit=2: the target has 2 layers"),
        ({"recipe": "sorted", "options": "{start: '', prefixes: [3]}"}, r"job.options.prefixes=\[3\]: the draft model"),
        ({"text": "/nowhere.txt"}, "job.text=/nowhere.txt"),
        ({"recipe": "medusa", "data": "mixed"}, "job.data=mixed: only job.recipe=distill writes text of its own"),
    ],
)
def test_wrong_settings_are_one_line_before_the_target_writes(
    target: Path, text: Path, tmp_path: Path, named: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "write_rows", lambda *_: pytest.fail("text was written"))
    with pytest.raises(ValueError, match=f"^{line}"):
        train.run(small(target, **{"text": text, **named}), tmp_path)
