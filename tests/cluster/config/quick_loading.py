"""Configurations for tests of what is checked after Hydra has composed them: each combination of choices once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from cluster.config.compose import register, typed_config
from cluster.config.schema import LaunchConfig


@cache
def composed(choices: tuple[str, ...]) -> DictConfig:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=list(choices))


def load_quickly(overrides: Sequence[str]) -> LaunchConfig:
    """Does what `load_config` does with one composition per combination of choices: most of its time is Hydra's."""
    keys = [override for override in overrides if "." in override.partition("=")[0]]
    config = composed(tuple(override for override in overrides if override not in keys)).copy()
    for override in keys:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    return typed_config(config)
