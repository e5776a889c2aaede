"""Handles of the actors of one engine: created together, watched together, ended together.

The only other file beside `worker.py` that knows Ray on this side of the house. It places nothing: options such as
devices and bundles come from the caller.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from actors.levels import is_spared

_GRACE_S = 5.0


class ActorGroup:
    """Named actors and the refs of their `run` calls."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._runs: dict[str, ray.ObjectRef] = {}

    def create(self, name: str, actor_class: Any, *arguments: object, **options: object) -> Any:
        """A new actor; returns at once, while its process starts."""
        self._actors[name] = actor_class.options(name=name, **options).remote(*arguments)
        return self._actors[name]

    def run(self, name: str, *arguments: object) -> None:
        self._runs[name] = self._actors[name].run.options(name=name).remote(*arguments)  # processes bear task names

    def death(self) -> str | None:
        """One line about the first `run` that ended, or None while all go on. Costs well under a millisecond."""
        names = {ref: name for name, ref in self._runs.items() if not is_spared(name)}
        ended, _ = ray.wait(list(names), num_returns=1, timeout=0) if names else ([], [])
        if not ended:
            return None
        name = names[ended[0]]
        try:
            ray.get(ended[0])
        except RayError as error:
            return f"{name}: {_cause(error)}"
        return f"{name}: ended"

    def close(self) -> None:
        """Give every `run` a moment to end by itself, then end the processes.

        Who is told to leave hands over its last metrics; who is killed does not.
        """
        if self._runs:
            ended, _ = ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=_GRACE_S)
            names = [name for name, ref in self._runs.items() if ref in ended]
            leaving = [self._actors[name].__ray_terminate__.remote() for name in names]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=_GRACE_S)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._runs.clear()


def _cause(error: RayError) -> str:
    """The user's line out of Ray's report of many."""
    cause = getattr(error, "cause", None)
    text = str(cause) if cause is not None else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
