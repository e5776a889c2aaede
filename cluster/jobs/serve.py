"""`job=serve`: an HTTP server with OpenAI's API in front of the engine, until SIGTERM or Ctrl-C.

The first signal ends it in order: new requests are refused, running ones get `server.drain_s` to finish, and the exit
code is 0. A second one interrupts it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config.schema import LaunchConfig, ServerConfig
from cluster.engine import Engine
from cluster.io.console import Terminal
from cluster.observability.report import bytes_per_role
from cluster.placement.memory import mebibytes

_POLL_S = 0.5


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for an address or a key file that cannot be used, EngineError once the engine has failed."""
    try:
        from cluster.serving.app import HttpService
        from cluster.serving.server import HttpServer, bind
    except ModuleNotFoundError as error:
        raise ValueError(f"job=serve: needs {error.name}; install it with pip install specdec[serve]") from error
    terminal, server = Terminal(), config.server
    keys = read_keys(server)
    listener = bind(server.host, server.port)  # a port that is taken is noticed before weights are loaded
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    with engine, first_signal() as stopping:
        service = HttpService(engine, config, keys)
        http = HttpServer(service.application, listener)
        try:
            service.warm_up()
            _describe(terminal, http.url, service.model_name, engine, keys)
            while not stopping.wait(_POLL_S):
                engine.check_alive()
            left = f"{service.num_in_flight} in flight get {server.drain_s:g} s to finish"
            terminal.line(f"draining: new requests are refused, {left}; Ctrl-C again aborts them")
            if not service.drain(server.drain_s):
                terminal.line(f"server.drain_s={server.drain_s:g}: requests that still run are aborted")
        finally:
            http.close()
            service.close()


def read_keys(server: ServerConfig) -> list[str]:
    """The keys that requests may bring. Raises ValueError, one line, if the file has none."""
    if not server.api_key_file:
        return [server.api_key] if server.api_key else []
    try:
        keys = Path(server.api_key_file).expanduser().read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise ValueError(f"server.api_key_file={server.api_key_file}: cannot be read ({error})") from error
    if not keys:
        raise ValueError(f"server.api_key_file={server.api_key_file}: is empty; write one key in each line")
    return keys


def _describe(terminal: Terminal, url: str, model: str, engine: Engine, keys: list[str]) -> None:
    roles = [f"{place.identity} on {place.device}" for place in engine.places]
    drafts = engine.config.pipeline.name.drafts  # none for a target that fills masks
    terminal.line(f"layout: {', '.join(roles)}; drafter {engine.config.drafter.name if drafts else 'none'}")
    for role, held in bytes_per_role(engine.ready).items():
        terminal.line(f"{role}: {mebibytes(held['weights'])} of weights, {mebibytes(held['kv'])} of KV")
    terminal.line(f"serving {model} at {url}/v1" + ("" if keys else ", without a key"))


@contextmanager
def first_signal() -> Iterator[threading.Event]:
    """Is set by the first SIGTERM or SIGINT; the next one does what it did before."""
    stopping, numbers = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, listener in before.items():
            signal.signal(number, listener)

    def stop(_number: int, _frame: object) -> None:
        restore()
        stopping.set()

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield stopping
    finally:
        restore()
