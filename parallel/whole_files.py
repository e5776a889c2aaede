"""Files that are whole or as they were: written beside their place, then renamed. A full disk is one line.

All results are written through here, so that what cannot be written is a `WriteError` that names the file, and what
was there before is kept. Loads no PyTorch; knows no format.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError


class WriteError(OSError):
    """A file cannot be written. The message is one line: the file, the reason, the remedy."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors of writing within into a `WriteError` that names the file or folder `path`."""
    try:
        yield
    except WriteError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
        raise WriteError(f"{path}: cannot be written ({reason}); free space there or choose another place") from error


@contextmanager
def replaced_whole(path: Path) -> Iterator[Path]:
    """The place to write the file at; it takes the place of `path` at the end, unless something was raised. A device or
    a pipe is written to as it is: a file in its place would take it from every program."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        with naming(path):
            yield path
        return
    partial = path.with_name(f"{path.name}.part")
    try:
        with naming(path):
            yield partial
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the file by this text in UTF-8."""
    with replaced_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_privately(path: Path, text: str) -> Path:
    """A new file that its owner alone can read, in the place of one that is there."""
    with naming(path):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writer:
            writer.write(text)
    return path


def make_folder(path: Path) -> None:
    """Make the folder and those it is in; `WriteError` if that cannot be."""
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)


def append_text(path: Path, text: str) -> None:
    """Add text in UTF-8 to the end of the file: all of it, or nothing if there is no space for all."""
    with naming(path), path.open("ab", buffering=0) as file:
        size, left = file.tell(), text.encode()
        try:
            while left:
                left = left[file.write(left) :]  # a write may take a part only
        except OSError:
            with suppress(OSError):  # a device has no length
                file.truncate(size)
            raise
