"""Published layouts of heads: checkpoints with exactly their names, shapes and fields give the logits of their papers'
arithmetic, written out here once more."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.speculators.heads.config import HeadsConfig
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import read_speculator
from tests.parallel.conftest import Checkpoint

HIDDEN, VOCAB, DEPTHS = 32, 97, 3
TOKENS = [5, 9, 11, 40]
"""The newest token of the text, and those drafted after it."""

Tensors = dict[str, Tensor]
Expected = Callable[[Tensor, Tensor], list[Tensor]]
"""The target's hidden state [H] before the newest token, the embeddings [4, H] of `TOKENS` -> logits [V] by depth."""


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    torch.manual_seed(3)
    return {name: (0.3 * torch.randn(*shape)).bfloat16().float() for name, shape in shapes.items()}


def medusa_tensors(blocks: int) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(DEPTHS):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (HIDDEN, HIDDEN), f"{head}.{block}.linear.bias": (HIDDEN,)}
        shapes[f"{head}.{blocks}.weight"] = VOCAB, HIDDEN
    return random_tensors(shapes)


def medusa(tensors: Tensors, blocks: int, once: bool = False) -> Expected:
    def logits(hidden: Tensor, _: Tensor) -> list[Tensor]:
        found = []
        for head in range(DEPTHS):
            x = hidden
            for block in range(blocks):
                name = f"{head}.{0 if once else block}.linear"
                x = x + F.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
            found.append(tensors[f"{head}.{blocks}.weight"] @ x)
        return found

    return logits


MEDUSA = {"medusa_num_heads": DEPTHS, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


def write_medusa(folder: Path, file: str) -> Expected:
    tensors = medusa_tensors(2)
    config = MEDUSA | {"transformers_version": "4.31.0"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / file) if file.endswith(".pt") else save_file(tensors, folder / file)
    return medusa(tensors, 2)


def write_aliased_medusa(folder: Path) -> Expected:
    """One block, repeated, which safetensors keeps once."""
    tensors = medusa_tensors(2)
    (folder / "config.json").write_text(json.dumps(MEDUSA))
    kept = {name: value for name, value in tensors.items() if ".1.linear" not in name}
    save_file(kept, folder / "medusa_lm_head.safetensors")
    return medusa(tensors, 2, once=True)


def write_vllm_medusa(folder: Path) -> Expected:
    shapes: dict[str, tuple[int, ...]] = {f"blocks.{i}.layers.0.weight": (HIDDEN, HIDDEN) for i in range(DEPTHS)}
    tensors = random_tensors(shapes | {f"lm_heads.{i}.weight": (VOCAB, HIDDEN) for i in range(DEPTHS)})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": DEPTHS,
        "num_hidden_layers": 1,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")

    def logits(hidden: Tensor, _: Tensor) -> list[Tensor]:
        states = [hidden + F.silu(tensors[f"blocks.{i}.layers.0.weight"] @ hidden) for i in range(DEPTHS)]
        return [tensors[f"lm_heads.{i}.weight"] @ state for i, state in enumerate(states)]

    return logits


def write_redrafter(folder: Path) -> Expected:
    exit_dim, layers = 24, 2
    shapes: dict[str, tuple[int, ...]] = {
        "input_proj.weight": (exit_dim, 2 * HIDDEN),
        "input_proj.bias": (exit_dim,),
        f"lm_head.{layers}.weight": (VOCAB, exit_dim),
        "rnn_u.weight": (HIDDEN, HIDDEN),
        "rnn_u.bias": (HIDDEN,),
        "rnn_w.weight": (HIDDEN, HIDDEN),
    }
    for i in range(layers):
        shapes |= {f"lm_head.{i}.linear.weight": (exit_dim, exit_dim), f"lm_head.{i}.linear.bias": (exit_dim,)}
    tensors = random_tensors(shapes)
    config = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "exit_dim": exit_dim,
        "num_draft_layers": layers,
        "rnn": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")

    def logits(hidden: Tensor, embedded: Tensor) -> list[Tensor]:
        state, found = torch.zeros(HIDDEN), []
        for token in embedded[:DEPTHS]:
            state = F.silu(tensors["rnn_w.weight"] @ token + tensors["rnn_u.weight"] @ state + tensors["rnn_u.bias"])
            x = tensors["input_proj.weight"] @ torch.cat((hidden, state)) + tensors["input_proj.bias"]
            for i in range(layers):
                x = x + F.silu(tensors[f"lm_head.{i}.linear.weight"] @ x + tensors[f"lm_head.{i}.linear.bias"])
            found.append(tensors[f"lm_head.{layers}.weight"] @ x)
        return found

    return logits


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


def write_mlp_speculator(folder: Path, tied: bool, stacked: bool = False) -> Expected:
    """Tied tensors are saved once. Snowflake's `sum_rnn` has stacks of layers, here of one: a number more in the names
    of embeddings, projections and norms, none in those of heads."""
    inner, count = 24, 1 if tied else DEPTHS
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        shapes |= {f"emb.{i}.weight": (VOCAB, inner), f"head.{i}.weight": (VOCAB, inner)}
        shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    for i in range(2 if tied else DEPTHS):
        shapes[f"proj.{i}.weight"] = inner, inner if i else HIDDEN
    tensors = random_tensors(shapes)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": HIDDEN,
        "inner_dim": inner,
        "n_predict": DEPTHS,
        "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2],
        "vocab_size": VOCAB,
        "tie_weights": tied,
        "scale_input": tied,
    }
    saved = {f"speculator.{name}": value for name, value in tensors.items()}
    if stacked:
        config |= {"architectures": ["MLPVariantSpeculatorPreTrainedModel"], "input_hidden_dim": HIDDEN}
        config |= {"method": "sum_rnn"} | dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), str(inner))
        saved = {re.sub(r"^(emb|proj|ln)\.(\d)", r"\1.\2.0", name): value for name, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(saved, folder / "model.safetensors")
    state_weight = 0.5 ** (0.5 / DEPTHS)
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)

    def logits(hidden: Tensor, _: Tensor) -> list[Tensor]:
        state, found = rms(hidden) / 2**0.5 if tied else hidden, []
        for depth, token in enumerate(TOKENS[:DEPTHS]):
            i, proj = (0, min(depth, 1)) if tied else (depth, depth)
            summed = tensors[f"proj.{proj}.weight"] @ state
            summed = summed + tensors[f"emb.{i}.weight"][token] * token_weight / state_weight
            state = F.gelu(rms(summed) * tensors[f"ln.{i}.weight"] + tensors[f"ln.{i}.bias"])
            found.append(tensors[f"head.{i}.weight"] @ state)
        return found

    return logits


def write_lstm_speculator(folder: Path) -> Expected:
    inner = 24
    gates = ("forget", "input", "output", "cell")
    shapes: dict[str, tuple[int, ...]] = {"forget_emb.0.weight": (VOCAB, inner), "head.0.weight": (VOCAB, inner)}
    for gate in gates:
        shapes |= {f"{gate}_proj.0.weight": (inner, HIDDEN), f"{gate}_proj.1.weight": (inner, inner)}
    for norm in ("cell_ln", "state_ln"):
        shapes |= {f"{norm}.0.weight": (inner,), f"{norm}.0.bias": (inner,)}
    tensors = random_tensors(shapes)
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "input_hidden_dim": HIDDEN,
        "inner_dim": str(inner),
        "emb_dim": str(inner),
        "proj_dim": str(inner),
        "n_predict": DEPTHS,
        "vocab_size": VOCAB,
        "scale_input": True,
        "tie_weights": True,
        "tie_lstm_embs": True,
        "method": "sum_lstm",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    state_weight = 0.5 ** (0.5 / DEPTHS)
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)

    def normed(name: str, x: Tensor) -> Tensor:
        return F.gelu(rms(x) * tensors[f"{name}.0.weight"] + tensors[f"{name}.0.bias"])

    def logits(hidden: Tensor, _: Tensor) -> list[Tensor]:
        state, cell, found = rms(hidden) / 2**0.5, torch.zeros(inner), []
        for depth, token in enumerate(TOKENS[:DEPTHS]):
            entering = tensors["forget_emb.0.weight"][token] * token_weight / state_weight
            at = {gate: tensors[f"{gate}_proj.{min(depth, 1)}.weight"] @ state + entering for gate in gates}
            cell = cell * at["forget"].sigmoid() + normed("cell_ln", at["cell"]) * at["input"].sigmoid()
            state = normed("state_ln", cell) * at["output"].sigmoid()
            found.append(tensors["head.0.weight"] @ state)
        return found

    return logits


LAYOUTS: dict[str, Callable[[Path], Expected]] = {
    "Medusa, pickled": lambda folder: write_medusa(folder, "medusa_lm_head.pt"),
    "Medusa": lambda folder: write_medusa(folder, "medusa_lm_head.safetensors"),
    "Medusa, one block": write_aliased_medusa,
    "MedusaModel": write_vllm_medusa,
    "ReDrafter": write_redrafter,
    "MLP speculator": lambda folder: write_mlp_speculator(folder, tied=False),
    "MLP speculator, tied": lambda folder: write_mlp_speculator(folder, tied=True),
    "MLP speculator, stacks": lambda folder: write_mlp_speculator(folder, tied=False, stacked=True),
    "MLP speculator, tied stacks": lambda folder: write_mlp_speculator(folder, tied=True, stacked=True),
    "LSTM speculator": write_lstm_speculator,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_gives_its_own_logits(llama: Checkpoint, tmp_path: Path, layout: str) -> None:
    expected = LAYOUTS[layout](tmp_path)
    tables = open_tables(llama.path)
    runner = open_speculator(tmp_path, SpeculatorPlace(tables, SINGLE, "cpu", torch.float32, 64))
    config = read_speculator(tmp_path)
    assert (config.vocab_size, config.target_hidden, config.taps) == (VOCAB, HIDDEN, (-1,))
    assert runner.longest_draft == (DEPTHS if layout != "ReDrafter" else config.max_positions)
    features = torch.randn(3, HIDDEN)
    runner.open("a")
    runner.read_features("a", 0, features)
    logits = [runner.forward([Span("a", 4)], [1, 2, 3, TOKENS[0]]).logits[0]]
    logits += [runner.forward([Span("a", 1)], [token], fuzzy=True).logits[0] for token in TOKENS[1:DEPTHS]]
    embedded = tables.embedding.embed(torch.tensor(TOKENS))
    for ours, theirs in zip(logits, expected(features[-1], embedded), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rnn", [True, False, None])
def test_redrafters_steps_are_recurrent_where_its_file_says_so(tmp_path: Path, rnn: bool | None) -> None:
    write_redrafter(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"rnn": rnn}
    if rnn is None:
        del fields["rnn"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_speculator(tmp_path)
    assert isinstance(config, HeadsConfig) and config.recurrent is bool(rnn)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"medusa_num_heads": 2}, "config.json lacks medusa_num_layers"),
        ({**MEDUSA, "medusa_num_layers": 7}, "tensor 0.7.weight is missing from the checkpoint"),
        ({"model_type": "recurrent_drafting_drafter", "vocab_size": VOCAB}, "config.json lacks hidden_size"),
        (
            {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "vocab_size": 9, "input_hidden_dim": 8}
            | {"n_predict": 3, "inner_dim": "8.8", "emb_dim": "8", "proj_dim": "8"},
            "inner_dim=8.8, emb_dim and proj_dim=.* must be one number, the same",
        ),
        ({"speculator": {"method": "medusa", "depth": 3}}, "speculator.depth: is no field"),
        ({"speculator": {"method": "medusa"}}, "speculator: .*missing"),
        ({"architectures": ["LlamaForCausalLM"]}, "is of no known speculator"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path: Path, fields: dict[str, Any], error: str) -> None:
    write_medusa(tmp_path, "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=error):
        read_speculator(tmp_path)


def test_heads_of_another_target_are_refused(make_checkpoint: Callable[..., Checkpoint], tmp_path: Path) -> None:
    write_medusa(tmp_path, "medusa_lm_head.safetensors")
    tables = open_tables(make_checkpoint("Llama", vocab_size=50).path)
    with pytest.raises(ValueError, match="was made for a target with vocab_size=97, not 50"):
        open_speculator(tmp_path, SpeculatorPlace(tables, SINGLE, "cpu", torch.float32, 64))
