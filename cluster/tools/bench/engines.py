"""The engines of a bench, by what they are configured to be: side by side where that is possible, else one at a time.

An idle engine waits on a socket and costs memory alone, so engines on a CPU may all stay open and be measured in turn.
GPUs, and the cores that Ray hands out, belong to one engine at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cluster.config.schema import ClusterName, LaunchConfig
from cluster.engine import Engine
from cluster.tools.bench.plan import Setting


def may_share(config: LaunchConfig) -> bool:
    """Whether several engines of this configuration can be open at a time."""
    devices = (config.target.device, getattr(config.drafter, "device", "cpu"))
    on_gpu = "cuda" in devices or ("auto" in devices and torch.cuda.is_available())
    return config.cluster.name == ClusterName.inprocess and not on_gpu


class EnginePool:
    """Opens an engine when it is first asked for; `with` closes all. Only roles in processes of their own log."""

    def __init__(self, config: LaunchConfig, progress: Callable[[str], None], log_dir: Path | None = None) -> None:
        self._config = config
        self._progress = progress
        self._side_by_side = may_share(config)
        self._log_dir = None if config.cluster.name == ClusterName.inprocess else log_dir
        self._open: dict[str, Engine] = {}

    def blocks(self, settings: Sequence[Setting]) -> list[Sequence[Setting]]:
        """Settings whose trials may be interleaved: all of them, or engine by engine."""
        if self._side_by_side:
            return [settings]
        by_engine: dict[str, list[Setting]] = {}
        for setting in settings:
            by_engine.setdefault(setting.engine_key, []).append(setting)
        return list(by_engine.values())

    def engine(self, setting: Setting) -> Engine:
        key = setting.engine_key
        if key not in self._open:
            if not self._side_by_side:
                self.close()
            configured = setting.configure(self._config)
            self._open[key] = Engine(configured, progress=self._progress, log_dir=self._log_dir)
        return self._open[key]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
