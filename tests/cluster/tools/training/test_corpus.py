"""The corpus: the same every time, and without the held-out modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.tools.training.corpus import HELD_OUT, is_test, load_corpus


def write_library(root: Path) -> None:
    """A library of the held-out modules, two others, their tests, and files that must be skipped."""
    for name in HELD_OUT:
        (root / name).write_text(f"HELD_OUT = {name!r}\n")
    for name in ("os.py", "json/decoder.py", "test/test_os.py", "test/test_heapq.py", "test/test_json.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"TEXT = {name!r}\n" + "#" * 1000)
    for name in ("site-packages/pip.py", "encodings/cp437.py", "test/badsyntax_future3.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("SKIPPED = True\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "empty.py").write_text("\n")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """One of enough files for two orders."""
    write_library(tmp_path)
    for number in range(20):
        (tmp_path / f"module_{number}.py").write_text(f"NUMBER = {number}\n")
    return tmp_path


def test_same_seed_gives_same_corpus(library: Path):
    first, second = (load_corpus(seed=0, test_megabytes=0.5, root=library).fingerprint() for _ in range(2))
    assert first == second


def test_another_seed_gives_another_order_of_the_same_library(library: Path):
    corpus, other = (load_corpus(seed=seed, test_megabytes=0.5, root=library) for seed in (0, 1))
    assert other.fingerprint() != corpus.fingerprint()
    assert {s.path for s in other.training if not is_test(s.path)} == {
        s.path for s in corpus.training if not is_test(s.path)
    }


@pytest.mark.parametrize("kind", ["small", pytest.param("whole", marks=pytest.mark.slow)])
def test_held_out_modules_and_their_tests_are_never_trained_on(kind: str, library: Path):
    """Of a library of a few files, or of this Python's."""
    corpus = load_corpus(seed=0, test_megabytes=0.5, root=library) if kind == "small" else load_corpus(0, 0.5)
    assert [source.path for source in corpus.held_out] == list(HELD_OUT)
    trained = {source.path for source in corpus.training}
    assert not trained & set(HELD_OUT)
    assert "test/test_heapq.py" not in trained
    texts = {source.text for source in corpus.training}
    assert not texts & {source.text for source in corpus.held_out}


def test_tests_stay_below_their_cap(tmp_path: Path):
    write_library(tmp_path)
    for number in range(20):
        (tmp_path / f"test/test_{number}.py").write_text("#" * 9_999 + "\n")
    corpus = load_corpus(seed=0, test_megabytes=0.1, root=tmp_path)
    size = sum(len(source.text) for source in corpus.training if is_test(source.path))
    assert 0.09e6 < size <= 0.1e6


def test_huge_tests_are_skipped(tmp_path: Path):
    write_library(tmp_path)
    (tmp_path / "test/test_os.py").write_text("#" * 100_001)
    corpus = load_corpus(seed=0, test_megabytes=1.0, root=tmp_path)
    assert {source.path for source in corpus.training if is_test(source.path)} == {"test/test_json.py"}


def test_only_usable_files_are_read(tmp_path: Path):
    write_library(tmp_path)
    corpus = load_corpus(seed=0, test_megabytes=1.0, root=tmp_path)
    paths = {source.path for source in corpus.training}
    assert paths == {"os.py", "json/decoder.py", "test/test_os.py", "test/test_json.py"}


def test_cap_of_zero_leaves_no_tests(tmp_path: Path):
    write_library(tmp_path)
    corpus = load_corpus(seed=0, test_megabytes=0.0, root=tmp_path)
    assert {source.path for source in corpus.training} == {"os.py", "json/decoder.py"}


def test_missing_held_out_module_is_an_error(tmp_path: Path):
    write_library(tmp_path)
    (tmp_path / HELD_OUT[3]).unlink()
    with pytest.raises(FileNotFoundError, match=HELD_OUT[3]):
        load_corpus(seed=0, test_megabytes=1.0, root=tmp_path)
