"""The command line: `python -m cluster.launch [GROUP=CHOICE] [KEY=VALUE] ...`.

Composes the configuration, starts the job it names and turns every error into one line on stderr and an exit code: 2
for what the user can correct, 1 for a failure at run time, 130 after Ctrl-C or SIGTERM. `--help KEY` is answered
without Hydra. It must not know what a job does, and imports nothing heavy before one starts.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

SUCCESS, FAILURE, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
INTERRUPTION = "interrupted"
AGAIN_S = 0.05

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from actors.logs import dump_stacks_on_signal
    from cluster.config.compose import register, typed_config
    from cluster.config.errors import describe
    from cluster.config.schema import LaunchConfig
    from cluster.io.console import Terminal
    from parallel.whole_files import WriteError
except KeyboardInterrupt:  # these take most of a second
    sys.stderr.write(INTERRUPTION + "\n")
    sys.exit(INTERRUPTED)

FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Entry point of the module and of the console script; always leaves through `sys.exit`."""
    shows_tracebacks = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then raises its errors instead of printing them over several lines
    codes = [SUCCESS]

    @hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    def launch(composed: DictConfig) -> None:
        # A failed launch of a sweep is recorded, not raised: the others still run, as Hydra's users expect.
        codes.append(_launch(composed, shows_tracebacks))

    register()
    OmegaConf.register_new_resolver(
        "groups_help", lambda: _page().groups_help(), replace=True
    )  # for the help of conf/config.yaml
    OmegaConf.register_new_resolver("config_help", _config_help, replace=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again
    dump_stacks_on_signal()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that a locale lacks ends no run
    logging.raiseExceptions = False  # a full disk is one line of what has to be written, not a trace for each log line
    try:
        keys = _keys_to_explain(sys.argv[1:])
        if sys.argv[1:] == ["--version"]:
            from cluster.observability.report import PACKAGE, versions  # as for help: not for every launch

            sys.stdout.write(f"{PACKAGE} {versions()[PACKAGE]}, Hydra {hydra.__version__}\n")
        elif keys:
            sys.stdout.write("\n\n".join(map(_page().help_text, keys)) + "\n")
        else:
            launch()
    except KeyboardInterrupt:
        # Python ends by the signal, whatever the exit code, if an interrupt has ended code that was given as text, such
        # as that of a dataclass in an import. It forgets that where other such code runs.
        exec("")
        codes.append(_fail(INTERRUPTION, INTERRUPTED))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if shows_tracebacks:
            raise
        codes.append(_fail(f"error: {describe(error)}", USER_ERROR))
    except OSError as error:
        if shows_tracebacks:
            raise
        is_of_place = error.filename or error.errno == errno.ENOSPC  # Hydra has not named what it wrote
        remedy = "; choose another place with hydra.run.dir=DIR" if is_of_place else ""
        codes.append(_fail(f"error: {error}{remedy}", FAILURE))
    sys.exit(max(codes))


def _page() -> ModuleType:
    from cluster.config import options_page  # for help alone

    return options_page


def _config_help(*, _root_: DictConfig) -> str:
    sections = OmegaConf.masked_copy(_root_, list(_page().SECTIONS))
    return _page().config_help(cast(dict[str, Any], OmegaConf.to_container(sections, resolve=True)))


def _keys_to_explain(arguments: Sequence[str]) -> list[str]:
    """The keys and groups after `--help`; none if Hydra is to answer, as it does for `--help` with overrides."""
    words = [word for word in arguments if not word.startswith("-")]
    asks = "--help" in arguments or "-h" in arguments
    return words if asks and not any("=" in word for word in words) else []


def _launch(composed: DictConfig, shows_tracebacks: bool) -> int:
    """One launch, to its end; returns its exit code."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        config = typed_config(composed)
    except ValueError as error:
        if shows_tracebacks:
            raise
        return _fail(f"error: {describe(error)}", USER_ERROR)
    try:
        with _claimed(run_dir):
            _run(config, run_dir)
    except Exception as error:
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        if shows_tracebacks:
            raise
        trace = run_dir / "traceback.txt"
        try:
            trace.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            place = f"the traceback is in {trace}"
        except OSError as obstacle:
            place = f"{trace} cannot be written ({obstacle.strerror})"
        if isinstance(error, ValueError | RuntimeError | WriteError):
            return _fail(f"error: {describe(error)}", USER_ERROR if isinstance(error, ValueError) else FAILURE)
        return _fail(f"error: {type(error).__name__}: {describe(error)}; {place}", FAILURE)
    return SUCCESS


@contextmanager
def _claimed(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of the folder, whose files they would replace; ValueError if one is there. A file system that
    knows no locks for folders, as some over a network, keeps none out."""
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        remedy = "choose another folder, or wait until it has ended"
        raise ValueError(f"hydra.run.dir={run_dir}: another run writes there; {remedy}") from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(folder)


def _run(config: LaunchConfig, run_dir: Path) -> None:
    with Terminal().starting() as progress:
        progress("importing libraries")
        job = importlib.import_module(f"cluster.jobs.{config.job.name}")
    job.run(config, run_dir)


def _interrupt(_number: int, _frame: object) -> None:
    """Handle SIGINT and SIGTERM alike: the job writes what it has while KeyboardInterrupt unwinds it.

    Further signals must not disturb that: a batch system signals every process of a job, and a parent process may pass
    its signal on, so that both arrive, more than once. Only a third Ctrl-C kills.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda _number, _frame: signal.signal(signal.SIGINT, signal.SIG_DFL))
    raise KeyboardInterrupt


def _interrupt_again(dropped: Any) -> None:
    """Hook for exceptions that Python prints and drops, as those of finalizers: an interrupt that came in one comes
    again."""
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGINT, _interrupt)
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt caused the error, as Python raises RuntimeError from what ends a class body of an import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _fail(line: str, code: int) -> int:
    """Write the line to stderr; returns the exit code."""
    sys.stderr.write(line + "\n")
    return code


if __name__ == "__main__":
    main()
