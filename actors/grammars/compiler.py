"""Grammars compiled for one tokenizer by llguidance, each once. Knows no requests and no logits.

Compiling and every step of a matcher are bounded by the library's limits: a grammar that exceeds them is an error of
its own request. Whitespace between the parts of a JSON text is bounded too, because a model may repeat it without end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from actors.protocol.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 64
"""Compiled grammars; one of a large schema has megabytes."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
_MOST_ITEMS, _STEP_ITEMS, _STEP_FUEL = 500, 5_000, 100_000
"""Limits of a matcher's step, a tenth to a half of the library's: an ambiguous grammar is an error of its request
before its masks delay those beside it by more than a fraction of a second."""
_LARGEST_MULTIPLE = 10_000
"""The largest `multipleOf`, without its decimal point: time grows with its square and is bounded by nothing else."""
_MOST_SHOWN = 200
"""Characters of an error that are shown."""


class GrammarCompiler:
    """`read_tokenizer` returns the content of tokenizer.json; it is called for the first grammar. Without
    `eos_token_ids` the end token is what the tokenizer says. From any thread."""

    def __init__(self, read_tokenizer: Callable[[], str], eos_token_ids: Sequence[int] | None = None) -> None:
        self._read_tokenizer = read_tokenizer
        self._eos_token_ids = None if eos_token_ids is None else list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=_MOST_KEPT)(self._compile)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of a text. Raises ValueError, one line, if this is no grammar or too large."""
        return self._compiled(grammar).deep_copy()

    def start(self, grammar: Grammar) -> Future[LLMatcher]:
        """`matcher`, made in a thread of its own."""
        future: Future[LLMatcher] = Future()

        def run() -> None:
            try:
                future.set_result(self.matcher(grammar))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a panic of the library is no Exception
                future.set_exception(RuntimeError(str(error)))

        threading.Thread(target=run, name="grammar-compiler", daemon=True).start()
        return future

    def _compile(self, grammar: Grammar) -> LLMatcher:
        grammar.check()
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._open_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=_MOST_ITEMS, step_max_items=_STEP_ITEMS, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
        )
        try:
            _check_multiples(grammar)
            matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar: is no {grammar.kind} ({_line(str(error))})") from None
        if matcher.is_error():
            raise ValueError(f"grammar: this {grammar.kind} cannot be used ({_line(matcher.get_error())})")
        return matcher

    def _open_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ValueError("grammar: llguidance is not installed; install the extra `serve`") from None
        if self._eos_token_ids == []:
            raise ValueError("grammar: the target has no end token, with which its text could end")
        try:
            return LLTokenizer(self._read_tokenizer(), eos_token=self._eos_token_ids)
        except Exception as error:  # the library raises several kinds for a tokenizer that it cannot read
            raise ValueError(f"grammar: the target's tokenizer does not allow any ({_line(str(error))})") from error


def _source(grammar: Grammar) -> str:
    """As the library has it."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case _:
            return LLMatcher.grammar_from_lark(grammar.text)


def _check_multiples(grammar: Grammar) -> None:
    """Raise ValueError for a `multipleOf` that would take minutes to compile; in Lark, whose schemas are not looked
    through, for any."""
    if grammar.kind == "json_schema":
        for value in _values_of("multipleOf", json.loads(grammar.text)):
            if isinstance(value, int | float) and not _is_small(value):
                raise ValueError(f"multipleOf: {value} has more than {_LARGEST_MULTIPLE} steps; use a smaller one")
    elif "%json" in grammar.text and ("multipleOf" in grammar.text or "\\u" in grammar.text):
        raise ValueError("multipleOf and escapes of characters cannot be used in %json")


def _is_small(multiple: float) -> bool:
    number = Decimal(str(multiple))
    return number.is_finite() and abs(int(number.scaleb(max(0, -int(number.as_tuple().exponent))))) <= _LARGEST_MULTIPLE


def _values_of(name: str, schema: Any) -> list[Any]:
    """What a schema and all in it say under a name."""
    if isinstance(schema, list):
        return [value for one in schema for value in _values_of(name, one)]
    if not isinstance(schema, dict):
        return []
    own = [schema[name]] if name in schema else []
    return own + [value for one in schema.values() for value in _values_of(name, one)]


def _line(text: str) -> str:
    return " ".join(text.split())[:_MOST_SHOWN]
