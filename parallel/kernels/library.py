"""The C++ kernels of this package: compiled once per machine with the compiler that is there, cached, and loaded.

The sources beside this file have a plain C interface and are called through ctypes with addresses of tensors: they need
none of PyTorch's headers, so they compile in seconds and a call costs about a microsecond. `SPECDEC_KERNELS=0` switches
them off. Without them callers compute with PyTorch's operators. Knows no layers.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch  # noqa: F401  loads the OpenMP runtime that the kernels are bound to

SWITCH = "SPECDEC_KERNELS"
SOURCES = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-shared")
_LIMIT_S = 120
_once = threading.Lock()


class NoKernelsError(Exception):
    """Why there are no kernels; the message names the remedy."""


def function(name: str, *argument_types: type) -> Callable[..., Any] | None:
    """The kernel of that name, which returns nothing; None where there are no kernels."""
    kernels = library()
    if kernels is None:
        return None
    kernel = getattr(kernels, name)
    kernel.argtypes, kernel.restype = argument_types, None
    return kernel


def library() -> ctypes.CDLL | None:
    """All kernels; None, after one line in the log, where they cannot be had."""
    with _once:  # ranks may be threads of one process
        return _library()[0]


def obstacle() -> str | None:
    """Why kernels that this process has asked for cannot be had, with the remedy; None where there are some."""
    with _once:
        return _library()[1] if _library.cache_info().currsize else None


@cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """All kernels, or why there are none although they are not switched off."""
    if os.environ.get(SWITCH) == "0":
        return None, None
    try:
        return ctypes.CDLL(str(build(cache_folder()))), None
    except (NoKernelsError, OSError) as error:
        logging.getLogger("specdec.kernels").warning("kernels-unavailable", extra={"facts": {"why": str(error)}})
        return None, str(error)


def cache_folder() -> Path:
    """A folder of this user that no other user may write to, because what lies in it is loaded."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "specdec" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NoKernelsError(f"{folder}: others may write to it; make it yours with mode 0700")
    return folder


def build(folder: Path) -> Path:
    """The library in `folder`, compiled unless it is there; its name tells sources, compiler, flags and processor."""
    compiler = find_compiler()
    sources = sorted(SOURCES.glob("*.cpp"))
    parts = [_version(compiler), " ".join(_flags()), _processor()]
    parts += [file.read_text() for file in (*sorted(SOURCES.glob("*.h")), *sources)]
    library_file = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    if library_file.exists():
        return library_file
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks of this machine wait for the first
        if not library_file.exists():
            _compile(compiler, sources, library_file)
    return library_file


def find_compiler() -> str:
    """The path of `$CXX` or of the first compiler on the path."""
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else _COMPILERS:
        if found := shutil.which(name):
            return found
    missing = f"CXX={chosen}: not found" if chosen else f"none of {', '.join(_COMPILERS)} was found"
    raise NoKernelsError(f"{missing}; install a C++ compiler (apt-get install g++) for faster passes on this CPU")


def _compile(compiler: str, sources: list[Path], library_file: Path) -> None:
    """Each source by itself, as many at once as there are cores."""
    with TemporaryDirectory(dir=library_file.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        pairs = zip(sources, objects, strict=True)
        list(pool.map(_run, [[compiler, *_flags(), "-c", str(source), "-o", str(made)] for source, made in pairs]))
        unfinished = Path(folder) / library_file.name
        _run([compiler, *_flags(), *map(str, objects), "-o", str(unfinished)])
        unfinished.replace(library_file)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoKernelsError(f"{command[0]} took longer than {_LIMIT_S} s; try again") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise NoKernelsError(f"{command[0]} failed ({first}); use GCC 12, Clang 14 or newer, or another CXX")


def _flags() -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    # OpenMP's entry points are those that PyTorch has loaded; macOS wants to hear that they come later
    late = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [*_FLAGS, native, *late]


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return done.stdout


def _processor() -> str:
    """What `native` depends on: a cache folder may lie on a disk that unlike machines share."""
    wanted = ("flags", "Features", "model name", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
