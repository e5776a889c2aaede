"""A grammar that the text of a request has to follow, as a text with its kind. Standard library only; `actors/grammars`
compiles it, and knows which texts are grammars.
"""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR_KINDS = ("json_schema", "regex", "lark")
"""A JSON schema, a regular expression in the syntax of Rust's `regex`, and a Lark grammar as llguidance has it."""
MOST_GRAMMAR_CHARACTERS = 1 << 16
"""A schema of so many is compiled in about 0.1 s."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The generated text is a sentence of it once the request ends with an end token.

    A `frame` is a Lark grammar in which `@answer` stands for this one: the generated text is then a sentence of the
    frame. `<[7]>` in it is the token 7.
    """

    kind: str
    text: str
    frame: str = ""

    @property
    def num_characters(self) -> int:
        return len(self.text) + len(self.frame)

    def check(self) -> None:
        """Raise ValueError, one line, for a kind that does not exist or a text of impossible length."""
        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(f"grammar.kind: {self.kind!r:.40} is none of {', '.join(GRAMMAR_KINDS)}")
        if not self.text or self.num_characters > MOST_GRAMMAR_CHARACTERS:
            remedy = f"give 1 to {MOST_GRAMMAR_CHARACTERS}"
            raise ValueError(f"grammar.text: has {self.num_characters} characters; {remedy}")
