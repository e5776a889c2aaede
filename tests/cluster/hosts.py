"""Several hosts on one machine: namespaces with addresses, names and process tables of their own. Needs root.

Nothing is left in the machine's own namespaces: the hosts hang on a bridge inside a namespace of its own, a host ends
with its first process, and all of them end with the test run, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

NETWORK = "10.78.0"
TOOLS = ("ip", "unshare", "nsenter", "setpriv")
WAIT_S = 30
PRIVATE_TMP = "/var/tmp"
"""A folder that each host has for itself; everything else on the disk is shared, as on a cluster."""


class Host:
    """A machine as its processes see it. `address` is of its `eth0`.

    Everything on it has a session of its own: daemons there signal their process group, which must not be the tests'.
    """

    def __init__(self, name: str, address: str, names: Path) -> None:
        self.name, self.address, self._names = name, address, names
        self._switch_on()

    def _switch_on(self) -> None:
        prepare = (
            f"hostname {self.name}; mount --bind {self._names} /etc/hosts; mount -t tmpfs tmpfs {PRIVATE_TMP}; "
            "ip link set lo up; echo up; read forever"
        )
        isolate = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        self._outer = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *isolate, "bash", "-c", prepare],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        said = self._outer.stdout.readline()
        if said.strip() != "up":
            self._outer.wait(WAIT_S)
            raise OSError(f"no namespaces: {said.strip()}")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.pid = int(children[0])

    def enter(self, command: Sequence[object], cwd: Path | str = "/") -> list[str]:
        """The command line that runs the command there."""
        inside = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--uts", "--", "env", "-C", str(cwd)]
        return [*inside, *map(str, command)]

    def run(self, *command: object, cwd: Path | str = "/", timeout: float = 120, **options: object) -> str:
        """A command on this host, to its end; its output."""
        options = {"capture_output": True, "text": True, "start_new_session": True} | options
        result = subprocess.run(self.enter(command, cwd), timeout=timeout, check=False, **options)
        assert result.returncode == 0, f"{self.name}: {command} ended {result.returncode}: {result.stderr[-2000:]}"
        return result.stdout

    def start(self, *command: object, log: Path, **options: object) -> subprocess.Popen:
        """A command on this host that goes on; it ends with the host."""
        with log.open("a") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            return subprocess.Popen(self.enter(command), start_new_session=True, **streams, **options)

    def processes(self) -> list[str]:
        """Command lines of everything that runs here."""
        lines = self.run("ps", "-eo", "stat=,args=").splitlines()
        ours = ("ps -eo", "bash -c hostname")
        return [line for line in lines if not line.startswith("Z") and not line.split(None, 1)[1].startswith(ours)]

    def plug(self, *, is_in: bool) -> None:
        """Put the network cable in, or pull it."""
        self.run("ip", "link", "set", "eth0", "up" if is_in else "down")

    @property
    def is_on(self) -> bool:
        return self._outer.poll() is None

    def power_off(self) -> None:
        """The host gives no sign to others: no connection is closed."""
        self.plug(is_in=False)
        self.end()

    def boot(self, switch: Host) -> None:
        """A host that was powered off is there again, with nothing running on it."""
        self._switch_on()
        connect(switch, self)

    def end(self) -> None:
        """Everything on the host dies with its first process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.wait(WAIT_S)
        self._outer.stdin.close()
        self._outer.stdout.close()


def missing() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid():
        return "namespaces need root: run this test as root, for example in a virtual machine or a privileged container"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install iproute2 util-linux"
    return None


@contextlib.contextmanager
def network(directory: Path, *names: str) -> Iterator[tuple[Host, list[Host]]]:
    """A switch, which is the host `switch`, and hosts with these names plugged into it; skips where that cannot be."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    everyone = {"switch": f"{NETWORK}.254"} | {name: f"{NETWORK}.{i}" for i, name in enumerate(names, start=1)}
    hosts_file = directory / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{addr} {name}\n" for name, addr in everyone.items()))
    hosts: list[Host] = []
    try:
        try:
            for name, address in everyone.items():
                hosts.append(Host(name, address, hosts_file))
            _wire(*hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"namespaces are refused here ({error}): run this test as root of a virtual machine")
        yield hosts[0], hosts[1:]
    finally:
        for host in reversed(hosts):
            host.end()


def _wire(switch: Host, *others: Host) -> None:
    """A bridge on the switch, and a cable from it to every host."""
    switch.run("ip", "link", "add", "br0", "type", "bridge")
    switch.run("ip", "addr", "add", f"{switch.address}/24", "dev", "br0")
    switch.run("ip", "link", "set", "br0", "up")
    for host in others:
        connect(switch, host)


def port_of(host: Host) -> str:
    """The switch's end of its cable."""
    return f"to{host.pid}"


def connect(switch: Host, host: Host) -> None:
    """A cable from the switch to a host."""
    port = port_of(host)
    link = f"ip link add {port} type veth peer name eth0 netns {host.pid}"
    subprocess.run(  # from outside, where the process ids of both ends are visible
        ["nsenter", "-t", str(switch.pid), "--net", *link.split()],
        check=True,
        capture_output=True,
    )
    switch.run("ip", "link", "set", port, "master", "br0", "up")
    host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    host.plug(is_in=True)
