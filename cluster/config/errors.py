"""Exceptions of Hydra, OmegaConf and jobs as one line for the user: the field, what is wrong, the remedy.

Reads exceptions and the records that they name; it must not know how anything is run.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from shlex import quote
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from cluster.config.schema import CHOICES, SamplingConfig, SchedulerConfig, ServerConfig


def describe(error: BaseException) -> str:
    """The error in one line."""
    cause: BaseException | None = error
    if isinstance(error, HydraException):  # other errors with a cause are lines of ours already, with the whole key
        cause = error.__cause__ or error.__context__
    line = _first_line(error)
    match error, cause:
        case MissingConfigException(), _:
            line = _unknown_choice(error)
        case OverrideParseException(), _:
            line = _no_override(error)
        case _, ConfigAttributeError() | ConfigKeyError():
            line = _unknown_key(cause)
        case _, ValidationError():
            line = _bad_value(cause)
        case _, MissingMandatoryValue():
            line = f"{cause.full_key}: has no value; give {cause.full_key}=..."
        case _, OmegaConfBaseException():
            line = f"{cause.full_key}: {_first_line(cause)}" if cause.full_key else _first_line(cause)
        case _ if line.startswith("Ambiguous value for argument "):
            line = _several_values(line.removeprefix("Ambiguous value for argument ").strip("'"))
        case _ if line.startswith("Config group override must be"):
            line = "a group takes the name of one of its choices, not a number or null; see --help"
    return line


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _no_override(error: OverrideParseException) -> str:
    """Hydra's grammar knows few characters outside of quotes; these have to reach it through the shell."""
    key, equals, value = str(error.override).partition("=")
    remedy = "write key=value, and quote lists, as 'sampling.stop=[a,b]'"
    if re.search(r"\s[\w.]+=", value):
        remedy = "give each KEY=VALUE to the shell as a word of its own"
    elif equals and value.startswith(("[", "{")):
        remedy = """quote lists, and special characters in them, as 'sampling.stop=["<end>"]'"""
    elif equals and not value.startswith(("'", '"')):
        escaped = value.replace('"', '\\"')
        remedy = "quote special characters, also from the shell: " + quote(f'{key}="{escaped}"')
    return f"{error.override}: is no override; {remedy}"


def _several_values(override: str) -> str:
    key, _, values = override.partition("=")
    return f"{override}: has several values; write -m for a run with each, '{key}=[{values}]' for a list"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    remedy = f"choose one of {', '.join(error.options)}" if error.options else "see --help"
    return f"{group}={choice}: no such choice; {remedy}" if group else f"{choice}: no such configuration; {remedy}"


def _unknown_key(error: OmegaConfBaseException) -> str:
    section, _, key = str(error.full_key).rpartition(".")
    known = [item.name for item in fields(error.object_type)] if is_dataclass(error.object_type) else []
    return unknown_key(section, key, known)


def unknown_key(section: str, key: str, known: list[str]) -> str:
    """The line for a key that `section` (empty at the top) does not have; of a group, the choices that have it."""
    prefix = f"{section}." if section else ""
    choices = CHOICES.get(section, {}).items()
    owners = [name for name, record in choices if any(item.name == key for item in fields(record))]
    close = [f"{prefix}{name}" for name in get_close_matches(key, known, n=1)] or ([] if section else _elsewhere(key))
    remedy = f"choose one of {', '.join(known)}" if known else "see --help"
    if owners:
        remedy = f"it is one of {section}={', '.join(owners)}; add one of these"
    elif close:
        remedy = f"did you mean {' or '.join(close)}?"
    return f"{prefix}{key}: no such key; {remedy}"


def _elsewhere(key: str) -> list[str]:
    """The key with its section, in each that has one of this name."""
    records: dict[str, list[Any]] = {name: list(choices.values()) for name, choices in CHOICES.items()}
    records |= {"scheduler": [SchedulerConfig], "sampling": [SamplingConfig], "server": [ServerConfig]}
    return [
        f"{section}.{key}"
        for section, kinds in records.items()
        if key != "name" and any(item.name == key for kind in kinds for item in fields(kind))
    ]


def _bad_value(error: ValidationError) -> str:
    """A value of the wrong type; the default shows what would be right."""
    name, what = str(error.full_key), _first_line(error).rstrip(".")
    what = what[0].lower() + what[1:]
    if what.startswith("merge error"):
        return "a group takes one choice; for a launch with each of them write -m GROUP=A,B"
    if what.startswith("invalid type assigned"):
        return f"{name}: is a section, not a value; set its keys, as {name}.KEY=VALUE"
    if "expected one of" in what or not isinstance(error.object_type, type) or not is_dataclass(error.object_type):
        return f"{name}: {what}"
    return f"{name}: {what}; the default is {getattr(error.object_type(), name.rpartition('.')[2])!r}"
