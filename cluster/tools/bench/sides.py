"""The sides of a trial: who completed the same prompts, by name."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.observability.results import Run

SPECULATIVE = "speculative"
PLAIN = "plain"
"""The engine itself, with and without speculation; every trial has these two."""

TRANSFORMERS = "transformers"
ASSISTED = "transformers assisted"
"""A peer's, where it was asked for and can do what the setting wants."""

Trial = dict[str, Run]
"""One repeat of one setting: a run per side."""


def peer_sides(sides: Iterable[str]) -> list[str]:
    """Without the engine's own, each once, in order."""
    return [side for side in dict.fromkeys(sides) if side not in (SPECULATIVE, PLAIN)]
