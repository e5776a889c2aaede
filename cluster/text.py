"""Text at the edge of the engine: a checkpoint's tokenizer, its end tokens, and text out of a stream of tokens.

Everything behind this file speaks token ids. Uses the `tokenizers` library alone, so that starting up costs
milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The checkpoint's `tokenizer.json`; ValueError if it has none."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"target.path: {checkpoint} has no tokenizer.json; save the tokenizer beside the weights")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        raise ValueError(f"target.path: {path} cannot be read as a tokenizer ({error}); save it again") from error


def read_json(path: Path) -> dict:
    """The file's object, or an empty one where there is no such file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def read_eos_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """End-of-sequence ids, from generation_config.json or else config.json, as transformers reads them."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(checkpoint / name).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def check_same_vocabulary(target: Path, drafter: Path) -> None:
    """ValueError unless both checkpoints mean the same by every token id."""
    sizes = [read_json(path / "config.json").get("vocab_size") for path in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"drafter.path: vocabulary of {sizes[1]} tokens against the target's {sizes[0]}; "
            "use a drafter of the same vocabulary or drafter=ngram"
        )
    files = [path / "tokenizer.json" for path in (target, drafter)]
    if all(file.is_file() for file in files):
        vocabularies = [read_json(file).get("model", {}).get("vocab") for file in files]
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(
                f"drafter.path: the tokenizer of {drafter} gives other ids than the target's; "
                "use a drafter of the same vocabulary or drafter=ngram"
            )


class TextStream:
    """Text of one completion, token by token, watching for stop strings.

    `text` is what may be shown: it excludes the stop string, and while generation goes on it also holds back an
    ending that could still become one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._reach = max(map(len, stop), default=1) - 1
        self._whole = ""
        self._ended = False

    def push(self, token: int) -> bool:
        """Add one token; True if its text completed a stop string."""
        searched = max(0, len(self._whole) - self._reach)
        self._whole += self._decoder.step(self._tokenizer, token) or ""
        found = [at for stop in self._stop if (at := self._whole.find(stop, searched)) >= 0]
        if found:
            self._whole = self._whole[: min(found)]
            self._ended = True
        return self._ended

    def end(self) -> None:
        """Nothing more will come: release what was held back."""
        self._ended = True

    @property
    def text(self) -> str:
        return self._whole if self._ended or not self._reach else self._whole[: len(self._whole) - self._reach]
