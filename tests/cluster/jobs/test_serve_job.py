"""`job=serve` as a process: what it prints, how it answers, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from actors.options import PipelineConfig, PipelineName
from cluster.config.schema import ServerConfig
from cluster.io.console import Terminal
from cluster.jobs.serve import _describe, first_signal, read_keys
from cluster.serving.server import bind

ROOT = Path(__file__).parents[3]


@pytest.fixture
def started(tmp_path, tiny_checkpoint):
    """Starts the job; its process and its lines up to the address."""
    processes = []

    def start(*overrides: str) -> tuple[subprocess.Popen, list[str]]:
        path = tiny_checkpoint("Llama")
        command = [sys.executable, "-P", "-m", "cluster.launch", "job=serve", "cluster=inprocess", "server.port=0"]
        command += ["target=hf", f"target.path={path}", "drafter=ngram", f"hydra.run.dir={tmp_path}", *overrides]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("serving "):
                return process, lines
        raise AssertionError(lines)

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(url: str, body: dict, into: list) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        into.append(json.load(reply))


def test_it_says_what_it_serves_and_ends_in_order(started):
    process, lines = started("target.pace_ms=25", "target.max_model_len=400")
    found = re.fullmatch(r"serving \S+ at (http://\S+/v1), without a key", lines[-1])
    assert found is not None
    url = found[1]
    (layout,) = (line for line in lines if line.startswith("layout: target-0 on cpu"))
    assert layout.endswith("; drafter ngram")
    assert any(re.fullmatch(r"target: [\d.]+ MiB of weights, [\d.]+ MiB of KV", line) for line in lines)
    answers: list[dict] = []
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "speculative": {"enabled": False}}
    asking = threading.Thread(target=ask, args=(f"{url}/completions", body, answers))
    asking.start()
    with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=60) as reply:
        assert reply.status == 200
    while True:  # until the request runs
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60) as reply:
            if re.search(rb"num_requests_running\{.*\} 1\.0", reply.read()):
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 100
    assert "draining: new requests are refused, 1 in flight get 60 s to finish" in process.stdout.read()


def test_the_first_signal_asks_for_an_end_and_the_second_does_what_it_did():
    def before(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    was = {number: signal.signal(number, before) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with first_signal() as stopping:
            assert not stopping.is_set()
            signal.raise_signal(signal.SIGTERM)
            assert stopping.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with first_signal():
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is before
    finally:
        for number, listener in was.items():
            signal.signal(number, listener)


def test_keys_come_from_one_place(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo\n")
    assert read_keys(ServerConfig()) == []
    assert read_keys(ServerConfig(api_key="a")) == ["a"]
    assert read_keys(ServerConfig(api_key_file=str(file))) == ["one", "two"]
    file.write_text("\n")
    for path in (file, tmp_path / "none"):
        with pytest.raises(ValueError, match=r"^server.api_key_file="):
            read_keys(ServerConfig(api_key_file=str(path)))
    with pytest.raises(ValueError, match=r"^server.api_key="):
        ServerConfig(api_key="a", api_key_file="b").check("server")


@pytest.mark.extended
def test_a_port_that_is_taken_is_one_line(entered, tiny_checkpoint):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = tiny_checkpoint("Llama")
        code, _, err = entered(
            "job=serve", "cluster=inprocess", f"server.port={port}", f"target.path={path}", "drafter=ngram"
        )
    assert code == 2 and err.startswith(f"error: server.port={port}: cannot be had on 127.0.0.1")


@pytest.mark.parametrize("host", ["no host", "203.0.113.7"])
def test_an_address_of_another_machine_is_said_of_the_host(host):
    with pytest.raises(ValueError, match=rf"^server.host={host}: .*; give an address of this machine"):
        bind(host, 0)


def test_it_names_no_drafter_where_none_drafts(open_engine, capsys):
    """As beside a target that fills masks, whose pipeline is plain whatever the drafter."""
    engine = open_engine("ngram", pipeline=PipelineConfig(PipelineName.plain))
    _describe(Terminal(), "http://host", "m", engine, [])
    assert "; drafter none\n" in capsys.readouterr().out
