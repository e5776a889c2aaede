"""A token list for tests that build drafters from their records: every other of a hundred tokens."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

from actors.drafters.vocabulary.token_list import write_token_list

LISTED = tuple(range(1, 97, 2))


@cache
def every_other() -> str:
    """The path of the file, made once and removed at the end."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    path = Path(directory.name) / "list.json"
    write_token_list(path, LISTED, dict.fromkeys(LISTED, 1), "of tests")
    return str(path)
