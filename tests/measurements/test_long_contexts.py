"""The program of `docs/measurements/long_contexts.md`: its pair, its texts, its table."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from cluster import pocket
from docs.measurements.long_contexts import SETTINGS, make_pair, table, text_of
from parallel.model.families.registry import read_config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_pair(folder)
    return folder


def test_the_pair_is_the_bundled_one_with_more_positions(pair: Path) -> None:
    for name, source in (("target", pocket.TARGET), ("drafter", pocket.DRAFTER)):
        assert read_config(pair / name).max_positions == 65_536 > read_config(source).max_positions
        assert (pair / name / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_text_is_the_beginning_of_any_longer_one(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a library of two modules, of which the first is too short."""
    for name in ("bisect.py", "cmd.py"):
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / name, tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    target = pair / "target"
    long = text_of(target, 2500)
    assert len(long) == 2500 and text_of(target, 700) == long[:700]
    with pytest.raises(ValueError, match="lower --lengths"):
        text_of(target, 10**9)


def test_the_table_has_a_row_for_each_setting() -> None:
    lines = [
        {
            "setting": name,
            "length": length,
            "ms_per_token": 2.0,
            "tokens_per_pass": 3.0,
            "kv_bytes": 2**20,
            "digest": "",
        }
        for name in list(SETTINGS)[:2]
        for length in (64, 2048)
    ]
    rows = table(json.loads(json.dumps(lines[:3]))).splitlines()
    assert rows[0] == "|  | 64 | 2,048 | draft rows, MiB |"
    assert rows[2:] == ["| plain | 2.0 (3.0) | 2.0 (3.0) | 1.0 |", "| model | 2.0 (3.0) |  | 1.0 |"]
