"""The structure of the project: directions of imports, names and words. Style is checked by ruff, types by pyright."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("parallel", "actors", "cluster", "conf")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted((ROOT / "docs").rglob("*.py"))

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
    "transformers": (
        "cluster/tools/training/",
        "cluster/tools/bench/",
        "cluster/jobs/bench",
        "cluster/serving/call_readers.py",
    ),
}
"""Library -> the only paths that may import it."""

STDLIB_ONLY = (
    "actors/protocol/sampling_params.py",
    "actors/protocol/grammar.py",
    "actors/protocol/logprobs.py",
    "actors/protocol/messages.py",
    "actors/protocol/membership.py",
    "actors/options.py",
    "parallel/ranges.py",
    "cluster/config/jobs.py",
)
"""Files that may import the standard library and one another."""

BANNED_WORDS = {"helper", "helpers", "util", "utils", "manager", "verbose"}
BANNED_PREFIXES = ("handle_", "do_", "new_")
BANNED_NOUNS = ("data", "info", "process")
"""Banned at the end of a name, where they are nouns: `process_logits` is a verb and says something."""

PRIVATE_WORDS = frozenset(
    [
        "beneath",
        "chronicle",
        "conductor",
        "daring",
        "debt",
        "foresee",
        "foretell",
        "foretold",
        "glance",
        "ledger",
        "lifecycle",
        "muster",
        "nobody",
        "outlook",
        "patience",
        "prospect",
        "pulse",
        "somebody",
        "strangers",
        "tally",
        "tax",
        "temper",
        "told",
        "whoever",
    ]
)
"""Words that were once used here for what the field calls child level, width, event log, coordinator, preview,
snapshot, heartbeat, outbox, membership, stats, timing and calibration, and for estimates of what drafting costs and
brings; and roles and ranks are things, not persons."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parse(path)))


@cache
def imported_modules(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively"
            names.add(node.module or "")
    return names


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports."""
    return {name.split(".")[0] for name in imported_modules(path)}


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
    ours = {other.removesuffix(".py").replace("/", ".") for other in STDLIB_ONLY}
    modules = imported_modules(ROOT / name)
    assert not {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names} - ours


def test_inference_never_loads_training_or_its_libraries():
    """The engine as a user starts it loads neither transformers nor matplotlib."""
    probe = "import sys, cluster.engine; print(*({'transformers', 'matplotlib', 'ray'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_every_module_says_what_it_is():
    files = [path for path in (*SOURCES, *SCRIPTS) if path.read_text().strip()]
    assert not [relative(path) for path in files if not ast.get_docstring(parse(path))]


def test_names_say_something():
    wrong = []
    for path in SOURCES:
        names = [part.removesuffix(".py") for part in path.relative_to(ROOT).parts]
        for node in nodes_of(path):
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
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong


def test_nothing_is_left_unfinished():
    words = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert not [relative(path) for path in SOURCES if words.search(path.read_text())]


def test_class_names_are_used_once():
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(relative(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


@cache
def room(path: Path) -> str:
    """The folder of a file, as a module; in a folder with sub-packages every file is a room of its own."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    has_packages = any(path.parent.glob("*/__init__.py"))
    return ".".join(parts if has_packages and path.stem != "__init__" else parts[:-1])


def test_no_import_cycle_between_rooms():
    """Imports inside functions count: they are there for start-up time, not to escape from a cycle."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
    }
    arrows: dict[str, dict[str, str]] = {}
    for module, path in modules.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [
                    f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module
                    for alias in node.names
                ]
            else:
                continue
            for name in names:
                if name in modules and room(modules[name]) != room(path):
                    arrows.setdefault(room(path), {})[room(modules[name])] = f"{module} imports {name}"
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        cycle = error.args[1][::-1]
        pytest.fail("; ".join(arrows[place][other] for place, other in pairwise(cycle)))


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and word of every name, comment and text in a file; of names their parts."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
                for offset, line in enumerate(token.string.split("\n")):
                    for word in re.findall(r"[A-Z]?[a-z]+", line):
                        yield token.start[0] + offset, word.lower()


def may_have_words(path: Path) -> bool:
    """Whether its text, read without regard to tokens, which takes a while, has such a word anywhere."""
    return not PRIVATE_WORDS.isdisjoint(word.lower() for word in re.findall(r"[A-Z]?[a-z]+", path.read_text()))


def test_words_are_the_fields():
    wrong = [
        f"{relative(path)}:{line}: {word}"
        for path in filter(may_have_words, {*SOURCES, *TESTS} - {Path(__file__)})
        for line, word in words_of(path)
        if word in PRIVATE_WORDS
    ]
    assert not wrong


def test_a_docstring_names_what_it_describes():
    """One that begins with "Of" or "By" has no subject."""
    prepositions = re.compile(r"(Of|By|For|With|From|To|In|On|At|As|Until|Between|Beside|Within|After|Before|Under) ")
    cut = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and prepositions.match(str(node.value.value))
    ]
    assert not cut


EXAMPLE_FILES = {"echo.py", "test_echo.py", "test_MODULE.py"}
"""Named in recipes, without being there."""


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def test_the_index_of_the_documentation_has_every_page_once():
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"^\| \[[^]]*\]\(([^)#]+)\)", index.read_text(), re.MULTILINE)
    pages = [path.relative_to(index.parent).as_posix() for path in (ROOT / "docs").rglob("*.md") if path != index]
    assert sorted(links) == sorted(pages)


def test_pages_say_when_their_figures_were_taken():
    """Pages whose tables hold defaults, constants and plans are left out: those are no measurements."""
    chosen = {"docs/options.md", "docs/recipes.md", "docs/adaptive.md", "docs/gpu/README.md"}
    pages = {relative(path): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    is_table, date = re.compile(r"^\|.*\d\.\d", re.MULTILINE), re.compile(r"20\d\d-\d\d-\d\d|November 20\d\d")
    undated = [name for name, text in pages.items() if is_table.search(text) and not date.search(text)]
    assert not set(undated) - chosen


def test_files_that_are_named_exist():
    """Paths from the root or ends of paths, links of a page, and names of modules, in code and documentation alike."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    modules = {path.name for path in (*SOURCES, *TESTS, *SCRIPTS)}
    from_root = re.compile(r"\b(?:actors|cluster|conf|docs|parallel|tests)/[\w/]*\w\.(?:py|md|yaml|json|png)\b")
    ends = "".join(f"/{relative(path)}\n" for path in (*SOURCES, *TESTS, *SCRIPTS))
    wrong = []
    for path in (*SOURCES, *TESTS, *SCRIPTS, *pages):
        text = path.read_text()
        places = [ROOT / name for name in from_root.findall(text)]
        if path in pages:
            places += [path.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
            places += [ROOT / name for name in re.findall(r"`(\w+/[\w/]+\.py)`", text) if f"/{name}\n" not in ends]
        modules_run = re.findall(r"-m ((?:cluster|docs|tests)\.[\w.]*\w)", text)
        places += [ROOT / f"{name.replace('.', '/')}.py" for name in modules_run]
        missing = [place.name for place in places if not place.exists()]
        missing += [name for name in re.findall(r"`(\w+\.py)`", text) if name not in modules]
        wrong += [f"{relative(path)}: {name}" for name in missing if name not in EXAMPLE_FILES]
    assert not wrong


def test_commands_run_measurements_as_modules():
    """As files they would not find one another: Python then looks for modules beside the file, not in the root."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SCRIPTS]
    as_file = re.compile(r"python3?\s+docs/measurements/")
    assert not [relative(path) for path in pages if as_file.search(path.read_text())]


@cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = (node for path in SOURCES for node in nodes_of(path))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@cache
def members(name: str) -> frozenset[str]:
    """Names of a class's functions and fields, those of its bases among them; none of a class that is not ours."""
    found = set[str]()
    for node in ast.walk(classes()[name]) if name in classes() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ClassDef):
            found |= {member for base in node.bases for member in members(ast.unparse(base).partition("[")[0])}
    return frozenset(found)


_MEMBER = re.compile(r"`([A-Z]\w+)(?:\.(\w+))?[^`]*`")


def misnamed(text: str) -> list[str]:
    """`Class.member` where a class of ours has no such member."""
    named = _MEMBER.findall(text)
    return [f"{one}.{member}" for one, member in named if member and one in classes() and member not in members(one)]


def unplaced(text: str) -> list[str]:
    """`_member` of no class that its paragraph, or step of a list, names."""
    wrong = []
    for paragraph in re.split(r"\n\n|\n(?=\d+\. )", text):
        known = {member for name, _ in _MEMBER.findall(paragraph) for member in members(name)}
        wrong += [member for member in re.findall(r"`(_\w+)`", paragraph) if member not in known]
    return wrong


def test_functions_that_pages_name_exist():
    """If one was renamed or moved, read the sentence or step that names it again."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert not [f"{relative(page)}: {name}" for page in pages for name in misnamed(page.read_text())]
    assert not unplaced((ROOT / "docs" / "architecture.md").read_text()), "name their class before them"
    assert misnamed("`Coordinator.on`, `Coordinator.begin`") == ["Coordinator.begin"]
    assert unplaced("`Coordinator.on` -> `_end_round` -> `_never`\n\n`_end_round`") == ["_never", "_end_round"]


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as renderers of Markdown build them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", name).lower()).replace(" ", "-") for name in headings}


def test_links_to_a_heading_find_it():
    wrong = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)", path.read_text()):
            page = path.parent / name if name else path
            if anchor not in anchors(page):
                wrong.append(f"{relative(path)}: {name}#{anchor}")
    assert not wrong


CLOCKS = {"monotonic", "perf_counter", "process_time", "time"}


def is_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def is_elapsed(node: ast.AST, names: frozenset[str] = frozenset()) -> bool:
    """A reading of a clock minus something, or one of the names that stand for it."""
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and any(map(is_clock, ast.walk(node)))
    return is_difference or (isinstance(node, ast.Name) and node.id in names)


def smaller_sides(comparison: ast.Compare) -> Iterator[ast.expr]:
    for (left, right), order in zip(pairwise([comparison.left, *comparison.comparators]), comparison.ops, strict=True):
        if isinstance(order, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            yield left if isinstance(order, ast.Lt | ast.LtE) else right


@pytest.mark.extended
def test_no_test_bounds_a_time_from_above():
    """A busy machine takes longer. What limits a hang is a deadline: `assert time.monotonic() < deadline`."""
    wrong, clock = [], re.compile(rf"\.\s*({'|'.join(CLOCKS)})\s*\(")
    for path in (path for path in TESTS if clock.search(path.read_text())):
        nodes = nodes_of(path)
        kept = [node for node in nodes if isinstance(node, ast.Assign) and is_elapsed(node.value)]
        names = frozenset(one.id for node in kept for one in node.targets if isinstance(one, ast.Name))
        compared = [part for node in nodes if isinstance(node, ast.Assert) for part in ast.walk(node.test)]
        wrong += [
            f"{relative(path)}:{one.lineno}"
            for one in compared
            if isinstance(one, ast.Compare) and any(is_elapsed(side, names) for side in smaller_sides(one))
        ]
    assert not wrong
