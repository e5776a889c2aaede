"""A Ray of an engine's own on this machine: closed to other users and hosts, and gone with its owner.

It listens on the loopback, asks for a token made for it, and keeps its files in a folder that only the user can open:
Ray lets everybody write into its own. Run as a program, this file is the guard: once its owner closes the pipe between
them or dies, it ends what is left of Ray, whose agents would go on for a minute, and deletes the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

FOLDER = "RAY_TMPDIR"
"""Environment variable of every process of a Ray: the folder with the files of that Ray."""
_END_S = 5.0
_AGAIN_S = 0.2


class LocalRay:
    """Settles, until `close`, how this process starts Ray. A token or mode in the user's environment has precedence."""

    def __init__(self) -> None:
        """Raises ValueError if there is no place for the folder."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="specdec-", dir=os.environ.get(FOLDER)))
        except OSError as error:
            remedy = f"let {FOLDER} name a folder that you can write, or use cluster=inprocess"
            raise ValueError(f"cluster=local: Ray has no place for its files ({error}); {remedy}") from error
        self._guard = subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        settings = {FOLDER: str(self._folder), "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
        self.token_file: Path | None = None
        """Holds the token, if there is one that was made here."""
        if settings["RAY_AUTH_MODE"] == "token" and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            from parallel.whole_files import write_privately  # not in the guard

            self.token_file = write_privately(self._folder / "ray-token", secrets.token_hex())
            settings["RAY_AUTH_TOKEN_PATH"] = str(self.token_file)
        self._before = {name: os.environ.get(name) for name in settings}
        settle(settings, loopback=True)

    def close(self) -> None:
        """Called after `ray.shutdown`."""
        settle(self._before)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


@contextlib.contextmanager
def dashboard_apart() -> Iterator[Callable[[], str]]:
    """A Ray that is started inside the block has no dashboard; what is yielded starts it and returns its address.

    Ray itself waits for the dashboard before it starts a worker, which takes seconds and serves no rank.
    """
    from ray._private.node import Node

    start, held = Node.start_api_server, []

    def start_now() -> str:
        node, options = held.pop()
        start(node, **options)
        return node.webui_url

    def hold(self: Node, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        held.append((self, {"include_dashboard": include_dashboard, "raise_on_failure": raise_on_failure}))

    Node.start_api_server = hold
    try:
        yield start_now
    finally:
        Node.start_api_server = start


def settle(settings: Mapping[str, str | None], *, loopback: bool = False) -> None:
    """Set the environment, for Ray in this process and in those it starts. Ray has read its own once, at its import."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = not loopback  # without it Ray takes 127.0.0.1 for the address of this node


def _clear(folder: str) -> None:
    """End what Ray's daemons started, which themselves end with the owner, and delete Ray's files."""
    for _ in range(10):
        remains = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended, or of another user
                if _belongs(process, folder):
                    process.kill()
                    remains.append(process)
        psutil.wait_procs(remains, timeout=_END_S)
        shutil.rmtree(folder, ignore_errors=True)
        if not remains and not os.path.exists(folder):
            break
        time.sleep(_AGAIN_S)  # what is ending may still write into the folder


def _belongs(process: psutil.Process, folder: str) -> bool:
    """Whether a daemon of the Ray in this folder started it; titles such as `ray::IDLE` overwrite environments."""
    if "".join(process.cmdline()[:1]).startswith("ray::"):
        return any(file.path.startswith(folder) for file in process.open_files())
    environment = process.environ()
    return environment.get(FOLDER) == folder and "RAY_RAYLET_PID" in environment


if __name__ == "__main__":
    sys.stdin.read()
    _clear(sys.argv[1])
