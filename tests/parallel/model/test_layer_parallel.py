"""Layer-parallel passes against the published formula written out plainly, and what every rank holds after them."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.model.partition import LayerLayout, default_partition, partition_of
from parallel.runtime.model_bytes import kv_bytes_per_slot, weight_bytes
from parallel.runtime.runner import open_model
from tests.families import FAMILIES, LIKE_OTHERS
from tests.matrices import in_turn
from tests.parallel.backends import BACKENDS

CALIBRATIONS = ("recompute", "owner", "broadcast")
WAYS = [(mlp, calibration) for mlp in ("replicated", "tensor") for calibration in CALIBRATIONS][:-1]
"""All but split MLPs with one rank that runs the exact pass alone."""
PROMPT = [3, 14, 15, 92, 65, 35, 89]
DRAFT = [79, 32, 38]


@pytest.fixture
def open_deep(make_checkpoint):
    def open_(family):
        overrides = {"attention_bias": True, "mlp_bias": True} if family == "Llama" else {}
        return make_checkpoint(family, num_hidden_layers=8, initializer_range=0.15, **overrides)

    return open_


@pytest.fixture
def deep_llama(make_checkpoint):
    return make_checkpoint("Llama", num_hidden_layers=8, initializer_range=0.15)


class PlainFormula:
    """EasySpec's pass in float64, one process, straight from a checkpoint's tensors: no cache, no plan, no ranks."""

    def __init__(self, checkpoint) -> None:
        self.w = {name: t.double() for name, t in load_file(checkpoint.path / "model.safetensors").items()}
        self.config = checkpoint.model.config
        self.keys, self.values = {}, {}

    def feed(self, tokens, start, partition):
        """Feed `tokens` from position `start` on with the given hyper-layers; logits [T, V]."""
        h = self.w["model.embed_tokens.weight"][tokens]
        for members in partition:
            attended = {
                i: self._attention(i, self._norm(h, f"model.layers.{i}.input_layernorm"), start) for i in members
            }
            for i in members:
                h = h + attended[i]
                h = h + self._mlp(i, self._norm(h, f"model.layers.{i}.post_attention_layernorm"))
        return self._norm(h, "model.norm") @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T

    def _norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self.w[f"{name}.weight"]

    def _linear(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _mlp(self, i, x):
        name = f"model.layers.{i}.mlp"
        return self._linear(
            F.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def _attention(self, i, x, start):
        name, d = f"model.layers.{i}.self_attn", self.config.head_dim
        q, k, v = (self._linear(x, f"{name}.{part}_proj").view(len(x), -1, d) for part in "qkv")
        if f"{name}.q_norm.weight" in self.w:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._turn(q, start), self._turn(k, start)
        self.keys[i] = torch.cat((self.keys.get(i, k[:0])[:start], k))
        self.values[i] = torch.cat((self.values.get(i, v[:0])[:start], v))
        out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
        for row in range(len(x)):
            for head in range(q.shape[1]):
                seen = slice(0, start + row + 1)
                scores = self.keys[i][seen, head // group] @ q[row, head] / d**0.5
                out[row, head] = scores.softmax(0) @ self.values[i][seen, head // group]
        return self._linear(out.flatten(1), f"{name}.o_proj")

    def _turn(self, x, start):
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.outer(
            torch.arange(start, start + len(x)).double(), theta ** (-torch.arange(half).double() / half)
        )[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def layout_of(width, ranks, *, num_layers=8, **options):
    return LayerLayout(default_partition(num_layers, width), ranks, **options)


def prefilled(path, layout, group=None, **options):
    runner = open_model(path, *(() if group is None else (group,)), num_slots=64, layout=layout, **options)
    runner.open("s")
    runner.forward([Span("s", len(PROMPT))], PROMPT)
    runner.commit("s", range(len(PROMPT)))
    return runner


def draft(runner):
    """Logits of a fuzzy chain, token by token, [3, V], its rows committed."""
    logits = [runner.forward([Span("s", 1)], [token], fuzzy=True).logits for token in DRAFT]
    runner.commit("s", range(len(DRAFT)))
    return torch.cat(logits)


def rows_of(runner):
    """Keys and values of sequence s by model layer."""
    slots = runner.pool.slots("s")
    return {
        layer: torch.stack((runner.pool.keys[place, slots], runner.pool.values[place, slots]))
        for place, layer in enumerate(runner.decoder.held)
    }


def sequential_rows(path, tokens):
    fresh = open_model(path, num_slots=64)
    fresh.open("s")
    fresh.forward([Span("s", len(tokens))], tokens)
    slots = fresh.pool.slots("s")
    return {i: torch.stack((fresh.pool.keys[i, slots], fresh.pool.values[i, slots])) for i in range(8)}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("width", "ranks", "mlp", "family"),
    list(
        in_turn(
            [(4, 1), (2, 2), (2, 3), (3, 3), (4, 4)],
            ["replicated", "tensor"],
            ["Llama", "Qwen3"],
            times={(2, 2): 0, (3, 3): 0},
        )
    ),
)
def test_a_fuzzy_pass_is_the_published_formula(open_deep, on_ranks, width, ranks, mlp, family):
    deep = open_deep(family)
    plain = PlainFormula(deep)
    layout = layout_of(width, ranks, mlp=mlp)
    plain.feed(PROMPT, 0, [(i,) for i in range(8)])
    expected = [plain.feed([token], len(PROMPT) + i, layout.partition)[0] for i, token in enumerate(DRAFT)]
    exact = PlainFormula(deep).feed(PROMPT + DRAFT, 0, [(i,) for i in range(8)])[-3:]
    assert (torch.stack(expected) - exact).abs().max() > 1e-2, "fuzzy is exact here: the test shows nothing"
    for logits in on_ranks(ranks, lambda group: draft(prefilled(deep.path, layout, group))):
        torch.testing.assert_close(logits.double(), torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mlp", ["replicated", "tensor"])
def test_fuzzy_trees_and_batches_are_their_chains(deep_llama, on_ranks, mlp):
    """A tree of two branches in one fuzzy pass, beside another sequence, gives what each branch gives alone."""
    layout = layout_of(2, 2, mlp=mlp)

    def alone(group):
        runner = prefilled(deep_llama.path, layout, group)
        return draft(runner)[-1]

    def together(group):
        runner = prefilled(deep_llama.path, layout, group)
        runner.open("t")
        runner.forward([Span("t", 4)], PROMPT[:4])
        runner.commit("t", range(4))
        spans = [Span("t", 2, None, 2), Span("s", 5, [-1, 0, -1, 1, 2], 5)]
        tokens = [7, 8, DRAFT[0], DRAFT[1], 55, DRAFT[2], 56]
        return runner.forward(spans, tokens, fuzzy=True).logits[5]

    for one, other in zip(on_ranks(2, alone), on_ranks(2, together), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("calibration", "ranks"), list(in_turn(CALIBRATIONS, [1, 2])))
def test_hyper_layers_of_one_are_the_exact_pass_to_the_bit(deep_llama, on_ranks, calibration, ranks):
    layout = layout_of(1, ranks, calibration=calibration)

    def passes(group):
        runner = prefilled(deep_llama.path, layout, group)
        outputs = []
        for fuzzy in (True, False):
            plan = runner.plan([Span("s", 3, num_logits=3)])
            plan.fuzzy = fuzzy  # the runner knows that nothing runs side by side and would not say so
            outputs.append(runner.run(plan, DRAFT, taps=(0, 3, 8)))
            runner.drop_pending("s")
        return outputs

    for fuzzy, exact in on_ranks(ranks, passes):
        assert torch.equal(fuzzy.logits, exact.logits)
        for ours, theirs in zip(fuzzy.features, exact.features, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.extended
@pytest.mark.parametrize(("mlp", "calibration", "ranks"), list(in_turn(WAYS, [2, 3])))
def test_ranks_agree_to_the_bit(deep_llama, on_ranks, calibration, mlp, ranks):
    layout = layout_of(2, ranks, mlp=mlp, calibration=calibration)

    def streams(group):
        runner = prefilled(deep_llama.path, layout, group)
        fuzzy = runner.forward([Span("s", 2, num_logits=2)], DRAFT[:2], taps=(0, 1, 4, 8), fuzzy=True)
        runner.drop_pending("s")
        exact = runner.forward([Span("s", 2, num_logits=2)], DRAFT[:2], taps=(0, 1, 4, 8))
        return [fuzzy.logits, fuzzy.hidden, *fuzzy.features, exact.logits, exact.hidden, *exact.features]

    first, *others = on_ranks(ranks, streams)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mlp", "calibration", "width", "ranks", "backend"),
    list(in_turn(WAYS, [(2, 2), (3, 1), (3, 3)], ["sdpa", "padded", *BACKENDS[2:]])),
)
def test_after_calibration_every_rank_has_the_sequential_rows(
    deep_llama, on_ranks, width, ranks, calibration, mlp, backend
):
    layout = layout_of(width, ranks, mlp=mlp, calibration=calibration)
    plain = open_model(deep_llama.path, num_slots=64)
    plain.open("s")
    expected_logits = plain.forward([Span("s", 10)], PROMPT + DRAFT).logits
    expected = sequential_rows(deep_llama.path, PROMPT + DRAFT)

    def calibrated(group):
        runner = prefilled(deep_llama.path, layout, group, backend=backend)
        draft(runner)
        assert (runner.exact_len("s"), runner.cached_len("s")) == (7, 10)
        off = max(float((rows[:, 7:] - expected[layer][:, 7:]).abs().max()) for layer, rows in rows_of(runner).items())
        assert off > 1e-3, "the fuzzy rows are exact: the test shows nothing"
        assert runner.drop_fuzzy("s") and runner.cached_len("s") == 7 and not runner.drop_fuzzy("s")
        logits = runner.forward([Span("s", 3)], DRAFT).logits
        runner.commit("s", range(3))
        assert runner.exact_len("s") == 10
        runner.pool.check()
        return logits, rows_of(runner)

    held = set()
    for logits, rows in on_ranks(ranks, calibrated):
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
        held |= set(rows)
        for layer, ours in rows.items():
            torch.testing.assert_close(ours, expected[layer], atol=2e-5, rtol=1e-4)
    assert held == set(range(8))


@pytest.mark.extended
@pytest.mark.parametrize(("family", "mlp"), list(in_turn(FAMILIES, ["replicated", "tensor"], times=LIKE_OTHERS)))
def test_every_family_runs_layer_parallel(make_checkpoint, on_ranks, family, mlp):
    """Exact passes are those of transformers; fuzzy ones on two ranks are those of one rank, which has all layers."""
    checkpoint = make_checkpoint(family, **FAMILIES[family] | {"num_hidden_layers": 4})

    def passes(group):
        runner = prefilled(checkpoint.path, layout_of(2, group.size, num_layers=4, mlp=mlp), group)
        exact = runner.forward([Span("s", 3, num_logits=3)], DRAFT).logits
        runner.drop_pending("s")
        return exact, draft(runner)

    expected = checkpoint.logits(PROMPT + DRAFT)[-3:]
    _, alone = passes(SINGLE)
    assert (alone - expected).abs().max() > 1e-2, "fuzzy is exact here: the test shows nothing"
    for exact, fuzzy in on_ranks(2, passes):
        torch.testing.assert_close(exact, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(fuzzy, alone, atol=1e-4, rtol=0)


@pytest.mark.extended
def test_every_calibration_gives_the_same_drafts(deep_llama, on_ranks):
    """Two rounds of drafting with a calibration between them, MLPs whole and split."""

    def rounds(group, mlp, calibration):
        runner = prefilled(deep_llama.path, layout_of(2, 2, mlp=mlp, calibration=calibration), group)
        first = draft(runner)
        runner.drop_fuzzy("s")
        exact = runner.forward([Span("s", 2)], DRAFT[:2]).logits
        runner.commit("s", range(2))
        return torch.cat((first, exact, draft(runner)))

    expected = None
    for mlp, calibration in WAYS:
        for logits in on_ranks(2, lambda group: rounds(group, mlp, calibration)):  # noqa: B023
            expected = logits if expected is None else expected
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))


class CountingGroup(Group):
    """Notes every collective by its name."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.calls = group.rank, group.size, []
        for name in ("all_reduce", "all_gather", "broadcast"):
            setattr(self, name, partial(self._noted, name, getattr(group, name)))

    def _noted(self, name, collective, *arguments):
        self.calls.append(name)
        return collective(*arguments)


@pytest.mark.extended
@pytest.mark.parametrize(("mlp", "calibration"), WAYS)
def test_how_often_ranks_wait_for_each_other(deep_llama, on_ranks, mlp, calibration):
    """L = 8 layers in 5 hyper-layers, M = 3 of which have two; beside that the head's all-gather."""

    def passes(group):
        group = CountingGroup(group)
        runner = prefilled(deep_llama.path, layout_of(2, 2, mlp=mlp, calibration=calibration), group)
        group.calls.clear()
        runner.forward([Span("s", 2, num_logits=2)], DRAFT[:2], fuzzy=True)
        fuzzy = Counter(group.calls[:-1])
        assert group.calls.pop() == "all_gather"
        runner.commit("s", range(2))
        runner.drop_fuzzy("s")
        group.calls.clear()
        runner.forward([Span("s", 2, num_logits=0)], DRAFT[:2])
        return fuzzy, Counter(group.calls)

    split = Counter(all_reduce=8 * (mlp == "tensor"))
    alone = Counter(broadcast=2 * (calibration == "owner"))  # of the first and the last layer, from who has it
    exact = {"recompute": Counter(), "owner": Counter(broadcast=8), "broadcast": Counter(broadcast=1)}[calibration]
    for fuzzy, calibrated in on_ranks(2, passes):
        assert fuzzy == Counter(all_gather=3) + split + alone
        assert calibrated == exact + split


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "ranks", "mlp", "calibration"),
    list(in_turn([("Llama", 1), ("Llama", 2), ("Qwen3", 4), ("Gemma3", 2), ("Mixtral", 2), ("OPT", 1)], WAYS)),
)
def test_bytes_are_those_allocated(make_checkpoint, on_ranks, family, calibration, mlp, ranks):
    overrides = {"num_hidden_layers": 8, "tie_word_embeddings": family == "Llama"}
    path = make_checkpoint(family, **FAMILIES[family] | overrides).path
    layout = LayerLayout(partition_of([1, 2, 2, 2, 1] if ranks > 1 else [1, 6, 1], 8), ranks, mlp, calibration)
    for rank, runner in enumerate(on_ranks(ranks, lambda group: open_model(path, group, num_slots=9, layout=layout))):
        config, dtype = runner.config, torch.float32
        weights = weight_bytes(config, ranks, dtype.itemsize, layout, rank)
        assert weights == runner.decoder.nbytes()
        pool_bytes = runner.pool.keys.nbytes + runner.pool.values.nbytes
        assert (
            kv_bytes_per_slot(config, ranks, dtype.itemsize, layout, rank) * 10 == pool_bytes
        )  # with the scratch slot
