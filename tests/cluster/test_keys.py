"""The file of an engine's clients: keys are made, read again while the engine runs, taken away, and private."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.protocol.membership import ClientKeys
from actors.transport.keys import HubKeys, LinkKey
from cluster import keys
from cluster.engine import Engine, EngineError, connect
from cluster.keys import ClientFile, ClientFileWatch, main
from parallel.whole_files import WriteError

FIRST = HubKeys(bytes(32)).of("client:default")


@pytest.fixture
def file(tmp_path):
    file = ClientFile(tmp_path / "logs")
    file.create(FIRST)
    return file


def test_keys_are_made_listed_and_taken_away(file, tmp_path):
    folder = tmp_path / "logs"
    assert LinkKey.read((folder / "secret").read_text()) == FIRST
    path = file.add("alice")
    key = LinkKey.read(path.read_text())
    assert (key.peer, key.hub) == ("client:alice", FIRST.hub)
    assert file.read() == {"default": FIRST.public, "alice": key.public}
    assert {entry.stat().st_mode & 0o777 for entry in folder.iterdir()} == {0o600}
    assert key.private.hex() not in (folder / "clients").read_text()
    assert main([str(folder)]) == "default\nalice"
    file.remove("alice")
    assert list(file.read()) == ["default"] and not path.exists()
    again = LinkKey.read(file.add("alice").read_text())
    assert again.public != key.public, "a key that was taken away stays so"
    file.delete()
    assert not list(folder.iterdir())


def test_the_clients_of_a_secret_stay_when_it_is_used_again(tmp_path):
    file = ClientFile(tmp_path / "pool.keys")
    path = file.open(FIRST)
    assert LinkKey.read(path.read_text()) == FIRST and list(file.read()) == ["default"]
    file.add("alice")
    file.remove("default")
    assert file.open(FIRST) == path and list(file.read()) == ["alice"]
    with pytest.raises(ValueError, match=r"has the keys of another secret; delete the folder .*pool.keys"):
        file.open(HubKeys(bytes([1] * 32)).of("client:default"))


@pytest.mark.parametrize("name", ["default", "", "a b", "../x", "a" * 41, "é", "a:b"])
def test_names_are_words_and_taken_once(file, name):
    with pytest.raises(ValueError, match="choose another name"):
        file.add(name)


@pytest.mark.parametrize("text", ["", "no header", "# hub 00\nalice 12", "# hub 00\na b c", "# hub 00\nalice zz"])
def test_what_is_no_file_of_clients_is_one_line(file, tmp_path, text):
    (tmp_path / "logs" / "clients").write_text(text)
    with pytest.raises(ValueError, match=r"logs/clients: ") as caught:
        file.read()
    assert "\n" not in str(caught.value)


@pytest.mark.extended
def test_the_command_says_what_is_wrong(file, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "cluster.keys", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    folder = str(tmp_path / "logs")
    assert run(folder, "add", "bob") == (0, f"{folder}/secret-bob\n")
    assert run(folder, "remove", "carol") == (1, "carol: no such client; there are default, bob\n")
    assert run(str(tmp_path))[1].count("\n") == 1
    assert run() == (1, "python -m cluster.keys LOGS [add NAME | remove NAME]\n")
    assert run("--help") == (0, f"{keys.__doc__.strip()}\n")


def test_the_file_is_sent_again_and_again_unless_it_cannot_be_read(file, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keys, "_READ_S", 0.01)
    sent: list[ClientKeys] = []

    def await_next(record) -> None:
        sent.clear()
        while sent[-1:] != [record]:
            time.sleep(0.01)

    watch = ClientFileWatch(file, sent.append)
    await_next(ClientKeys(((FIRST.public, "default"),)))
    public = LinkKey.read(file.add("alice").read_text()).public
    await_next(ClientKeys(((FIRST.public, "default"), (public, "alice"))))
    with caplog.at_level(logging.WARNING):
        (tmp_path / "logs" / "clients").write_text("damaged")
        while not caplog.records:
            time.sleep(0.01)
    sent.clear()
    time.sleep(0.1)
    assert not sent and len(caplog.records) == 1
    watch.close()


def until(ends, work):
    """What `work` returns, once it raises an EngineError, or raises none, as wanted; tried seldom, as an address that
    connects too often is not served for seconds."""
    while True:
        time.sleep(0.3)
        try:
            result = work()
        except EngineError as error:
            if ends is EngineError:
                return str(error)
        else:
            if ends is None:
                return result
            result.close()


@pytest.mark.extended
def test_clients_of_a_running_engine_are_added_and_taken_away(open_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_READ_S", 0.05)
    logs = tmp_path / "logs"
    with Engine(open_engine("none").config, log_dir=logs) as engine:
        key = Path(main([str(logs), "add", "alice"])).read_text()
        address = engine.address.replace("127.0.0.1", "localhost")  # keys are shown on the network, not in memory
        alice = until(None, lambda: connect(address, key))
        with connect(engine.address, engine.secret) as first:
            plain = first.generate(["x"])[0].token_ids
            assert alice.generate(["x"])[0].token_ids == plain
            main([str(logs), "remove", "alice"])
            assert "does not admit this key" in until(EngineError, lambda: connect(address, key))
            completion = alice.submit("x")
            with pytest.raises(TimeoutError):
                completion.result(0.5)
            assert first.generate(["x"])[0].token_ids == plain
        alice.close()
    assert not list(logs.glob("secret*")) and not (logs / "clients").exists()


def test_a_full_disk_is_one_line(file, monkeypatch):
    """An engine writes keys before anything else of its run."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(WriteError, match=r"secret-carol: cannot be written \(No space left on device\); free space"):
        file.add("carol")
