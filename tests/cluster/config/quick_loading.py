"""Configurations for tests of what is checked after Hydra has composed them: Hydra composes the default ones alone."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from cluster.config.compose import _schema, register, typed_config
from cluster.config.errors import describe
from cluster.config.schema import CHOICES, LaunchConfig


def composed_by_hydra(choices: Sequence[str]) -> DictConfig:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=list(choices))


@cache
def composed(choices: tuple[str, ...]) -> DictConfig:
    """The default configuration with the records that Hydra's store keeps for these choices of groups.

    That Hydra composes the same, `test_hydra_composes_the_record_of_every_choice` shows.
    """
    if not choices:
        return composed_by_hydra(choices)
    config = composed(()).copy()
    with open_dict(config):
        for group, name in (choice.split("=") for choice in choices):
            config[group] = _schema(CHOICES[group][name])
    return config


def load_quickly(overrides: Sequence[str]) -> LaunchConfig:
    """Does what `load_config` does without composing anew, or making a schema anew: most of its time is theirs."""
    keys = [override for override in overrides if "." in override.partition("=")[0]]
    config = pickle.loads(_composed_once(tuple(override for override in overrides if override not in keys)))
    try:
        for override in keys:
            key, _, value = override.partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value))
    except OmegaConfBaseException as error:
        raise ValueError(describe(error)) from error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.config.compose._schema", _schema_once)
        return typed_config(config)


@cache
def _composed_once(choices: tuple[str, ...]) -> bytes:
    """Read back, it is a copy, several times sooner than one that is made node by node."""
    return pickle.dumps(composed(choices))


def _schema_once(record: Any) -> DictConfig:
    """A copy of what `_schema` made of the first such record."""
    of = record if isinstance(record, type) else (type(record), repr(record))
    if of not in _SCHEMAS:
        _SCHEMAS[of] = pickle.dumps(_schema(record))
    return pickle.loads(_SCHEMAS[of])


_SCHEMAS: dict[object, bytes] = {}


def each_complaint_once(rows: Iterable[tuple[list[str], str]]) -> Iterator[Any]:
    """Overrides and the line that refuses them; by default one row for a section and the beginning of a complaint.

    Those of a section that complain in the same words are found by one check, or by checks of the same form.
    """
    seen = set[tuple[str, ...]]()
    for overrides, line in rows:
        key, _, complaint = line.partition(": ")
        kind = (re.split(r"[.=\[]", key)[0], *complaint.split()[:3])
        yield pytest.param(overrides, line, marks=pytest.mark.slow if kind in seen else [])
        seen.add(kind)
