"""A text that grows in one tokenizer's tokens, in those of another.

Tokenizers are not stable under continuation: with the next token the last ones may merge. So the last tokens are
encoded again with every piece that is added, and the number of tokens that stayed tells which KV rows are still right.
Bytes that make no character yet wait for the rest. Knows no models.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from actors.drafters.vocabulary.token_pieces import TokenPieces

_WINDOWS = (32, 256)
"""Tokens that are encoded again, if the first half of them comes out as it was; else more, at last the whole text."""


class RetokenizedText:
    """`token_ids` are the text in `draft` tokens; the text comes in `target` tokens, of which `num_target` are here."""

    def __init__(self, target: TokenPieces, draft: TokenPieces) -> None:
        self._target = target
        self._draft = draft
        self._text = ""
        self._rest = b""  # of a character
        self._marks: list[tuple[int, bytes]] = []  # characters and rest after each target token
        self._num_fixed = len(draft.beginning)
        self.token_ids = list(draft.beginning)
        self._ends = [0] * self._num_fixed  # in characters

    @property
    def num_target(self) -> int:
        return len(self._marks)

    @property
    def is_whole(self) -> bool:
        """Whether the text ends with a whole character."""
        return not self._rest

    def extend(self, target_ids: Sequence[int]) -> int:
        """Add tokens; returns how many of the draft tokens stayed."""
        num_characters = len(self._text)
        for token in target_ids:
            self._add(token)
        return len(self.token_ids) if len(self._text) == num_characters else self._encode_end()

    def append(self, target_id: int, draft_id: int) -> None:
        """Add a token that is one in both."""
        self._add(target_id)
        self.token_ids.append(draft_id)
        self._ends.append(len(self._text))

    def cut(self, num_target: int) -> int:
        """Take back all but the first `num_target` target tokens; returns how many of the draft tokens stayed."""
        del self._marks[num_target:]
        num_characters, self._rest = self._marks[-1] if self._marks else (0, b"")
        self._text = self._text[:num_characters]
        kept = len(self._ends)
        while kept > self._num_fixed and self._ends[kept - 1] > num_characters:
            kept -= 1
        self._replace(kept, [], [])
        return min(kept, self._encode_end())

    def num_target_within(self, num_draft: int) -> int:
        """Target tokens whose text is that of the first `num_draft` draft tokens, or less."""
        end, count = self._ends[num_draft - 1] if num_draft else 0, len(self._marks)
        while count and (self._marks[count - 1][0] > end or self._marks[count - 1][1]):
            count -= 1
        return count

    def skip(self, start: int, count: int) -> None:
        """Forget `count` draft tokens from `start` on: the model will not have read them."""
        del self.token_ids[start : start + count], self._ends[start : start + count]

    def _add(self, token: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        characters = decoder.decode(self._rest + self._piece(token))
        self._rest = decoder.getstate()[0]
        if not self._text and self._target.prepends_space:
            characters = characters.removeprefix(" ")
        self._text += characters
        self._marks.append((len(self._text), self._rest))

    def _piece(self, token: int) -> bytes:
        """The bytes of a target token; the name of a special one where it is one of the draft tokenizer's too."""
        if token < len(self._target.of) and (piece := self._target.of[token]):
            return piece
        name = self._target.names.get(token, "")
        draft = self._draft.special.get(name)
        return b"" if draft is None or draft in self._draft.beginning else name.encode()

    def _encode_end(self) -> int:
        """Bring the draft tokens up to the text; returns how many stayed."""
        for window in _WINDOWS:
            first = self._window_start(len(self.token_ids) - window)
            if first == self._num_fixed:
                break
            start, num_checked = self._ends[first - 1], (len(self.token_ids) - first) // 2
            encoding = self._draft.encode(self._text[start + self._draft.prepends_space :])
            if num_checked and encoding.ids[:num_checked] == self.token_ids[first : first + num_checked]:
                offset = start + self._draft.prepends_space
                return self._replace(first, encoding.ids, [offset + end for _, end in encoding.offsets])
        encoding = self._draft.encode(self._text)
        return self._replace(self._num_fixed, encoding.ids, [end for _, end in encoding.offsets])

    def _window_start(self, first: int) -> int:
        """The last place at or before draft token `first` where a token begins after a whole character; with a space,
        where the tokenizer puts one before every text."""
        while first > self._num_fixed:
            end = self._ends[first - 1]
            if self._ends[first] > end and (not self._draft.prepends_space or self._text[end : end + 1] == " "):
                return first
            first -= 1
        return self._num_fixed

    def _replace(self, first: int, token_ids: Sequence[int], ends: Sequence[int]) -> int:
        """Put other draft tokens from `first` on; returns how many stayed."""
        both = min(len(self.token_ids) - first, len(token_ids))
        same = next((i for i in range(both) if self.token_ids[first + i] != token_ids[i]), both)
        self.token_ids[first:], self._ends[first:] = token_ids, ends
        return first + same
