"""Shared by all tests: worker processes, one thread per process, tiny checkpoints, skips that name what is missing."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import matrices

# Before anything imports PyTorch: tests measure no speed, and many small threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also before it: without a GPU, Triton's kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Process groups look up the names of their peers' addresses, which takes 5 s by default where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples in every run: what a run reports, the next one reports too. `explore` draws new ones.
# Drawing them may take any time, since the machine may be busy.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if settings.get_current_profile_name() == "repeatable":
    # Hypothesis also draws constants that it finds in the source of whatever modules are loaded. That gives every
    # selection of tests other examples, and takes each worker 2 s.
    providers._get_local_constants = lambda: providers._local_constants

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
END_OF_TEXT = "<|endoftext|>"

DEFAULT_MARKS = "not slow and not extended"
"""What `-m` is where the command line does not say (`addopts` of pyproject.toml)."""

MAX_WORKERS = 8
"""A worker needs about 1 GB of memory and 10 s to import its libraries."""

ONE_AT_A_TIME = re.compile(r"\bpytest\.mark\.(ray|multinode|slurm)\b")
"""Markers of tests that start daemons or change the machine's network; one worker runs their files, in turn."""

BACKGROUND_NICE = 10
"""Niceness of the other workers: the files with daemons are the longest chain, run first, and mostly wait."""

NEEDED_PROGRAMS = {"multinode": ("ip", "unshare", "nsenter"), "slurm": ("slurmctld", "slurmd", "sbatch", "munged")}
"""Marker -> programs without which its tests cannot run; they need root besides."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use a worker per core and one more.

    Not where the command line chooses (`-n`), selects files or names, starts the debugger or measures coverage, which
    has to know of workers earlier: `--cov` takes `-n 3 --dist loadfile`.
    A few tests end sooner without workers, each of which imports the libraries and collects again. This is done here
    and not in `addopts`, where `-n` would be an unknown option under `-p no:xdist`.
    """
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    option = config.option
    option.loadscopereorder = False  # the files with daemons stay first
    has_coverage = bool(getattr(option, "cov_source", None))
    if option.numprocesses is None and option.dist == "no" and not option.usepdb and not has_coverage:
        num_cores = len(os.sched_getaffinity(0))
        is_selection = bool(option.keyword) or _are_files(config.args)
        # One more: the worker that starts daemons mostly waits for them.
        option.numprocesses = 0 if is_selection else min(num_cores + 1, MAX_WORKERS)
    if option.numprocesses and option.dist == "no":
        option.dist = "loadfile"
    if option.maxworkerrestart is None:
        option.maxworkerrestart = "1"  # the test that ended a worker is the first that the next one runs


def _are_files(arguments: list[str]) -> bool:
    return all(".py" in argument for argument in arguments)


def pytest_configure(config: pytest.Config) -> None:
    """Run the `extended` tests of files that are named, and collect them and slow rows of matrices only where they may
    run.

    Each are half of what is left without the others.
    """
    if config.option.markexpr == DEFAULT_MARKS and _are_files(config.args):
        config.option.markexpr = "not slow"
    matrices.is_whole = "not slow" not in config.option.markexpr


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """None of an `extended` function where none would run."""
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    return [] if "extended" in marks and collector.config.option.markexpr == DEFAULT_MARKS else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file of tests runs in one worker, so that its fixtures are made once; all files with daemons run in one."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "machine" if _has_daemons(config.rootpath / file) else file

    return OneAtATime(config, log)


@cache
def _has_daemons(file: Path) -> bool:
    return ONE_AT_A_TIME.search(file.read_text()) is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected lives to the end of the run: the garbage collector need not look through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)  # at the usual 700 objects it takes a twentieth of the time of all tests
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest chain of tests starts first, so that the run does not end with one busy worker."""
    items.sort(key=lambda item: not _has_daemons(item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _missing(item)
    if reason:
        pytest.skip(reason)
    if "PYTEST_XDIST_WORKER" in os.environ and not _has_daemons(item.path):
        os.nice(max(0, BACKGROUND_NICE - os.nice(0)))
    torch = sys.modules.get("torch")
    if torch is not None:  # an engine in this process may have set more; beside other workers their barriers spin
        torch.set_num_threads(1)


def _missing(item: pytest.Item) -> str | None:
    """What this machine lacks for the test, or None."""
    for marker, programs in NEEDED_PROGRAMS.items():
        if item.get_closest_marker(marker):
            absent = [program for program in programs if shutil.which(program) is None]
            if absent:
                return f"{marker}: {', '.join(absent)} not installed: apt-get install iproute2 munge slurm-wlm"
            if os.geteuid() != 0:
                return f"{marker}: needs root: sudo ./launch.sh --test -m {marker}"
    wanted = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
    if wanted:
        import torch

        found = torch.cuda.device_count()
        if found < wanted:
            return f"needs {wanted} CUDA device{'s' * (wanted > 1)}, found {found}"
    return None


@pytest.fixture
def device() -> Iterator[Any]:
    """The device on which Triton's kernels run here."""
    from tests.parallel.triton_device import triton_device

    with triton_device() as where:
        yield where


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Folders that all workers of a run share: `made_once(name, fill)` calls `fill(folder)` in the first that asks."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder = shared / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                partial = tmp_path_factory.mktemp(name) / name  # one that is interrupted leaves nothing half made
                fill(partial)
                partial.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of randomly initialised checkpoints with a byte-level tokenizer, each made once per session.

    `tiny_checkpoint("Qwen3", seed=1, num_hidden_layers=1)`: family as transformers names it, seed, configuration.
    """
    made: dict[str, Path] = {}

    def make(family: str = "Llama", *, seed: int = 0, **overrides: Any) -> Path:
        key = json.dumps([family, seed, overrides], sort_keys=True)
        if key not in made:
            made[key] = save_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, seed, overrides)
        return made[key]

    return make


def save_checkpoint(path: Path, family: str, seed: int, overrides: dict[str, Any]) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from tests.families import ENCODER_DECODERS, tiny_model

    alphabet = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(path / "tokenizer.json"))

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    shape = (
        (TINY if family not in ENCODER_DECODERS else {"max_position_embeddings": 256})
        | {"vocab_size": len(alphabet)}
        | special
        | overrides
    )
    tiny_model(family, seed, **shape).save_pretrained(path)
    return path
