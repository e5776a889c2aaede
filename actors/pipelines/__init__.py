"""In which order the same verbs are spoken: one file per pipeline policy, and the table of their names.

What a drafter prepares while the target verifies is the business of `actors/branches.py`.
"""

from __future__ import annotations

from actors.pipelines.ahead import AheadPipeline
from actors.pipelines.pingpong import PingpongPipeline
from actors.pipelines.plain import PlainPipeline
from actors.pipelines.policy import Pipeline
from actors.pipelines.sync import SyncPipeline

__all__ = ["PIPELINES", "Pipeline"]

PIPELINES: dict[str, type[Pipeline]] = {
    "plain": PlainPipeline,
    "sync": SyncPipeline,
    "pearl": AheadPipeline,
    "branches": AheadPipeline,
    "tree": AheadPipeline,
    "pingpong": PingpongPipeline,
}
