"""Checkpoints of heads: our own and the published layouts, read to one record and loaded by name.

Published ones are recognised by their fields: Medusa as its authors save it (`medusa_num_heads`) and as vLLM does
(`MedusaModel`), ReDrafter (`recurrent_drafting_drafter`), IBM's MLP speculator (`MLPSpeculatorPreTrainedModel`) and
Snowflake's MLP and LSTM ones (`ArcticMLPSpeculatorPreTrainedModel`, `ArcticLSTMSpeculatorPreTrainedModel`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallel.model.checkpoint import tensor_headers
from parallel.model.families.fields import HfConfig, refuse, require
from parallel.model.weights import load_shards
from parallel.speculators.config import FINAL
from parallel.speculators.head_cells import CELLS, HEAD_CHOICES, HeadsConfig
from parallel.speculators.head_tensors import LoadedTensors, Sources
from parallel.speculators.heads import HeadsRunner
from parallel.speculators.place import SpeculatorPlace

ANY_LENGTH = 2**20
"""Positions of a published module: it has none."""


def open_own(directory: Path, config: HeadsConfig, place: SpeculatorPlace) -> HeadsRunner:
    """Load a checkpoint whose names are ours."""
    return _opened(directory, config, place, lambda name: [name])


def _opened(directory: Path, config: HeadsConfig, place: SpeculatorPlace, sources: Sources) -> HeadsRunner:
    target = place.tables.config
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.target_hidden, target.hidden_size),
    ):
        if ours != theirs:
            raise ValueError(f"{directory}: was made for a target with {name}={ours}, not {theirs}; use one of its own")
    cell = CELLS[config.method](config)
    tensors = LoadedTensors(cell, place, sources)
    shards, shapes = zip(*tensors.shards(), strict=True)
    asked = {shard.name: shape for shard, shape in zip(shards, shapes, strict=True)}
    load_shards(shards, asked, directory)
    tensors.pack()
    return HeadsRunner(cell, tensors, place.tables)


# --- our own ----------------------------------------------------------------------------------------------------------


def is_own(hf: HfConfig) -> bool:
    return (hf.get("speculator") or {}).get("method") in CELLS


def read_own(hf: HfConfig) -> HeadsConfig:
    """The record that training wrote, field by field. ValueError, one line, for another."""
    known = {field.name for field in fields(HeadsConfig)}
    given = dict(hf["speculator"])
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"speculator.{unknown[0]}: is no field of heads")
    given["taps"] = tuple(given.get("taps", (FINAL,)))
    try:
        config = HeadsConfig(**given)
    except TypeError as error:
        raise ValueError(f"speculator: {error}") from None
    refuse(given, "head", *HEAD_CHOICES)
    return config


def write_heads(config: HeadsConfig) -> dict[str, Any]:
    """config.json of a trained module."""
    return {
        "architectures": ["HeadsSpeculator"],
        "speculator": {field.name: getattr(config, field.name) for field in fields(config)},
    }


# --- published --------------------------------------------------------------------------------------------------------


def _is_medusa(hf: HfConfig) -> bool:
    """As the authors save it; the file says nothing of the target's shape."""
    return "medusa_num_heads" in hf


def _read_medusa(hf: HfConfig) -> HeadsConfig:
    require(hf, "medusa_num_heads", "medusa_num_layers")
    blocks, directory = hf["medusa_num_layers"], Path(hf["_name_or_path"])
    name = f"0.{blocks}.weight"
    shape = tensor_headers(directory).get(name)
    if shape is None:
        raise ValueError(f"{directory}: tensor {name} is missing from the checkpoint; fetch it again")
    return _heads("medusa", shape[0], shape[1], hf["medusa_num_heads"], shape[1], num_blocks=blocks, head="own")


def _open_medusa(directory: Path, config: HeadsConfig, place: SpeculatorPlace) -> HeadsRunner:
    """The released code repeats one block `medusa_num_layers` times; a file may hold such a block once."""
    stored = tensor_headers(directory)

    def sources(name: str) -> list[str]:
        head, block, *linear = name.split(".")
        return [name if f"{name}.weight" in stored else ".".join((head, "0" if linear else block, *linear))]

    return _opened(directory, config, place, sources)


def _is_vllm_medusa(hf: HfConfig) -> bool:
    return hf.get("architectures") == ["MedusaModel"]


def _read_vllm_medusa(hf: HfConfig) -> HeadsConfig:
    require(hf, "hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    vocab_size, hidden = hf["vocab_size"], hf["hidden_size"]
    refuse(hf, "truncated_vocab_size", vocab_size)
    head, bias = "shared" if hf.get("original_lm_head") else "own", bool(hf.get("medusa_fc_bias"))
    blocks = hf["num_hidden_layers"]
    return _heads("medusa", vocab_size, hidden, hf["num_heads"], hidden, num_blocks=blocks, head=head, block_bias=bias)


def _open_vllm_medusa(directory: Path, config: HeadsConfig, place: SpeculatorPlace) -> HeadsRunner:
    def sources(name: str) -> list[str]:
        depth, block, *linear = name.split(".")
        return [f"blocks.{depth}.layers.{block}" if linear else f"lm_heads.{depth}"]

    return _opened(directory, config, place, sources)


def _is_redrafter(hf: HfConfig) -> bool:
    return hf.get("model_type") == "recurrent_drafting_drafter"


def _read_redrafter(hf: HfConfig) -> HeadsConfig:
    require(hf, "vocab_size", "hidden_size", "exit_dim", "num_draft_layers")
    sizes = hf["vocab_size"], hf["hidden_size"], 0, hf["exit_dim"]
    return _heads("rnn", *sizes, num_blocks=hf["num_draft_layers"], head="shared", recurrent=bool(hf.get("rnn", False)))


def _is_mlp_speculator(hf: HfConfig) -> bool:
    return _architecture(hf) in ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")


def _read_mlp_speculator(hf: HfConfig) -> HeadsConfig:
    """`emb_dim` is the width of the target's state; `inner_dim` 0 means as wide."""
    require(hf, "vocab_size", "emb_dim", "n_predict")
    sizes = hf["vocab_size"], hf["emb_dim"], hf["n_predict"], hf.get("inner_dim") or hf["emb_dim"]
    tied = bool(hf.get("tie_weights"))
    head, scaled = "shared" if tied else "own", bool(hf.get("scale_input"))
    return _heads("mlp", *sizes, own_embedding=True, tied=tied, scale_input=scaled, head=head)


def _is_lstm_speculator(hf: HfConfig) -> bool:
    return _architecture(hf) in ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")


def _read_lstm_speculator(hf: HfConfig) -> HeadsConfig:
    """Dimensions are written as texts; a text of several, joined by points, is a stack of layers."""
    require(hf, "vocab_size", "input_hidden_dim", "n_predict")
    inner, *others = (str(hf.get(name)) for name in ("inner_dim", "emb_dim", "proj_dim"))
    if not inner.isdecimal() or others != [inner, inner]:
        raise ValueError(f"inner_dim={inner}, emb_dim and proj_dim={others} must be one number, the same")
    tied = bool(hf.get("tie_weights"))
    method = {"sum_lstm": "lstm", "sum_rnn": "mlp"}.get(hf.get("method", "sum_rnn"))
    if method is None or (method == "lstm" and not (tied and hf.get("tie_lstm_embs"))):
        raise ValueError(
            "method must be sum_rnn, or sum_lstm with tie_weights and tie_lstm_embs, as all that were published"
        )
    sizes = hf["vocab_size"], hf["input_hidden_dim"], hf["n_predict"], int(inner)
    head, scaled = "shared" if tied else "own", bool(hf.get("scale_input"))
    return _heads(method, *sizes, own_embedding=True, tied=tied, scale_input=scaled, head=head)


def _open_token_sums(directory: Path, config: HeadsConfig, place: SpeculatorPlace) -> HeadsRunner:
    """IBM's and Snowflake's: a prefix, parts in sequences of one where they may be stacks, gates as four matrices."""
    stored = tensor_headers(directory)
    prefix = "speculator." if any(name.startswith("speculator.") for name in stored) else ""
    suffix = ".0" if f"{prefix}proj.0.0.weight" in stored else ""

    def sources(name: str) -> list[str]:
        if name.startswith("projs."):
            return [f"{prefix}{gate}_proj.{name[-1]}" for gate in ("forget", "input", "output", "cell")]
        is_stack = name.split(".", maxsplit=1)[0] in ("emb", "proj", "ln")
        return [f"{prefix}{name}{suffix if is_stack else ''}"]

    return _opened(directory, config, place, sources)


PUBLISHED: dict[
    str, tuple[Callable[[HfConfig], bool], Callable[[HfConfig], HeadsConfig], Callable[..., HeadsRunner]]
] = {
    "Medusa": (_is_medusa, _read_medusa, _open_medusa),
    "MedusaModel": (_is_vllm_medusa, _read_vllm_medusa, _open_vllm_medusa),
    "ReDrafter": (_is_redrafter, _read_redrafter, open_own),
    "MLP speculator": (_is_mlp_speculator, _read_mlp_speculator, _open_token_sums),
    "LSTM speculator": (_is_lstm_speculator, _read_lstm_speculator, _open_token_sums),
}
"""Layout -> whether a config.json is of it, its record, and how the directory is opened."""


def _heads(method: str, vocab_size: int, hidden: int, num_heads: int, inner: int, **others: Any) -> HeadsConfig:
    return HeadsConfig(
        method=method,
        vocab_size=vocab_size,
        max_positions=ANY_LENGTH,
        target_hidden=hidden,
        taps=(FINAL,),
        num_heads=num_heads,
        inner=inner,
        **others,
    )


def _architecture(hf: HfConfig) -> str:
    """A list in most files, a name in some."""
    named = hf.get("architectures") or [""]
    return named if isinstance(named, str) else named[0]
