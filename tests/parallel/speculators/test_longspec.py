"""LongSpec: the published layout with random weights against its equations, its window of 513 keys, rows that leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cluster.tools.training.speculators.frozen_target import MOST_ANCHORS, offset_positions
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import ModelRunner, open_model
from parallel.speculators.glide import layouts
from parallel.speculators.glide.runner import GlideRunner
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import read_speculator
from tests.parallel.backends import BACKENDS
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.nets import random_text, read_text

LENGTH, STEPS = 540, 4
SHAPE = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


class Published:
    """A layer as its authors save it, beside a target: its config.json, with names of the release, random numbers."""

    def __init__(self, target: Checkpoint, folder: Path) -> None:
        self.target, self.path = target, folder
        config: Any = target.model.config  # pyright: ignore
        hidden, size = config.hidden_size, config.hidden_size // config.num_attention_heads
        kv, wide = config.num_key_value_heads * size, config.intermediate_size
        shapes = {f"{part}.{name}.weight": (rows, hidden) for part in ("self_attn", "cross_attn") for name, rows in
                  (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden))}  # fmt: skip
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if "o_proj" not in name}
        norms = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")
        shapes |= {f"{norm}.weight": (hidden,) for norm in norms}
        shapes |= {"mlp.gate_proj.weight": (wide, hidden), "mlp.up_proj.weight": (wide, hidden)}
        shapes |= {"mlp.down_proj.weight": (hidden, wide)}
        generator = torch.Generator().manual_seed(2)
        self.tensors = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for norm in norms:
            self.tensors[f"{norm}.weight"] += 1
        folder.mkdir()
        save_file(self.tensors, folder / "model.safetensors")
        fields = {**config.to_dict(), "architectures": ["LlamaGlideDecoderLayer"]}
        (folder / "config.json").write_text(json.dumps(fields))
        self.batch = read_text(target, random_text(target, LENGTH + STEPS))
        self.tokens: list[int] = self.batch.tokens[0].tolist()
        self.last = config.num_hidden_layers - 1
        self.keys, self.values = self.batch.kv[self.last]
        self.features = torch.cat([rows[0].transpose(0, 1).flatten(1) for rows in (self.keys, self.values)], 1)

    @torch.no_grad()
    def expected(self, anchor: int) -> Tensor:
        """Logits of rows `anchor` to `anchor + STEPS`, which see the target's rows before the anchor."""
        model: Any = self.target.model
        of = self.tensors
        tokens = torch.tensor(self.tokens[: anchor + STEPS])
        x = model.get_input_embeddings()(tokens)[None]
        cos, sin = model.model.rotary_emb(x, torch.arange(len(tokens))[None])

        def norm(name: str, x: Tensor) -> Tensor:
            eps = model.config.rms_norm_eps
            return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * of[f"{name}.weight"]

        def heads(name: str, x: Tensor) -> Tensor:
            rows = x @ of[f"{name}.weight"].T + of[f"{name}.bias"]
            return rows.view(1, len(tokens), -1, 8).transpose(1, 2)

        def attended(q: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
            group = q.shape[1] // keys.shape[1]
            keys, values = (rows.repeat_interleave(group, 1) for rows in (keys, values))
            scores = (q @ keys.transpose(2, 3) * 8**-0.5).masked_fill(~sees, -torch.inf)
            return (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)

        places = torch.arange(len(tokens))
        distance = places[:, None] - places
        normed = norm("input_layernorm", x)
        q, k, v = (heads(f"self_attn.{name}_proj", normed) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        own = attended(q, k, v, (distance >= 0) & (distance <= 512))
        x = x + own @ of["self_attn.o_proj.weight"].T
        q = heads("cross_attn.q_proj", norm("post_self_attention_layernorm", x))
        q, _ = apply_rotary_pos_emb(q, q, cos, sin)
        keys, values = (rows[:, :, :anchor] for rows in (self.keys, self.values))
        x = x + attended(q, keys, values, torch.ones(1, dtype=torch.bool)) @ of["cross_attn.o_proj.weight"].T
        normed = norm("post_cross_attention_layernorm", x)
        gate, up = (normed @ of[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ of["mlp.down_proj.weight"].T
        return model.get_output_embeddings()(x)[0, anchor:]

    def place(self, target: ModelRunner | None = None, num_slots: int = 1200) -> SpeculatorPlace:
        tables = open_tables(self.target.path) if target is None else target.decoder
        return SpeculatorPlace(tables, SINGLE, "cpu", torch.float32, num_slots, target=target)

    def open(self, backend: str | None = None) -> GlideRunner:
        """A runner beside the tables alone: it keeps the target's rows itself."""
        runner = open_speculator(self.path, self.place())
        assert isinstance(runner, GlideRunner)
        if backend is None:
            return runner
        return GlideRunner(runner.layers, self.place(), backend=backend)

    def attached(self, backend: str | None = None) -> tuple[GlideRunner, ModelRunner]:
        """A runner behind a target that has read the text."""
        target = open_model(self.target.path, num_slots=1200, backend=backend)
        runner = open_speculator(self.path, self.place(target))
        assert isinstance(runner, GlideRunner)
        runner = GlideRunner(runner.layers, self.place(target), backend=backend)
        target.open("a")
        return runner, target

    def draft(self, runner: GlideRunner, anchor: int, target: ModelRunner | None = None, chunk: int = 100) -> Tensor:
        """Logits of a chain of the text's own tokens behind the text before the anchor, read in chunks."""
        runner.open("a")
        for start in range(0, anchor, chunk):
            part = self.tokens[start : min(anchor, start + chunk)]
            if target is not None:
                target.forward([Span("a", len(part), num_logits=0)], part)
                target.commit("a", range(len(part)))
            runner.read_features("a", start, self.features[start : start + len(part)])
            runner.forward([Span("a", len(part), num_logits=0)], part)
            runner.commit("a", range(len(part)))
        rows = [runner.forward([Span("a", 1)], [self.tokens[anchor + i]]).logits for i in range(STEPS)]
        runner.commit("a", range(STEPS))
        return torch.cat(rows)


@pytest.fixture(scope="module")
def made(make_checkpoint: Callable[..., Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Published:
    target = make_checkpoint("Llama", max_position_embeddings=2048, **SHAPE)
    torch.manual_seed(1)
    return Published(target, tmp_path_factory.mktemp("longspec") / "layer")


def test_its_record_names_what_the_release_has(made: Published) -> None:
    config = read_speculator(made.path)
    assert isinstance(config, layouts.GlideConfig) and config.is_longspec
    assert (config.window, config.block.windowed, config.kv_layer) == (513, {0}, made.last)
    assert set(made.tensors) - set(config.tensor_shapes()) == {
        f"cross_attn.{name}_proj.{part}" for name in "kv" for part in ("weight", "bias")
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("anchor", [20, LENGTH])
def test_the_published_layer_computes_its_equations(made: Published, backend: str, anchor: int) -> None:
    torch.testing.assert_close(made.draft(made.open(backend), anchor), made.expected(anchor), atol=1e-3, rtol=1e-3)


def test_a_window_of_512_keys_is_another_layer(made: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "PUBLISHED_WINDOW", 512)
    found, expected = made.draft(made.open(), LENGTH), made.expected(LENGTH)
    assert (found - expected).abs().max() > 5e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_the_targets_ranks_it_reads_the_targets_rows_in_place(made: Published, backend: str) -> None:
    runner, target = made.attached(backend)
    assert runner.pool.keys.shape[0] == 1, "no second copy of the target's layer"
    found = made.draft(runner, LENGTH, target)
    torch.testing.assert_close(found, made.expected(LENGTH), atol=1e-3, rtol=1e-3)
    assert runner.drops_rows == (backend != "padded")
    used = runner.pool.num_slots - runner.pool.num_free
    assert used <= 513 + 64 + 100 + STEPS if runner.drops_rows else used == LENGTH + STEPS
    assert runner.cached_len("a") == LENGTH + STEPS
    runner.truncate("a", LENGTH)
    assert runner.cached_len("a") == LENGTH
    runner.pool.check()


def test_room_for_its_window_is_all_that_it_takes(made: Published) -> None:
    target = open_model(made.target.path, num_slots=1200)
    place = replace(made.place(target, 10_000), slots_of_windows=lambda limits: limits.most_with(100, 8))
    runner = open_speculator(made.path, place)
    assert isinstance(runner, GlideRunner) and runner.pool.num_slots == 513 + 64 - 1 + 100 + 8
    target.open("a")
    torch.testing.assert_close(made.draft(runner, LENGTH, target), made.expected(LENGTH), atol=1e-3, rtol=1e-3)
    assert runner.kv_bytes == 2 * runner.pool.keys.nbytes


def test_a_target_whose_rows_are_not_as_the_layer_reads_them_is_copied(made: Published) -> None:
    target = open_model(made.target.path, num_slots=1200, dtype=torch.bfloat16)
    runner = open_speculator(made.path, made.place(target))
    assert isinstance(runner, GlideRunner) and runner.pool.keys.shape[0] == 2 and not runner.drops_rows


def test_offsets_move_the_later_tokens_of_a_row_together() -> None:
    positions = offset_positions(200, 20, 1000)
    steps = positions.diff(dim=1)
    jumps = steps > 1
    assert positions.min() == 0 and positions.max() < 1000 and (positions.max(1).values > 500).any()
    assert (jumps.sum(1) <= 1).all() and (steps[~jumps] == 1).all()
    kept = torch.where(jumps.any(1), jumps.int().argmax(1) + 1, 0)
    assert set(kept.tolist()) == set(range(MOST_ANCHORS + 1)), "0: the first token is moved too"
    assert torch.equal(offset_positions(3, 20, 10), torch.arange(20).expand(3, -1))
