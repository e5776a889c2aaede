"""Log-probabilities of the target at consecutive tokens of a text, as records carry them and as users read them.

Standard library only, and no tensor: arrays are bytes, little endian, so that the bits of float32 arrive as they were
computed. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_LOGPROBS = 20
"""Likeliest tokens of a position that a request may ask for: the bound of OpenAI's chats, and of vLLM by default."""
_CELL = 4
"""Bytes of a token id, a value and a rank."""
_ROUNDING = 1e-3
"""Amount by which the logarithm of a probability near one may exceed zero."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position. `rank` counts the tokens that are at least as likely there: 1
    is the likeliest, and tokens that tie share the last of their places; that of a listed token is its place there.
    """

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Those of n consecutive tokens: `token_ids` int32 and `values` float32 [n, 1 + k] hold the text's own token and
    then the `k` likeliest ones, of ties the lowest first; `ranks` int32 [n] are those of the text's own tokens. Values
    are log-softmax of the target's logits as they are, before sampling parameters apply.
    """

    k: int
    token_ids: bytes = b""
    values: bytes = b""
    ranks: bytes = b""

    def __len__(self) -> int:
        return len(self.ranks) // _CELL

    def part(self, start: int, stop: int) -> Logprobs:
        """Those of the tokens from `start` to `stop` among these."""
        rows, cells = slice(_CELL * start, _CELL * stop), _CELL * (1 + self.k)
        row_cells = slice(cells * start, cells * stop)
        return Logprobs(self.k, self.token_ids[row_cells], self.values[row_cells], self.ranks[rows])

    @staticmethod
    def joined(k: int, parts: Iterable[Logprobs]) -> Logprobs:
        """Those of the tokens of all parts, which have the same `k`."""
        parts = list(parts)
        assert all(part.k == k for part in parts), "parts of one request list equally many tokens"
        arrays = zip(*[(part.token_ids, part.values, part.ranks) for part in parts], strict=True)
        return Logprobs(k, *map(b"".join, arrays)) if parts else Logprobs(k)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless the arrays fit together and hold tokens of this vocabulary, ranks among them, and
        logarithms of probabilities."""
        sizes, cells = (len(self.token_ids), len(self.values)), len(self.ranks) * (1 + self.k)
        if not 0 <= self.k <= MOST_LOGPROBS or len(self.ranks) % _CELL or sizes != (cells, cells):
            raise ValueError(f"logprobs: {(*sizes, len(self.ranks))} bytes are not rows of {self.k} tokens")
        if not self.ranks:
            return
        token_ids, ranks, values = self._numbers()
        if not (0 <= min(token_ids) <= max(token_ids) < vocab_size and 0 < min(ranks) <= max(ranks) <= vocab_size):
            raise ValueError(f"logprobs: names a token or rank that a vocabulary of {vocab_size} tokens does not have")
        if not all(value <= _ROUNDING for value in values):  # false of NaN
            raise ValueError("logprobs: a value is not the logarithm of a probability")

    def entries(self) -> list[dict[int, Logprob]]:
        """What is known for each token, by token id: the text's own token first, then the likeliest ones."""
        token_ids, ranks, values = self._numbers()
        found, width = [], 1 + self.k
        for row, own in enumerate(ranks):
            cells = range(row * width, (row + 1) * width)
            places = (own, *range(1, width))
            found.append({token_ids[c]: Logprob(values[c], rank) for c, rank in zip(cells, places, strict=True)})
        return found

    def _numbers(self) -> tuple[list[int], list[int], Sequence[float]]:
        token_ids, ranks, values = (memoryview(one) for one in (self.token_ids, self.ranks, self.values))
        return token_ids.cast("i").tolist(), ranks.cast("i").tolist(), values.cast("f").tolist()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Those of a part of a request's prompt that was read in one pass, the tokens from index `first` on; nothing is
    known of token 0, which no token precedes."""

    request_id: int
    first: int
    logprobs: Logprobs
