"""`invariant=True`: a row's logits have the same bits alone, in company, in a tree, in a chain and in a prompt."""

from __future__ import annotations

import random

import pytest
import torch

from parallel.comm.group import NcclGroup
from parallel.kernels import fixed_products, packed_products
from parallel.kernels.attention import has_attention
from parallel.kernels.fixed_products import multiply_fixed
from parallel.kernels.packing import Packing
from parallel.kernels.triton_launch import INTERPRETS, has_triton
from parallel.kv.pass_plan import Span
from parallel.model.layers import split_kv
from parallel.model.layers.weight import Weight
from parallel.runtime.runner import open_model
from tests.families import FAMILIES

SHAPE = dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=1)
TEXT = [5, 17, 3, 88, 41, 2, 9, 60, 33, 71, 8, 19, 54, 90, 26, 13]
NUM_PROMPT = 14
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")


def alone(runner, text, num_prompt):
    """Logits after each token of the text from the prompt on, one row a pass."""
    runner.open("text")
    logits = [runner.forward([Span("text", num_prompt)], text[:num_prompt]).logits.cpu()]
    runner.commit("text", range(num_prompt))
    for token in text[num_prompt:]:
        logits.append(runner.forward([Span("text", 1)], [token]).logits.cpu())
        runner.commit("text", [0])
    runner.close("text")
    return torch.cat(logits)


def in_a_tree(runner, text, num_prompt, draw):
    """The same by a pass of a tree in which the rest of the text is a path among others, beside other sequences."""
    for name in ("text", "other", "third"):
        runner.open(name)
    others = [draw.randrange(97) for _ in range(6)]
    spans = [Span("other", 5), Span("text", num_prompt, num_logits=1), Span("third", 1)]
    first = runner.forward(spans, others[:5] + text[:num_prompt] + others[5:]).logits.cpu()[1:2]
    for name, count in (("other", 5), ("text", num_prompt), ("third", 1)):
        runner.commit(name, range(count))
    tokens, parents, path, last = [], [], [], -1
    for token in text[num_prompt:]:
        for _ in range(draw.randrange(1, 4)):  # nodes between those of the path
            tokens.append(draw.randrange(97))
            parents.append(draw.randrange(-1, len(parents)))
        path.append(len(tokens))
        tokens.append(token)
        parents.append(last)
        last = path[-1]
    spans = [Span("other", 2, num_logits=2), Span("text", len(tokens), parents, len(tokens)), Span("third", 1)]
    logits = runner.forward(spans, others[:2] + tokens + others[2:3]).logits.cpu()
    for name in ("text", "other", "third"):
        runner.close(name)
    return torch.cat([first, logits[[2 + place for place in path]]])


def in_a_prompt(runner, text, num_prompt):
    runner.open("text")
    logits = runner.forward([Span("text", len(text), num_logits=len(text) + 1 - num_prompt)], text).logits.cpu()
    runner.close("text")
    return logits


def differences(runner, text=TEXT, num_prompt=NUM_PROMPT):
    """Rows whose bits are others in a tree, and in a prompt, than alone."""
    plain = alone(runner, text, num_prompt)
    shapes = in_a_tree(runner, text, num_prompt, random.Random(3)), in_a_prompt(runner, text, num_prompt)
    return [int((logits != plain).any(-1).sum()) for logits in shapes]


@pytest.fixture
def rowwise_products(monkeypatch):
    """The interpreter multiplies tiles by NumPy, whose float32 products of a row depend on the row's place in the tile,
    as a GPU's do not; in float64 they do not after rounding. Without effect on a GPU."""
    if not INTERPRETS:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_self, a, b, d, *_):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.extended
@needs_triton
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {}),
        pytest.param("Mistral", {"sliding_window": 6}, marks=pytest.mark.slow),
        pytest.param("Mixtral", {}, marks=pytest.mark.slow),
    ],
)
def test_bits_of_a_row_on_a_gpu_do_not_depend_on_company_or_tree(
    make_checkpoint, monkeypatch, rowwise_products, family, overrides, device
):
    """Keys are cut into several ranges. In float32: bfloat16 would hide most of what differs in the usual mode."""
    monkeypatch.setattr(split_kv, "FIXED_KEYS", 16)
    monkeypatch.setattr(split_kv.KeyTiles, "choose", lambda *_: split_kv.KeyTiles(16, 1))
    path = make_checkpoint(family, **SHAPE | overrides).path
    options = dict(device=device, num_slots=200, backend="triton", graphs=False, dtype=torch.float32)
    assert differences(open_model(path, invariant=True, **options)) == [0, 0]
    assert all(differences(open_model(path, **options)))  # the negative control: the usual mode is not


@needs_triton
@pytest.mark.slow
def test_an_invariant_pass_is_the_usual_one_but_for_rounding(make_checkpoint, device):
    path = make_checkpoint("Llama", **SHAPE).path
    options = dict(device=device, num_slots=200, backend="triton", graphs=False)
    usual, invariant = open_model(path, **options), open_model(path, invariant=True, **options)
    draws = random.Random(3), random.Random(3)
    found = [in_a_tree(runner, TEXT, NUM_PROMPT, draw) for runner, draw in zip((usual, invariant), draws, strict=True)]
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-3)


@needs_triton
def test_usual_plans_depend_on_company(make_checkpoint, device, monkeypatch):
    """The negative control: how the keys of a text are cut depends on what is beside it, unless ranges are fixed."""
    monkeypatch.setattr(split_kv, "_most_cuts", lambda *_: 4)  # as on a device of few processors
    path = make_checkpoint("Llama", **SHAPE).path

    def cuts(invariant, numbers):
        runner = open_model(path, device=device, num_slots=3000, backend="triton", graphs=False, invariant=invariant)
        for name, number in numbers.items():
            runner.open(name)
            runner.pool.reserve(name, number)
            runner.pool.commit(name, range(number))
        items = runner.plan([Span(name, 1) for name in numbers]).attention.items.cpu()
        return items[items[:, 0] == 0, 2:4].tolist()

    for invariant in (True, False):
        found = [cuts(invariant, numbers) for numbers in ({"text": 1100}, {"text": 1100, "other": 1600})]
        assert (found[0] == found[1]) == invariant
    assert cuts(True, {"text": 1100}) == [[0, 512], [512, 1024], [1024, 1101]]


@pytest.mark.extended
@needs_triton
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_fixed_product_is_pytorchs_and_keeps_a_rows_bits(device, dtype, with_bias):
    torch.manual_seed(0)
    x, matrix, bias = torch.randn(70, 600).to(dtype), torch.randn(72, 600).to(dtype), torch.randn(72).to(dtype)
    given = [one.to(device) for one in (x, matrix, bias)]
    if not with_bias:
        given[2] = None
    product = multiply_fixed(*given).cpu()
    exact = x.double() @ matrix.double().T + (bias.double() if with_bias else 0)
    torch.testing.assert_close(product, exact.to(dtype), atol=1e-3, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4)
    for rows in ([69], range(60, 67)):
        assert torch.equal(multiply_fixed(given[0][list(rows)], *given[1:]).cpu(), product[list(rows)])


@needs_triton
@pytest.mark.parametrize("kept", ["plain", Packing("int4", 128), Packing("fp8", 128)], ids=str)
def test_products_of_any_number_of_rows_have_one_tile_and_one_split(monkeypatch, kept):
    """The interpreter's own products depend on a row's place in a tile, so that the launches are compared."""
    seen = []

    def launch(kernel, grid, *_, **options):
        seen.append((kernel.__name__, grid[1:], options.get("BLOCK_M"), options.get("PARTS")))

    for module in (packed_products, fixed_products):
        monkeypatch.setattr(module, "launch", launch)
    weight = Weight(4096, 4096, dtype=torch.bfloat16, device="meta")
    if kept != "plain":
        weight.store_as("packed")
        weight.settle(kept)

    def launches(num_rows):
        seen.clear()
        assert weight.multiply(torch.empty(num_rows, 4096, dtype=torch.bfloat16, device="meta")).shape[0] == num_rows
        return [one for one in seen if one[0] != "merge_parts"]

    rows = (1, 40, packed_products.MOST_ROWS + 1)
    assert launches(1) == launches(3)
    usual = [launches(number) for number in rows]
    weight.keep_rows_apart()
    found = [launches(number) for number in rows]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1 and found[0][0][2] == 64
    assert kept == "plain" or usual[0] != usual[1] != usual[2]


@needs_triton
def test_invariant_experts_are_multiplied_one_by_one(make_checkpoint, monkeypatch, device):
    """The operator that multiplies all of them at once chooses its tiles by the number of rows."""
    monkeypatch.setattr("parallel.model.layers.weight.groups_on", lambda device, dtype: True)
    path = make_checkpoint("Qwen3Moe", **FAMILIES["Qwen3Moe"]).path
    options = dict(device=device, num_slots=40, backend="triton", graphs=False)
    found = [open_model(path, invariant=invariant, **options).decoder.waits_for_nothing for invariant in (False, True)]
    assert found == [True, False]


@pytest.mark.skipif(not has_attention(), reason="no C++ compiler")
def test_ranks_of_an_invariant_model_add_in_their_order(make_checkpoint, on_ranks):
    path = make_checkpoint("Llama").path

    def on_rank(group):
        usual = group.sums_in_order
        return usual, differences(open_model(path, group, num_slots=200, invariant=True)), group.sums_in_order

    assert on_ranks(2, on_rank) == [(False, [0, 0], True)] * 2


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen2Moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_kernels_of_ours_are_invariant_and_nothing_else_is(make_checkpoint, family, dtype):
    """Hidden sizes that fill no whole vectors, so that PyTorch's own functions would leave a remainder."""
    path = make_checkpoint(family, intermediate_size=52, vocab_size=99).path
    if not has_attention():
        with pytest.raises(ValueError, match="numerics=invariant"):
            open_model(path, dtype=dtype, num_slots=200, invariant=True)
        return
    assert differences(open_model(path, dtype=dtype, num_slots=200, invariant=True)) == [0, 0]
    with pytest.raises(ValueError, match="numerics=invariant: attention 'sdpa'"):
        open_model(path, dtype=dtype, num_slots=200, backend="sdpa", invariant=True)


class _Ranks:
    """What NCCL gathers on a rank of three: all ranks' tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def rank(self):
        return 0

    def size(self):
        return len(self.tensors)

    def _allgather_base(self, parts, own):
        assert torch.equal(own, self.tensors[0])
        parts.copy_(torch.stack(self.tensors))
        return self

    def wait(self):
        """Nothing is under way."""


def test_sums_over_ranks_are_in_rank_order():
    """1 + 256 is, in bfloat16, 256 or 258 by what is added first."""
    tensors = [torch.full((4,), value, dtype=torch.bfloat16) for value in (1.0, 1.0, 256.0)]
    group = NcclGroup(_Ranks(tensors))
    group.sums_in_order = True
    assert group.all_reduce(tensors[0].clone()).tolist() == [258.0] * 4
    group = NcclGroup(_Ranks(tensors[::-1]))
    group.sums_in_order = True
    assert group.all_reduce(tensors[2].clone()).tolist() == [256.0] * 4
