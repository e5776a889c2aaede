"""Text at the edge of the engine: a checkpoint's tokenizer, its end tokens, and text out of a stream of tokens.

The rest of the engine knows token ids only. Imports the `tokenizers` library alone, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path

from tokenizers import Tokenizer

from actors.tokenizer_file import open_tokenizer
from parallel.model.config_fields import read_config_file
from parallel.ranges import errors_of

_PARTIAL = "\ufffd"
"""What bytes that do not make a character decode to."""


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """Load the checkpoint's `tokenizer.json`. Raises ValueError if it is missing or cannot be read."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"target.path: {checkpoint} has no tokenizer.json; save the tokenizer beside the weights")
    with errors_of("target.path"):
        return open_tokenizer(checkpoint)


def read_eos_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """End-of-sequence ids, from generation_config.json or else config.json, as transformers reads them."""
    for name in ("generation_config.json", "config.json"):
        eos = read_config_file(checkpoint / name).get("eos_token_id") if (checkpoint / name).is_file() else None
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell these words, each with and without a space before it, as in vLLM."""
    found = []
    for word in words:
        plain, spaced = (tokenizer.encode(p + word.lstrip(), add_special_tokens=False).ids for p in ("", " "))
        found.append(tuple(plain))
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(tuple(spaced))
    return tuple(found)


def named_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and patterns of `job.files` name, sorted. Raises ValueError if there are none."""
    found = sorted({path for pattern in patterns for path in glob(str(Path(pattern).expanduser()), recursive=True)})
    files = [path for path in map(Path, found) if path.is_file()]
    if not files:
        raise ValueError(f"job.files={list(patterns)}: name no file; give paths or patterns such as 'texts/**/*.txt'")
    return files


class TextStream:
    """Text of one completion, token by token, up to a stop string: what decode(prompt + output) adds to decode(prompt).

    The shown text excludes the stop string, unless `includes_stop`, and has the names of special tokens unless
    `skips_special`. No stop string ends with one of the first `min_tokens` tokens. Until the end, characters that could
    begin a stop string are held back, and so are bytes that do not make a character yet.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        skips_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._includes_stop = includes_stop
        self._skips_special = skips_special
        self._num_early = min_tokens  # tokens that are yet to come
        self._early_len = 0  # leading characters of `_held` that came with them
        self._stop = stop
        self._reach = max(map(len, stop), default=1) - 1
        self._before, self._before_text = self._context(prompt)
        self._pending: list[int] = []
        self._shown: list[str] = []
        self._held = ""
        self.stop_string: str | None = None
        """The one that ended the text."""

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """The text shown so far."""
        return "".join(self._shown)

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return not self.stopped and bool(self._held or self._pending)

    def push(self, token: int) -> str:
        """Add one token; returns the text to show now. `stopped` is True once a stop string is complete."""
        self._pending.append(token)
        text = self._pending_text()
        if text and not text.endswith(_PARTIAL):
            self._held += text
            self._before, self._pending = self._pending, []
            self._before_text = self._decoded(self._before)
        if self._num_early:
            self._num_early, self._early_len = self._num_early - 1, len(self._held)
        found = [(at, stop) for stop in self._stop if (at := self._place_of(stop)) >= 0]
        if not found:
            return self._show(max(0, len(self._held) - self._reach))
        at, self.stop_string = min(found, key=lambda one: one[0])
        return self._show(at + (len(self.stop_string) if self._includes_stop else 0))

    def end(self) -> str:
        """No token follows: show the text that was held back."""
        if self.stopped:
            return ""
        self._held += self._pending_text()
        self._pending = []
        return self._show(len(self._held))

    def _pending_text(self) -> str:
        """Decoded after the tokens before: many tokenizers put a space before each word but the first of a text."""
        return self._decoded(self._before + self._pending)[len(self._before_text) :]

    def _decoded(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _place_of(self, stop: str) -> int:
        """Where it stands in the text that is held back; -1: nowhere."""
        return self._held.find(stop, max(0, self._early_len + 1 - len(stop)))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self._early_len = max(0, self._early_len - length)
        self._shown.append(shown)
        return shown

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The last few tokens of a prompt, more until they decode to whole characters, and their text."""
        size = 8
        while True:
            last = list(prompt[-size:])
            text = self._decoded(last)
            if size >= len(prompt) or (text and _PARTIAL not in text):
                return last, text
            size *= 2
