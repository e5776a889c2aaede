"""The configuration of a launch. `load_config` composes it from command-line overrides."""

from __future__ import annotations

from cluster.config.compose import load_config

__all__ = ["load_config"]
