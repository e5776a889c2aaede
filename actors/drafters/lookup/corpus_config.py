"""Options of the drafters that read a text at their start. Loads no tokenizer before it is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from actors.drafters.config import DrafterConfig, PathResolver, PlacedDrafterConfig


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
        from actors.drafters.lookup.corpus import read_corpus  # loads the tokenizers library

        return read_corpus(Path(self.corpus), Path(self.tokenizer)) if self.corpus else []
