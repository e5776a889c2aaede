"""An object in a process of its own, whose methods this process calls one at a time.

For what is measured beside an engine and must not share its process: OpenMP gives the threads of one process less time
to wait as soon as all its teams together outnumber the cores, and reads its settings once. It knows nothing of engines.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from actors.worker import openmp

_END_S = 10.0


class Apart:
    """What `make(*arguments)` returns over there; both, and all that is passed, can be pickled.

    The process starts at construction, and ends with `close`, with this process, or with `make` when that fails.
    """

    def __init__(self, name: str, make: Callable[..., Any], *arguments: object) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), name=name, daemon=True)
        with openmp.unconfigured_children():
            self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: object) -> Any:
        """The method's result. Raises what it raised, or what `make` did, and RuntimeError if the process is gone."""
        try:
            self._connection.send((method, arguments))
            result, error = self._connection.recv()
        except (EOFError, ConnectionError) as gone:
            raise RuntimeError(f"{self._name}: its process died") from gone
        if error is not None:
            raise error
        return result

    def close(self, *, within_s: float = _END_S) -> None:
        """End the process, which gets so long to close what it made. Safe to call twice."""
        self._connection.close()
        self._process.join(within_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(within_s=_END_S if kind is None else 0.0)


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """Answer calls until the other end is closed. Ctrl-C is for the process that measures."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        made = make(*arguments)
    except Exception as error:
        _answer(connection, None, error)
        return
    try:
        while True:
            method, given = connection.recv()
            try:
                result, failure = getattr(made, method)(*given), None
            except Exception as error:
                result, failure = None, error
            _answer(connection, result, failure)
    except (EOFError, ConnectionError):
        if hasattr(made, "close"):
            made.close()


def _answer(connection: Connection, result: object, error: Exception | None) -> None:
    try:
        connection.send((result, error))
    except (ConnectionError, EOFError):
        return
    except Exception:  # an error, or a part of a result, that cannot be pickled
        connection.send((None, RuntimeError(str(error or "its answer cannot be sent to another process"))))
