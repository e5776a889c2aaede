"""Parameters that a model writes one by one as raw text: what a text means by its schema, and the rules it follows.

A text is a string as it is where the schema has strings, and JSON where it has none. Where both may come, what looks
like JSON of an allowed type is that. Parameters come in the order of the schema's properties, and there are no others
where it has any. It must not know where in a reply they stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from actors.grammars.compiler import WHITESPACE
from cluster.serving.grammars import quoted
from cluster.serving.tools import ANY_ARGUMENTS, moved

END = "\n</parameter>"
"""What ends a text; no text has it."""
_END = END.replace("/", "\\/").replace("\n", "\\n")
_TEXT = r"(.|\n)"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_SCALARS = {"null": "null", "boolean": "(true|false)", "integer": r"-?(0|[1-9][0-9]*)", "number": _NUMBER}
_BEGINNINGS = {"object": "{", "array": "["}
_KINDS = frozenset(("string", *_SCALARS, *_BEGINNINGS))
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Some chat templates write the values of earlier calls so, and models go on with it."""
_HERE = "cannot be held in this model's form of calls"
_COMBINATIONS = ("not", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
_OF_OBJECTS = ("minProperties", "maxProperties", "patternProperties", "propertyNames", "dependentRequired")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("pattern", "format")
_KIND_OF_KEY = {
    **dict.fromkeys(("properties", "required", "additionalProperties", *_OF_OBJECTS), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(_OF_NUMBERS, "number"),
    **dict.fromkeys(("minLength", "maxLength", *_OF_STRINGS), "string"),
}
"""A schema that names no type means others, too; those that its keys are about are enough."""
_NOTES = {"title", "description", "default", "examples", "$defs", "definitions"}
_NAME = re.compile(r"[^<>\n]+")
_MOST_STEPS = 32
"""References and combinations within one another."""


class UnwritableError(ValueError):
    """A schema that texts of this form cannot be held to."""


@dataclass(frozen=True, slots=True)
class _Alternative:
    """One of the ways to satisfy a schema; it allows `values` alone, unless that is None."""

    kinds: frozenset[str]
    schema: Mapping[str, Any]
    values: Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class RawValue:
    """A parameter's text: JSON of one of the `kinds`, but a string as it is. With its end it is one of the `literals`,
    follows one of the regular expressions in `patterns`, or is JSON of `schema`; it is free if there are none."""

    kinds: frozenset[str]
    literals: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None

    def read(self, text: str) -> str:
        """The text as JSON. Raises RecursionError for one that is nested without end."""
        if _look(text) & self.kinds and _is_json(text):
            return text
        if "string" not in self.kinds:
            stripped = text.strip()
            stripped = _PYTHON.get(stripped, stripped)
            if _look(stripped) and _is_json(stripped):
                return stripped
        return json.dumps(text, ensure_ascii=False)

    def rules(self, name: str) -> list[str]:
        """The rules of Lark; the first one, `name`, is the text with its end."""
        patterns, rules = self.patterns, list[str]()
        if not self.literals and self.schema is None:
            patterns = patterns or (f"/{_TEXT}*{_END}/",)
        ways = [quoted(text + END) for text in self.literals]
        for place, pattern in enumerate(patterns):
            ways.append(f"{name}_{place}")
            rules.append(f"{name}_{place}[lazy]: {pattern}")
        if self.schema is not None:
            schema = {**self.schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
            ways.append(f"{name}_json {quoted(END)}")
            rules.append(f"{name}_json: %json {json.dumps(schema)}")
        return [f"{name}: {' | '.join(ways)}", *rules]


_FREE = RawValue(frozenset(("string", "object", "array")))
"""A parameter of which nothing is known: what looks like a number is a string."""


class RawParameters:
    """Those of one function, whose arguments `schema` describes. With `is_strict` it raises UnwritableError, one line,
    for a schema that cannot be held; else what can be held of it is."""

    def __init__(self, schema: Mapping[str, Any], *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        try:
            self._read(schema)
        except UnwritableError:
            if is_strict:
                raise
            self._read(ANY_ARGUMENTS)

    def _read(self, root: Mapping[str, Any]) -> None:
        found = _alternatives(root, root)
        if len(found) != 1 or found[0].kinds != {"object"} or found[0].values is not None:
            raise UnwritableError(f"arguments that are not one object with properties {_HERE}")
        schema = found[0].schema
        for key in _OF_OBJECTS:
            if key in schema:
                raise UnwritableError(f"{key} {_HERE}")
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        self._required = {*schema.get("required", ())}
        if missing := sorted(self._required - {*properties}):
            properties = {**properties, **dict.fromkeys(missing, others)}
        self._values = {name: self._value(name, one, root) for name, one in properties.items()}
        self._other = None if properties or others is False else self._value("other", others, root)

    def _value(self, name: str, schema: Any, root: Mapping[str, Any]) -> RawValue:
        if not _NAME.fullmatch(name):
            raise UnwritableError(f"the name {name!r:.80} {_HERE}")
        try:
            return _value_of(schema, root)
        except UnwritableError as error:
            if self._is_strict:
                raise UnwritableError(f"{name}: {error}") from None
            return _FREE if (kinds := _named_kinds(schema)) is None else RawValue(kinds)

    def read(self, name: str, text: str) -> str:
        """The text of one parameter as JSON. Raises RecursionError for one that is nested without end."""
        return self._values.get(name, self._other or _FREE).read(text)

    def rules(self, name: str) -> list[str]:
        """The rules of Lark; the first one, `name`, is all parameters, each on lines of its own with its marks."""
        parts, rules = list[str](), list[str]()
        for place, (key, value) in enumerate(self._values.items()):
            part = f"{name}_{place}"
            parts.append(part if key in self._required else f"{part}?")
            rules.append(f"{part}: {quoted(f'<parameter={key}>{chr(10)}')} {part}_text {quoted(chr(10))}")
            rules += value.rules(f"{part}_text")
        if self._other is not None:
            part = f"{name}_other"
            parts.append(f"{part}*")
            rules.append(f"{part}: /<parameter=[a-zA-Z0-9_.\\-]{{1,64}}>\\n/ {part}_text {quoted(chr(10))}")
            rules += self._other.rules(f"{part}_text")
        return [f"{name}: {' '.join(parts) or quoted('')}", *rules]


def _value_of(schema: Any, root: Mapping[str, Any]) -> RawValue:
    """How values of a schema are written. Raises UnwritableError where some text would be none of them."""
    found = _alternatives(schema, root)
    if any(one.kinds == _KINDS and one.values is None for one in found):
        return _FREE
    kinds = frozenset[str]().union(*[one.kinds for one in found])
    texts = [one for one in found if "string" in one.kinds]
    if not texts:
        return RawValue(kinds, schema=_moved_schema(schema, root))
    if all(one.values is not None for one in found):
        return RawValue(kinds, _literals(found, kinds))
    if any(one.values is not None or {*one.schema} & {*_OF_NUMBERS} for one in found if one.kinds - {"string"}):
        raise UnwritableError(f"a text beside numbers or values that are limited {_HERE}")
    structured = sorted(kinds & {*_BEGINNINGS})
    literals = [text for one in texts if one.values is not None for text in _literals([one], kinds)]
    patterns = [_pattern(one.schema, structured) for one in texts if one.values is None]
    patterns += [f"/{_SCALARS[kind]}{_END}/" for kind in sorted(kinds & {*_SCALARS})]
    return RawValue(
        kinds,
        tuple(literals),
        tuple(patterns),
        _moved_schema(schema, root, structured) if structured else None,
    )


def _pattern(schema: Mapping[str, Any], structured: Sequence[str]) -> str:
    """A regular expression of strings with their end, none of which looks like what is `structured`."""
    for key in _OF_STRINGS:
        if key in schema:
            raise UnwritableError(f"{key} of a text {_HERE}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    pattern = f"/{_TEXT}{{{least},{most}}}{_END}/"
    if least:  # the end is the first one, however short the text before it
        pattern += f" & ~/{_TEXT}*{_END}{_TEXT}+/"
    if structured:
        beginnings = "".join([re.escape(_BEGINNINGS[kind]) for kind in structured])
        pattern += f" & ~/[{beginnings}]{_TEXT}*/"
    return pattern


def _literals(found: Sequence[_Alternative], kinds: Collection[str]) -> tuple[str, ...]:
    """Values as they are written, without strings that look like one of another kind."""
    written = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for one in found
        for value in one.values or ()
        if not isinstance(value, str) or not _look(value) & {*kinds}
    ]
    if not written or any(END in text for text in written):
        raise UnwritableError(f"some of its values {_HERE}")
    return tuple(dict.fromkeys(written))


def _moved_schema(schema: Any, root: Mapping[str, Any], kinds: Sequence[str] = ()) -> dict[str, Any]:
    """The schema by itself, of these kinds alone if there are some, with all that it refers to."""
    place = "#/$defs/root"
    whole: dict[str, Any] = {"allOf": [moved(schema, place), *([{"type": [*kinds]}] if kinds else [])]}
    return whole | ({"$defs": {"root": moved(root, place)}} if '"$ref"' in json.dumps(schema) else {})


def _alternatives(schema: Any, root: Mapping[str, Any], num_steps: int = 0) -> list[_Alternative]:
    """The ways to satisfy a schema, without references and combinations."""
    schema = {} if schema is True else schema
    if not isinstance(schema, dict) or num_steps > _MOST_STEPS:
        raise UnwritableError("a schema that is none")
    for key in _COMBINATIONS:
        if key in schema:
            raise UnwritableError(f"{key} {_HERE}")
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        if key in schema:
            rest = {name: value for name, value in schema.items() if name != key}
            branches = [_target(schema[key], root)] if key == "$ref" else schema[key]
            if not isinstance(branches, list) or (key == "allOf" and len(branches) != 1):
                raise UnwritableError(f"{key} of several schemas {_HERE}")
            found = [one for branch in branches for one in _alternatives(_joined(branch, rest), root, num_steps + 1)]
            if key == "oneOf":
                _check_exclusive(found)
            return found
    return [_single(schema)]


def _single(schema: Mapping[str, Any]) -> _Alternative:
    """A schema without references and combinations."""
    named = _named_kinds(schema)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        values = [value for value in values if named is None or _kinds_of(value) & named]
        return _Alternative(frozenset[str]().union(*map(_kinds_of, values)), schema, values)
    kinds = frozenset([_KIND_OF_KEY[key] for key in schema if key in _KIND_OF_KEY])
    return _Alternative((kinds or _KINDS) if named is None else named, schema, None)


def _named_kinds(schema: Any) -> frozenset[str] | None:
    """The types that a schema names; None if it names none that there is."""
    named = schema.get("type") if isinstance(schema, dict) else None
    kinds = frozenset([one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)])
    return kinds if kinds and kinds <= _KINDS else None


def _target(reference: Any, root: Any) -> Any:
    """What a reference means: a place in the whole schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise UnwritableError(f"the reference {reference!r:.80} {_HERE}")
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, dict) or name not in root:
            raise UnwritableError(f"the reference {reference!r:.80} {_HERE}")
        root = root[name]
    return root


def _joined(branch: Any, rest: Mapping[str, Any]) -> Any:
    """A schema that says what both say."""
    if not isinstance(branch, dict):
        return rest if branch is True else branch
    if any(branch[key] != rest[key] for key in {*branch} & {*rest} - _NOTES):
        raise UnwritableError(f"what two schemas say of the same {_HERE}")
    return {**rest, **branch}


def _check_exclusive(found: Sequence[_Alternative]) -> None:
    """Raise UnwritableError if a text could satisfy two of them."""
    if not any("string" in one.kinds for one in found):
        return  # all of it is JSON
    if any(one.values is None for one in found):
        kinds = [kind for one in found for kind in one.kinds]
        is_exclusive = len({*kinds}) == len(kinds) and not {"integer", "number"} <= {*kinds}
    else:
        values = [json.dumps(value) for one in found for value in one.values or ()]
        is_exclusive = len({*values}) == len(values)
    if not is_exclusive:
        raise UnwritableError(f"oneOf of texts {_HERE}")


def _kinds_of(value: Any) -> frozenset[str]:
    return frozenset(("string",)) if isinstance(value, str) else _look(json.dumps(value))


def _look(text: str) -> frozenset[str]:
    """The types of JSON, but strings, that a text looks like."""
    for kind, beginning in _BEGINNINGS.items():
        if text.startswith(beginning):
            return frozenset((kind,))
    return frozenset([kind for kind, pattern in _SCALARS.items() if re.fullmatch(pattern, text)])


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_no_number)
"""Tells JSON from other texts; some numbers are too large to be one of Python's, and NaN is none of JSON."""


def _is_json(text: str) -> bool:
    try:
        return _DECODER.raw_decode(text)[1] == len(text)
    except ValueError:
        return False
