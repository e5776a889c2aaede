"""The command line as a user meets it: exit codes, one line on stderr, Hydra's own modes, and `launch.sh`."""

from __future__ import annotations

import copy
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore

import conf
from actors.logs import LogSpec, close_logs, log_event, logger_of, open_logs
from cluster import launch, pocket
from cluster.config.compose import load_config
from cluster.config.jobs import TrainConfig
from cluster.config.schema import CHOICES, LaunchConfig
from cluster.io.console import Terminal
from parallel.whole_files import append_text

ROOT = Path(launch.__file__).parents[1]

DRAFTERS = ", ".join(sorted(CHOICES["drafter"]))

Outcome = tuple[int, list[str]]
"""Exit code, lines on stderr."""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Overrides that need no bundled pair and write nowhere else."""
    shutil.copy(pocket.TARGET / "config.json", tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f():"}\n')
    return [
        f"target.path={tmp_path}",
        f"drafter.path={tmp_path}",
        f"job.prompts={tmp_path}/prompts.jsonl",
        f"hydra.run.dir={tmp_path}/run",
        f"hydra.sweep.dir={tmp_path}/sweep",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]


@pytest.fixture
def launched(paths: list[str], entered, monkeypatch: pytest.MonkeyPatch):
    """Runs `main` in this process with a stand-in for the job."""

    def run(job: Callable[[object, Path], None], *overrides: str, name: str = "generate") -> Outcome:
        monkeypatch.setitem(sys.modules, f"cluster.jobs.{name}", SimpleNamespace(run=job))
        flags_first = overrides and overrides[0].startswith("-")
        code, _, err = entered(*((*overrides, *paths) if flags_first else (*paths, *overrides)))
        return code, err.splitlines()

    return run


def raising(error: BaseException) -> Callable[[object, Path], None]:
    def job(config: object, run_dir: Path) -> None:
        raise error

    return job


# --- a job's end ----------------------------------------------------------------------------------------------------


def test_launches_of_the_same_second_have_directories_of_their_own():
    """Engines of one draft pool are often started together; each would overwrite what another has written."""
    pattern = yaml.safe_load((Path(conf.__file__).parent / "config.yaml").read_text())["hydra"]["run"]["dir"]
    at, later = datetime(2026, 1, 1, microsecond=1), datetime(2026, 1, 1, microsecond=2)
    names = {
        re.sub(r"\$\{now:(.*?)\}", lambda found, time=time: time.strftime(found[1]), pattern) for time in (at, later)
    }
    assert len(names) == 2


def test_a_job_gets_the_configuration_and_its_run_directory(launched, tmp_path: Path):
    seen: list[tuple[object, Path]] = []
    code, lines = launched(lambda config, run_dir: seen.append((config, run_dir)), "drafter.num_draft_tokens=3")
    assert (code, lines) == (0, [])
    (config, run_dir), *_ = seen
    assert isinstance(config, LaunchConfig) and config.drafter.num_draft_tokens == 3
    assert run_dir == tmp_path / "run" and run_dir.is_dir()


@pytest.mark.extended
def test_the_console_shows_warnings_and_not_every_event(entered, paths: list[str], tmp_path: Path, monkeypatch):
    paths.remove("hydra/job_logging=none")
    monkeypatch.setattr(logging.root, "handlers", [])

    def job(config: object, run_dir: Path) -> None:
        log_event(logger_of("coordinator"), "request")
        log_event(logger_of("coordinator"), "lost", level=logging.WARNING)

    monkeypatch.setitem(sys.modules, "cluster.jobs.generate", SimpleNamespace(run=job))
    _, out, err = entered(*paths)
    assert "lost" in out + err and "request" not in out + err
    assert "request" in (tmp_path / "run" / "launch.log").read_text()


@pytest.mark.extended
def test_a_job_may_compose_other_configurations(launched, paths: list[str]):
    """As `job=bench` does for its axes, while Hydra's own application is running."""
    seen: list[Any] = []
    pair = [path for path in paths if not path.startswith("hydra")]
    code, lines = launched(
        lambda config, run_dir: seen.append(load_config(["drafter=model", "drafter.width=7", *pair]))
    )
    assert (code, lines) == (0, [])
    assert seen[0].drafter.width == 7


@pytest.mark.extended
def test_a_job_is_imported_while_the_user_sees_that_it_is(launched, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(launch.Terminal, "line", lambda terminal, text: said.append(text))
    assert launched(lambda config, run_dir: said.append("ran"))[0] == 0
    assert said == ["importing libraries", "ran"]


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["--help", "target.tp", "drafter"], ["target.tp", "drafter"]),
        (["target.tp", "-h"], ["target.tp"]),
        (["--help", "drafter=ngram", "target.tp"], []),
        (["--help"], []),
        (["--cfg", "job"], []),
        (["job"], []),
    ],
)
def test_help_of_keys_is_asked_for_with_help_and_without_overrides(arguments, keys):
    assert launch._keys_to_explain(arguments) == keys


@pytest.mark.extended
def test_stacks_of_threads_are_at_hand_from_the_beginning(entered, monkeypatch):
    registered: list[int] = []
    monkeypatch.setattr("faulthandler.register", lambda number, **_: registered.append(number))
    entered("--help", "target.tp")
    assert registered == [signal.SIGUSR1]


@pytest.mark.extended
def test_training_gets_its_own_options(launched, paths: list[str]):
    paths[:] = [override for override in paths if not override.startswith("job.")]
    seen: list[object] = []
    code, _ = launched(lambda config, run_dir: seen.append(config), "job=train", "job.steps=300", name="train")
    assert code == 0
    (config,) = seen
    assert isinstance(config, LaunchConfig)
    assert isinstance(config.job, TrainConfig) and config.job.steps == 300


def test_what_the_user_can_put_right_is_one_line_and_code_2(launched):
    assert launched(raising(ValueError("job.prompts: line 3 is no JSON; mend it"))) == (
        2,
        ["error: job.prompts: line 3 is no JSON; mend it"],
    )


@pytest.mark.extended
def test_a_full_disk_is_one_line_and_no_trace_of_a_log(launched, tmp_path: Path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    for name in ("logs/engine.log", "traceback.txt", "completions.jsonl"):
        (tmp_path / "run" / name).symlink_to("/dev/full")

    def job(config: object, run_dir: Path) -> None:
        open_logs("engine", LogSpec("info", (str(run_dir / "logs"),)))
        try:
            log_event(logger_of("engine"), "request")
            append_text(run_dir / "completions.jsonl", "{}")
        finally:
            close_logs()

    full = "cannot be written (No space left on device); free space there or choose another place"
    assert launched(job) == (1, [f"error: {tmp_path}/run/completions.jsonl: {full}"])


@pytest.mark.extended
def test_a_failure_at_run_time_is_one_line_and_code_1(launched):
    assert launched(raising(RuntimeError("target-0 died; see its log\nsecond line"))) == (
        1,
        ["error: target-0 died; see its log"],
    )


def test_a_defect_leaves_its_traceback_in_the_run_directory(launched, tmp_path: Path):
    trace = tmp_path / "run" / "traceback.txt"
    assert launched(lambda config, run_dir: 1 / 0) == (
        1,
        [f"error: ZeroDivisionError: division by zero; the traceback is in {trace}"],
    )
    assert "lambda config" in trace.read_text()


def test_a_second_run_in_a_folder_is_refused_while_the_first_is_there(launched, tmp_path: Path):
    """It would replace the other's results, and delete the keys of its clients."""
    run_dir, began = tmp_path / "run", list[int]()
    run_dir.mkdir()
    with launch._claimed(run_dir):
        line = f"error: hydra.run.dir={run_dir}: another run writes there; choose another folder, or wait until it has"
        assert launched(lambda config, run_dir: began.append(1)) == (2, [f"{line} ended"])
    assert launched(lambda config, run_dir: began.append(2)) == (0, []) and began == [2]


@pytest.mark.extended
def test_a_character_that_the_locale_lacks_ends_no_run(launched, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert launched(lambda config, run_dir: Terminal().line("caf\u00e9 \u2026")) == (0, [])
    assert written.getvalue().splitlines()[-1] == b"caf? ?"


@pytest.mark.extended
def test_ctrl_c_is_code_130(launched):
    assert launched(raising(KeyboardInterrupt())) == (130, ["interrupted"])


@pytest.mark.extended
def test_ctrl_c_in_a_finalizer_ends_the_job_too(launched):
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def job(config: object, run_dir: Path) -> None:
        Finalized()  # Python would print the interrupt and drop it
        time.sleep(60)

    assert launched(job) == (130, ["interrupted"])


@pytest.mark.extended
def test_ctrl_c_that_python_wraps_while_it_makes_a_class_is_no_failure(launched):
    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    assert launched(lambda config, run_dir: type("Owner", (), {"named": Named()})) == (130, ["interrupted"])


@pytest.mark.extended
def test_a_sweep_goes_on_behind_a_failed_launch_and_tells_in_the_end(launched):
    limits: list[int] = []

    def job(config: LaunchConfig, run_dir: Path) -> None:
        limits.append(config.job.limit)
        if config.job.limit == 2:
            raise ValueError("job.limit: unlucky; take another")

    code, lines = launched(job, "-m", "job.limit=2,3")
    assert limits == [2, 3]
    assert (code, lines) == (2, ["error: job.limit: unlucky; take another"])


# --- before a job starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["drafter=model", "drafter.widht=3"], "error: drafter.widht: no such key; did you mean drafter.width?"),
        pytest.param(
            ["drafter=eagle"], f"error: drafter=eagle: no such choice; choose one of {DRAFTERS}", marks=pytest.mark.slow
        ),
        pytest.param(
            ["target.tp=two"],
            "error: target.tp: value 'two' of type 'str' could not be converted to Integer",
            marks=pytest.mark.slow,
        ),
        pytest.param(["+spare=1"], "error: spare: no such key; choose one of target, drafter", marks=pytest.mark.slow),
        (["target.tp=0"], "error: target.tp=0: must be at least 1"),
        (
            ["drafter=auto", "drafter.drafters=[ngram,{name: model, widht: 3}]"],
            "error: drafter.drafters[1].widht: no such key; did you mean width?",
        ),
        (
            ["drafter=auto", "drafter.drafters=[ngram,{name: model, width: two}]"],
            "error: drafter.drafters[1].width: value 'two' of type 'str' could not be converted to Integer",
        ),
        pytest.param(
            ["job.prompts=/no/such.jsonl"], "error: job.prompts=/no/such.jsonl: no such file", marks=pytest.mark.slow
        ),
        (["-m", "target.tp=1", "drafter=eagle,ngram"], "error: drafter=eagle: no such choice"),
        pytest.param(["--cfg", "job", "drafter=eagle"], "error: drafter=eagle: no such choice", marks=pytest.mark.slow),
        (
            ["hydra.run.dir=/proc/no/such"],
            "error: [Errno 2] No such file or directory: '/proc/no'; choose another place",
        ),
    ],
)
def test_a_refusal_is_one_line_and_code_2(launched, overrides: list[str], line: str):
    ran: list[object] = []
    code, lines = launched(lambda config, run_dir: ran.append(config), *overrides)
    assert not ran
    assert code == (1 if "Errno" in line else 2)
    assert len(lines) == 1 and lines[0].startswith(line)


@pytest.mark.extended
def test_a_traceback_is_shown_when_asked_for(paths: list[str]):
    done = command("target.tp=0", *paths, env={launch.FULL_ERROR: "1"})
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "target.tp=0: must be at least 1" in done.stderr


# --- as a process of its own ----------------------------------------------------------------------------------------


def command(*arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    program = [sys.executable, "-m", "cluster.launch", *arguments]
    return subprocess.run(program, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.extended
def test_the_configuration_can_be_shown_from_anywhere(tmp_path: Path):
    done = command("--cfg", "job", "--resolve", "sampling.temperature=0.5", "drafter=ngram", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    shown = yaml.safe_load(done.stdout)
    assert shown["sampling"]["temperature"] == 0.5
    assert shown["drafter"]["name"] == "ngram"
    assert not list(tmp_path.iterdir())


def test_help_names_groups_keys_and_examples(entered):
    code, out, err = entered("--help")
    assert (code, err) == (0, "")
    for word in ("drafter.num_draft_tokens=0", "== Examples ==", "--cfg job --resolve", "explained by --help KEY"):
        assert word in out
    groups = out.partition("== Groups")[2].partition("== Keys")[0]
    named = {word for line in groups.splitlines() for word in line.replace(",", " ").split()}
    assert not [choice for choices in CHOICES.values() for choice in choices if choice not in named]


@pytest.mark.extended
def test_no_composition_copies_the_records_of_all_choices_or_changes_them(entered):
    """A copy for every group that help lists took two thirds of its time."""
    entered("--help", "drafter=ngram")
    store = ConfigStore.instance()
    before = repr(store.repo)
    drafter: Any = load_config(["drafter=ngram", "drafter.max_ngram=7"]).drafter
    assert drafter.max_ngram == 7
    assert repr(store.repo) == before and "max_ngram" in before
    assert copy.deepcopy(store) is store


def test_the_version_is_that_of_the_package(entered):
    code, out, err = entered("--version")
    assert (code, err) == (0, "") and re.fullmatch(r"specdec \d+\.\d+\S*, Hydra \S+\n", out)


def test_help_explains_a_key(entered):
    code, out, err = entered("--help", "drafter.kv_slots")
    assert (code, err) == (0, "")
    assert out.startswith(
        "drafter=model, drafter=speculator, drafter=self: drafter.kv_slots=0\n"
        "    whole number, 0 (sized automatically) or above"
    )
    code, out, err = entered("drafter.widht", "--help")
    assert (code, out) == (2, "")
    assert err.startswith("error: drafter.widht: no such key; did you mean drafter.width")


def test_help_with_overrides_shows_the_keys_of_what_is_chosen_with_their_values(entered):
    out = entered("--help", "drafter=ngram", "drafter.max_ngram=7", "job=certify", "sampling.seed=5")[1]
    shown = re.findall(r"^ *((?:target|drafter|job|sampling|scheduler|cluster)\.\w+)=(\S*)", out, re.MULTILINE)
    assert dict(shown).items() >= {"drafter.max_ngram": "7", "sampling.seed": "5", "job.draws": "4000"}.items()
    assert len(shown) == len(dict(shown)) < 40 and "Seed of the noise" in out


def test_shell_completion_offers_choices(entered, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMP_LINE", "specdec drafter=")
    monkeypatch.setenv("COMP_POINT", "16")
    code, out, _ = entered("-sc", "query=bash")
    assert code == 0 and out.split() == [f"drafter={name}" for name in sorted(CHOICES["drafter"])]


@pytest.mark.slow
def test_a_bad_override_through_the_module_exits_with_2():
    """By default in this process, and another mistake through the module (where a traceback is asked for)."""
    done = command("drafter=eagle")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: drafter=eagle: no such choice; choose one of {DRAFTERS}\n"


@pytest.mark.extended
def test_nothing_heavy_is_imported_before_a_job_starts():
    probe = "import sys, cluster.launch; print(*{'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        pytest.param([signal.SIGTERM], 130, marks=pytest.mark.slow),  # the others begin so
        pytest.param([signal.SIGINT, signal.SIGTERM, signal.SIGINT], 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM, signal.SIGTERM, signal.SIGINT], 130, marks=pytest.mark.slow),
        ([signal.SIGINT] * 3, -signal.SIGINT),
    ],
    ids=["once", "both", "both, the other way round", "a third time"],
)
def test_a_signal_lets_the_job_write_what_it_has(numbers: list[signal.Signals], code: int, paths: list[str], tmp_path):
    """Those behind the first come while it writes."""
    program = f"""
import signal, sys, types
job = types.ModuleType("cluster.jobs.generate")
def run(config, run_dir):
    first, *others = {list(map(int, numbers))}
    try:
        signal.raise_signal(first)
    finally:
        for number in others:
            signal.raise_signal(number)
        (run_dir / "kept").touch()
job.run = run
sys.modules["cluster.jobs.generate"] = job
sys.argv = ["launch", *{paths!r}]
from cluster.launch import main
from parallel.whole_files import append_text
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "interrupted\n" if code == 130 else "")
    assert (tmp_path / "run" / "kept").exists() == (code == 130)


@pytest.mark.extended
def test_an_interrupt_in_code_that_is_given_as_text_has_the_same_exit_code(paths: list[str], tmp_path):
    """As in a dataclass that an import makes. Python would end a module that is run so by the signal."""
    program = f"""
import sys, types
job = types.ModuleType("cluster.jobs.generate")
job.run = lambda config, run_dir: exec("import signal; signal.raise_signal(signal.SIGINT)")
sys.modules["cluster.jobs.generate"] = job
sys.argv = ["launch", *{paths!r}]
from cluster.launch import main
main()
"""
    (tmp_path / "interrupted_job.py").write_text(program)
    folders = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = [sys.executable, "-m", "interrupted_job"]
    done = subprocess.run(run, cwd=ROOT, env=folders, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.extended
def test_a_signal_during_the_first_imports_is_one_line():
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "omegaconf.errors":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
import cluster.launch
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# --- launch.sh ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what `launch.sh` reads, and an interpreter that records what it is asked, in folders with a space."""
    root = tmp_path / "a checkout"
    root.mkdir()
    for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    fake = tmp_path / "an env" / "python3"
    fake.parent.mkdir()
    fake.write_text(
        "#!/usr/bin/env bash\n"
        f'printf "%s|" "$PWD" "$@" >>"{tmp_path}/calls"; echo >>"{tmp_path}/calls"\n'
        '[[ "$1 $2" == "-m venv" ]] && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"\n'
        '[[ " $* " == *" install "* && -n ${FAIL_INSTALL:-} ]] && echo "no matching distribution" && exit 1\n'
        "exit 0\n"
    )
    fake.chmod(0o755)
    return root


def launch_script(checkout: Path, *arguments: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the script did, and the interpreter's calls, each as `cwd|argument|argument|`."""
    calls = checkout.parent / "calls"
    calls.unlink(missing_ok=True)
    # the tests themselves may have been started with an environment of the user's own
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    environment = {**inherited, "SPECDEC_PYTHON": str(checkout.parent / "an env" / "python3"), **env}
    program: Sequence[str] = [str(checkout / "launch.sh"), *arguments]
    done = subprocess.run(program, cwd="/", env=environment, capture_output=True, text=True, check=False)
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_the_script_sets_up_once_and_passes_arguments_on(checkout: Path):
    done, calls = launch_script(checkout, "drafter=ngram", "sampling.stop=[a b]")
    assert done.returncode == 0
    assert f"/|-m|venv|--clear|{checkout}/.venv|" in calls
    (install,) = [call for call in calls if "|install|" in call]
    assert f"|-c|{checkout}/constraints.txt|-e|{checkout}[serve,test]|" in install
    assert calls[-1] == "/|-P|-m|cluster.launch|drafter=ngram|sampling.stop=[a b]|"

    again, calls = launch_script(checkout, "--help")
    assert (again.returncode, again.stderr) == (0, "")
    assert calls == ["/|-P|-m|cluster.launch|--help|"]


def test_a_dry_run_sets_nothing_up(checkout: Path):
    done, calls = launch_script(checkout, "sampling.stop=[a b]", "--dry-run")
    assert not calls and not (checkout / ".venv").exists()
    assert done.stdout == f"{str(checkout).replace(' ', chr(92) + ' ')}/.venv/bin/python -P -m cluster.launch " + (
        "sampling.stop=\\[a\\ b\\]\n"
    )


def test_the_script_runs_tests_in_the_checkout(checkout: Path):
    launch_script(checkout)
    _, calls = launch_script(checkout, "--test", "-k", "config")
    assert calls == [f"{checkout}|-P|-m|pytest|-k|config|"]


def test_the_script_sets_up_again_when_the_versions_change(checkout: Path, tmp_path: Path):
    launch_script(checkout)
    other = tmp_path / "other.txt"
    other.write_text("torch==2.11.0\n")
    _, calls = launch_script(checkout, SPECDEC_CONSTRAINTS=str(other))
    assert any(f"|-c|{other}|" in call for call in calls)


def test_the_script_says_why_it_cannot_set_up(checkout: Path):
    done, _ = launch_script(checkout, SPECDEC_PYTHON="/bin/false")
    assert done.returncode == 1
    assert (
        "error: /bin/false: Python 3.11 or newer is needed; install it or name one with SPECDEC_PYTHON" in done.stderr
    )

    done, calls = launch_script(checkout, FAIL_INSTALL="1")
    assert done.returncode == 1
    assert "no matching distribution" in done.stderr and "error: " in done.stderr.splitlines()[-1]
    assert not any("cluster.launch" in call for call in calls)
