"""The drafter of SpecDec: what its rows see in training, that the engine drafts what was trained, and a whole run."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.config.jobs import TrainConfig
from cluster.jobs import train
from cluster.tools.training.corpus import Source
from cluster.tools.training.pairs import LENGTHS, corrupted, library_pairs, read_pairs
from cluster.tools.training.specdec import (
    MaskedBlockDrafter,
    SpecDecOptions,
    TokenPairs,
    keep_decoder_layers,
    visible,
)
from parallel.kv.pass_plan import Span
from parallel.model.families.registry import read_config
from parallel.runtime.runner import open_model
from parallel.speculators.pard import PardRunner, filling_masks
from tests.families import ENCODER_DECODERS, tiny_encoder_decoder

BLOCK, MASK = 5, 3
SOURCES = [[5, 6, 7, 8, 0], [11, *range(20, 32), 0]]
TEXTS = [[2, 11, 12, 13, 14, 15, 16, 17, 0], [2, *range(40, 52), 0]]


@pytest.fixture(scope="module", params=ENCODER_DECODERS)
def net(request) -> MaskedBlockDrafter:
    model = tiny_encoder_decoder(request.param, 0, vocab_size=97, max_position_embeddings=64)
    return MaskedBlockDrafter(model, SpecDecOptions(block=BLOCK, mask_token=MASK))


def test_rows_of_text_see_what_is_before_them_and_a_block_sees_itself():
    seen = visible(torch.tensor([2, 4]), 6, 3)
    assert seen[0].int().tolist()[:4] == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
    ]
    assert seen[1].int().tolist()[3:] == [[1, 1, 1, 1, 0, 0], [1] * 6, [1] * 6]


@torch.no_grad()
def test_masks_see_each_other_but_no_label_and_shown_tokens_change_the_others(net):
    pairs, cuts = TokenPairs.of(SOURCES, TEXTS), torch.tensor([3, 6])
    logits, labels = net.logits(pairs, cuts), net.labels(pairs, cuts)
    assert labels.tolist() == [[13, 14, 15, 16, 17], [45, 46, 47, 48, 49]]
    assert net.labels(pairs, torch.tensor([7, 12])).tolist() == [[17, 0, -100, -100, -100], [51, 0, -100, -100, -100]]
    changed = replace(pairs, texts=pairs.texts.clone())
    for row, cut in enumerate(cuts.tolist()):
        changed.texts[row, cut:] = 60
    torch.testing.assert_close(net.logits(changed, cuts), logits)
    shown = torch.zeros(2, BLOCK, dtype=torch.bool)
    shown[:, 3] = True  # the input of the third mask
    after = net.logits(pairs, cuts, shown)
    torch.testing.assert_close(after[:, 0], logits[:, 0])  # the last row of text is causal
    assert ((after - logits).abs().amax(-1)[:, 1:] > 1e-3).all(), "masks before and behind it see it"
    torch.testing.assert_close(net.logits(changed, cuts, shown)[:, 0], logits[:, 0])


@pytest.mark.parametrize("decoder_layers", [0, 2])
def test_the_engine_drafts_what_was_trained(net, tmp_path, decoder_layers):
    """Logits at every depth, whatever was accepted of the drafts before; also with fewer layers than the encoder."""
    if decoder_layers:
        net = copy.deepcopy(net)
        keep_decoder_layers(net.model, decoder_layers)
    net.save(tmp_path)
    assert read_config(tmp_path).num_layers == (decoder_layers or 3)
    runner = filling_masks(open_model(tmp_path), tmp_path)
    assert isinstance(runner, PardRunner) and runner.longest_draft == BLOCK
    text, choice = TEXTS[1], random.Random(0)
    runner.open("a")
    runner.set_source("a", SOURCES[1])
    runner.forward([Span("a", 1, None, 0)], text[:1])
    runner.commit("a", range(1))
    for accepted in (0, BLOCK, 2, 1, 0):
        suffix = text[runner.cached_len("a") :]
        rows = [runner.forward([Span("a", len(suffix))], suffix).logits]
        drafted = [choice.randrange(20, 90) for _ in range(BLOCK - 1)]
        rows += [runner.forward([Span("a", 1)], [token], fuzzy=True).logits for token in drafted]
        pairs = TokenPairs.of([SOURCES[1]], [text])
        with torch.no_grad():
            expected = net.logits(pairs, torch.tensor([len(text)]))[0]
        torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0)
        runner.commit("a", range(len(suffix) + min(accepted, BLOCK - 1)))
        runner.drop_fuzzy("a")
        text = [*text, *drafted[: min(accepted, BLOCK - 1)], choice.randrange(20, 90)]
    runner.close("a")


def test_decoder_layers_are_kept_from_the_first_to_the_last(net):
    def layers(model):
        decoder = model.get_decoder()
        return [layer.state_dict() for layer in (decoder.block if hasattr(decoder, "block") else decoder.layers)]

    for count, places in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
        model = copy.deepcopy(net.model)
        keep_decoder_layers(model, count)
        for kept, place in zip(layers(model), places, strict=True):
            assert all(torch.equal(tensor, layers(net.model)[place][name]) for name, tensor in kept.items())
    with pytest.raises(ValueError, match=r"job.options.decoder_layers=4: is more than the 3"):
        keep_decoder_layers(net.model, 4)


def test_glancing_shows_a_share_of_what_is_wrong_and_does_not_learn_it(net, monkeypatch):
    asked = []
    right = MaskedBlockDrafter.logits

    def watched(self, pairs, cuts, shown=None):
        asked.append((cuts, shown))
        return right(self, pairs, cuts, shown)

    monkeypatch.setattr(MaskedBlockDrafter, "logits", watched)
    pairs = TokenPairs.of(SOURCES * 8, TEXTS * 8)
    shares = []
    for progress in (0.0, 1.0):
        asked.clear()
        loss = net.loss(pairs, progress, torch.Generator().manual_seed(1))
        assert loss.isfinite() and loss.requires_grad
        (cuts, first), (again, shown) = asked
        assert first is None and torch.equal(cuts, again) and not shown[:, 0].any()
        labels = net.labels(pairs, cuts) != -100
        wrong = ((right(net, pairs, cuts).argmax(-1) != net.labels(pairs, cuts)) & labels).sum()
        shares.append(float(shown.sum() / wrong))
    assert shares[0] > shares[1] > 0.15


def test_lines_are_corrupted_alike_for_equal_seeds(tmp_path):
    sources = [Source("a.py", "\n".join(f"value_{i} = compute(value_{i - 1}, {i})" for i in range(50)))]
    pairs = library_pairs(sources, 20, 0)
    assert pairs == library_pairs(sources, 20, 0) != library_pairs(sources, 20, 1) and len(pairs) == 20
    assert all(pair.source != pair.text and len(pair.text) in LENGTHS for pair in pairs if pair.source != pair.text)
    assert sum(pair.source == pair.text for pair in pairs) < 4
    assert len({corrupted("return value", random.Random(seed)) for seed in range(30)}) > 20
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"source": "a b", "text": "ab"}\n{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"line 2 has no `source`"):
        list(read_pairs(file))


@pytest.fixture(scope="module")
def trained(tiny_checkpoint, tmp_path_factory) -> tuple[Path, Path]:
    target, run = tiny_checkpoint("Bart", seed=70), tmp_path_factory.mktemp("specdec")
    text = run / "pairs.jsonl"
    text.write_text("\n".join(json.dumps({"source": f"def f{i}(x): return {i}"}) for i in range(24)))
    options = {"block": 6, "mask_token": 2, "decoder_layers": 2}
    steps = dict(steps=8, batch_tokens=200, continuation_length=12)
    config = TrainConfig(recipe="specdec", text=str(text), threads=1, options=options, **steps)
    from cluster.config.schema import LaunchConfig

    report = train.run(replace(LaunchConfig(), target=TargetConfig(path=str(target)), job=config), run)
    assert report["held_out"]["loss"] < report["held_out_before"]["loss"] and report["rows"] == 22
    return target, run / "drafter"


@pytest.mark.extended
def test_a_trained_drafter_drafts_blocks_and_changes_no_token(trained, open_engine):
    target, path = trained
    sources, sampling = ["def f1(x): return 1", "def f30(x): return 30", "return"], SamplingParams(max_tokens=14)
    found = []
    for config in ("none", ModelDrafterConfig(path=str(path), num_draft_tokens=6, device="cpu")):
        options = {"target": TargetConfig(path=str(target), device="cpu"), "pipeline": PipelineConfig(adaptive=False)}
        with open_engine(config, **options) as engine:
            found.append([completion.token_ids for completion in engine.generate(sources, sampling)])
            counters = engine.report().counters
    assert found[0] == found[1]
    assert counters["num_draft_tokens"] > 0 and counters["num_accepted_tokens"] > 0


@pytest.mark.extended
def test_the_recipe_and_the_target_have_to_fit(entered, trained):
    target, _ = trained
    code, _, error = entered("job=train", "job.recipe=specdec")
    assert code == 2 and "job.recipe=specdec: is for a target with an encoder" in error
    code, _, error = entered("job=train", "target=hf", f"target.path={target}", "drafter=copy")
    assert code == 2 and "or train with job.recipe=specdec" in error
