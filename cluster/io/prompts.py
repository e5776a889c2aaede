"""Prompts from a JSONL file: one object per line, with a `prompt` text, as in HumanEval, or the `turns` of Spec-Bench.

A folder may hold several such sets, each under its name. A file is read and checked as a whole before anything starts;
an error names the bad line. Must not know tokenizers or engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from actors.protocol.messages import PLAIN_DECODING
from parallel.typed_json import json_lines, read_text


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the labels from its file. `token_ids` replaces the text where a prompt was made, not read;
    `drafter` names the one that drafts for it."""

    text: str
    category: str | None = None
    question_id: str | int | None = None
    source: str | None = None
    token_ids: tuple[int, ...] | None = None
    drafter: str | None = None

    @property
    def content(self) -> str | tuple[int, ...]:
        """What to submit."""
        return self.text if self.token_ids is None else self.token_ids

    def labels(self) -> dict[str, object]:
        """The labels that are set."""
        labels = {"category": self.category, "question_id": self.question_id, "source": self.source}
        return {name: value for name, value in labels.items() if value is not None}


class PromptFields(TypedDict, total=False):
    """The keys of a line that are known; others are left alone."""

    prompt: str | None
    turns: list[str] | None
    category: str | None
    question_id: str | int | None
    task_id: str | int | None
    source: str | None
    drafter: str | None
    # Not of a line, but of the run. They are known so that `read_prompts` can say so.
    sampling: object
    max_tokens: object
    temperature: object
    top_p: object
    top_k: object
    seed: object
    stop: object


_OF_THE_RUN = frozenset({"sampling", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"})


def prompt_sets(folder: Path) -> dict[str, Path]:
    """Name -> file of every prompt set in a folder: NAME.jsonl, or NAME/question.jsonl as Spec-Bench keeps them."""
    nested = {file.parent.name: file for file in sorted(folder.glob("*/question.jsonl"))}
    return nested | {file.stem: file for file in sorted(folder.glob("*.jsonl"))}


def read_prompts(
    path: Path,
    limit: int = 0,
    *,
    drafters: Collection[str] | None = None,
    note: Callable[[str], None] = lambda _line: None,
) -> list[Prompt]:
    """Prompts in the file's order, at most `limit` (0: all) spread evenly over its categories. `note` is called with a
    line about what of the file is not used.

    Raises ValueError for a file without prompts, and for the first line that is not a prompt or names a drafter that
    is none of these (None: any is).
    """
    where = f"job.prompts={path}"
    prompts, unused = list[Prompt](), set[str]()
    for place, record in json_lines(read_text(path, where), PromptFields, where):
        prompts.append(_prompt(place, record))
        _check_drafter(place, prompts[-1].drafter, drafters)
        unused |= record.keys() & _OF_THE_RUN
    if not prompts:
        raise ValueError(f"job.prompts={path}: holds no prompt; give one JSON object a line with `prompt` or `turns`")
    if unused:
        note(f"{where}: {', '.join(sorted(unused))} of its lines are not read; sampling.* hold for all prompts")
    if 0 < limit < len(prompts):
        note(f"job.limit={limit}: {limit} of the {len(prompts)} prompts of {path.name}; job.limit=0 takes all")
    return spread(prompts, limit) if limit else prompts


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """Up to `limit` prompts in their order, as evenly over the categories as their sizes allow."""
    by_category: dict[str | None, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_category[prompt.category].append(index)
    # Every category's first, then every category's second, ...
    turns = sorted((turn, index) for members in by_category.values() for turn, index in enumerate(members))
    return [prompts[index] for index in sorted(index for _, index in turns[:limit])]


def _prompt(place: str, record: PromptFields) -> Prompt:
    turns = record.get("turns") or [None]
    text = turns[0] if record.get("prompt") is None else record.get("prompt")
    if text is None:
        raise ValueError(f"{place} has neither a text `prompt` nor a list of texts `turns`; correct or remove it")
    if not text:
        raise ValueError(f"{place} has an empty prompt; correct or remove it")
    question_id = record.get("question_id", record.get("task_id"))
    return Prompt(text, record.get("category"), question_id, record.get("source"), drafter=record.get("drafter"))


def _check_drafter(place: str, drafter: str | None, known: Collection[str] | None) -> None:
    if known is not None and drafter not in (None, PLAIN_DECODING, *known):
        names = ", ".join((*known, PLAIN_DECODING))
        raise ValueError(f"{place}: the engine has no drafter {drafter!r:.40}; name one of {names}, or leave it out")
