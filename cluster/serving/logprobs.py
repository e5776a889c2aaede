"""Log-probabilities as replies have them: the lists of OpenAI's completions and chats, and vLLM's `prompt_logprobs`.

Tokens are named by the bytes they stand for: their text, or `bytes:\\x..` for a part of a character; a special token
has its name. JSON has no infinity: a token without probability has -9999, as in vLLM. Knows no HTTP and no engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from tokenizers import Tokenizer

from actors.drafters.vocabulary.token_pieces import TokenPieces
from actors.protocol.logprobs import Logprob
from cluster.completion import Completion

Entry = Mapping[int, Logprob]
"""What is known at a token by token id, the text's own first."""
_LEAST = -9999.0


class ListedToken(Struct):
    """A token that was likely in a chat, and its value."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ListedToken):
    """A token of a chat, with those that were likeliest in its place."""

    top_logprobs: list[ListedToken]


class ChatLogprobs(Struct):
    """`logprobs` of a choice of a chat."""

    content: list[ChatToken]
    refusal: None = None


class TextLogprobs(Struct):
    """`logprobs` of a choice of a completion; `text_offset` counts characters from its begin."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(Struct):
    """A token that was likely in a prompt."""

    logprob: float
    rank: int
    decoded_token: str


class TokenNames:
    """Names and bytes of the tokens of a tokenizer; `pieces` is None where tokens are no pieces of the text."""

    def __init__(self, tokenizer: Tokenizer, pieces: TokenPieces | None) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces

    def bytes_of(self, token: int) -> bytes:
        """What it adds to the text; nothing for a special token."""
        pieces = self._pieces
        if pieces is None:
            return self._tokenizer.decode([token]).encode()
        return pieces.of[token] if token < len(pieces.of) else b""

    def name_of(self, token: int) -> str:
        """Its text, or what stands for it."""
        piece = self.bytes_of(token)
        try:
            return piece.decode() if piece else self._tokenizer.id_to_token(token) or ""
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """What a request asks for: so many of the likeliest tokens at each token, and at each of its prompt; None: nothing.
    `echoes`: the prompt's tokens come before the others. `by_id`: listed tokens are named `token_id:N`."""

    generated: int | None
    prompt: int | None
    echoes: bool = False
    is_chat: bool = False
    by_id: bool = False

    @property
    def asks(self) -> bool:
        return self.generated is not None or self.prompt is not None

    @property
    def most_of_prompt(self) -> int | None:
        """What the engine is to say of the prompt."""
        of_echo = self.generated if self.echoes else None
        return max((one for one in (of_echo, self.prompt) if one is not None), default=None)


class LogprobWriter:
    """Writes those of one reply, whole or chunk by chunk, each token once."""

    def __init__(self, asked: AskedLogprobs, names: TokenNames) -> None:
        self._asked = asked
        self._names = names
        self._offsets: dict[int, _Offsets] = {}  # by choice

    def part(self, index: int, completion: Completion, entries: Sequence[Entry]) -> TextLogprobs | ChatLogprobs | None:
        """Those of what a choice gained."""
        if self._asked.generated is None or not (entries or completion.prompt_logprobs):
            return None
        if self._asked.is_chat:
            return ChatLogprobs([self._chat_token(entry) for entry in entries]) if entries else None
        offsets, before = self._offsets.get(index), list[tuple[int, Entry | None]]()
        if offsets is None:
            offsets = self._offsets[index] = _Offsets(self._names)
            if self._asked.echoes and completion.prompt_logprobs is not None:
                before = [*zip(completion.prompt_token_ids, completion.prompt_logprobs, strict=True)]
        tokens = [*before, *[(next(iter(entry)), entry) for entry in entries]]
        if not tokens:
            return None
        return TextLogprobs(
            [offsets.take(token) for token, _ in tokens],
            [None if entry is None else _value(entry[token]) for token, entry in tokens],
            [self._name_of(token) for token, _ in tokens],
            [None if entry is None else self._top(entry) for _, entry in tokens],
        )

    def prompt(self, completion: Completion) -> list[dict[str, PromptToken] | None] | None:
        """vLLM's field, by token ids; None if it is not asked for."""
        if self._asked.prompt is None or completion.prompt_logprobs is None:
            return None
        return [None if one is None else self._prompt_token(one) for one in completion.prompt_logprobs]

    def _chat_token(self, entry: Entry) -> ChatToken:
        own, k = next(iter(entry)), self._asked.generated
        listed = [self._listed(token, entry[token]) for token in _ranked(entry, k or 0)] if k else []
        mine = self._listed(own, entry[own])
        return ChatToken(mine.token, mine.logprob, mine.bytes, listed)

    def _name_of(self, token: int) -> str:
        return f"token_id:{token}" if self._asked.by_id else self._names.name_of(token)

    def _listed(self, token: int, known: Logprob) -> ListedToken:
        stands_for = self._names.bytes_of(token) or self._names.name_of(token).encode()
        return ListedToken(self._name_of(token), _value(known), [*stands_for])

    def _top(self, entry: Entry) -> dict[str, float]:
        """The log-probabilities by name; of tokens with the same name the likeliest."""
        found: dict[str, float] = {}
        for token in _ranked(entry, self._asked.generated or 0):
            found.setdefault(self._name_of(token), _value(entry[token]))
        return found

    def _prompt_token(self, entry: Entry) -> dict[str, PromptToken]:
        tokens = [next(iter(entry)), *_ranked(entry, self._asked.prompt or 0)]
        return {
            str(token): PromptToken(_value(entry[token]), entry[token].rank, self._names.name_of(token))
            for token in tokens
        }


class _Offsets:
    """Counts the characters that the tokens before one have completed."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def take(self, token: int) -> int:
        """Offset in characters at which the text of the next token begins."""
        start = self._length
        self._length += len(self._decoder.decode(self._names.bytes_of(token)))
        return start


def _ranked(entry: Entry, k: int) -> list[int]:
    """The text's own token and the `k` likeliest, the likeliest first."""
    own = next(iter(entry))
    return sorted((token for token in entry if token == own or entry[token].rank <= k), key=lambda t: entry[t].rank)


def _value(known: Logprob) -> float:
    return max(known.logprob, _LEAST)
