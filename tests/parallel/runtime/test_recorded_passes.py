"""Passes whose kernels are called from one call have the bits of those that are run layer by layer."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels.attention import has_attention
from parallel.kernels.choice import Race
from parallel.kernels.noise import gumbel_rows
from parallel.kernels.steps import Steps
from parallel.kv.pass_plan import Span
from parallel.kv.row_limits import ChunkLimits
from parallel.model.layer_plan import LayerPlan
from parallel.runtime import recorded_passes
from parallel.runtime.row_policies import ChunkRows
from parallel.runtime.runner import ModelRunner, open_model
from parallel.runtime.weight_update import update_weights
from parallel.self_speculation.runner import SelfDraftRunner
from tests.families import ENCODER_DECODERS, FAMILIES
from tests.matrices import in_turn
from tests.parallel.runtime.test_weight_update import FEW_EXPERTS

pytestmark = pytest.mark.skipif(not has_attention(), reason="no compiler")

MOST_ROWS = 64
"""Rows of a pass that is recorded, here."""
WAYS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "stored bfloat16": {"weights": torch.bfloat16},
    "int8": {"weights": torch.int8},
    "w8a8": {"weights": "w8a8"},
    "invariant": {"invariant": True},
}
PASSES = [
    [Span("a", 5, num_logits=5)],
    [Span("a", 1), Span("b", 4, [-1, 0, 0, 2], num_logits=4)],
    [Span("b", 3, num_logits=3), Span("a", 2, num_logits=2)],
    [Span("a", MOST_ROWS + 1)],
    [Span("a", MOST_ROWS, num_logits=MOST_ROWS)],
    [Span("b", 1)],
]


@pytest.fixture
def runs(monkeypatch):
    """The number of rows of every run of recorded steps; of chains the numbers of their passes."""
    seen, run = [], Steps.run

    def counted(steps, *times):
        seen.append(times[0][0] if len(times) == 1 else tuple(given[0] for given in times))
        run(steps, *times)

    monkeypatch.setattr(Steps, "run", counted)
    monkeypatch.setattr(recorded_passes, "WORTH_RECORDING", 1)
    monkeypatch.setattr(recorded_passes, "MOST_ROWS", MOST_ROWS)
    return seen


def opened(path, *, eager: bool, **options) -> ModelRunner:
    model = open_model(path, num_slots=400, backend="ragged", **options)
    if eager:
        model.run_eagerly()
    for seq_id in ("a", "b"):
        model.open(seq_id)
        model.set_source(seq_id, [2, 7, 1])  # without effect but for encoders
    return model


def outputs(model: ModelRunner, taps=()) -> list[torch.Tensor]:
    """Everything that the passes return, held until the last one has run."""
    found = []
    for spans in PASSES:
        num_rows = sum(span.num_tokens for span in spans)
        made = model.forward(spans, [7 * row % 97 for row in range(num_rows)], taps)
        found += [made.logits, made.hidden, *made.features]
        for span in spans:
            model.commit(span.seq_id, range(1 if span.parents else span.num_tokens))
    return found


def assert_equal(found, expected) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, *ENCODER_DECODERS])
def test_every_family_has_the_bits_of_its_layers(tiny_checkpoint, runs, family, dtype):
    path = tiny_checkpoint(family, **FEW_EXPERTS.get(family, {}))
    found = outputs(opened(path, eager=False, dtype=dtype))
    assert runs == [5, 5, 5, MOST_ROWS, 1]
    assert_equal(found, outputs(opened(path, eager=True, dtype=dtype)))


def test_the_largest_pass_that_is_recorded_leaves_nothing_to_a_small_one(tiny_checkpoint, monkeypatch):
    """Passes of all sizes fill the same memory."""
    monkeypatch.setattr(recorded_passes, "WORTH_RECORDING", 1)
    found, runs, run = [], [], Steps.run
    monkeypatch.setattr(Steps, "run", lambda steps, *times: (runs.append(times[0][0]), run(steps, *times)))
    sizes = recorded_passes.MOST_ROWS, 1, 700, 1
    for eager in (False, True):
        model = open_model(tiny_checkpoint("Llama"), num_slots=sum(sizes), backend="ragged")
        if eager:
            model.run_eagerly()
        model.open("a")
        for size in sizes:
            found.append(model.forward([Span("a", size)], [7 * row % 97 for row in range(size)]).logits)
            model.commit("a", range(size))
    assert runs == [*sizes]
    assert_equal(found[: len(sizes)], found[len(sizes) :])


@pytest.mark.parametrize("of_target", [False, True])
def test_passes_that_choose_the_rows_of_later_ones_are_run_layer_by_layer(tiny_checkpoint, runs, of_target):
    """Of a draft model with `rows=chunks`, and of the target's own drafts; the others are recorded."""
    found = []
    for eager in (False, True):
        model = opened(tiny_checkpoint("Llama"), eager=eager)
        own = SelfDraftRunner(model, LayerPlan.whole(model.config.num_layers)) if of_target else None
        drafts = own or model
        drafts.keep_rows_by(ChunkRows(model.decoder, model.pool, ChunkLimits(4, 4, 10)))
        logits = []
        for i in range(60):
            logits.append(drafts.forward([Span("a", 1)], [7 * i % 97]).logits)
            if own is not None:
                own.release_rows()
                model.forward([Span("a", 1)], [7 * i % 97])
            model.commit("a", [0])
        found.append(logits)
    assert_equal(*found)
    assert len(runs) == 60 * (1 + of_target) - 5, "one in ten chooses, from the first row beyond 16 on"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
def test_every_activation_of_any_number_of_gates(tiny_checkpoint, runs, activation, dtype):
    path = tiny_checkpoint("Llama", hidden_act=activation, intermediate_size=40)  # gates of 2.5 panels
    found = outputs(opened(path, eager=False, dtype=dtype))
    assert len(runs) == 5
    assert_equal(found, outputs(opened(path, eager=True, dtype=dtype)))


@pytest.mark.parametrize("taps", [(), (0, 2), (1, 3)])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_keep_weights_and_every_tap(tiny_checkpoint, runs, way, taps):
    path = tiny_checkpoint("Llama", num_hidden_layers=3)
    found = outputs(opened(path, eager=False, **WAYS[way]), taps)
    assert len(runs) == 5
    assert_equal(found, outputs(opened(path, eager=True, **WAYS[way]), taps))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_that_are_the_head_too_and_others(tiny_checkpoint, runs, way, tied):
    path = tiny_checkpoint("Llama", tie_word_embeddings=tied)
    found = outputs(opened(path, eager=False, **WAYS[way]))
    assert len(runs) == 5
    assert_equal(found, outputs(opened(path, eager=True, **WAYS[way])))


@pytest.mark.parametrize("layers", [LayerPlan.prefix(2), LayerPlan.skipping(3, attention=[1], mlp=[0, 2])])
@pytest.mark.parametrize("enters", [False, True])
def test_some_sublayers_alone(tiny_checkpoint, runs, layers, enters):
    def features(*, eager):
        model = opened(tiny_checkpoint("Qwen3", num_hidden_layers=3), eager=eager)
        found = []
        for num_rows in (3, 1):
            plan = model.plan([Span("a", num_rows, num_logits=num_rows)])
            plan.layers = layers
            if enters:
                plan.entering = torch.randn(
                    num_rows, model.config.hidden_size, generator=torch.Generator().manual_seed(1)
                )
            made = model.run(plan, [5] * num_rows, (0, 3))
            found += [made.logits, made.hidden, *made.features]
            model.commit("a", range(num_rows))
        return found

    found = features(eager=False)
    assert runs == [3, 1]
    assert_equal(found, features(eager=True))


def test_a_pass_after_new_weights_reads_them(tiny_checkpoint, runs):
    first, second = (tiny_checkpoint("Llama", seed=seed) for seed in (0, 1))
    model = opened(first, eager=False)
    outputs(model)
    update_weights(model, second)
    for seq_id in ("a", "b"):
        model.close(seq_id)
        model.open(seq_id)
    assert_equal(outputs(model), outputs(opened(second, eager=True)))
    assert len(runs) == 10


def test_the_recording_that_was_used_longest_ago_goes_first(tiny_checkpoint, runs, monkeypatch):
    monkeypatch.setattr(recorded_passes, "MOST_KINDS", 2)
    model = opened(tiny_checkpoint("Llama", num_hidden_layers=3), eager=False)
    recorded = []
    passes, record = model._recorded.passes, model._recorded.passes._record
    monkeypatch.setattr(
        passes, "_record", lambda layers, *rest: recorded.append(layers.args[0].taps) or record(layers, *rest)
    )
    for taps in ((1,), (2,), (1,), (3,), (1,), (2,)):
        model.forward([Span("a", 1)], [1], taps)
        model.commit("a", [])
    assert recorded == [(1,), (2,), (3,), (2,)] and len(runs) == 6


@pytest.mark.parametrize("width", [40, 41])
def test_the_first_passes_of_a_kind_are_not_worth_a_recording(tiny_checkpoint, runs, monkeypatch, width):
    """Rows of an odd number of bfloat16 are filled up by PyTorch, so they cannot be recorded."""
    monkeypatch.setattr(recorded_passes, "WORTH_RECORDING", 3)
    path, recorded = tiny_checkpoint("Llama", intermediate_size=width), []
    model = opened(path, eager=False, dtype=torch.bfloat16)
    record = model._recorded.passes._record
    monkeypatch.setattr(model._recorded.passes, "_record", lambda *layers: recorded.append(layers) or record(*layers))
    for num_passes in range(1, 6):
        model.forward([Span("a", 1)], [1])
        model.commit("a", [])
        assert len(recorded) == (0 if num_passes < 3 else 1 + width % 2), "each kind is tried once"
    assert len(runs) == (0 if width % 2 else 3)


class Drawn:
    """Steps of the largest of logits / temperature + noise, where it is `noisy`, else of the logits."""

    def __init__(self, num_steps: int, count: int, *, noisy: bool) -> None:
        drawn = torch.Generator().manual_seed(num_steps)
        keys = torch.randint(-(1 << 31), 1 << 31, (num_steps, count + 1, 2), dtype=torch.int32, generator=drawn)
        self.num_steps, self.of_kernel = num_steps, Race(torch.full((count,), 0.7), keys) if noisy else Race()

    def __len__(self):
        return self.num_steps

    def choose(self, logits, step):
        temperatures, keys, *_ = self.of_kernel
        if keys is not None:
            noise = gumbel_rows(keys[step, : len(logits)], torch.arange(logits.shape[1]))
            logits = logits / temperatures[:, None] + noise
        return logits.argmax(-1)

    def race(self):
        return self.of_kernel


CHAINS = [
    [Span("a", 5), Span("b", 2)],
    [Span("b", 1), Span("a", 3)],
    [Span("a", MOST_ROWS - 1), Span("b", 1)],
    [Span("b", MOST_ROWS + 1)],
    [Span("a", 1)],
]


def chains(model: ModelRunner, *, noisy: bool) -> list[torch.Tensor]:
    """The tokens of every chain, and the keys and values of its rows. Between them both texts go on, so that a third
    sequence has its slots in between."""
    model.open("c")
    found = []
    for spans in CHAINS:
        for num_steps in (6, 1, 2):
            choice = Drawn(num_steps, len(spans), noisy=noisy)
            num_rows = sum(span.num_tokens for span in spans)
            found.append(model.extend(spans, [7 * row % 97 for row in range(num_rows)], choice))
            slots = [model.pool.slots(span.seq_id).copy() for span in spans]
            found += [part[:, own] for own in slots for part in (model.pool.keys, model.pool.values)]
            for span in spans:
                model.commit(span.seq_id, range(min(span.num_tokens, 2)))
        model.forward([Span("c", 1)], [1])
        model.commit("c", [0])
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "noisy"),
    list(in_turn(FAMILIES, [torch.float32, torch.bfloat16], [False, True], times=dict.fromkeys(FAMILIES, 2))),
)
def test_a_chain_in_one_call_has_the_tokens_and_rows_of_its_passes(tiny_checkpoint, runs, family, dtype, noisy):
    path = tiny_checkpoint(family, **FEW_EXPERTS.get(family, {}))
    found = chains(opened(path, eager=False, dtype=dtype), noisy=noisy)
    of_chains = [one for one in runs if isinstance(one, tuple)]
    assert of_chains == [(7, *[2] * 5), (7, 2), (4, *[2] * 5), (4, 2), (64, *[2] * 5), (64, 2), (1,) * 6, (1, 1)]
    expected = chains(opened(path, eager=True, dtype=dtype), noisy=noisy)
    assert_equal(found, expected)
    assert len({tuple(one.flatten().tolist()) for one in expected if one.dtype == torch.int64}) > 5


def test_chains_that_cannot_be_recorded_run_pass_by_pass(tiny_checkpoint, runs):
    path, bfloat16 = tiny_checkpoint("Llama", intermediate_size=41), {"dtype": torch.bfloat16}
    found = chains(opened(path, eager=False, **bfloat16), noisy=True)
    assert not runs
    assert_equal(found, chains(opened(path, eager=True, **bfloat16), noisy=True))
