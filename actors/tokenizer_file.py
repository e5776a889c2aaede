"""A checkpoint's `tokenizer.json`, as far as it is read as JSON: held against types before anything of it is used.

Text is encoded by the `tokenizers` library; this file says what it cannot: which tokens there are and how they are
written. Knows no models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta
from tokenizers import Tokenizer

from parallel.ranges import errors_of
from parallel.typed_json import as_type, read_json

MOST_TOKENS = 2**24
"""Most tokens of a vocabulary; no published one has as many."""
_REMEDY = "save the tokenizer again"


class AddedToken(TypedDict):
    id: Annotated[int, Meta(ge=0, lt=MOST_TOKENS)]
    content: str
    special: bool


class TokenizerStep(TypedDict, total=False):
    """A step of decoding or of cutting text; a sequence holds others."""

    type: str
    decoders: list[TokenizerStep]
    pretokenizers: list[TokenizerStep]


class _Model(TypedDict):
    model: dict[str, Any]


class TokenizerFields(_Model, total=False):
    """Fields that are read; `model` as a whole, because it identifies the vocabulary."""

    added_tokens: list[AddedToken]
    decoder: TokenizerStep | None
    pre_tokenizer: TokenizerStep | None


def read_tokenizer_file(checkpoint: Path) -> TokenizerFields:
    """The checked fields; ValueError, one line that names the file, if there is none or it is damaged."""
    file = checkpoint / "tokenizer.json"
    content = read_json(file)
    with errors_of(str(file), _REMEDY):
        return as_type(content, TokenizerFields)


def open_tokenizer(checkpoint: Path) -> Tokenizer:
    """The library's tokenizer; ValueError, one line that names the file, if it cannot read it."""
    file = checkpoint / "tokenizer.json"
    try:
        return Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: cannot be read as a tokenizer ({reason}); {_REMEDY}") from None


def tokenizer_digest(checkpoint: Path) -> str:
    """Identifies the vocabulary: the model and the added tokens of `tokenizer.json`, without its templates."""
    tokenizer = read_tokenizer_file(checkpoint)
    added = [(token["id"], token["content"]) for token in tokenizer.get("added_tokens", [])]
    named = json.dumps([tokenizer["model"], sorted(added)], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()
