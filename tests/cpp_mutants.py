"""Small mistakes in C++, planted in its text: `tests/mutation.py` takes them for the kernels.

No parser: comments, strings and preprocessor lines are blanked, then each pattern finds its places in what is left. It
reads the kernels' own layout, where binary operators stand between spaces and the brackets of templates do not. A
mistake that does not compile is none, so the caller compiles each.
"""

from __future__ import annotations

import random
import re

_BLANK = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.M | re.S)
_OPERATOR = re.compile(r"(?<= )(?:[-+*/]=?|%|[<>=!]=|&&|\|\||<<|>>|<|>)(?= )")
_PAIRS = "< <=  > >=  == !=  + -  && ||  << >>  += -=  *= /=  * /"
_OTHER_OPERATOR = {"%": "/"}
for _pair in _PAIRS.split("  "):
    _one, _other = _pair.split()
    _OTHER_OPERATOR |= {_one: _other, _other: _one}
_NUMBER = re.compile(r"(?<![\w.])(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)[fFuUlL]*(?![\w.])")
_PLACE = r"\*?\w+(?:(?:\.|->|::)\w+|\[[^\]\n]*\])*"
_STATEMENT = re.compile(
    rf"(?:(?<=\) )|(?<=else )|(?<=\{{ )|^[ \t]+)(?P<dropped>{_PLACE}(?: [-+*/]?= |\()[^;{{}}]*)(?=;)", re.M
)


def places(source: str) -> list[tuple[str, int, int, str]]:
    """Every mistake: its kind, the first and one past the last character that it replaces, and what stands there."""
    code = _BLANK.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    found = [("operator", *match.span(), _OTHER_OPERATOR[match[0]]) for match in _OPERATOR.finditer(code)]
    for match in _NUMBER.finditer(code):
        found += [("number", *match.span(), f"({match[0]} {sign} 1)") for sign in "+-"]
    found += [("dropped statement", *match.span("dropped"), "") for match in _STATEMENT.finditer(code)]
    return sorted(found, key=lambda place: place[1:])


def chosen_places(source: str, rng: random.Random) -> list[tuple[str, int, int, str]]:
    """One mistake for each stretch of text that any replaces."""
    options: dict[tuple[int, int], list[tuple[str, int, int, str]]] = {}
    for place in places(source):
        options.setdefault(place[1:3], []).append(place)
    return [rng.choice(some) for some in options.values()]


def planted(source: str, start: int, end: int, text: str) -> str:
    return source[:start] + text + source[end:]
