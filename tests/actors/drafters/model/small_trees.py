"""A small file of fixed trees for tests that build drafters from their records."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from actors.drafters.model.fixed_trees import best_trees, write_trees


@cache
def small_trees() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "trees.json"
    write_trees(path, best_trees([0.5, 0.2, 0.1], 9, 4), {})
    return str(path)
