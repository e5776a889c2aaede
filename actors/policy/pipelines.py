"""In which order the same verbs are spoken: one file per pipeline policy, and the table of their names.

What a drafter prepares while the target verifies is the business of `actors/protocol/draft_tree.py`.
"""

from __future__ import annotations

from actors.policy.ahead import AheadPipeline
from actors.policy.base import Pipeline
from actors.policy.pingpong import PingpongPipeline
from actors.policy.plain import PlainPipeline
from actors.policy.sync import SyncPipeline

__all__ = ["PIPELINES", "Pipeline"]

PIPELINES: dict[str, type[Pipeline]] = {
    "plain": PlainPipeline,
    "sync": SyncPipeline,
    "pearl": AheadPipeline,
    "branches": AheadPipeline,
    "tree": AheadPipeline,
    "pingpong": PingpongPipeline,
}
