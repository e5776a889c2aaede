"""Text at the edge of the engine: a checkpoint's tokenizer, its end tokens, and text out of a stream of tokens.

The rest of the engine knows token ids only. Imports the `tokenizers` library alone, which takes milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """Load the checkpoint's `tokenizer.json`. Raises ValueError if it is missing or cannot be read."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"target.path: {checkpoint} has no tokenizer.json; save the tokenizer beside the weights")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        raise ValueError(f"target.path: {path} cannot be read as a tokenizer ({error}); save it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file, empty if there is no file. Raises ValueError if it is not JSON."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); save the checkpoint again") from error


def read_eos_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """End-of-sequence ids, from generation_config.json or else config.json, as transformers reads them."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(checkpoint / name).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def check_same_vocabulary(target: Path, drafter: Path) -> None:
    """Raise ValueError unless every token id has the same meaning in both checkpoints.

    Model families pad their embeddings differently: with equal tokenizers the drafter's vocabulary may be the smaller.
    """
    target_size, drafter_size = (read_json(path / "config.json").get("vocab_size", 0) for path in (target, drafter))
    files = [path / "tokenizer.json" for path in (target, drafter)]
    tokenizers = [read_json(file).get("model", {}).get("vocab") for file in files if file.is_file()]
    same_tokens = len(tokenizers) == 2 and tokenizers[0] == tokenizers[1]
    if target_size != drafter_size and not (same_tokens and drafter_size < target_size):
        raise ValueError(
            f"drafter.path: vocabulary of {drafter_size} tokens against the target's {target_size}; "
            "use a drafter of the same vocabulary or drafter=ngram"
        )
    if len(tokenizers) == 2 and not same_tokens:
        raise ValueError(
            f"drafter.path: the tokenizer of {drafter} gives other ids than the target's; "
            "use a drafter of the same vocabulary or drafter=ngram"
        )


class TextStream:
    """Text of one completion, token by token, up to a stop string.

    The shown text excludes the stop string. Until the end, characters that could begin a stop string are held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._reach = max(map(len, stop), default=1) - 1
        self._shown: list[str] = []
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """The text shown so far."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """Add one token; returns the text to show now. `stopped` is True once a stop string is complete."""
        self._held += self._decode(token)
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return self._show(max(0, len(self._held) - self._reach))
        self.stopped = True
        self._held = self._held[: min(found)]
        return self.end()

    def end(self) -> str:
        """No token follows: show the text that was held back."""
        return self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self._shown.append(shown)
        return shown

    def _decode(self, token: int) -> str:
        try:
            return self._decoder.step(self._tokenizer, token) or ""
        except Exception:  # the library raises bare Exception for bytes that are not UTF-8; decode from here anew
            self._decoder = DecodeStream(skip_special_tokens=True)
            return self._decoder.step(self._tokenizer, token) or ""
