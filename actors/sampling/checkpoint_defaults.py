"""How a checkpoint of an encoder-decoder says that its text is to be sampled, where a request does not.

transformers applies these settings in every `generate`; greedy text without them is another one. Loads no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from actors.protocol.sampling_params import NGRAM
from parallel.model.config_fields import TokenId, read_config_file

_FILES = ("generation_config.json", "config.json")


class GenerationFields(TypedDict, total=False):
    """Those of transformers' `GenerationConfig` that are read; older checkpoints have them in config.json."""

    min_length: Annotated[int, Meta(ge=0)] | None
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=int(NGRAM.high or 0))] | None
    bad_words_ids: list[list[TokenId]] | None
    forced_bos_token_id: TokenId | list[TokenId] | None
    forced_eos_token_id: TokenId | list[TokenId] | None


def read_defaults(directory: Path, start_len: int) -> dict[str, Any]:
    """Fields of `SamplingParams`, of a text that starts with so many tokens of the checkpoint's. ValueError, one line,
    for what the engine does not do."""
    file = next(directory / name for name in _FILES if (directory / name).is_file())
    hf: Mapping[str, Any] = read_config_file(file, GenerationFields)
    defaults = {
        "min_tokens": max(0, (hf.get("min_length") or 0) - start_len),
        "no_repeat_ngram_size": hf.get("no_repeat_ngram_size") or 0,
        "bad_words": [word for word in hf.get("bad_words_ids") or [] if word],
    }
    found = {name: value for name, value in defaults.items() if value}
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        token = hf.get(name)
        if isinstance(token, list):
            if len(token) != 1:
                raise ValueError(f"{file}: {name}={token}: several tokens cannot be forced; give one")
            (token,) = token
        if token is not None:
            found[name] = token
    return found
