from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel.comm.group import SINGLE
from parallel.kernels.products import has_products
from parallel.model.layers.embedding import VocabTable
from parallel.model.layers.linear import ColumnLinear, RowLinear, even_rows
from parallel.model.layers.norm import RMSNorm, RMSNormPlusOne
from parallel.model.layers.weight import Layer, QuantizedRows, Weight

PLAIN = {"dtype": torch.float32, "device": "cpu"}


def filled(outputs, inputs, dtype=torch.float32):
    weight = Weight(outputs, inputs, dtype=dtype, device="cpu")
    weight.plain.normal_()
    return weight


@pytest.mark.parametrize("shape", [(64, 32), (97, 33), (5, 7), (1792, 384)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_weight_is_the_same_weight(shape, with_bias):
    weight, bias = filled(*shape), torch.randn(shape[0]) if with_bias else None
    plain = weight.plain
    weight.pack()
    assert weight.plain.numel() == 0 or not has_products()
    ids = torch.tensor([shape[0] - 1, 0])
    assert torch.equal(weight.look_up(ids), plain[ids])
    for num_rows in (1, 2, 3, 4, 5, 70):
        x = torch.randn(num_rows, shape[1])
        torch.testing.assert_close(weight.multiply(x, bias), F.linear(x, plain, bias), atol=1e-3, rtol=0)


def test_float16_is_not_packed():
    weight = filled(8, 8, torch.float16)
    plain = weight.plain
    weight.pack()
    assert weight.plain is plain


@pytest.mark.skipif(not has_products(), reason="needs a C++ compiler")
def test_bfloat16_is_packed_and_its_scores_are_not_rounded():
    weight, x = filled(32, 9, torch.bfloat16), torch.randn(3, 9).bfloat16()
    plain = weight.plain.clone()
    weight.pack()
    assert weight.plain.numel() == 0 and torch.equal(weight.look_up(torch.tensor([3])), plain[3:4])
    exact = x.double() @ plain.double().T
    torch.testing.assert_close(weight.scores(x).double(), exact, atol=1e-5, rtol=1e-5)
    assert weight.scores(x).dtype == torch.float32
    assert torch.equal(weight.multiply(x), weight.scores(x).bfloat16())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("stored", "error"), [(torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)])
def test_a_smaller_type_rounds_and_nothing_else(monkeypatch, kernels, stored, error):
    if not kernels:
        monkeypatch.setattr("parallel.model.layers.weight.has_products", lambda: False)
    matrix, bias, x = torch.randn(64, 33), torch.randn(64), torch.randn(3, 33)
    matrix[5] = 0
    weight = Weight(64, 33, **PLAIN)
    weight.store_as(stored)
    weight.shard("w", slice(64)).destination.copy_(matrix)
    weight.pack()
    assert weight.nbytes() == 64 * 33 * stored.itemsize + (4 * 64 if stored == torch.int8 else 0)
    rounded = weight.look_up(torch.arange(64))
    largest = matrix.abs() if stored == torch.bfloat16 else matrix.abs().amax(1, keepdim=True)
    assert rounded.dtype == torch.float32 and ((rounded - matrix).abs() <= largest * error * 1.001).all()
    expected = F.linear(x, rounded, bias)
    torch.testing.assert_close(weight.multiply(x, bias), expected, atol=1e-4, rtol=1e-4)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(weight.multiply_gated(x, bias), F.silu(gate) * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_too_and_to_the_same_bits_without_kernels(monkeypatch, dtype):
    torch.manual_seed(0)
    matrix, bias, x = torch.randn(64, 36), torch.randn(64).to(dtype), torch.randn(5, 36).to(dtype)
    weights = []
    for _ in range(2):
        weight = Weight(64, 36, dtype=dtype, device="cpu")
        weight.store_as("w8a8")
        weight.shard("w", slice(64)).destination.copy_(matrix)
        weight.pack()
        monkeypatch.setattr("parallel.model.layers.weight.has_products", lambda: False)
        weights.append(weight)
    packed, plain = weights
    assert packed.nbytes() == plain.nbytes() == 64 * 36 + 4 * 64
    assert torch.equal(packed.look_up(torch.tensor([5])), plain.look_up(torch.tensor([5])))
    products = packed.multiply(x, bias)
    assert torch.equal(products, plain.multiply(x, bias)) and products.dtype == dtype
    assert torch.equal(packed.scores(x).to(dtype), plain.scores(x))
    error = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(packed.multiply_gated(x), plain.multiply_gated(x), atol=error, rtol=error)
    whole = x.float() @ plain.look_up(torch.arange(64)).float().T + bias.float()
    off = (products.float() - whole).abs().max() / whole.abs().max()
    assert 0 < off < 0.02


def test_int8_weights_are_the_same_on_any_number_of_ranks(on_ranks):
    torch.manual_seed(0)
    matrix = torch.randn(10, 24)

    def work(group):
        row = RowLinear("c", 24, 10, group, bias=False, **PLAIN)
        row.weight.store_as(torch.int8)
        fill(row, "c.weight", matrix)
        return group.all_gather(row.weight.look_up(torch.arange(10)))

    (whole,) = on_ranks(1, work)
    assert all(torch.equal(parts, whole) for parts in on_ranks(2, work))


def test_rows_are_rounded_alike_on_any_number_of_ranks(on_ranks):
    torch.manual_seed(0)
    matrix, x = torch.randn(10, 24), torch.randn(7, 24)
    x[:, 0] *= 20  # the largest number of a row lies on one rank

    def work(group):
        row = RowLinear("c", 24, 10, group, bias=False, **PLAIN)
        row.weight.store_as("w8a8")
        fill(row, "c.weight", matrix)
        row.weight.pack()
        return row(x[:, row.columns].contiguous())

    (whole,) = on_ranks(1, work)
    for parts in on_ranks(2, work):
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-6)


def test_numbers_that_are_not_finite_are_noticed_in_int8():
    codes, scales = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2)
    for bad in (float("nan"), float("inf"), -float("inf")):
        rows = QuantizedRows(codes, scales, slice(None))
        rows.copy_(torch.tensor([[1.0, 2, 3, 4], [0, bad, 1, 2]]))
        assert not torch.stack(rows.aminmax()).isfinite().all()


def test_bytes_count_shared_weights_once():
    class Twice(Layer):
        def __init__(self):
            self.first = filled(4, 4)
            self.list = [self.first, RMSNorm(8, 1e-5, **PLAIN)]

    assert Twice().nbytes() == 4 * (16 + 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, RMSNormPlusOne])
def test_norm_is_transformers_norm(kind, dtype):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = kind(48, 1e-5, dtype=dtype, device="cpu")
    norm.weight.normal_()
    reference = {RMSNorm: LlamaRMSNorm, RMSNormPlusOne: Gemma2RMSNorm}[kind](48, 1e-5).to(dtype)
    reference.weight.data = norm.weight
    for scale in (1e-4, 1.0, 300.0):  # the first is where eps matters
        x = (scale * torch.randn(5, 3, 48)).to(dtype)
        expected = reference(x)
        assert norm(x).dtype == dtype
        torch.testing.assert_close(norm(x), expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("pack", [False, True])
def test_a_column_and_a_row_layer_share_a_product(on_ranks, pack):
    torch.manual_seed(0)
    up, down, up_bias, down_bias = torch.randn(24, 10), torch.randn(10, 24), torch.randn(24), torch.randn(10)
    x = torch.randn(5, 10)

    def work(group):
        rows = even_rows(12, group)
        column = ColumnLinear(10, [("a", rows), ("b", rows)], bias=True, **PLAIN)
        row = RowLinear("c", 24, 10, group, bias=True, **PLAIN)
        for name, source in (("a.weight", up[:12]), ("b.weight", up[12:]), ("a.bias", up_bias[:12])):
            fill(column, name, source)
        fill(column, "b.bias", up_bias[12:])
        first = slice(group.rank * 6, group.rank * 6 + 6)
        # this rank's inputs of the row layer are its halves of a and of b
        columns = torch.cat((torch.arange(24)[first], torch.arange(12, 24)[first]))
        row.weight.plain.copy_(down[:, columns] if group.size > 1 else down)
        if row.bias is not None:
            row.bias.copy_(down_bias)
        if pack:
            column.weight.pack()
            row.weight.pack()
        return row(torch.relu(column(x)))

    expected = F.linear(torch.relu(F.linear(x, up, up_bias)), down, down_bias)
    for result in [*on_ranks(2, work), work(SINGLE)]:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def fill(layer, name, source):
    (shard,) = [shard for shard in layer.shards("p") if shard.name == f"p.{name}"]
    shard.destination.copy_(source[shard.index])


@pytest.mark.parametrize("vocab_size", [9, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("width", "dtype"), [(6, torch.float32), (7, torch.bfloat16)])
def test_a_vocabulary_of_any_size_is_shared(on_ranks, vocab_size, size, width, dtype):
    """Kernels keep an odd number of bfloat16 inputs with one more."""
    torch.manual_seed(0)
    table, hidden = torch.randn(vocab_size, width).to(dtype), torch.randn(3, width).to(dtype)
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2])

    def work(group):
        vocab = VocabTable("v", vocab_size, width, group, **PLAIN | {"dtype": dtype})
        (shard,) = vocab.shards()
        shard.destination.copy_(table[shard.index])
        vocab.weight.pack()
        return vocab.embed(token_ids), vocab.logits(hidden)

    for embedded, logits in on_ranks(size, work):
        assert torch.equal(embedded, table[token_ids]) and logits.shape == (3, vocab_size)
        close = 1e-5 if dtype == torch.float32 else 2**-7  # PyTorch's product, without a compiler, rounds to bfloat16
        torch.testing.assert_close(logits.float(), hidden.float() @ table.float().T, atol=close, rtol=close)
