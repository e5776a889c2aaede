"""A token list: the tokens that a text uses, the most frequent first, as one small JSON file.

`job=vocabulary` writes it and `drafter.vocabulary` names it: a draft model whose head has rows for these tokens only
(VocabTrim, arXiv 2506.22694; FR-Spec, 2502.14856). Ids are the target's. Knows files, no models.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from actors.tokenizer_file import tokenizer_digest
from parallel.model.config_fields import TokenId
from parallel.typed_json import as_type, read_json
from parallel.whole_files import write_text

_VERSION = 1
_REMEDY = "make one with job=vocabulary"


class TokenListFields(TypedDict):
    version: Literal[1]
    tokenizer: str
    tokens: Annotated[list[TokenId], Meta(min_length=1)]


def ranked_tokens(counts: Mapping[int, int], first: Sequence[int] = (), size: int = 0) -> list[int]:
    """The tokens `first`, which every list must hold, and then those counted, by falling frequency; ties by id.

    `size` bounds the list; 0: every token that was counted.
    """
    counted = sorted(counts, key=lambda token: (-counts[token], token))
    ranked = list(dict.fromkeys([*first, *counted]))
    return ranked[: max(size, len(first))] if size else ranked


def count_tokens(texts: Iterable[Sequence[int]]) -> Counter[int]:
    """Occurrences of every token."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    return counts


def write_token_list(path: Path, tokens: Sequence[int], counts: Mapping[int, int], tokenizer: str) -> None:
    """Write the file, whole or not at all; `tokenizer` is the digest of the target's."""
    about = {"version": _VERSION, "tokenizer": tokenizer, "num_counted": sum(counts.values())}
    found = {"tokens": list(tokens), "counts": [counts.get(one, 0) for one in tokens]}
    write_text(path, json.dumps(about | found))


def read_token_list(path: Path, target: Path | None = None, key: str = "drafter.vocabulary") -> list[int]:
    """The tokens; ValueError, one line that begins with `key`, for another file, or another tokenizer than that of the
    checkpoint `target`."""
    try:
        content = as_type(read_json(path), TokenListFields)
    except ValueError:
        raise ValueError(f"{key}={path}: is no token list of version {_VERSION}; {_REMEDY}") from None
    tokens = content["tokens"]
    if len({*tokens}) < len(tokens):
        raise ValueError(f"{key}={path}: names a token twice; {_REMEDY}")
    if target is not None and content["tokenizer"] != tokenizer_digest(target):
        raise ValueError(f"{key}={path}: was made with another tokenizer than the target's; {_REMEDY} and this target")
    return tokens
