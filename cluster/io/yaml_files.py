"""YAML files that users write, held against a type before they are used. Knows no format."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml

from parallel.typed_json import as_type

T = TypeVar("T")


def read_yaml(path: Path, kind: type[T]) -> T:
    """The file's content as this type; ValueError, one line without the path, for what cannot be read as one."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # a date or a number that is none is a ValueError
        raise ValueError(f"is no YAML ({str(error).strip().splitlines()[0]})") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    return as_type(content, kind)
