"""Training rows: prompts, of the corpus or of the user's own text, and what a model writes after them.

Only tokens are stored. It must not know losses or what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from actors.drafters.corpus import DocumentFields
from cluster.tools.training.models import continue_text, grouped
from parallel.training.checkpoints import save_whole
from parallel.typed_json import json_lines

BATCH = 128
"""Prompts continued at once."""
WINDOW = 64
"""Tokens of a prompt that is cut from plain text."""


@dataclass(frozen=True)
class TextRows:
    """Text in rows of one length, and which part of each may be learnt."""

    tokens: torch.Tensor
    """int64 `[rows, length]`."""
    begins: torch.Tensor
    """int64 `[rows]`: the first token that is a label; those before it are the prompt."""
    ends: torch.Tensor
    """int64 `[rows]`: the first token behind the labels: what a model wrote after its end of text is no text."""

    def mask(self) -> torch.Tensor:
        """bool `[rows, length]`: which tokens are labels."""
        place = torch.arange(self.tokens.shape[1])
        return (place >= self.begins[:, None]) & (place < self.ends[:, None])

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, chosen: torch.Tensor) -> TextRows:
        """The chosen rows."""
        return TextRows(self.tokens[chosen], self.begins[chosen], self.ends[chosen])

    def save(self, path: Path) -> None:
        """Write the rows; a reader sees the old file or the new one, never a part."""
        tensors = {"tokens": self.tokens.int(), "begins": self.begins, "ends": self.ends}
        save_whole(tensors, path)


def load_rows(path: Path) -> TextRows:
    """Read what `TextRows.save` wrote."""
    tensors = torch.load(path)
    return TextRows(tensors["tokens"].long(), tensors["begins"], tensors["ends"])


def joined(parts: Sequence[TextRows]) -> TextRows:
    """All rows in order; they must have one length."""
    tokens, begins, ends = ([getattr(part, name) for part in parts] for name in ("tokens", "begins", "ends"))
    return TextRows(torch.cat(tokens), torch.cat(begins), torch.cat(ends))


def written_rows(tokens: torch.Tensor, prompt_length: int, end_ids: Sequence[int]) -> TextRows:
    """TextRows `[rows, length]` whose labels go from the end of the prompt to the first end of text, that included."""
    is_end = torch.isin(tokens, torch.tensor(list(end_ids), dtype=torch.long))
    is_end[:, :prompt_length] = False
    length = tokens.shape[1]
    ends = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, length)
    return TextRows(tokens, torch.full((len(tokens),), prompt_length), ends)


def write_rows(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    length: int,
    temperature: float,
    end_ids: Sequence[int],
    seed: int,
    parts: Path,
    say: Callable[[str], None],
) -> TextRows:
    """Every prompt continued to `length` tokens; equal arguments give equal rows.

    A file in `parts` for each batch that is done lets a run that was killed go on.
    """
    done = []
    for number, group in enumerate(grouped(prompts, length, BATCH)):
        path = parts / f"{number}.pt"
        if not path.exists():
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            tokens = continue_text(model, group, length, temperature, generator)
            written_rows(tokens, group.shape[1], end_ids).save(path)
            rows = sum(map(len, done)) + len(group)
            say(f"the target continues prompts at temperature {temperature:g}: {rows} of {len(prompts)}")
        done.append(load_rows(path))
    return joined(done)


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Kind and text of every entry of a file or of all files of a folder: the `prompt` or `text` of a line of JSONL,
    or a file as a whole.

    ValueError for a line without either, and where there is no text.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            if path.is_dir():
                continue  # pictures and archives lie beside texts
            raise ValueError(f"job.text={path}: is not UTF-8 text; save it as UTF-8") from None
        except OSError as error:
            raise ValueError(f"job.text={path}: {error.strerror}; give a text file, a JSONL file or a folder") from None
        if file.suffix != ".jsonl":
            yield "text", text
            continue
        for place, record in json_lines(text, DocumentFields, f"job.text={file}"):
            kind = next((key for key in ("prompt", "text") if record.get(key) is not None), None)
            if kind is None:
                raise ValueError(f"{place} has no text `prompt` or `text`; correct or remove it")
            yield kind, record[kind]


def prompts_of_text(path: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Up to `count` prompts from the user's own text: its prompts as they are, and windows spread over the rest.

    ValueError, one line, for text that cannot be read or is too short.
    """
    prompts: list[list[int]] = []
    windows: list[list[int]] = []
    for kind, text in read_texts(path):
        ids = tokenizer.encode(text).ids
        if kind == "prompt":
            prompts.append(ids)
        else:
            windows.extend(ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW))
    found = [prompt for prompt in prompts if prompt] + windows
    if not found:
        raise ValueError(f"job.text={path}: holds no prompt and no text of {WINDOW} tokens; give more text")
    chosen = torch.linspace(0, len(found) - 1, min(count, len(found))).long()
    return [found[i] for i in chosen.tolist()]
