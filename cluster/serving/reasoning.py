"""Reasoning blocks: what a model writes between `<think>` and `</think>` before its answer.

A checkpoint whose chat template names the marks has them. The end of a prompt tells how a reply begins: inside of a
block that the template opened, behind one that it closed, or in front of one that the model may open itself. A grammar
holds for the answer alone. It must not know tools or how replies are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto

from tokenizers import Tokenizer

from actors.protocol.grammar import Grammar
from cluster.serving.marks import without_beginning_of

OPEN, CLOSE = "<think>", "</think>"
_MOST_MARK_TOKENS = 2 * len(CLOSE)
"""One for each character, and as many without text."""


_RULES = f"""TEXT: /(.|\\n)*/
spelled[lazy]: /(.|\\n)*{CLOSE.replace("/", chr(92) + "/")}/
SPACE: /[ \\n]{{0,9}}/
"""
"""A mark may be spelled by tokens that are none."""


class Beginning(Enum):
    """Whether a reply begins before, inside or after its block of reasoning."""

    before = auto()  # the model may open a block
    inside = auto()
    within = auto()  # the same, behind text of the block, and so with the white space before its rest
    after = auto()  # there is no block


class ReasoningMarks:
    """The marks of one checkpoint; `names` says whether its chat template has them."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str) -> None:
        tokens = [tokenizer.token_to_id(mark) for mark in (OPEN, CLOSE)]
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        # the text of a reply has no special tokens, so that marks which are some cannot be found in it
        self.exist = CLOSE in chat_template and not {OPEN, CLOSE} & {*special}
        self._tokens = None if None in tokens else tuple(tokens)

    def beginning(self, prompt: str, continued: str = "") -> Beginning:
        """How the reply to a prompt begins, as the template wrote it; or the rest of a message that goes on."""
        if continued.strip():
            is_open = continued.rfind(OPEN) > continued.rfind(CLOSE)
            return Beginning.within if self.exist and is_open else Beginning.after
        end = prompt.rstrip()
        if not self.exist or end.endswith(CLOSE):
            return Beginning.after
        return Beginning.inside if end.endswith(OPEN) else Beginning.before

    def grammar(self, grammar: Grammar | None, beginning: Beginning) -> Grammar | None:
        """The grammar of a whole reply whose answer follows `grammar`."""
        if grammar is None or beginning is Beginning.after:
            return grammar
        opened, rest = f'"{OPEN}"', "spelled"
        if self._tokens is not None:
            opened, closed = (f"<[{token}]>" for token in self._tokens)
            rest = f"(TEXT {closed} | spelled)"
        block = f"{rest} SPACE" if beginning is not Beginning.before else f"({opened} {rest} SPACE)?"
        answer = grammar.frame.replace("start:", "answer:", 1) or "answer: @answer\n"
        return replace(grammar, frame=f"start: {block} answer\n{_RULES}{answer}")


class ReasoningReader:
    """Tells the reasoning of one reply from its answer, cut anywhere. White space at the edges of both belongs to
    neither; a reply without a block is an answer as it is."""

    def __init__(self, beginning: Beginning) -> None:
        self._place = Beginning.inside if beginning is Beginning.within else beginning
        self._held = ""  # may belong to a mark, or is white space that ends a block if nothing follows
        self._is_first = beginning is Beginning.inside  # no text of the present part was shown
        self.had_block = False
        """Whether a block has ended."""

    @property
    def is_inside(self) -> bool:
        """Whether what follows belongs to the block."""
        return self._place is Beginning.inside

    def feed(self, text: str) -> tuple[str, str]:
        """What the reasoning and the answer gained."""
        reasoning, answer = "", ""
        self._held += text
        if self._place is Beginning.before:
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._place, self._held, self._is_first = Beginning.inside, begun[len(OPEN) :], True
            elif not OPEN.startswith(begun):
                self._place = Beginning.after
        if self._place is Beginning.inside:
            inner, mark, rest = self._held.partition(CLOSE)
            shown = inner.rstrip() if mark else without_beginning_of(CLOSE, inner).rstrip()
            reasoning = shown.lstrip() if self._is_first else shown
            self._is_first = self._is_first and not reasoning
            self._held = rest if mark else inner[len(shown) :]
            if mark:
                self._place, self._is_first = Beginning.after, True
                self.had_block = True
        if self._place is Beginning.after:
            answer = self._held.lstrip() if self.had_block and self._is_first else self._held
            self._is_first = self._is_first and not answer
            self._held = ""
        return reasoning, answer

    def end(self) -> tuple[str, str]:
        """No text follows: what was held."""
        held, self._held = self._held, ""
        if self._place is Beginning.inside:
            return (held.strip() if self._is_first else held.rstrip()), ""
        return "", held


class ReasoningCount:
    """Counts the tokens of one reply's block: all up to the one that completes its closing mark."""

    def __init__(self, beginning: Beginning, decode: Callable[[Sequence[int]], str]) -> None:
        self._reader = ReasoningReader(beginning)
        self._decode = decode
        self._is_over = beginning is Beginning.after
        self.num = 0

    def feed(self, token_ids: Sequence[int], texts: Iterable[tuple[int, str]]) -> None:
        """`token_ids` are all of the reply, `texts` what followed since: numbers of tokens, and what the last of so
        many added."""
        for num_tokens, text in texts:
            if self._is_over:
                return
            self._reader.feed(text)
            if self._reader.is_inside:
                self.num = num_tokens
            elif self._reader.had_block:
                self.num, self._is_over = self._end(token_ids, num_tokens), True

    def _end(self, token_ids: Sequence[int], num_tokens: int) -> int:
        """The number of tokens up to the closing mark's end. Text comes later than its token where it may begin a stop
        string, or where a character is not complete behind it."""
        while CLOSE in self._decode(token_ids[max(0, num_tokens - 1 - _MOST_MARK_TOKENS) : num_tokens - 1]):
            num_tokens -= 1
        return num_tokens
