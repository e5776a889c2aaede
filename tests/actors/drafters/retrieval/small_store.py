"""A small datastore for tests that build drafters from their records: random texts over a hundred tokens."""

from __future__ import annotations

import atexit
import random
import tempfile
from functools import cache
from pathlib import Path

from actors.drafters.retrieval.datastore import write_datastore


@cache
def small_store() -> str:
    """The path of the file, made once and removed at the end."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    choose, path = random.Random(0), Path(directory.name) / "store"
    write_datastore(path, [[choose.randrange(97) for _ in range(3000)] for _ in range(4)], "of tests")
    return str(path)
