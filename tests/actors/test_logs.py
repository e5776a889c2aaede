"""Structured logs: one line per event, to every place that can be written, and stacks on demand."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from actors.logs import LogSpec, close_logs, log_event, logger_of, open_logs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def opened():
    yield open_logs
    close_logs()


def test_an_event_is_one_line_of_keys_and_values(opened):
    stream = io.StringIO()
    opened("target-0", LogSpec(), stream)
    log_event(logger_of("target-0"), "ready", epoch=0, load_s=0.41234, cores=(0, 1), why='two "words"\nhere', phase="")
    (line,) = stream.getvalue().splitlines()
    moment, level, identity, *facts = line.split(" ", 4)
    assert (level, identity, facts[0]) == ("INFO", "target-0", f"pid={os.getpid()}")
    assert moment[10] == "T" and len(moment) == 23
    assert facts[1] == r'event=ready epoch=0 load_s=0.412 cores=[0,1] why="two \"words\"\nhere" phase=""'


def test_a_traceback_stays_in_its_line(opened):
    stream = io.StringIO()
    opened("target-0", LogSpec(), stream)
    try:
        raise KeyError("x")
    except KeyError:
        logger_of("target-0").exception("failed", extra={"facts": {"epoch": 3}})
    (line,) = stream.getvalue().splitlines()
    assert "ERROR target-0" in line and "event=failed epoch=3 traceback=" in line and "KeyError" in line


def test_every_directory_gets_a_file_and_levels_hold(opened, tmp_path):
    (tmp_path / "blocked").write_text("a file where a directory should be")
    directories = tuple(str(tmp_path / name) for name in ("run/logs", "blocked/logs", "session"))
    file = opened("draft-0", LogSpec("warning", directories))
    assert Path(file.name) == tmp_path / "run/logs/draft-0.log"
    log_event(logger_of("draft-0"), "ready")
    log_event(logger_of("draft-0"), "failed", level=logging.ERROR)
    for directory in ("run/logs", "session"):
        (line,) = (tmp_path / directory / "draft-0.log").read_text().splitlines()
        assert "event=failed" in line


def test_once_closed_events_go_where_they_went_before(tmp_path, caplog):
    open_logs("target-0", LogSpec("error", (str(tmp_path),)))
    log_event(logger_of("target-0"), "failed", level=logging.ERROR)
    assert not caplog.records
    close_logs()
    log_event(logger_of("target-0"), "lost", level=logging.WARNING)
    assert [record.getMessage() for record in caplog.records] == ["lost"]
    assert "lost" not in (tmp_path / "target-0.log").read_text()


def test_what_is_not_opened_is_silent(capfd):
    log_event(logger_of("target-0"), "failed", level=logging.INFO)
    assert capfd.readouterr() == ("", "")


def test_a_process_that_hangs_shows_its_stacks_and_goes_on(tmp_path):
    script = f"""
        import time
        from actors.logs import LogSpec, dump_stacks_on_signal, open_logs

        def hang_here():
            print("hanging", flush=True)
            time.sleep(60)

        dump_stacks_on_signal(open_logs("target-0", LogSpec(directories=({str(tmp_path)!r},))))
        hang_here()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"hanging\n"
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            log = tmp_path / "target-0.log"
            for _ in range(1200):
                if log.exists() and "hang_here" in log.read_text():
                    break
                time.sleep(0.05)
            assert "in hang_here" in log.read_text()
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
