from __future__ import annotations

import ctypes
import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel.kernels import library

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler; apt-get install g++"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the user's, and no compiler chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(library.SWITCH, raising=False)
    library._library.cache_clear()
    yield tmp_path
    library._library.cache_clear()


@pytest.fixture
def switched_on(monkeypatch):
    """Kernels that this process has not asked for yet, also in a run of the tests without them."""
    monkeypatch.delenv(library.SWITCH, raising=False)
    library._library.cache_clear()
    yield
    library._library.cache_clear()


@NEEDS_COMPILER
def test_ranks_that_start_together_compile_once(cache, monkeypatch):
    calls, compiler = cache / "calls", cache / "counted"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo call >> {calls}\nexec {library.find_compiler()} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "SOURCES", cache)
    for name in ("one", "two"):
        (cache / f"{name}.cpp").write_text(f"int {name} = 1;\n")
    found: list[Path] = []
    ranks = [threading.Thread(target=lambda: found.append(library.build(library.cache_folder()))) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 3 and len(set(found)) == 1
    assert calls.read_text() == 3 * "call\n", "each source, and what they make together"
    assert library.cache_folder().stat().st_mode & 0o777 == 0o700
    assert {file.name for file in found[0].parent.iterdir()} == {found[0].name, "lock"}, "only what is whole stays"
    kernels = ctypes.CDLL(str(found[0]))
    assert [ctypes.c_int.in_dll(kernels, name).value for name in ("one", "two")] == [1, 1]


@pytest.mark.parametrize("changed", ["one.cpp", "vectors.h", "compiler"])
def test_a_changed_source_header_or_compiler_is_compiled_anew(cache, monkeypatch, changed):
    compiler = cache / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && cat "$0" || for file; do touch "$file"; done\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "SOURCES", cache)
    for name in ("one.cpp", "vectors.h"):
        (cache / name).write_text("int one;\n")
    folder = library.cache_folder()
    first = library.build(folder)
    assert library.build(folder) == first
    with (cache / changed).open("a") as file:
        file.write("\n")
    assert library.build(folder) != first


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("/nowhere/c++", "CXX=/nowhere/c++: not found; install a C++ compiler"),
        ("false", "false failed (no message); use GCC"),
    ],
)
def test_without_kernels_the_log_names_the_remedy_once(cache, monkeypatch, caplog, compiler, why):
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING, "specdec.kernels"):
        assert library.library() is None and library.function("multiply_rows") is None
    (record,) = caplog.records
    assert why in record.facts["why"] and library.obstacle() == record.facts["why"]


def test_the_switch_is_silent(cache, monkeypatch, caplog):
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.library() is None and library.obstacle() is None and not caplog.records


@NEEDS_COMPILER
def test_there_is_no_obstacle_before_kernels_are_asked_for_and_where_there_are_some(switched_on):
    assert library.obstacle() is None and library._library.cache_info().currsize == 0
    assert library.library() is not None and library.obstacle() is None


def test_a_folder_that_others_may_write_to_is_refused(cache):
    library.cache_folder().chmod(0o777)
    with pytest.raises(library.NoKernelsError, match="make it yours with mode 0700"):
        library.cache_folder()


@NEEDS_COMPILER
def test_the_kernels_use_the_openmp_runtime_of_pytorch(switched_on):
    assert library.library() is not None
    wanted, before = ctypes.CDLL(None).omp_get_max_threads, torch.get_num_threads()  # as the library looks it up
    torch.set_num_threads(3)
    try:
        assert wanted() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("found", "chosen"), [({"c++", "g++"}, "c++"), ({"clang++"}, "clang++"), ({"g++", "clang++"}, "g++")]
)
def test_the_first_compiler_on_the_path_is_taken(cache, monkeypatch, found, chosen):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in found else None)
    assert library.find_compiler() == f"/bin/{chosen}"
    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(library.NoKernelsError, match="CXX=mine: not found; install a C"):
        library.find_compiler()


def test_without_a_compiler_the_line_names_those_that_were_looked_for(cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(library.NoKernelsError, match=r"^none of c\+\+, g\+\+, clang\+\+ was found; install"):
        library.find_compiler()


@pytest.mark.parametrize(
    ("machine", "system", "flag", "is_late"),
    [
        ("x86_64", "linux", "-march=native", False),
        ("aarch64", "linux", "-mcpu=native", False),
        ("arm64", "darwin", "-mcpu=native", True),
    ],
)
def test_kernels_are_compiled_for_this_processor(monkeypatch, machine, system, flag, is_late):
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    monkeypatch.setattr(library.sys, "platform", system)
    flags = library._flags()
    assert flag in flags and ("dynamic_lookup" in flags) == is_late and {"-O3", "-shared", "-fPIC"} <= {*flags}


@pytest.mark.parametrize(
    ("mode", "is_own", "is_taken"),
    [(0o700, True, True), (0o755, True, True), (0o720, True, False), (0o702, True, False), (0o700, False, False)],
)
def test_only_a_folder_of_this_user_alone_is_used(cache, monkeypatch, mode, is_own, is_taken):
    folder = library.cache_folder()
    assert folder == cache / "cache" / "specdec" / "kernels"
    folder.chmod(mode)
    uid = library.os.getuid()
    monkeypatch.setattr(library.os, "getuid", lambda: uid if is_own else uid + 1)
    if is_taken:
        assert library.cache_folder() == folder
        return
    with pytest.raises(library.NoKernelsError):
        library.cache_folder()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo one.cpp: error: no >&2; exit 1", "failed (one.cpp: error: no)"),
        ("sleep 9", "took longer than 1 s; try again"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing(cache, monkeypatch, script, why):
    compiler = cache / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor file; do :; done; touch "$file"\n{script}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "_LIMIT_S", 1)
    folder = library.cache_folder()
    with pytest.raises(library.NoKernelsError) as raised:
        library.build(folder)
    assert why in str(raised.value) and [file.name for file in folder.iterdir()] == ["lock"]


def test_a_function_takes_the_types_it_is_given_and_returns_nothing(monkeypatch):
    kernel = SimpleNamespace(argtypes=None, restype=int)
    monkeypatch.setattr(library, "_library", lambda: (SimpleNamespace(one=kernel), None))
    assert library.function("one", int, float) is kernel
    assert (kernel.argtypes, kernel.restype) == ((int, float), None)
