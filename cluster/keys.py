"""Adds clients to a running engine or draft pool, each with a key of its own, and takes them away again.

    python -m cluster.keys outputs/DATE/TIME/logs add alice       # writes the key to secret-alice there
    python -m cluster.keys outputs/DATE/TIME/logs remove alice
    python -m cluster.keys outputs/DATE/TIME/logs                 # names the clients

`clients` in that folder has a line for each client: its name, and the public half of its key. The engine reads it again
about once a second, and so does a draft pool, whose folder is `FILE.keys` beside its `job.secret_file`. Keys are files
that their owner alone can read.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from actors.protocol.membership import ClientKeys
from actors.transport.keys import CLIENTS, SECRET_BYTES, LinkKey
from parallel.whole_files import WriteError, naming, write_privately

log = logging.getLogger(__name__)

_READ_S = 1.0
_HEADER = "# hub "
_USAGE = "python -m cluster.keys LOGS [add NAME | remove NAME]"
_LINE = re.compile(rf"([\w-]{{1,40}}) ([0-9a-f]{{{2 * SECRET_BYTES}}})", re.ASCII)


class ClientFile:
    """The clients of an engine or a pool whose keys are in `directory`. ValueError, one line, if no file of them can
    be read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "clients"
        self._refused = ""

    def create(self, first: LinkKey) -> Path:
        """Create the folder with the engine's first client; returns the file of its key."""
        with naming(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._write(first.hub, {_name(first): first.public})
        return write_privately(self._directory / "secret", first.text)

    def open(self, first: LinkKey) -> Path:
        """Create the file where there is none; else clients stay as they are. ValueError if their keys are of another
        secret."""
        if not self._path.exists():
            return self.create(first)
        if self._read()[0] != first.hub:
            raise ValueError(f"{self._path}: has the keys of another secret; delete the folder {self._directory}")
        return self._directory / "secret"

    def read(self) -> dict[str, bytes]:
        """Public halves by name."""
        return self._read()[1]

    def read_again(self) -> dict[str, bytes] | None:
        """What `read` returns; None for a file that cannot be read, of which the log says so once."""
        try:
            return self.read()
        except ValueError as error:
            if str(error) != self._refused:
                log.warning("%s", error)
            self._refused = str(error)
            return None

    def add(self, name: str) -> Path:
        """A new client; returns the file of its key."""
        hub, clients = self._read()
        if name in clients or not re.fullmatch(r"[\w-]{1,40}", name, re.ASCII):
            raise ValueError(f"{name}: is taken, or not of 1 to 40 letters, digits, - and _; choose another name")
        key = LinkKey.made_for(name, hub)
        path = write_privately(self._directory / f"secret-{name}", key.text)
        self._write(hub, clients | {name: key.public})
        return path

    def remove(self, name: str) -> None:
        """The engine closes its connections, and ends its requests."""
        hub, clients = self._read()
        if clients.pop(name, None) is None:
            raise ValueError(f"{name}: no such client; there are {', '.join(clients) or 'none'}")
        self._write(hub, clients)
        (self._directory / f"secret-{name}").unlink(missing_ok=True)

    def delete(self) -> None:
        """The engine has ended: its keys open nothing any more."""
        for path in (self._path, *self._directory.glob("secret-*"), self._directory / "secret"):
            path.unlink(missing_ok=True)

    def _read(self) -> tuple[bytes, dict[str, bytes]]:
        try:
            header, *lines = self._path.read_text().splitlines()
            hub = bytes.fromhex(header.removeprefix(_HEADER))
        except (OSError, ValueError) as error:
            remedy = "give the folder logs/ of a run that has not ended, or that of a pool's keys"
            raise ValueError(f"{self._path}: cannot be read ({type(error).__name__}); {remedy}") from error
        clients: dict[str, bytes] = {}
        for line in filter(str.strip, lines):
            if (found := _LINE.fullmatch(line.strip())) is None or found[1] in clients:
                raise ValueError(f"{self._path}: {line[:60]!r} is not a new name and the public half of its key")
            clients[found[1]] = bytes.fromhex(found[2])
        return hub, clients

    def _write(self, hub: bytes, clients: dict[str, bytes]) -> None:
        lines = [f"{_HEADER}{hub.hex()}", *(f"{name} {public.hex()}" for name, public in clients.items())]
        new = write_privately(self._path.with_name("clients.new"), "\n".join(lines) + "\n")
        new.replace(self._path)


class ClientFileWatch:
    """Sends what the file says, about once a second from construction to `close`: a coordinator that was replaced has
    not read it. A file that cannot be read changes nothing."""

    def __init__(self, file: ClientFile, send: Callable[[ClientKeys], None]) -> None:
        self._file = file
        self._send = send
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_READ_S):
            if (clients := self._file.read_again()) is not None:
                self._send(ClientKeys(tuple([(public, name) for name, public in clients.items()])))


def _name(key: LinkKey) -> str:
    return key.peer.removeprefix(CLIENTS)


def main(arguments: list[str]) -> str:
    """What to print; ValueError, one line, if it cannot be done."""
    match arguments:
        case ["-h" | "--help"]:
            return (__doc__ or _USAGE).strip()
        case [directory]:
            return "\n".join(ClientFile(Path(directory)).read())
        case [directory, "add", name]:
            return str(ClientFile(Path(directory)).add(name))
        case [directory, "remove", name]:
            ClientFile(Path(directory)).remove(name)
            return f"{name} is removed"
        case _:
            raise ValueError(_USAGE)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{main(sys.argv[1:])}\n")
    except (ValueError, WriteError) as failure:
        sys.exit(str(failure))
