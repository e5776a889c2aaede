"""Structured logs: one `key=value` line per event, the same to a process's stderr and to files.

Events go through the standard library's `logging`, under `specdec.<identity>`; without `open_logs` nothing is written.
Also writes the stacks of all threads on SIGUSR1, for a process that hangs.

    2026-01-31T12:00:00.123 INFO target-0 pid=4711 event=ready epoch=0 load_s=0.41 weight_bytes=44961280
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

ROOT = "specdec"
"""Name of the parent of all loggers here."""


class LogLevel(StrEnum):
    """How much is logged: `info` is starts, ends and requests, `debug` every round."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@dataclass(frozen=True, slots=True)
class LogSpec:
    """Where a process logs, beside its stderr. Directories that cannot be made on its host are left out."""

    level: str = LogLevel.info
    directories: tuple[str, ...] = ()


class KeyValueFormatter(logging.Formatter):
    """Values with spaces, quotes or line ends are quoted as in JSON, so that an event stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        identity = record.name.removeprefix(f"{ROOT}.")
        facts = {"pid": record.process, "event": record.getMessage(), **getattr(record, "facts", {})}
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        values = " ".join(f"{key}={_quoted(value)}" for key, value in facts.items())
        return f"{moment}.{int(record.msecs):03d} {record.levelname} {identity} {values}"


def logger_of(identity: str) -> logging.Logger:
    return logging.getLogger(f"{ROOT}.{identity}")


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **facts: object) -> None:
    """One line; `facts` are its values."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"facts": facts})


def open_logs(name: str, spec: LogSpec, stream: IO[str] | None = None) -> IO[str] | None:
    """Log this process's events to `stream` and to `<name>.log` in each directory; returns the first such file."""
    root = logging.getLogger(ROOT)
    root.setLevel(spec.level.upper())
    root.propagate = False
    files: list[logging.StreamHandler] = []
    for directory in map(Path, spec.directories):
        with contextlib.suppress(OSError):  # another host's disk
            directory.mkdir(parents=True, exist_ok=True)
            files.append(logging.FileHandler(directory / f"{name}.log", encoding="utf-8"))
    for handler in [*files, *([logging.StreamHandler(stream)] if stream is not None else [])]:
        handler.setFormatter(KeyValueFormatter())
        root.addHandler(handler)
    return files[0].stream if files else None


def close_logs() -> None:
    """Events go where they went before `open_logs`."""
    root = logging.getLogger(ROOT)
    root.propagate = True
    root.setLevel(logging.NOTSET)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # what a full disk did not take
            handler.close()


def dump_stacks_on_signal(file: IO[str] | None = None) -> None:
    """Make `kill -USR1 PID` write the stacks of all threads to `file`, or to stderr; the process goes on."""
    stream = file or sys.__stderr__
    assert stream is not None
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=False)


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, separators=(",", ":"), default=str)
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "\n\t=') else text
