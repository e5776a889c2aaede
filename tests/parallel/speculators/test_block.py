"""Block drafters: the runner against the training pass, what a block may see, and drafts after every verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.tools.training.speculators.block import BlockDrafter, BlockOptions, build
from cluster.tools.training.speculators.interface import TargetBatch, TargetShape
from cluster.tools.training.speculators.recipes import RECIPES
from parallel.comm.group import SINGLE
from parallel.runtime.runner import Span, open_model
from parallel.speculators.config import FINAL
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import open_speculator

LENGTH = 24
SMALL = {"intermediate_size": 40, "taps": 2, "rank": 8, "state_size": 12, "top_k": 5, "conv_group": 4, "anchors": 12}
FLAGS = {
    name: replace(recipe.options, **SMALL)
    for name, recipe in RECIPES.items()
    if isinstance(recipe.options, BlockOptions)
}
KINDS = FLAGS | {kind: replace(FLAGS["dspark"], corrector=kind, confidence=False) for kind in ("none", "gated", "rnn")}


class Pair:
    """A target, the text that both sides read, and what the target computes of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        torch.manual_seed(5)
        self.tokens = torch.randint(self.model.config.vocab_size, (2, LENGTH))
        self.runner = open_model(path, num_slots=512)
        counts = torch.ones(self.model.config.vocab_size, dtype=torch.int64)
        tables = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        self.shape = TargetShape(self.model.config, *tables, counts)

    def net(self, options: BlockOptions, seed: int = 0) -> BlockDrafter:
        """With no weight at an initial value that would hide it, all of them as the checkpoint stores them."""
        torch.manual_seed(seed)
        net = build(options, self.shape)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
                parameter.copy_(parameter.bfloat16().float())
        return net.eval()

    def batch(self, net: BlockDrafter, tokens: torch.Tensor | None = None) -> TargetBatch:
        tokens = self.tokens if tokens is None else tokens
        taps = {tap: torch.stack([self.features(row, (tap,)) for row in tokens]) for tap in net.taps}
        with torch.no_grad():
            taps[FINAL] = self.model.model(tokens).last_hidden_state
        model = self.model
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return TargetBatch(tokens, taps, mask, model.lm_head, model.model.embed_tokens)

    def features(self, row: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """Taps [n, F] of a text, from the engine's own pass."""
        self.runner.open("features")
        out = self.runner.forward([Span("features", len(row))], row.tolist(), taps)
        self.runner.close("features")
        return torch.cat(out.features, -1)


@pytest.fixture(scope="module")
def pair(make_checkpoint):
    return Pair(make_checkpoint("Llama", num_hidden_layers=4).path)


def opened(pair, net, tmp_path, **place):
    net.save(tmp_path)
    options = {
        "tables": pair.runner.decoder,
        "group": SINGLE,
        "device": "cpu",
        "dtype": torch.float32,
        "num_slots": 512,
    }
    return open_speculator(tmp_path, SpeculatorPlace(**(options | place)))


def drafted(runner, seq_id, suffix, path, first_pass=True):
    """Logits at the root, the last token of `suffix`, and along a chain of draft tokens, [1 + len(path), V]."""
    rows = [runner.forward([Span(seq_id, len(suffix))], suffix).logits] if first_pass else []
    return torch.cat(rows + [runner.forward([Span(seq_id, 1)], [token], fuzzy=True).logits for token in path])


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_has_the_logits_of_the_training_pass(kind, pair, tmp_path):
    net = pair.net(KINDS[kind])
    runner, batch = opened(pair, net, tmp_path), pair.batch(net)
    depths = net.num_draft_tokens
    assert runner.longest_draft == depths
    anchors = torch.tensor([[2, 9, LENGTH - depths - 1]] * 2)
    with torch.no_grad():
        expected = net.logits_at(batch, anchors)
    for row, tokens in enumerate(batch.tokens.tolist()):
        runner.open(row)
        features, known = pair.features(batch.tokens[row], net.taps), 0
        for place, anchor in enumerate(anchors[row].tolist()):
            runner.read_features(row, known, features[known:anchor])
            known = anchor
            cached = runner.cached_len(row)
            logits = drafted(runner, row, tokens[cached : anchor + 1], tokens[anchor + 1 : anchor + depths])
            torch.testing.assert_close(logits, expected[row, place], atol=1e-4, rtol=0)
            runner.commit(row, range(anchor + 1 - cached + 2))
            assert runner.drop_fuzzy(row) and runner.cached_len(row) == anchor
        runner.close(row)
    assert runner.pool.num_free == 512


@pytest.mark.parametrize("kind", FLAGS)
def test_no_block_sees_what_comes_with_its_anchor_or_later(kind, pair):
    net = pair.net(FLAGS[kind])
    batch = pair.batch(net)
    anchors = torch.tensor([[5, 11], [5, 11]])
    depths = net.num_draft_tokens
    with torch.no_grad():
        before = net.hidden_states(batch, anchors)
        for anchor, place in ((5, 0), (11, 1)):
            changed = {tap: states.clone() for tap, states in batch.taps.items()}
            for states in changed.values():
                states[:, anchor:] += 1.0
            after = net.hidden_states(replace(batch, taps=changed), anchors)
            assert torch.equal(after[:, place], before[:, place]), "features from the anchor on"
            for states in changed.values():
                states[:, anchor - 1] += 1.0
            after = net.hidden_states(replace(batch, taps=changed), anchors)
            assert not torch.equal(after[:, place], before[:, place]), "the last features before the anchor"
        tokens = batch.tokens.clone()
        tokens[:, 6:] = (tokens[:, 6:] + 1) % 97
        after = net.hidden_states(replace(batch, tokens=tokens), anchors)
        assert torch.equal(after[:, 0], before[:, 0]), "tokens after the anchor"
        logits = net.logits_at(batch, anchors), net.logits_at(replace(batch, tokens=tokens), anchors)
    assert torch.equal(logits[0][:, 0, 0], logits[1][:, 0, 0]), "the first draft token follows from the anchor alone"
    assert depths == 7


def test_every_recipe_learns_its_own_text(pair):
    """Loss and acceptance after a few steps on one batch; an anchor's depths behind the text's end do not count."""
    for kind, options in FLAGS.items():
        net = build(options, pair.shape).train()
        batch, random = pair.batch(net), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        losses = []
        for _ in range(30):
            loss, metrics = net.loss(batch, random)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        missing = [name for name, parameter in net.named_parameters() if parameter.grad is None]
        assert not missing, f"{kind}: no gradient reaches {missing}"
        assert losses[-1] < 0.9 * losses[0], f"{kind}: {losses[0]} -> {losses[-1]}"
        assert {f"accept_{k}" for k in range(1, 8)} <= metrics.keys() and 1 <= metrics["length"] <= 8
