"""The corpus: Python's own standard library, split once into training and held-out sources.

Selects files and reads them, in an order that depends on the seed alone. It must not know tokens, models or prompts.
The standard library is distributed under the PSF licence.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_HELD_OUT_MODULES = (
    "bisect calendar cmd colorsys configparser contextlib copy csv fnmatch fractions getopt glob heapq hmac pprint "
    "queue random reprlib shlex statistics string tempfile textwrap timeit"
)
HELD_OUT = tuple(f"{module}.py" for module in _HELD_OUT_MODULES.split())
"""Modules, relative to the standard library, that are left out of all training, and so are their tests."""

SKIPPED_FOLDERS = frozenset({"site-packages", "lib-dynload", "__pycache__", "encodings", "pydoc_data"})
"""Installed packages, build products, and folders of modules that hold tables."""

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
"""Folders whose files are tests; together they hold more text than the library and are capped."""

TEST_MEGABYTES = 6.0
"""Upper bound on test files in the corpus, in 10^6 bytes."""

LARGEST_TEST_BYTES = 100_000
"""A longer test file is skipped: it is mostly one repetitive pattern."""

BROKEN_ON_PURPOSE = (
    "lib2to3/tests/data",
    "test/bad",
    "test/cjkencodings",
    "test/tokenizedata",
    "test/test_lib2to3/data",
)
"""Path prefixes of files that are wrong, in another language version, or no program at all by intention."""


@dataclass(frozen=True)
class Source:
    """One file of the corpus."""

    path: str
    """Path relative to the standard library, with forward slashes."""
    text: str
    """Its whole text."""


@dataclass(frozen=True)
class Corpus:
    """Training and held-out sources."""

    training: tuple[Source, ...]
    """Sources that tokenizer and models are trained on, in shuffled order."""
    held_out: tuple[Source, ...]
    """The modules of `HELD_OUT`, in that order."""

    def fingerprint(self) -> str:
        """Return the SHA-256 hex digest of every path and text in order; equal digests mean equal corpora."""
        digest = hashlib.sha256()
        for source in (*self.training, *self.held_out):
            digest.update(f"{source.path}\0{source.text}\0".encode())
        return digest.hexdigest()


def is_test(path: str) -> bool:
    """Return whether a library-relative path lies in a test folder."""
    return not TEST_FOLDERS.isdisjoint(PurePosixPath(path).parts[:-1])


def _is_about_held_out(path: str) -> bool:
    """Return whether a path is a held-out module or the test of one."""
    return path in HELD_OUT or PurePosixPath(path).name.removeprefix("test_") in HELD_OUT


def _read(root: Path, path: str) -> Source | None:
    """Read one file; None when it is empty or not UTF-8."""
    try:
        text = (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return Source(path, text) if text.strip() else None


def library_paths(root: Path) -> list[str]:
    """Return the library-relative paths of all usable `.py` files under `root`, sorted."""
    paths = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root).as_posix()
        if SKIPPED_FOLDERS.isdisjoint(PurePosixPath(path).parts) and not path.startswith(BROKEN_ON_PURPOSE):
            paths.append(path)
    return sorted(paths)


def load_corpus(seed: int, test_megabytes: float = TEST_MEGABYTES, root: Path | None = None) -> Corpus:
    """Read the corpus from `root`, by default the running interpreter's library; equal arguments give equal corpora.

    `seed` decides which tests are kept and the order of the training sources. Raises FileNotFoundError for a held-out
    module that is missing, ValueError for one that is empty or not UTF-8.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    held_out = []
    for path in HELD_OUT:
        source = _read(root, path)
        if source is None:
            raise ValueError(f"held-out module {path} is empty or not UTF-8")
        held_out.append(source)
    paths = library_paths(root)
    random.Random(seed).shuffle(paths)
    training, test_bytes = [], 0
    for path in paths:
        if _is_about_held_out(path) or (source := _read(root, path)) is None:
            continue
        if is_test(path):
            size = len(source.text.encode())
            if size > LARGEST_TEST_BYTES or test_bytes + size > test_megabytes * 1e6:
                continue
            test_bytes += size
        training.append(source)
    return Corpus(tuple(training), tuple(held_out))


def library_sources(corpus: Corpus) -> list[Source]:
    """Return the training sources that are no tests: they are what the held-out prompts resemble."""
    return [source for source in corpus.training if not is_test(source.path)]
