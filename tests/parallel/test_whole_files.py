"""Files are whole or as they were, and a full disk is one line, under a real limit on the size of files."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from parallel.whole_files import WriteError, append_text, make_folder, naming, replaced_whole, write_text
from tests.full_disk import full_disk

ROOT = Path(__file__).parents[2]
BY_OTHER_MEANS = {
    "parallel/whole_files.py",
    "cluster/launch.py",  # the traceback, beside the line on stderr
    "cluster/slurm/job.py",  # logs of other programs
    "cluster/engine.py",
    "parallel/kernels/library.py",  # a lock
}
WRITING = {"write_text", "write_bytes", "tofile", "save_pretrained", "savefig", "save_file"}


def save_tensors(path, size):
    with replaced_whole(path) as partial:
        save_file({"a": torch.zeros(size)}, partial)


def save_array(path, size):
    with replaced_whole(path) as partial, partial.open("wb") as file:
        file.write(np.zeros(size, ">u4").data)


@pytest.mark.parametrize("write", [lambda path, size: write_text(path, "é" * size), save_tensors, save_array])
def test_what_does_not_fit_leaves_the_old_file(tmp_path, write):
    path = tmp_path / "file"
    with full_disk(4096):
        write(path, 500)
        whole = path.read_bytes()
        with pytest.raises(WriteError, match=rf"^{path}: cannot be written \(File too large.*\); free space there or"):
            write(path, 5000)
    assert path.read_bytes() == whole and [*tmp_path.iterdir()] == [path]


def test_a_line_that_does_not_fit_is_left_out_as_a_whole(tmp_path):
    path = tmp_path / "lines"
    with full_disk(1000):
        append_text(path, "é" * 400 + "\n")
        with pytest.raises(WriteError, match=f"^{path}: cannot be written"):
            append_text(path, "ü" * 400 + "\n")
        append_text(path, "it fits\n")
    assert path.read_text() == "é" * 400 + "\nit fits\n"


def test_a_device_without_space_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(WriteError, match=r"^/dev/full: cannot be written \(No space left on device\)"):
        append_text(Path("/dev/full"), "line\n")
    with pytest.raises(WriteError, match=r"/none/file: cannot be written \(No such file or directory\)"):
        write_text(tmp_path / "none" / "file", "text")
    with pytest.raises(WriteError, match=r"/proc/none: cannot be written \(No such file or directory\); free space"):
        make_folder(Path("/proc/none"))


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path):
    """A run of root would replace a device for all programs."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(end, 9) == b"text" and pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]
    os.close(end)


def interrupted_write(path):
    with replaced_whole(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt


def test_an_interrupt_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(KeyboardInterrupt):
        interrupted_write(tmp_path / "file")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_name_is_not_put_twice(tmp_path):
    with pytest.raises(WriteError, match="^/dev/full: "), naming(tmp_path):
        append_text(Path("/dev/full"), "line\n")


def unguarded(tree):
    """Lines that write a file, but not within `replaced_whole` or `naming`."""
    guards = {"replaced_whole", "naming"}
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    guarded = {
        id(node)
        for block in blocks
        if guards & {getattr(getattr(item.context_expr, "func", None), "id", "") for item in block.items}
        for node in ast.walk(block)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in guarded]
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        words = [each.value for each in call.args if isinstance(each, ast.Constant)]
        method = isinstance(call.func, ast.Attribute) or name == "save_file"
        if (name in WRITING and method) or (name == "open" and {"w", "a", "wb", "ab"} & set(words)):
            yield call.lineno


NAMES = re.compile(rf"\b({'|'.join(WRITING)}|open)\b")
"""What a file that writes has in its text; of the others no syntax tree is built."""


@pytest.mark.extended
def test_every_result_is_written_whole():
    """A file that is written by other means would be lost halfway without its name."""
    for code in ("path.write_text('a')", "with path.open('w') as file: pass", "open(path, 'wb')", "save_file(x, path)"):
        assert [*unguarded(ast.parse(code))] == [1]
    files = [path for package in ("actors", "cluster", "parallel") for path in (ROOT / package).rglob("*.py")]
    found = [
        f"{name}:{line}"
        for path in files
        if (name := str(path.relative_to(ROOT))) not in BY_OTHER_MEANS
        if NAMES.search(text := path.read_text())
        for line in unguarded(ast.parse(text))
    ]
    assert not found, found
