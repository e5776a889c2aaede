"""Plant small mistakes in the product, one at a time, and count how many the tests of the same folder notice.

    python tests/mutation.py --num 150 --seed 1                    # a random sample of everything in DEFAULT
    python tests/mutation.py --num 30 actors/policy cluster/engine.py
    python tests/mutation.py --again build/mutation.json           # the same mistakes, after tests were added

Needs `pip install -e '.[test,mutation]'`. It works on a copy of the files that git does not ignore, with one process: a
mutant is one line or expression changed by an operator of cosmic-ray, by one of the two below, or, in C++, by
`tests/cpp_mutants.py`; kernels that do not compile are left out. Each is run in a fork of a process that has imported
the libraries already, against `tests/PACKAGE/test_MODULE.py`, the rest of that folder, and the tests elsewhere that are
named after the module or import it, up to the first failure. A test that fails without the mistake as well is left out
from then on. A folder gets a share of the sample in proportion to the root of its size. Left out: annotations, messages
of errors and logs, decorators. What survives is printed as a diff and written to `--out`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cpp_mutants  # beside this script
import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

DEFAULT = [
    "actors",
    "parallel",
    "cluster/config",
    "cluster/jobs",
    "cluster/observability",
    "cluster/runtime/supervisor.py",
]
DEFAULT += [f"cluster/{name}.py" for name in ("engine", "client", "completion", "launch")]
DEFAULT += [f"cluster/tools/{name}" for name in ("planning", "simulation", "certify", "training", "offline.py")]
MARKS = "not slow and not ray and not multinode and not slurm and not gpu"
CPP = (".cpp", ".h")
ELSEWHERE = {f"cluster/{name}.py": "tests/cluster/engine" for name in ("client", "completion")}
"""Module -> folder whose tests use it without importing it."""
NO_TESTS = 5
"""Exit code of pytest if all tests were left out."""

_COMPARISONS = """Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"""
_ARITHMETIC = """Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv BitOr_BitAnd BitAnd_BitOr Pow_Mul"""
_OTHERS = """AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd NumberReplacer
    ReplaceBreakWithContinue ReplaceContinueWithBreak ZeroIterationForLoop ReplaceUnaryOperator_Delete_Not"""
OPERATORS = [
    *(f"core/ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()),
    *(f"core/ReplaceBinaryOperator_{name}" for name in _ARITHMETIC.split()),
    *(f"core/{name}" for name in _OTHERS.split()),
]
"""Operators of cosmic-ray without the replacements that are hardly ever made by mistake."""


class SwapArguments(Operator):
    """Exchanges two positional arguments that follow one another."""

    def mutation_positions(self, node):
        for i in self._places(node):
            yield node.children[i].start_pos, node.children[i + 2].end_pos

    def mutate(self, node, index):
        i = list(self._places(node))[index]
        node.children[i], node.children[i + 2] = node.children[i + 2], node.children[i]
        return node

    def _places(self, node) -> Iterator[int]:
        if node.type != "arglist" or node.parent.type != "trailer":
            return
        if node.get_previous_leaf().get_previous_leaf().value not in ("min", "max"):
            for i in range(0, len(node.children) - 2, 2):
                both = node.children[i], node.children[i + 2]
                if all(one.type != "argument" for one in both) and len({one.get_code().strip() for one in both}) == 2:
                    yield i

    @classmethod
    def examples(cls):
        return ()


class DropStatement(Operator):
    """Replaces a call, an update, or an assignment to an attribute or element by `pass`; not in a constructor."""

    def mutation_positions(self, node):
        if node.parent is not None and node.parent.type == "simple_stmt" and (_is_call(node) or _is_update(node)):
            function = node.search_ancestor("funcdef")
            if function is not None and function.name.value != "__init__":
                yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        leaf = parso.parse("pass").children[0]
        leaf.prefix = node.get_first_leaf().prefix
        return leaf

    @classmethod
    def examples(cls):
        return ()


def _is_call(node) -> bool:
    return node.type == "atom_expr" and node.children[-1].get_code().startswith("(")


def _is_update(node) -> bool:
    is_augmented = node.type == "expr_stmt" and node.children[1].type == "operator" and node.children[1].value != "="
    return node.type == "expr_stmt" and (is_augmented or node.children[0].type != "name")


def operators() -> list[Operator]:
    assert set(OPERATORS) <= set(operator_names())
    return [get_operator(name)() for name in OPERATORS] + [SwapArguments(), DropStatement()]


def is_left_out(node) -> bool:
    """Annotations, decorators, what is raised or logged, messages of assertions, and `zip`'s own check of lengths."""
    while node.parent is not None:
        child, node = node, node.parent
        kind = node.type
        if (
            kind in ("decorator", "raise_stmt", "import_from", "tfpdef")
            or (kind == "annassign" and node.children[1] is child)
            or (kind == "parameters" and child.type == "operator")
            or (kind in ("param", "funcdef") and node.annotation is child)
            or (kind == "assert_stmt" and node.children[1] is not child)
            or (kind == "argument" and node.children[0].get_code().strip() == "strict")
            or (kind == "atom_expr" and _logs(node))
        ):
            return True
    return False


def _logs(node) -> bool:
    return re.match(r"(self\.)?_?(log|logger|logging|warnings)\.", node.get_code().strip()) is not None


def mutants(path: str, rng: random.Random) -> list[tuple[str, Callable[[], str]]]:
    """One mistake for each place of the file: its kind, and what makes the file's text with it."""
    source = Path(path).read_text()
    if path.endswith(CPP):
        chosen = cpp_mutants.chosen_places(source, rng)
        return [(f"C++ {kind}", partial(cpp_mutants.planted, source, *place)) for kind, *place in chosen]
    places = collections.defaultdict(list)
    nodes = [(node, is_left_out(node)) for node in ast_nodes(parso.parse(source))]
    for operator in operators():
        occurrence = 0
        for node, left_out in nodes:
            for position in operator.mutation_positions(node):
                if not left_out:
                    places[position].append((operator, occurrence))
                occurrence += 1
    chosen = [rng.choice(options) for _, options in sorted(places.items())]
    return [(type(operator).__name__, partial(mutate_code, source, operator, number)) for operator, number in chosen]


def sample(roots: list[str], num: int, rng: random.Random) -> list[dict[str, str]]:
    listed = subprocess.run(["git", "ls-files", "--", *roots], capture_output=True, text=True, check=True).stdout
    folders = collections.defaultdict(list)
    for path in listed.split():
        if path.endswith((".py", *CPP)):
            folders[str(Path(path).parent)] += [(path, *mutant) for mutant in mutants(path, rng)]
    total = sum(len(all_) ** 0.5 for all_ in folders.values())
    taken = []
    for all_ in folders.values():
        share = num * len(all_) ** 0.5 / total
        count = int(share) + (rng.random() < share % 1)
        for path, operator, mutated in rng.sample(all_, min(count, len(all_))):
            before, after = fragments(Path(path).read_text(), mutated())
            taken.append({"path": path, "operator": operator, "before": before, "after": after})
    rng.shuffle(taken)
    return taken


def fragments(old: str, new: str) -> tuple[str, str]:
    """The lines that differ, with as many lines before them as make the old ones unique in the file."""
    a, b = old.splitlines(True), new.splitlines(True)
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tail = next((i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), 0)
    while old.count("".join(a[head : len(a) - tail])) != 1:
        head -= 1
    return "".join(a[head : len(a) - tail]), "".join(b[head : len(b) - tail])


def tests_of(path: str) -> list[str]:
    """The module's own file first, then the nearest folder that mirrors its place, then what uses it elsewhere."""
    folder = Path("tests") / Path(path).parent
    if (folder / Path(path).stem).is_dir():
        folder = folder / Path(path).stem
    while not list(folder.glob("test_*.py")):
        folder = folder.parent
    name, module = f"test_{Path(path).stem}", re.compile(re.escape(path.removesuffix(".py").replace("/", ".")) + r"\b")
    here = sorted(folder.glob("test_*.py"), key=lambda file: (file.stem != name, file.stem))
    used = [file for file in sorted(Path("tests/").glob("*/**/test_*.py")) if file not in here]
    own = ELSEWHERE.get(path, name)
    used = [file for file in used if own in str(file.with_suffix("")) or module.search(file.read_text())]
    return [str(file) for file in [*here, *used]]


class Judge:
    """Runs tests against a mistake; a test that fails without it as well is no witness, now and later."""

    def __init__(self, test_s: float, total_s: float) -> None:
        """A test of more than `test_s` found the mistake (it hangs); what none finds in `total_s` survives."""
        self._limits = test_s, total_s
        self._is_sound: dict[str, bool] = {}

    def find(self, file: Path, source: str, mutated: str) -> tuple[str, float]:
        """The test that noticed, "" for none; and the seconds."""
        began = time.monotonic()
        while True:
            file.write_text(mutated)
            unsound = [test for test, is_sound in self._is_sound.items() if not is_sound]
            failed = run_tests(tests_of(str(file)), unsound, *self._limits)
            file.write_text(source)
            if self.is_witness(failed):
                return failed, time.monotonic() - began

    def is_witness(self, failed: str) -> bool:
        if "::" not in failed:
            return True
        if failed not in self._is_sound:
            self._is_sound[failed] = not run_tests([failed], [], *self._limits)
            if not self._is_sound[failed]:
                print(f"fails without a mistake: {failed}", flush=True)
        return self._is_sound[failed]


class _FirstFailure:
    """A plugin of pytest that prints the node id of what fails, whole, on a line of its own."""

    MARK = "first failure: "

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            print(f"\n{self.MARK}{report.nodeid}", flush=True)

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tests: list[str], left_out: list[str], test_s: float, total_s: float) -> str:
    """How a fork of this process fares with the tests: the one that failed, or how it ended; "" for none."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        if not (pid := os.fork()):
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            options = f"-x -q -s -p no:xdist -p no:cacheprovider --tb=no -o timeout={test_s} -o timeout_method=thread"
            import pytest

            options = [*options.split(), *(f"--deselect={test}" for test in left_out)]
            os._exit(pytest.main([*options, "-m", MARKS, *tests], plugins=[_FirstFailure()]))
        status = None
        while status is None and time.monotonic() - began < total_s:
            time.sleep(0.05)
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also what the tests started
        if status is None:
            os.waitpid(pid, 0)
        output.seek(0)
        text = output.read()
    if status in (None, 0, NO_TESTS):
        return ""
    failed = re.search(rf"^{_FirstFailure.MARK}(.*)$", text, re.M)
    return failed[1] if failed else f"exit status {status}: {text[-200:]}"


def compiled(file: Path, source: str, mutated: str) -> bool:
    file.write_text(mutated)
    is_valid = compiles()
    file.write_text(source)
    return is_valid


def compiles() -> bool:
    """Whether the kernels of the working folder compile; the tests then find them in the cache."""
    build = "from parallel.kernels import library as kernels; kernels.build(kernels.cache_folder())"
    return not subprocess.run([sys.executable, "-c", build], capture_output=True, check=False).returncode


def import_libraries() -> None:
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before its first import, as in tests/conftest.py
    import hypothesis
    import pytest  # noqa: F401
    import torch
    import transformers

    torch.set_num_threads(1)
    _ = transformers.LlamaForCausalLM
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure is enough, it need not be small
    hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)
    hypothesis.settings.load_profile("mutation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", default=DEFAULT)
    parser.add_argument("--num", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="results of an earlier run")
    parser.add_argument("--survivors", action="store_true", help="with --again: only what survived")
    parser.add_argument("--test-s", type=float, default=60, help="a test that takes longer hangs: it noticed")
    parser.add_argument("--total-s", type=float, default=150, help="what no test noticed in this time survives")
    parser.add_argument("--out", type=Path, default=Path("build/mutation.json"))
    arguments = parser.parse_args()
    if arguments.again:
        todo = json.loads(arguments.again.read_text())
        todo = [one for one in todo if not (arguments.survivors and one["failed"])]
    else:
        todo = sample(arguments.roots, arguments.num, random.Random(arguments.seed))
    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as copy:
        subprocess.run(
            f"git ls-files -zco --exclude-standard | xargs -0 cp --parents -t {copy}", shell=True, check=True
        )
        os.chdir(copy)
        os.environ["PYTHONPATH"] = sys.path[0] = copy
        os.environ["XDG_CACHE_HOME"] = f"{copy}/.cache"  # of compiled kernels: none of a mutant outlives this
        import_libraries()
        compiles()
        judge, done = Judge(arguments.test_s, arguments.total_s), []
        for one in todo:
            file = Path(one["path"])
            source = file.read_text() if file.exists() else ""
            if source.count(one["before"]) != 1:
                print(f"gone: {file}", flush=True)
                continue
            mutated = source.replace(one["before"], one["after"])
            if file.suffix in CPP and not compiled(file, source, mutated):
                print(f"does not compile: {file}", flush=True)
                continue
            one["failed"], one["seconds"] = judge.find(file, source, mutated)
            done.append(one)
            out.write_text(json.dumps(done, indent=1))
            print(f"{one['seconds']:5.0f} s  {file}: {one['failed'] or 'SURVIVED'}", flush=True)
            if not one["failed"]:
                lines = one["before"].splitlines(), one["after"].splitlines()
                print("\n".join(list(difflib.unified_diff(*lines, lineterm="", n=1))[2:]), flush=True)
    report(done)


def report(done: list[dict[str, str]]) -> None:
    folders = collections.defaultdict(list)
    for one in done:
        folders[str(Path(one["path"]).parent)].append(bool(one["failed"]))
    for folder, caught in sorted(folders.items()):
        print(f"{folder:40} {sum(caught):3} of {len(caught):3}")
    caught = sum(bool(one["failed"]) for one in done)
    print(f"{'all':40} {caught:3} of {len(done):3} ({caught / max(1, len(done)):.0%})")


if __name__ == "__main__":
    main()
