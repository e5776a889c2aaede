"""Grammars compiled for one tokenizer by llguidance, each once. Knows no requests and no logits.

Compiling and every step of a matcher are bounded by the library's limits, and where these bound nothing by a trial: a
grammar that exceeds them is an error of its own request. Whitespace between the parts of a JSON text is bounded too,
because a model may repeat it without end.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from actors.grammars.trial import is_compiled_in_time, needs_trial
from actors.protocol.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 64
"""Compiled grammars, and as many that were refused; one of a large schema has megabytes."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""What may stand between the parts of a JSON text."""
_MOST_ITEMS, _STEP_ITEMS, _STEP_FUEL = 500, 5_000, 100_000
"""Limits of a matcher's step, a tenth to a half of the library's: an ambiguous grammar is an error of its request
before its masks delay those beside it by more than a fraction of a second."""
_REMEDY = "use fewer or simpler pattern, format and multipleOf, or & and ~"
_MOST_SHOWN = 200
"""Characters of an error that are shown."""
_NO_TEXT = "NoExtensionBias"
"""How the library's error begins where nothing may come next, not even the end."""
_K = TypeVar("_K")


class TooBusyError(ValueError):
    """The machine had no time for the trial of a grammar, which may be as good as any other."""


class _Kept(Generic[_K]):
    """What is known of the grammars that were asked for last. From any thread."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Grammar, _K] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, grammar: Grammar) -> _K | None:
        with self._lock:
            if grammar in self._entries:
                self._entries.move_to_end(grammar)
            return self._entries.get(grammar)

    def put(self, grammar: Grammar, entry: _K) -> None:
        with self._lock:
            self._entries[grammar] = entry
            if len(self._entries) > _MOST_KEPT:
                self._entries.popitem(last=False)


class GrammarCompiler:
    """`read_tokenizer` returns the content of tokenizer.json; it is called for the first grammar. Without
    `eos_token_ids` the end token is what the tokenizer says. From any thread."""

    def __init__(self, read_tokenizer: Callable[[], str], eos_token_ids: Sequence[int] | None = None) -> None:
        self._read_tokenizer = read_tokenizer
        self._eos_token_ids = None if eos_token_ids is None else list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock, self._trial = threading.Lock(), threading.Lock()
        # no thread before the first grammar, and grammars without a trial do not wait behind those with one
        self._quick, self._tried = (ThreadPoolExecutor(1, f"{kind}-grammars") for kind in ("quick", "tried"))
        self._compiled: _Kept[LLMatcher] = _Kept()
        self._refused: _Kept[str] = _Kept()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of a text. Raises ValueError, one line, if this is no grammar or too large, or no
        text follows it."""
        if (known := self._compiled.get(grammar)) is None:
            grammar.check()
            if (line := self._refused.get(grammar)) is not None:
                raise ValueError(line)
            try:
                known = self._compile(grammar)
            except TooBusyError:
                raise
            except ValueError as error:
                self._refused.put(grammar, str(error))
                raise
            self._compiled.put(grammar, known)
        return known.deep_copy()

    def start(self, grammar: Grammar) -> Future[LLMatcher]:
        """`matcher`, made in another thread, one after another; cancel it if it is not wanted any more. One that is
        known does not wait for others."""
        if self._compiled.get(grammar) is not None or self._refused.get(grammar) is not None:
            known: Future[LLMatcher] = Future()
            try:
                known.set_result(self.matcher(grammar))
            except ValueError as error:
                known.set_exception(error)
            return known
        return (self._tried if _needs_trial(grammar) else self._quick).submit(self._matcher_or_error, grammar)

    def _matcher_or_error(self, grammar: Grammar) -> LLMatcher:
        try:
            return self.matcher(grammar)
        except Exception:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise ValueError(f"grammar: this {grammar.kind} cannot be used ({_line(str(error))})") from error

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._open_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=_MOST_ITEMS, step_max_items=_STEP_ITEMS, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
        )
        try:
            source = _source(grammar)
            self._try(grammar, source)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            kind = TooBusyError if isinstance(error, TooBusyError) else ValueError
            raise kind(f"grammar: is no {grammar.kind} ({_line(str(error))})") from None
        begun = matcher.deep_copy()
        if not begun.is_error():
            begun.compute_bitmask()  # fails where no text follows the grammar, or too many rules may begin one
            begun.compute_ff_tokens()
        if not begun.is_error():
            begun = matcher.deep_copy()  # fails where the first one, whose lexer it shares, used up what that may hold
            begun.compute_bitmask()
        if begun.is_error():
            line = _line(begun.get_error())
            reason = "no text follows it" if line.startswith(_NO_TEXT) else line
            raise ValueError(f"grammar: this {grammar.kind} cannot be used ({reason})")
        return matcher

    def _try(self, grammar: Grammar, source: str) -> None:
        """Raise ValueError if it could take more time or memory than there is; one trial at a time takes some."""
        if _needs_trial(grammar):
            with self._trial:
                try:
                    is_quick = is_compiled_in_time(source)
                except TimeoutError:
                    raise TooBusyError("the machine is too busy to compile it; try again later") from None
                if not is_quick:
                    raise ValueError(f"takes too long to compile; {_REMEDY}")

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
    """The grammar as the library has it."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            source = LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITESPACE})
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        case _:
            source = LLMatcher.grammar_from_lark(grammar.text)
    if not grammar.frame:
        return source
    answer = {"lark_grammar": source} if grammar.kind == "lark" else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": grammar.frame}, answer | {"name": "answer"}]})


def _needs_trial(grammar: Grammar) -> bool:
    return needs_trial(grammar.text) or needs_trial(grammar.frame)


def _line(text: str) -> str:
    return " ".join(text.split())[:_MOST_SHOWN]
