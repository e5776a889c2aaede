"""Other weights for a running engine: one order at a time, until the target serves them or goes on with those before.

Knows the records of an update and where checkpoints are; neither models nor processes.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.protocol.membership import Weights
from actors.protocol.messages import UpdateWeights, WeightsUpdated
from cluster.completion import EngineError
from cluster.io.weights import WeightLayout

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S = 0.2


class WeightUpdates:
    """`send` sends a record to the coordinator, `check_alive` raises once the engine has failed, `on_served` receives
    what the target serves from then on. Tensors need ranks that `share_files` with this process."""

    def __init__(
        self,
        first: str,
        send: Callable[[Any], None],
        check_alive: Callable[[], None],
        on_served: Callable[[Weights], None],
        *,
        share_files: bool,
    ) -> None:
        self._layout = WeightLayout(Path(first))
        self._present = Weights(first)
        self._send = send
        self._check_alive = check_alive
        self._on_served = on_served
        self._share_files = share_files
        self._ordered: Weights | None = None
        self._answer: WeightsUpdated | None = None
        self._written: Path | None = None  # holds the present ones, if they came as tensors
        self._changed = threading.Condition()

    def update(self, source: str | Path | Mapping[str, Tensor], version: int | None) -> int:
        """Does what `Engine.update_weights` says, for one thread at a time."""
        version = self._present.version + 1 if version is None else version
        if version <= self._present.version:
            raise ValueError(f"version: {version} must be above {self._present.version}, that of the present weights")
        if not isinstance(source, Mapping):
            self._replace(source, version)
            return version
        if not self._share_files:
            raise ValueError("source: tensors need ranks on this machine; save them where all nodes can read them")
        written = self._layout.write(source)
        try:
            self._replace(written, version)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise
        self._written = written
        return version

    def _replace(self, path: str | Path, version: int) -> None:
        weights = Weights(self._layout.check(path), version)
        if Path(weights.path).absolute() == Path(self._present.path).absolute():
            raise ValueError(
                f"{path}: holds the present weights, which processes that are replaced read; write to another"
            )
        with self._changed:
            self._ordered, self._answer = weights, None
        self._send(UpdateWeights(weights))
        with self._changed:
            while (answer := self._answer) is None:
                self._changed.wait(_POLL_S)
                self._check_alive()
        if answer.refusal:
            raise EngineError(answer.refusal) if answer.is_lost else ValueError(answer.refusal)
        self.close()

    def ended(self, update: WeightsUpdated) -> None:
        """The coordinator's answer, in the reader's thread."""
        with self._changed:
            if self._ordered is None or self._ordered.version != update.version:
                return
            if not update.refusal:
                self._present = self._ordered
                self._on_served(self._present)
            self._ordered, self._answer = None, update
            self._changed.notify_all()

    def repeat(self) -> None:
        """Another coordinator serves, which may have been started before the last answer, and knows no order."""
        weights = self._ordered or self._present
        if weights.version:
            self._send(UpdateWeights(weights))

    def close(self) -> None:
        """Delete what was written for the weights before."""
        written, self._written = self._written, None
        if written is not None:
            shutil.rmtree(written, ignore_errors=True)
