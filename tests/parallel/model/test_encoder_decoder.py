"""Encoder-decoders against transformers: logits by text, source, tree and rank, and the rows of their sources."""

from __future__ import annotations

import json

import pytest
import torch

from parallel.kernels.attention import has_attention
from parallel.kv.pass_plan import Span
from parallel.model.checkpoint import tensor_headers
from parallel.model.families import registry
from parallel.model.families.registry import read_config
from parallel.model.layers.backends import TAKE_BIAS
from parallel.runtime.model_bytes import weight_bytes
from parallel.runtime.runner import open_model
from tests.families import ENCODER_DECODERS, tiny_encoder_decoder
from tests.parallel.backends import EVERY_BACKEND

SOURCES = [[5, 6, 7, 8, 9, 0], [40, 3, 0], [11, *range(20, 50), 0]]
T5_FIELDS = {"feed_forward_proj", "scale_decoder_outputs", "relative_attention_num_buckets", "d_kv"}
TEXT = [2, 11, 12, 13, 60, 61, 9]


@pytest.fixture(scope="module", params=[*ENCODER_DECODERS, "T5, version 1.1"])
def saved(request, tmp_path_factory):
    family, _, is_later = request.param.partition(", ")
    later = {"feed_forward_proj": "gated-gelu", "initializer_factor": 1.0} if is_later else {}
    shape = {"vocab_size": 97, "max_position_embeddings": 64} | later
    model, path = tiny_encoder_decoder(family, 0, **shape), tmp_path_factory.mktemp("checkpoint")
    if is_later:  # which has a head of its own, that is not scaled
        model.lm_head.weight = torch.nn.Parameter(torch.randn(97, 32) * 0.3)
        model.config.scale_decoder_outputs = False
    model.save_pretrained(path)
    if is_later:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        assert "lm_head.weight" in tensor_headers(path)
    return path, model


@torch.no_grad()
def reference(model, source, text=TEXT):
    return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text])).logits[0]


def feed(runner, source, chunks, seq_id: int | str = 0):
    runner.open(seq_id)
    runner.set_source(seq_id, source)
    logits, start = [], 0
    for i, size in enumerate(chunks):
        logits.append(runner.forward([Span(seq_id, size, num_logits=size)], TEXT[start : start + size]).logits)
        if i == 0:
            runner.commit(seq_id, range(size))
        start += size
    runner.close(seq_id)
    return torch.cat(logits)


def test_every_encoder_decoder_has_a_row():
    named = {"MarianMTModel", "BartForConditionalGeneration", "T5ForConditionalGeneration"}
    assert set(registry.ENCODER_DECODERS) == named and len(ENCODER_DECODERS) == 3 and not set(registry.FAMILIES) & named


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_logits_are_those_of_transformers(saved, backend):
    path, model = saved
    if read_config(path).relative_bias is not None and backend not in TAKE_BIAS:
        with pytest.raises(ValueError, match="adds a bias to its scores, which it does not take"):
            open_model(path, num_slots=80, backend=backend)
        return
    runner = open_model(path, num_slots=80, backend=backend)
    for source in SOURCES:
        expected = reference(model, source)
        assert expected.std() > 0.5, "weights too weak for the comparison to mean anything"
        for chunks in ([7], [3, 4], [1] * 7):
            torch.testing.assert_close(feed(runner, source, chunks), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(reference(model, SOURCES[0]), reference(model, SOURCES[1]), atol=0.5), "sources matter"
    runner.pool.check()
    assert runner.pool.num_free == 80, "rows of sources are given back"


def test_sequences_of_a_pass_read_their_own_sources_and_so_do_trees_and_those_that_borrow(saved):
    path, model = saved
    runner = open_model(path, num_slots=200)
    for i, source in enumerate(SOURCES):
        runner.open(i)
        runner.set_source(i, source)
    assert not runner.can_reserve(200 - sum(map(len, SOURCES)) + 1), "sources are counted before they are read"
    assert runner.can_reserve(200 - sum(map(len, SOURCES)))
    together = runner.forward([Span(i, 4, num_logits=4) for i in range(3)], TEXT[:4] * 3).logits.view(3, 4, -1)
    for i, source in enumerate(SOURCES):
        torch.testing.assert_close(together[i], reference(model, source, TEXT[:4]), atol=1e-4, rtol=0)
        runner.commit(i, range(3))
    tree, parents = [TEXT[3], 70, 71, 72], [-1, 0, 0, 1]
    logits = runner.forward([Span(1, 4, parents, num_logits=4)], tree).logits
    for node, path_tokens in enumerate(([], [70], [71], [70, 72])):
        expected = reference(model, SOURCES[1], [*TEXT[:4], *path_tokens])[-1]
        torch.testing.assert_close(logits[node], expected, atol=1e-4, rtol=0)
    runner.sequences.borrow("draft", 2)
    logits = runner.forward([Span("draft", 1)], TEXT[3:4]).logits
    torch.testing.assert_close(logits[0], together[2, 3], atol=1e-4, rtol=0)
    runner.close("draft")
    for i in range(3):
        runner.close(i)
    runner.pool.check()
    assert runner.pool.num_free == 200


@pytest.mark.skipif(not has_attention(), reason="bits of a row depend on those beside it without a compiler")
@pytest.mark.parametrize("family", ["Marian", "Bart", "T5"])
def test_a_row_is_the_same_to_the_bit_alone_in_a_batch_and_in_chunks(family, tmp_path):
    """But for PyTorch's other activations, whose last bit depends on the place in a vector."""
    activation = {} if family == "T5" else {"activation_function": "relu"}
    shape = {"vocab_size": 97, "max_position_embeddings": 64} | activation
    tiny_encoder_decoder(family, 0, **shape).save_pretrained(tmp_path)
    runner = open_model(tmp_path, num_slots=200)
    for i, source in enumerate(SOURCES):
        runner.open(i)
        runner.set_source(i, source)
    together = runner.forward([Span(i, 7, num_logits=7) for i in range(3)], TEXT * 3).logits.view(3, 7, -1)
    for i, source in enumerate(SOURCES):
        assert torch.equal(feed(runner, source, [7], seq_id="alone"), together[i])
        assert torch.equal(feed(runner, source, [1] * 7, seq_id="alone"), together[i])


@pytest.mark.extended
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_share_both_stacks(saved, on_ranks, size):
    """97 tokens of vocabulary are odd for every size; the bias of the head is split with it."""
    path, model = saved
    expected = reference(model, SOURCES[2])

    def work(group):
        runner = open_model(path, group, num_slots=64)
        assert weight_bytes(runner.config, size, 4) >= runner.decoder.nbytes() > weight_bytes(runner.config, 8, 4)
        with runner.decoder.lm_head.ungathered():
            own = feed(runner, SOURCES[2], [7])
        return feed(runner, SOURCES[2], [3, 4]), own

    results = on_ranks(size, work)
    for logits, _ in results:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat([own for _, own in results], 1), expected, atol=1e-4, rtol=0)


def test_the_bytes_of_both_stacks_are_known_before_they_are_read(saved):
    runner = open_model(saved[0], num_slots=8)
    assert weight_bytes(runner.config, 1, 4) == runner.decoder.nbytes()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.int8, "w8a8"])
def test_both_stacks_are_stored_in_a_smaller_type(saved, weights):
    path, model = saved
    runner = open_model(path, num_slots=64, weights=weights)
    name = str(weights).removeprefix("torch.")
    assert weight_bytes(runner.config, 1, 4, weights=name) == runner.decoder.nbytes()
    error = (feed(runner, SOURCES[0], [7]) - reference(model, SOURCES[0])).std()
    assert 0 < error < 0.2 * reference(model, SOURCES[0]).std()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings=False"),
        ({"decoder_vocab_size": 5}, "decoder_vocab_size=5"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"decoder_start_token_id": None}, "lacks decoder_start_token_id"),
        ({"decoder_start_token_id": 97}, "decoder_start_token_id=97: is no token"),
        ({"decoder_attention_heads": 5}, "d_model=32: must be divided"),
        ({"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj='gated-relu'"),
        ({"scale_decoder_outputs": False}, "write tie_word_embeddings=false if the checkpoint has lm_head.weight"),
        ({"relative_attention_num_buckets": 6}, "relative_attention_num_buckets=6: must be a multiple of 4"),
        ({"d_kv": None}, "lacks d_kv|d_kv"),
    ],
)
def test_what_we_cannot_run_is_named(change, message):
    family, name = ("T5", "T5ForConditionalGeneration") if T5_FIELDS & set(change) else ("Marian", "MarianMTModel")
    hf = ENCODER_DECODERS[family] | {"vocab_size": 97, "max_position_embeddings": 64}
    with pytest.raises(ValueError, match=message):
        read_config(hf | {"architectures": [name]} | change)
