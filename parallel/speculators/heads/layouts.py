"""Checkpoints of heads, read to one record and loaded by name: our own, Medusa as its authors and as vLLM save it,
ReDrafter, IBM's MLP speculator, and Snowflake's MLP and LSTM ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallel.model.checkpoint import Shape, tensor_headers
from parallel.model.families.fields import HfConfig, refuse, require
from parallel.speculators.config import FINAL, record_of
from parallel.speculators.heads.config import HEAD_CHOICES, HeadsConfig, Sources, as_named, stored_shapes
from parallel.speculators.layout import CheckpointLayout, opened_by

ANY_LENGTH = 2**20
"""Positions of a published module: it has none."""


SourcesOf = Callable[[Path], Sources]
"""A layout's names for the tensors, which may depend on the files of the directory."""


def own_names(_directory: Path) -> Sources:
    """The names of our own checkpoints, and of a published layout that has the same."""
    return as_named


def tensor_shapes(names: SourcesOf, directory: Path, config: HeadsConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this layout holds."""
    return stored_shapes(config.shapes(), names(directory))


# --- our own ----------------------------------------------------------------------------------------------------------


def read_own(hf: HfConfig) -> HeadsConfig:
    """The record that training wrote, field by field. ValueError, one line, for another."""
    given = hf["speculator"]
    config = record_of(HeadsConfig, {"taps": (FINAL,)} | given)
    refuse(given, "head", *HEAD_CHOICES)
    return config


def write_heads(config: HeadsConfig) -> dict[str, Any]:
    """config.json of a trained module."""
    return {
        "architectures": ["HeadsSpeculator"],
        "speculator": {field.name: getattr(config, field.name) for field in fields(config)},
    }


# --- published --------------------------------------------------------------------------------------------------------


def _read_medusa(hf: HfConfig) -> HeadsConfig:
    require(hf, "medusa_num_heads", "medusa_num_layers")
    blocks, directory = hf["medusa_num_layers"], Path(hf["_name_or_path"])
    name = f"0.{blocks}.weight"
    shape = tensor_headers(directory).get(name)
    if shape is None:
        raise ValueError(f"{directory}: tensor {name} is missing from the checkpoint; fetch it again")
    return _heads("medusa", shape[0], shape[1], hf["medusa_num_heads"], shape[1], num_blocks=blocks, head="own")


def _medusa_names(directory: Path) -> Sources:
    """The released code repeats one block `medusa_num_layers` times; a file may hold such a block once."""
    stored = tensor_headers(directory)

    def sources(name: str) -> list[str]:
        head, block, *linear = name.split(".")
        return [name if f"{name}.weight" in stored else ".".join((head, "0" if linear else block, *linear))]

    return sources


def _read_vllm_medusa(hf: HfConfig) -> HeadsConfig:
    require(hf, "hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    vocab_size, hidden = hf["vocab_size"], hf["hidden_size"]
    refuse(hf, "truncated_vocab_size", vocab_size)
    head, bias = "shared" if hf.get("original_lm_head") else "own", bool(hf.get("medusa_fc_bias"))
    blocks = hf["num_hidden_layers"]
    return _heads("medusa", vocab_size, hidden, hf["num_heads"], hidden, num_blocks=blocks, head=head, block_bias=bias)


def _vllm_medusa_names(_directory: Path) -> Sources:
    def sources(name: str) -> list[str]:
        depth, block, *linear = name.split(".")
        return [f"blocks.{depth}.layers.{block}" if linear else f"lm_heads.{depth}"]

    return sources


def _read_redrafter(hf: HfConfig) -> HeadsConfig:
    require(hf, "vocab_size", "hidden_size", "exit_dim", "num_draft_layers")
    sizes = hf["vocab_size"], hf["hidden_size"], 0, hf["exit_dim"]
    return _heads("rnn", *sizes, num_blocks=hf["num_draft_layers"], head="shared", recurrent=bool(hf.get("rnn", False)))


def _read_mlp_speculator(hf: HfConfig) -> HeadsConfig:
    """`emb_dim` is the width of the target's state; `inner_dim` 0 means as wide."""
    require(hf, "vocab_size", "emb_dim", "n_predict")
    sizes = hf["vocab_size"], hf["emb_dim"], hf["n_predict"], hf.get("inner_dim") or hf["emb_dim"]
    tied = bool(hf.get("tie_weights"))
    head, scaled = "shared" if tied else "own", bool(hf.get("scale_input"))
    return _heads("mlp", *sizes, own_embedding=True, tied=tied, scale_input=scaled, head=head)


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


def _token_sums_names(directory: Path) -> Sources:
    """IBM's and Snowflake's: a prefix, parts in sequences of one where they may be stacks, gates as four matrices."""
    stored = tensor_headers(directory)
    prefix = "speculator." if any(name.startswith("speculator.") for name in stored) else ""
    suffix = ".0" if f"{prefix}proj.0.0.weight" in stored else ""

    def sources(name: str) -> list[str]:
        if name.startswith("projs."):
            return [f"{prefix}{gate}_proj.{name[-1]}" for gate in ("forget", "input", "output", "cell")]
        is_stack = name.split(".", maxsplit=1)[0] in ("emb", "proj", "ln")
        return [f"{prefix}{name}{suffix if is_stack else ''}"]

    return sources


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


def _layout(read: Callable[[HfConfig], HeadsConfig], names: SourcesOf) -> CheckpointLayout:
    """A layout with these names for its tensors."""
    return CheckpointLayout(
        read,
        opened_by("heads.runner", names),
        lambda directory, config, _target: tensor_shapes(names, directory, config),
    )


OWN = _layout(read_own, own_names)
MEDUSA = _layout(_read_medusa, _medusa_names)
VLLM_MEDUSA = _layout(_read_vllm_medusa, _vllm_medusa_names)
REDRAFTER = _layout(_read_redrafter, own_names)
MLP_SPECULATOR = _layout(_read_mlp_speculator, _token_sums_names)
LSTM_SPECULATOR = _layout(_read_lstm_speculator, _token_sums_names)
