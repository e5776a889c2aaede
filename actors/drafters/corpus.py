"""A corpus: a text file that a drafter reads at its start, or that a job does, as token ids. Loads no tokenizer before.

Plain text is one document, a `.jsonl` file has one per line. The rows of a run's `completions.jsonl` are such
documents: prompt, then text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from actors.drafters.config import DrafterConfig, PathResolver, PlacedDrafterConfig
from parallel.typed_json import json_lines, read_text


@dataclass(frozen=True, slots=True)
class CorpusDrafterConfig(PlacedDrafterConfig):
    """Base of the records of drafters that read a text at their start."""

    corpus: str = ""
    """Text to draft from, read at start: a text file, or JSONL with a `text` or `prompt` field; empty = none."""
    tokenizer: str = ""
    """Checkpoint directory whose tokenizer reads the corpus; empty = the target's."""

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        if not self.corpus:
            return self
        tokenizer = resolve.checkpoint(f"{where}.tokenizer", self.tokenizer or resolve.target)
        corpus = resolve.file(f"{where}.corpus", self.corpus, "a text file, or JSONL with a `text` field")
        return replace(self, corpus=corpus, tokenizer=tokenizer)

    def documents(self) -> list[list[int]]:
        """The documents of the corpus as token ids."""
        return read_corpus(Path(self.corpus), Path(self.tokenizer)) if self.corpus else []


def read_corpus(path: Path, checkpoint: Path, key: str = "drafter.corpus") -> list[list[int]]:
    """Documents of the file in the vocabulary of the checkpoint; ValueError, one line, for what is no corpus.

    `key` names the option in it.
    """
    from actors.tokenizer_file import open_tokenizer  # loads the tokenizers library

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
