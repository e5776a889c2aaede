"""The tokens of a tokenizer as bytes of text, and the tokens that two tokenizers share.

Tokens are compared by the bytes they stand for, whatever the tokenizer writes for a space or a byte: byte-level BPE has
its alphabet (GPT-2), SentencePiece a marker for spaces and `<0xNN>` for bytes. Text is the concatenation of these
bytes, so that pieces of a character, spaces and line ends need no rules of their own. Knows no models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from tokenizers import Encoding

from actors.tokenizer_file import (
    MOST_TOKENS,
    TokenizerFields,
    TokenizerStep,
    open_tokenizer,
    read_tokenizer_file,
)

_WINDOWS = (16, 8, 4, 3, 2, 1)
"""Tokens before a text that are encoded with it."""
_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for every byte: itself if it can be seen, else one from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


class TokenPieces:
    """The tokenizer of a checkpoint. `of[token]` are the bytes of an ordinary token, empty for a special one; those are
    in `special` by name and in `names` by token."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises ValueError, one line, for a tokenizer whose tokens are no pieces of the text, such as WordPiece."""
        file = checkpoint / "tokenizer.json"
        content = read_tokenizer_file(checkpoint)
        parts = {part.get("type") for part in _parts(content)}
        if "ByteLevel" not in parts and not parts & {"Metaspace", "ByteFallback"}:
            raise ValueError(f"{file}: is neither byte-level nor SentencePiece, so its tokens are no pieces of a text")
        self._tokenizer = open_tokenizer(checkpoint)
        added = {token["id"]: token for token in content.get("added_tokens", [])}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        alphabet = _byte_alphabet() if "ByteLevel" in parts else None
        largest = max(vocabulary.values(), default=-1)
        if largest >= MOST_TOKENS:
            raise ValueError(f"{file}: names token {largest}; the largest may be {MOST_TOKENS - 1}")
        self.of = [b""] * (largest + 1)
        self.special: dict[str, int] = {}
        self.names: dict[int, str] = {}
        for text, token in vocabulary.items():
            if token not in added:
                self.of[token] = _bytes_of(text, alphabet)
            elif added[token]["special"]:
                self.special[text], self.names[token] = token, text
            else:
                self.of[token] = text.encode()
        first = self.encode("a").ids[:1]
        self.prepends_space = bool(first) and self.of[first[0]].startswith(b" ")

    def encode(self, text: str) -> Encoding:
        """The tokens of a text, without those that the tokenizer would add to it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What the tokens stand for, up to a special token or to bytes that make no character."""
        pieces = list(takewhile(bool, (self.of[token] if token < len(self.of) else b"" for token in token_ids)))
        content = b"".join(pieces)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            return content[: error.start].decode()

    def continued(self, token_ids: Sequence[int], text: str) -> list[int]:
        """The tokens of `text` after these: encoded together with the last of them, and after a line end where these
        would come out otherwise."""
        for window in _WINDOWS:
            before = list(token_ids[-window:])
            known = self.text_of(before)
            if self.prepends_space:
                if not known.startswith(" "):
                    continue
                known = known[1:]
            encoded = self.encode(known + text).ids
            if encoded[: len(before)] == before:
                return encoded[len(before) :]
        before, encoded = self.encode("\n").ids, self.encode("\n" + text).ids
        return encoded[len(before) :] if encoded[: len(before)] == before else self.encode(text).ids

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """What a text of the model begins with: the tokens that the tokenizer puts there, or its first special one."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        ordinary = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        return tuple(encoding.ids[: ordinary[0]] if ordinary else ()) or (min(self.special.values(), default=0),)

    def by_bytes(self) -> dict[bytes, int]:
        """The token of every piece of text that is one; of several, not the one that names a byte."""
        pieces: dict[bytes, int] = {}
        for token, piece in enumerate(self.of):
            if piece and (piece not in pieces or _BYTE.fullmatch(self._tokenizer.id_to_token(pieces[piece]) or "")):
                pieces[piece] = token
        return pieces


def has_same_tokens(target: Path, draft: Path) -> bool | None:
    """Whether two checkpoints give every token the same id; None where one of them has no tokenizer."""
    if not all((path / "tokenizer.json").is_file() for path in (target, draft)):
        return None
    ours, theirs = (read_tokenizer_file(path)["model"].get("vocab") for path in (target, draft))
    return ours == theirs


def shared_tokens(target: TokenPieces, draft: TokenPieces) -> list[tuple[int, int]]:
    """(target token, draft token) of every piece of text, and every special token's name, that both have."""
    ours, theirs = target.by_bytes(), draft.by_bytes()
    pairs = [(token, theirs[piece]) for piece, token in ours.items() if piece in theirs]
    named = [(token, draft.special[name]) for name, token in target.special.items() if name in draft.special]
    return sorted(pairs + named)


def _parts(content: TokenizerFields) -> Iterator[TokenizerStep]:
    """The steps of decoder and pre-tokenizer, sequences opened."""
    pending = [part for part in (content.get("decoder"), content.get("pre_tokenizer")) if part]
    while pending:
        part = pending.pop()
        yield part
        pending += part.get("decoders", []) + part.get("pretokenizers", [])


def _bytes_of(text: str, alphabet: dict[str, int] | None) -> bytes:
    if alphabet is not None:
        return bytes(alphabet[character] for character in text) if alphabet.keys() >= set(text) else text.encode()
    if (byte := _BYTE.fullmatch(text)) is not None:
        return bytes([int(byte[1], 16)])
    return text.replace(_SPACE, " ").encode()
