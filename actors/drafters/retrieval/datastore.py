"""A datastore: tokenised text and its suffix array in one file, which any number of processes map into memory.

    header   4096 bytes: JSON with version, number of tokens and of documents, and the tokenizer's digest
    tokens   big-endian uint32, so that bytes compare as tokens do; after each document the separator
    array    native int32: where the suffixes begin, in lexicographic order of their first `DEPTH` tokens

No match and no continuation crosses a separator, because no query holds one. Sorting by `DEPTH` tokens is enough for
matches and continuations of `DEPTH` tokens together. Knows tokens, not drafts.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
from msgspec import Meta

from actors.drafters.retrieval.config import DEPTH
from parallel.typed_json import as_type, parse_json
from parallel.whole_files import replaced_whole

SEPARATOR = 2**32 - 1
_HEADER = 4096
_VERSION = 1
_MOST_TOKENS = 2**31 - 1
_AT_ONCE = 2**22
"""Tokens that are compared at a time."""
_REMEDY = "make it again with job=datastore"


class HeaderFields(TypedDict):
    version: int
    num_tokens: Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
    num_documents: int
    tokenizer: str


def write_datastore(path: Path, documents: Sequence[Sequence[int]], digest: str) -> int:
    """Write the file, whole or not at all; returns the number of tokens, separators included.

    ValueError, one line, if there are none, or more than the suffix array can number.
    """
    count = sum(len(document) + 1 for document in documents)
    if not documents or count > _MOST_TOKENS:
        raise ValueError(f"job.files: hold {count} tokens; a datastore takes 1 to {_MOST_TOKENS}")
    tokens = np.empty(count, ">u4")
    start = 0
    for document in documents:
        tokens[start : start + len(document)] = document
        tokens[start + len(document)] = SEPARATOR
        start += len(document) + 1
    about = {"version": _VERSION, "num_tokens": count, "num_documents": len(documents), "tokenizer": digest}
    with replaced_whole(path) as partial, partial.open("wb") as file:
        file.write(json.dumps(about).encode().ljust(_HEADER))
        file.write(tokens.data)
        file.write(suffix_array(tokens).data)
    return count


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Begins of all suffixes [n] int32, sorted by their first `DEPTH` tokens: prefix doubling.

    A round sorts by pairs of ranks, of a suffix and of the one `reach` tokens on, which doubles what they compare.
    """
    _, ranks = np.unique(tokens, return_inverse=True)
    ranks = ranks.astype(np.int64) + 1  # 0 is the rank beyond the end
    reach = 1
    while True:
        keys = ranks * (len(tokens) + 1)
        keys[:-reach] += ranks[reach:]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        ranks[order] = np.concatenate([[1], 1 + np.cumsum(keys[1:] != keys[:-1])])
        reach *= 2
        if reach >= DEPTH or reach >= len(tokens):
            return order.astype(np.int32)


class Datastore:
    """An open file. ValueError, one line that begins with the path, for a file that is none or is damaged.

    The array is held against the number of tokens, in one pass over it, so that nothing is read outside of the file.
    """

    def __init__(self, path: Path) -> None:
        self.about = read_header(path)
        count = self.about["num_tokens"]
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._tokens = np.frombuffer(self._bytes, ">u4", count, _HEADER)
        self._array = np.frombuffer(self._bytes, np.int32, count, _HEADER + 4 * count)
        self._starts = memoryview(self._bytes)[_HEADER + 4 * count :].cast("i")
        self._path = path
        if self._array.min() < 0 or self._array.max() >= count:
            raise ValueError(f"{path}: is damaged, it names tokens beyond its {count}; {_REMEDY}")

    def check_tokens(self, vocab_size: int) -> None:
        """ValueError, one line, unless all tokens are of a vocabulary of that size, or the separator."""
        for first in range(0, len(self._tokens), _AT_ONCE):
            tokens = self._tokens[first : first + _AT_ONCE]
            if ((tokens >= vocab_size) & (tokens != SEPARATOR)).any():
                raise ValueError(f"{self._path}: holds tokens beyond the target's {vocab_size}; {_REMEDY}")

    def matches(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The range of the suffixes that begin with these tokens, which are at most `DEPTH`."""
        wanted = np.array(token_ids, ">u4").tobytes()
        size, text = len(wanted), self._bytes

        def beginning(start: int) -> bytes:
            return text[_HEADER + 4 * start : _HEADER + 4 * start + size]

        low = bisect_left(self._starts, wanted, key=beginning)
        if low == len(self._starts) or beginning(self._starts[low]) != wanted:
            return low, low
        return low, bisect_right(self._starts, wanted, low, key=beginning)

    def longest_match(self, token_ids: Sequence[int], shortest: int, longest: int) -> tuple[int, int, int]:
        """(length, low, high) of the longest suffix of the text that occurs; (0, 0, 0) if none of `shortest` does.

        If a suffix occurs, every shorter one does, so the length is found by bisection.
        """
        found, low, high = (0, 0, 0), shortest, min(longest, len(token_ids))
        while low <= high:
            middle = (low + high) // 2
            first, end = self.matches(token_ids[-middle:])
            if first < end:
                found, low = (middle, first, end), middle + 1
            else:
                high = middle - 1
        return found

    def continuations(self, matched: int, low: int, high: int, length: int, most: int) -> np.ndarray:
        """What follows matches `low` to `high` of `matched` tokens, [n, length] in order, `SEPARATOR` after the end.

        Of more than `most` matches, as many spread evenly.
        """
        starts = self._array[low : high : -(-(high - low) // most)].astype(np.int64) + matched
        places = starts[:, None] + np.arange(length)
        tokens = self._tokens[np.minimum(places, len(self._tokens) - 1)].astype(np.int64)
        ended = np.logical_or.accumulate(tokens == SEPARATOR, axis=1)
        return np.where(ended, SEPARATOR, tokens)


def read_header(path: Path) -> HeaderFields:
    """The header of a datastore; ValueError, one line that begins with the path, for another file."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
        size = path.stat().st_size
        about = as_type(parse_json(header), HeaderFields)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"{path}: is no datastore ({error}); make one with job=datastore") from None
    if about["version"] != _VERSION or size != _HEADER + 8 * about["num_tokens"]:
        raise ValueError(f"{path}: is damaged or of another version; {_REMEDY}")
    return about
