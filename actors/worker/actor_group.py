"""Handles of one engine's Ray actors: created, watched and ended together, replaced one by one.

It places nothing: options such as devices and bundles come from the caller.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.protocol.membership import Death

_LEAVE_S = 5.0


class ActorGroup:
    """Named actors and the refs of their `run` calls."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._runs: dict[str, ray.ObjectRef] = {}

    def create(self, identity: str, name: str, actor_class: Any, *arguments: object, **options: object) -> Any:
        """A new actor of this identity in place of the old one; returns at once, while its process starts."""
        self.kill(identity)
        self._runs.pop(identity, None)
        self._actors[identity] = actor_class.options(name=name, **options).remote(*arguments)
        return self._actors[identity]

    def run(self, identity: str, *arguments: object) -> None:
        run = self._actors[identity].run.options(name=identity)  # Ray names the process after the task
        self._runs[identity] = run.remote(*arguments)

    def kill(self, identity: str) -> None:
        if identity in self._actors:
            ray.kill(self._actors.pop(identity), no_restart=True)

    def deaths(self, timeout_s: float) -> list[Death]:
        """Every `run` that ended, once; waits for the first. A killed process is reported within 10 ms."""
        identities = {ref: identity for identity, ref in self._runs.items()}
        refs = list(identities)
        if not refs:  # all have ended, and there is no room for successors
            time.sleep(timeout_s)
            return []
        ended = ray.wait(refs, num_returns=1, timeout=timeout_s)[0]
        if ended:
            ended = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
        for ref in ended:
            del self._runs[identities[ref]]
        return [_death(identities[ref], ref) for ref in ended]

    def close(self, *, graceful: bool) -> None:
        """End the processes; if `graceful`, wait until they leave by themselves, which exports their last metrics."""
        if graceful and self._runs:
            ended, _ = ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=_LEAVE_S)
            leaving = [
                self._actors[identity].__ray_terminate__.remote()
                for identity, ref in self._runs.items()
                if ref in ended and identity in self._actors  # not killed
            ]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
        for identity in list(self._actors):
            self.kill(identity)
        self._runs.clear()


def _death(identity: str, ref: ray.ObjectRef) -> Death:
    try:
        ray.get(ref)
    except RayTaskError as error:
        death = Death.by(identity, error.cause)
        return Death(identity, death.text, str(error))
    except RayError as error:
        return Death(identity, str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    return Death(identity, "ended")
