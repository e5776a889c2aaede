"""Whole passes on Triton's kernels: against PyTorch's in the interpreter, and on `meta`, where they are counted.

A tensor on `meta` has no numbers: an operation that needs one on the host, as `item` does, raises an error there.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.kernels import mixtures, triton_launch
from parallel.kernels.triton_launch import has_triton
from parallel.kv.pass_plan import Span
from parallel.model.config import DecoderConfig, RopeScaling
from parallel.model.decoder import Decoder
from parallel.model.layers import split_kv
from parallel.runtime.graph_list import example_rows, graph_shapes
from parallel.runtime.runner import ModelRunner, open_model

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
SHAPE = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
NO_LAUNCH = ("empty", "new_empty", "empty_like", "detach", "lift_fresh")


def rounds(runners, seed, num_rounds):
    """Logits and hidden states of random rounds of prompts, trees and commits, of every runner."""
    draw = random.Random(seed)
    texts = dict.fromkeys(range(3), 0)
    for runner in runners:
        for name in texts:
            runner.open(name)
    for _ in range(num_rounds):
        spans, tokens, kept = [], [], {}
        for name in draw.sample(list(texts), draw.randrange(1, 4)):
            count = draw.choice([1, 2, 5]) if texts[name] else 8
            is_tree = count in (2, 5)
            parents = [draw.randrange(-1, row) for row in range(count)] if is_tree else [*range(-1, count - 1)]
            spans.append(Span(name, count, parents if is_tree else None, draw.choice([count, 1])))
            tokens += [draw.randrange(97) for _ in range(count)]
            row, kept[name] = draw.randrange(count), []
            while row >= 0:
                kept[name].insert(0, row)
                row = parents[row]
        yield [runner.forward(spans, tokens) for runner in runners]
        for name, rows in kept.items():
            texts[name] += len(rows)
            for runner in runners:
                runner.commit(name, rows)


@pytest.mark.slow  # a prompt and steps of a model are in test_experts.py, trees in test_triton_attention.py
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Mistral", {"sliding_window": 9, "num_hidden_layers": 1}),
        ("Mistral", {"sliding_window": 9}),
        ("Qwen3", {}),
        ("Gemma2", {"sliding_window": 9}),
    ],
)
def test_triton_computes_what_pytorch_does(make_checkpoint, family, overrides, device):
    path = make_checkpoint(family, **SHAPE | overrides).path
    runners = [open_model(path, num_slots=200, backend="sdpa")]
    runners.append(open_model(path, device=device, num_slots=200, backend="triton", graphs=False))
    for reference, output in rounds(runners, 0, 2):
        torch.testing.assert_close(output.logits.cpu(), reference.logits, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(output.hidden.cpu(), reference.hidden, atol=2e-4, rtol=1e-3)


def meta_runner(**changes) -> ModelRunner:
    """An 8B model's layers, three of them, without numbers."""
    rope = RopeScaling(rope_theta=5e5)
    shape = dict(vocab_size=128256, hidden_size=4096, num_layers=3, num_heads=32, num_kv_heads=8, head_dim=128)
    shape |= dict(intermediate_size=14336, norm_eps=1e-5, max_positions=8192, rope=rope, tied=False)
    decoder = Decoder(DecoderConfig(**shape | changes), device="meta", dtype=torch.bfloat16)
    return ModelRunner(decoder, decoder.make_pool(4000), backend="triton")


class Launches(TorchDispatchMode):
    """Counts what launches a kernel on a device: operators that compute, and Triton's kernels."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.seen = Counter()
        for module in (triton_launch, split_kv, mixtures):
            monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, kernel, grid, *arguments, **options):
        assert all(tensor.is_meta for tensor in arguments if isinstance(tensor, torch.Tensor)), "on one device"
        self.seen[kernel.__name__] += 1

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        out = operator(*args, **kwargs or {})
        if not operator.is_view and name not in NO_LAUNCH:
            self.seen[name] += 1
        return out


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"window": 512, "windowed": frozenset((0, 1, 2))}])
def test_a_layer_is_at_most_twelve_launches(monkeypatch, changes):
    """And nothing in a pass waits for the device: on `meta` that would be an error."""
    counts = {}
    for num_layers in (2, 3):
        model = meta_runner(num_layers=num_layers, **changes)
        model._backend._num_cuts = 64  # as on a device of many processors
        for seq_id, length in enumerate((1500, 20)):
            model.open(seq_id)
            model.pool.reserve(seq_id, length)
            model.pool.commit(seq_id, range(length))
        plan = model.plan([Span(0, 4, [-1, 0, 0, 1], num_logits=4), Span(1, 1)])
        tokens = torch.zeros(5, dtype=torch.int64, device="meta")
        with Launches(monkeypatch) as launches:
            model.run(plan, tokens)
        counts[num_layers] = launches.seen
    layer = counts[3] - counts[2]
    assert layer.total() <= 11, layer
    assert {"attend_items", "merge_items", "store_heads", "gate_rows"} <= set(layer)
    assert (counts[3] - Counter({name: 3 * count for name, count in layer.items()})).total() <= 16, counts[3]


@pytest.mark.parametrize("num_rows", [1, 5, 96])
def test_launches_of_a_mixture_do_not_grow_with_its_experts_or_its_rows(monkeypatch, num_rows):
    """And, on `meta`, its rows are counted by the host nowhere."""
    monkeypatch.setattr("parallel.model.layers.weight.groups_on", lambda device, dtype: True)
    counts = []
    for num_experts in (32, 64):
        model = meta_runner(num_layers=1, num_experts=num_experts, experts_per_token=8, intermediate_size=256)
        for layer in model.decoder.layers:
            layer.mlp.pack()
        model.open(0)
        plan = model.plan([Span(0, num_rows)])
        tokens = torch.zeros(num_rows, dtype=torch.int64, device="meta")
        with Launches(monkeypatch) as launches:
            model.run(plan, tokens)
        counts.append(launches.seen)
    assert counts[0] == counts[1]
    assert counts[0]["_grouped_mm"] == (0 if num_rows == 1 else 2), "one row reads the matrices of its experts"
    assert counts[0].total() <= 24, counts[0]


@pytest.mark.extended
def test_a_replay_of_a_captured_pass_is_the_eager_pass(make_checkpoint, device):
    """Plans of one key differ only in tensors that a replay copies in, so one graph does for all contexts."""
    model = open_model(
        make_checkpoint("Llama", num_hidden_layers=1).path, num_slots=300, backend="triton", device=device, graphs=False
    )
    model._backend._bucketed = True
    model.open(0), model.open(1)
    model.forward([Span(0, 3), Span(1, 1)], [*range(4)])
    model.commit(0, range(3)), model.commit(1, range(1))
    plans, outputs = [], []
    for tokens in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 3]):
        plan = model.plan([Span(0, 4, [-1, 0, 0, 1]), Span(1, 1)])
        outputs.append(model.run(plan, tokens).hidden)
        plans.append((plan, tokens))
        model.commit(0, [0, 2]), model.commit(1, [0])
    (first, _), (second, tokens) = plans
    assert first.attention.key() == second.attention.key()
    twin = first.attention.like()
    torch._foreach_copy_(twin.tensors(), second.attention.tensors())
    first.attention, first.places = twin, twin.positions
    torch.testing.assert_close(model.run(first, tokens).hidden, outputs[1], atol=0, rtol=0)


@pytest.mark.parametrize("heads", [pytest.param({}, marks=pytest.mark.slow), SHAPE])
def test_the_list_of_graphs_has_one_for_ragged_passes_too(make_checkpoint, heads, device):
    """Plans are made, not run. Whatever rows the sequences of a pass have, it is of a shape captured at the start."""
    model = open_model(
        make_checkpoint("Llama", **heads).path, num_slots=2000, backend="triton", device=device, graphs=False
    )
    model._backend._bucketed = True
    sequences, rows = 20, 16

    def key(numbers, trees=False):
        spans = []
        for seq_id, number in enumerate(numbers):
            model.open(seq_id)
            parents = [-1] * number if trees and number > 1 else None
            spans.append(Span(seq_id, number, parents))
        found = model.plan(spans).attention.key()
        for span in spans:
            model.close(span.seq_id)
        return found

    captured = {key(example_rows(shape)) for shape in graph_shapes(sequences, rows, 512)}
    draw = random.Random(0)
    for _ in range(40):
        most = draw.randint(1, rows)
        numbers = [draw.randint(1, most) for _ in range(draw.randint(1, sequences))]
        assert key(numbers, draw.random() < 0.5) in captured, numbers
    assert len(captured) < 64


def test_a_level_below_a_wide_tree_needs_no_graph_of_its_own(make_checkpoint, device):
    """The pending rows of the levels above have words and depths too."""
    model = open_model(make_checkpoint("Llama").path, num_slots=100, backend="triton", device=device, graphs=False)
    model._backend._bucketed = True
    model.open(0)
    keys = []
    for level in range(6):
        keys.append(model.plan([Span(0, 4, [4 * level - 1] * 4 if level else [-1] * 4)]).attention.key())
    assert len(set(keys)) == 1


@pytest.mark.extended
def test_plans_of_a_chain_are_those_of_its_steps(make_checkpoint, device):
    """Laid out together, with keys cut as for the first: one sequence has two ranges of keys, one a single key."""
    models, path = [], make_checkpoint("Llama", num_hidden_layers=1).path
    for _ in range(2):
        model = open_model(path, num_slots=200, backend="triton", device=device, graphs=False)
        model._backend._bucketed, model._backend._num_cuts = True, 4
        for seq_id, length in ((0, 100), (1, 0)):
            model.open(seq_id)
            model.pool.reserve(seq_id, length)
            model.pool.commit(seq_id, range(length))
        for part in (model.pool.keys, model.pool.values):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(0)))
        models.append(model)
    together, single = models
    spans = [Span(0, 1), Span(1, 1)]
    plans = together._plan_chain(spans, 2)
    assert (plans[0].attention.items[:, 1] > 0).sum() == 3
    for plan, tokens in zip(plans, ([1, 3], [2, 5]), strict=True):
        ours, theirs = together.run(plan, tokens), single.forward(spans, tokens)
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)


def test_the_steps_of_all_chains_are_one_graph(make_checkpoint, device):
    """Whatever the lengths of their texts."""
    model = open_model(make_checkpoint("Llama").path, num_slots=900, backend="triton", device=device, graphs=False)
    model._backend._bucketed = True
    keys = set()
    for seq_id, length in enumerate((1, 30, 400)):
        model.open(seq_id)
        model.plan([Span(seq_id, length, num_logits=0)])
        model.open(("beside", seq_id))
        spans = [Span(seq_id, 1), Span(("beside", seq_id), 1)]
        plans = model._plan_chain(spans, 8)
        keys |= {(plan.attention.key(), len(plan.logit_rows)) for plan in plans}
        assert [plan.positions.tolist() for plan in plans] == [[length + step, step] for step in range(8)]
        model.close(seq_id)
    assert len(keys) == 1


def test_arguments_of_kernels_are_aligned_for_any_number_of_rows(make_checkpoint, device):
    """Triton compiles a kernel anew where an address is a multiple of 16 that was none before, or the other way."""
    model = open_model(make_checkpoint("Llama").path, num_slots=100, backend="triton", device=device, graphs=False)
    for seq_id, number in enumerate((5, 3, 1)):
        model.open(seq_id)
        tensors = model.plan([Span(seq_id, number, [-1] * number)]).attention.tensors()
        assert all(getattr(tensor, "on_cpu", tensor).data_ptr() % 16 == 0 for tensor in tensors)


def test_triton_is_refused_where_it_cannot_run(llama, monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETS", False)
    with pytest.raises(ValueError, match="attention=triton: needs a CUDA device"):
        open_model(llama.path, backend="triton")
