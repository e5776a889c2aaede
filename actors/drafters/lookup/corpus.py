"""A corpus file as token ids: plain text is one document, a `.jsonl` file has one per line.

The rows of a run's `completions.jsonl` are such documents: prompt, then text. Uses the `tokenizers` library alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from actors.tokenizer_file import open_tokenizer
from parallel.typed_json import json_lines, read_text


def read_corpus(path: Path, checkpoint: Path, key: str = "drafter.corpus") -> list[list[int]]:
    """Documents of the file in the vocabulary of the checkpoint; ValueError, one line, for what is no corpus.

    `key` names the option in it.
    """
    tokenizer = open_tokenizer(checkpoint)
    encodings = tokenizer.encode_batch(list(_documents(path, key)), add_special_tokens=False)
    return [encoding.ids for encoding in encodings if encoding.ids]


class DocumentFields(TypedDict, total=False):
    """The fields of a line that are read; others are left alone."""

    prompt: str | None
    text: str | None


def _documents(path: Path, key: str) -> Iterator[str]:
    where = f"{key}={path}"
    text = read_text(path, where)
    if path.suffix != ".jsonl":
        yield text
        return
    for place, record in json_lines(text, DocumentFields, where):
        texts = [part for name in ("prompt", "text") if (part := record.get(name)) is not None]
        if not texts:
            raise ValueError(f'{place} has neither `prompt` nor `text`; write {{"text": ...}}')
        yield "".join(texts)
