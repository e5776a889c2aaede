"""The walls of the house: who may import whom, which names say nothing."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("parallel", "actors", "cluster", "conf")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

ALLOWED_PACKAGES = {
    "parallel": {"parallel"},
    "actors": {"actors", "parallel"},
    "cluster": {"cluster", "actors", "parallel", "conf"},
    "conf": set(),
}
"""Package -> those of ours it may import."""

ALLOWED_PLACES = {
    "ray": ("cluster/", "actors/worker/ray_actors.py", "actors/worker/actor_group.py"),
    "hydra": ("cluster/launch.py", "cluster/config/compose.py", "cluster/config/errors.py"),
    "omegaconf": ("cluster/launch.py", "cluster/config/"),
    "transformers": ("cluster/tools/training/", "cluster/tools/bench/", "cluster/jobs/bench"),
}
"""Library -> the only paths that may import it."""

STDLIB_ONLY = {
    "actors/protocol/sampling_params.py": set(),
    "actors/protocol/token_tree.py": set(),
    "actors/protocol/messages.py": {"actors"},
    "actors/protocol/membership.py": set(),
    "actors/options.py": {"actors"},
    "actors/ranges.py": set(),
    "cluster/config/jobs.py": {"actors"},
}
"""File -> packages it may import besides the standard library."""

BANNED_WORDS = {"helper", "helpers", "util", "utils", "manager", "verbose"}
BANNED_PREFIXES = ("handle_", "do_", "new_")
BANNED_NOUNS = ("data", "info", "process")
"""Banned at the end of a name, where they are nouns: `process_logits` is a verb and says something."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported(path: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively"
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def test_imports_go_one_way():
    wrong = [
        f"{relative(path)} imports {name}"
        for path in SOURCES
        for name in imported(path) & {*PACKAGES, "tests"}
        if name not in ALLOWED_PACKAGES[relative(path).split("/")[0]]
    ]
    assert not wrong


@pytest.mark.parametrize("library", ALLOWED_PLACES)
def test_library_stays_in_its_rooms(library: str):
    wrong = [
        relative(path)
        for path in SOURCES
        if library in imported(path) and not relative(path).startswith(ALLOWED_PLACES[library])
    ]
    assert not wrong


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_records_need_nothing(name: str):
    assert imported(ROOT / name) <= sys.stdlib_module_names | STDLIB_ONLY[name]


def test_inference_never_loads_training_or_its_libraries():
    """The engine as a user starts it loads neither transformers nor matplotlib."""
    probe = "import sys, cluster.engine; print(*({'transformers', 'matplotlib', 'ray'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_every_module_says_what_it_is():
    files = [path for path in SOURCES if path.read_text().strip()]
    assert not [relative(path) for path in files if not ast.get_docstring(parse(path))]


def test_names_say_something():
    wrong = []
    for path in SOURCES:
        names = [part.removesuffix(".py") for part in path.relative_to(ROOT).parts]
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.append(node.name)
        for name in names:
            words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")
            banned = BANNED_WORDS & set(words) or words[-1] in BANNED_NOUNS
            if banned or name.lstrip("_").startswith(BANNED_PREFIXES):
                wrong.append(f"{relative(path)}: {name}")
    assert not wrong


def test_nothing_is_printed():
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong


def test_nothing_is_left_unfinished():
    words = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert not [relative(path) for path in SOURCES if words.search(path.read_text())]


def test_lint():
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    assert ruff, "ruff is part of the test extra"
    command = [ruff, "check", "--no-cache", "--output-format=concise", *PACKAGES, "tests"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout
