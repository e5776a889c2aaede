"""A corpus file as token ids: plain text is one document, a `.jsonl` file has one per line.

The rows of a run's `completions.jsonl` are such documents: prompt, then text. Uses the `tokenizers` library alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer


def read_corpus(path: Path, checkpoint: Path, key: str = "drafter.corpus") -> list[list[int]]:
    """Documents of the file in the vocabulary of the checkpoint; ValueError, one line, for what is no corpus.

    `key` names the option in it.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    encodings = tokenizer.encode_batch(list(_documents(path, key)), add_special_tokens=False)
    return [encoding.ids for encoding in encodings if encoding.ids]


def _documents(path: Path, key: str) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _document(line, f"{key}={path}: line {number}")


def _document(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error.msg} at column {error.colno}); correct or remove it") from error
    parts = [record.get(name) for name in ("prompt", "text")] if isinstance(record, dict) else []
    texts = [part for part in parts if isinstance(part, str)]
    if not texts:
        raise ValueError(f'{where} has neither `prompt` nor `text`; write {{"text": ...}}')
    return "".join(texts)
