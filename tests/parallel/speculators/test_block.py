"""Block drafters: the runner against the training pass, what a block may see, and drafts after every verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.tools.training.speculators.recipes import RECIPES
from parallel.comm.group import SINGLE
from parallel.kernels.products import has_tiles
from parallel.kernels.triton_launch import runs_on
from parallel.runtime.runner import Span, open_model
from parallel.speculators.block.layers import embedding_of
from parallel.speculators.block.runner import BlockRunner
from parallel.speculators.block.training import BlockDrafter, BlockOptions, build
from parallel.speculators.config import FINAL
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.training.interface import TargetBatch, TargetShape
from tests.families import FAMILIES

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
        """A net with no weight at an initial value that would hide it, all of them as the checkpoint stores them."""
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


def opened(pair, net, tmp_path, at=None, **place):
    """The runner of the checkpoint at `at`, by default the one that the module saves."""
    net.save(tmp_path)
    options = {
        "tables": pair.runner.decoder,
        "group": SINGLE,
        "device": "cpu",
        "dtype": torch.float32,
        "num_slots": 512,
    }
    return open_speculator(at or tmp_path, SpeculatorPlace(**(options | place)))


def drafted(runner, seq_id, suffix, path, first_pass=True):
    """Logits at the root, the last token of `suffix`, and along a chain of draft tokens, [1 + len(path), V]."""
    rows = [runner.forward([Span(seq_id, len(suffix))], suffix).logits] if first_pass else []
    return torch.cat(rows + [runner.forward([Span(seq_id, 1)], [token], fuzzy=True).logits for token in path])


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_has_the_logits_of_the_training_pass(kind, pair, tmp_path):
    net = pair.net(KINDS[kind])
    runner, batch = opened(pair, net, tmp_path), pair.batch(net)
    depths = net.num_draft_tokens
    assert runner.longest_draft == depths
    anchors = torch.tensor([[2, 9, LENGTH - depths - 1]] * 2)
    with torch.no_grad():
        expected = net.logits_at(batch, anchors)[-1]
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
        logits = net.logits_at(batch, anchors)[-1], net.logits_at(replace(batch, tokens=tokens), anchors)[-1]
    assert torch.equal(logits[0][:, 0, 0], logits[1][:, 0, 0]), "the first draft token follows from the anchor alone"
    assert depths == 7


@pytest.mark.slow
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


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_trees_has_the_logits_of_its_path(kind, pair, tmp_path):
    """Two texts in one pass and one whose block is of another pass; the root and some nodes in one exact pass, the
    others in a fuzzy one; the deepest node lies below the block."""
    net = pair.net(KINDS[kind])
    alone, runner, depths = opened(pair, net, tmp_path), opened(pair, net, tmp_path), net.num_draft_tokens
    texts = {"a": pair.tokens[0, :9].tolist(), "b": pair.tokens[1, :13].tolist(), "c": pair.tokens[1, :5].tolist()}
    parents = [-1, 0, 0, 1, 3, *range(4, 4 + depths)]  # of nodes, the root being -1
    tokens = [(7 * node + 3) % 97 for node in range(len(parents))]
    expected = {}
    for name, text in texts.items():
        for each in (alone, runner):
            each.open(name)
            each.read_features(name, 0, pair.features(torch.tensor(text[:-1]), net.taps))
        expected[name] = [_along(alone, name, text, tokens, parents, node) for node in range(-1, len(parents))]
    first = 3
    rows = {
        name: [*range(-1, len(text) - 1), *(len(text) + parent for parent in parents)] for name, text in texts.items()
    }
    found: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    for group in (["c"], ["a", "b"]):
        spans = [
            Span(name, len(texts[name]) + first, rows[name][: len(texts[name]) + first], first + 1) for name in group
        ]
        fed = [token for name in group for token in texts[name] + tokens[:first]]
        logits = runner.forward(spans, fed).logits
        for i, name in enumerate(group):
            found[name] += logits[i * (first + 1) : (i + 1) * (first + 1)]
    rest = len(parents) - first
    spans = [Span(name, rest, rows[name][len(texts[name]) + first :], rest) for name in ("a", "c", "b")]
    logits = runner.forward(spans, tokens[first:] * 3, fuzzy=True).logits
    for i, name in enumerate(("a", "c", "b")):
        found[name] += logits[i * rest : (i + 1) * rest]
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(expected[name]), atol=1e-5, rtol=1e-5)
        assert found[name][-1].isneginf().all()


def _along(runner, name, text, tokens, parents, node):
    """The logits at a node by a chain of passes; nothing stays pending."""
    path = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    logits = drafted(runner, name, text[runner.cached_len(name) :], path)[-1]
    runner.truncate(name, len(text) - 1)
    return logits


@pytest.mark.parametrize("kind", FLAGS)
def test_after_any_verdicts_the_rows_are_those_of_the_text(kind, pair, tmp_path):
    net = pair.net(FLAGS[kind])
    runner, depths = opened(pair, net, tmp_path), net.num_draft_tokens
    torch.manual_seed(2)
    text = torch.randint(97, (60,))
    features, tokens = pair.features(text, net.taps), text.tolist()
    runner.open("grown")
    root, known = 4, 0
    for accepted in (0, 3, depths, 1, 0, depths - 1, 2, depths):
        runner.read_features("grown", known, features[known:root])
        known, cached = root, runner.cached_len("grown")
        draft = tokens[root + 1 : root + 1 + accepted] + [5] * (depths - accepted)
        drafted(runner, "grown", tokens[cached : root + 1], draft[:-1])
        runner.commit("grown", range(min(root + 1 - cached + accepted, root - cached + depths)))
        assert runner.drop_fuzzy("grown")
        root += accepted + 1
    runner.read_features("grown", known, features[known:root])
    runner.open("fresh")
    runner.read_features("fresh", 0, features[:root])
    logits = drafted(runner, "grown", tokens[runner.cached_len("grown") : root + 1], [1, 2, 3])
    torch.testing.assert_close(logits, drafted(runner, "fresh", tokens[: root + 1], [1, 2, 3]), atol=1e-5, rtol=1e-5)
    rows = [torch.from_numpy(runner.pool.slots(name).copy()) for name in ("grown", "fresh")]
    assert [len(slots) for slots in rows] == [root, root], "rows of the text alone are kept"
    for kept in (runner.pool.keys, runner.pool.values):
        torch.testing.assert_close(kept[:, rows[0]], kept[:, rows[1]], atol=1e-5, rtol=1e-5)


def test_parts_without_weights_leave_the_plain_block(pair):
    """Convolutions as they begin: DFlash. A selector without codebook: its likeliest token. No Markov weights: the
    block whose anchor's row drafts first."""
    plain, batch, anchors = pair.net(FLAGS["dflash"]), None, torch.tensor([[3, 8], [4, 10]])
    batch = pair.batch(plain)

    def with_parts(options, *begin):
        net = build(options, pair.shape)
        weights = {name: value for name, value in net.state_dict().items() if name.split(".")[0] in begin}
        weights |= {name: value for name, value in net.state_dict().items() if "_conv." in name}
        net.load_state_dict(pair.net(replace(options, conv_taps=0, corrector="none")).state_dict() | weights)
        with torch.no_grad():
            return net.logits_at(batch, anchors)[-1]

    with torch.no_grad():
        expected = plain.logits_at(batch, anchors)[-1]
    convolved = with_parts(replace(FLAGS["dflash"], conv_taps=2))
    torch.testing.assert_close(convolved, expected)
    selected = with_parts(replace(FLAGS["dflash2"], conv_taps=0), "candidate_selector")
    assert torch.equal(selected.argmax(-1), expected.argmax(-1)) and (selected > -torch.inf).sum(-1).eq(5).all()
    first = replace(FLAGS["dspark"], confidence=False)
    with torch.no_grad():
        expected = pair.net(replace(first, corrector="none")).logits_at(batch, anchors)[-1]
    torch.testing.assert_close(with_parts(first, "markov_head"), expected)


def test_positions_weigh_what_they_lengthen_or_fall_exponentially(pair):
    """D-PACE: the later ones count the less, the less likely those before them are."""
    for weighting in ("d_pace", "exponential"):
        net = pair.net(replace(FLAGS["dflash"], weighting=weighting, decay=2.0))
        batch = pair.batch(net)
        with torch.no_grad():
            loss, _ = net.loss(batch, torch.Generator().manual_seed(3))
            anchors, valid = net._anchors(batch, torch.Generator().manual_seed(3))
            labels = net._tokens(batch, anchors, 1)
            logs = net.logits_at(batch, anchors)[-1].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        depths = torch.arange(net.num_draft_tokens)
        weights = valid * torch.exp(-depths / 2)
        if weighting == "d_pace":
            half = ((1 + logs.exp()) / 2 * valid).cumprod(-1)
            weights = torch.stack([half[..., depth:].sum(-1) for depth in depths], -1) * valid
        torch.testing.assert_close(loss, -(logs * weights).sum() / weights.sum())


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_draft_as_one(kind, pair, tmp_path, on_ranks):
    net = pair.net(KINDS[kind])
    tokens, features = pair.tokens[0].tolist(), pair.features(pair.tokens[0], net.taps)

    def draft(group):
        tables = open_tables(pair.path, group)
        runner = open_speculator(tmp_path, SpeculatorPlace(tables, group, "cpu", torch.float32, 64))
        runner.open(0)
        runner.read_features(0, 0, features[:11])
        return drafted(runner, 0, tokens[:12], [3, 1, 4])

    alone = opened(pair, net, tmp_path)
    alone.open(0)
    alone.read_features(0, 0, features[:11])
    expected = drafted(alone, 0, tokens[:12], [3, 1, 4])
    for logits in on_ranks(2, draft):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, "w8a8"])
def test_matrices_may_be_stored_rounded(stored, pair, tmp_path):
    net = pair.net(FLAGS["dspark"])
    tokens, features = pair.tokens[0].tolist(), pair.features(pair.tokens[0], net.taps)
    logits = []
    for weights in (None, stored):
        runner = opened(pair, net, tmp_path, weights=weights)
        runner.open(0)
        runner.read_features(0, 0, features[:11])
        logits.append(drafted(runner, 0, tokens[:12], [3, 1, 4]))
    off = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
    if stored == torch.bfloat16:
        assert off <= (1e-5 if has_tiles() else 0), "the checkpoint's numbers are bfloat16"
    else:
        assert 0 < off < 0.1


def test_the_confidence_of_a_node_is_that_of_training_and_knows_nothing_of_what_is_drawn(pair, tmp_path):
    net = pair.net(FLAGS["dspark"])
    runner, batch, depths = opened(pair, net, tmp_path), pair.batch(net), net.num_draft_tokens
    tokens, anchors = pair.tokens[0].tolist(), torch.tensor([[9], [9]])
    with torch.no_grad():
        hidden = net.hidden_states(batch, anchors)
        before = pair.tokens[:, None, 9 : 9 + depths]
        expected = net.predicted(hidden, before).sigmoid()[0, 0]
    runner.open(0)
    runner.read_features(0, 0, pair.features(pair.tokens[0], net.taps)[:9])
    found = [runner.forward([Span(0, 10)], tokens[:10]).acceptance]
    found += [runner.forward([Span(0, 1)], [token], fuzzy=True).acceptance for token in tokens[10 : 10 + depths]]
    torch.testing.assert_close(
        torch.cat([one for one in found if one is not None]), torch.cat((expected, torch.zeros(1))), atol=1e-5, rtol=0
    )


@pytest.mark.extended
def test_the_rows_of_blocks_are_those_of_cuda_in_one_rectangle(pair, tmp_path):
    """The backend of CUDA, here on a CPU, with texts of different lengths in one pass."""
    net = pair.net(FLAGS["dflash2"])
    logits = []
    for backend in ("sdpa", "padded", *(["triton"] if runs_on(torch.device("cpu")) else [])):
        runner = opened(pair, net, tmp_path)
        assert isinstance(runner, BlockRunner)
        place = SpeculatorPlace(pair.runner.decoder, SINGLE, "cpu", torch.float32, 512)
        runner = BlockRunner(runner.layers, place, backend=backend)
        texts = [pair.tokens[0, :4], pair.tokens[1, :9]]
        for name, text in enumerate(texts):
            runner.open(name)
            runner.read_features(name, 0, pair.features(text[:-1], net.taps))
        spans = [Span(name, len(text)) for name, text in enumerate(texts)]
        logits.append(runner.forward(spans, torch.cat(texts).tolist()).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "OPT"])
def test_without_a_scale_a_block_reads_what_enters_its_target_but_for_positions(make_checkpoint, family):
    tables = open_model(make_checkpoint(family, **FAMILIES[family]).path, num_slots=8).decoder
    token_ids = torch.arange(5)
    config: Any = SimpleNamespace(embedding_scale=None)
    found = embedding_of(config, tables)(token_ids)
    scaled = tables.config.embedding_scale or 1.0
    expected = tables.embedding.embed(token_ids) * (1.0 if family == "OPT" else scaled)
    torch.testing.assert_close(found, expected)
    assert tables.learns_positions is (family == "OPT")
