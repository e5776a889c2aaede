"""`pearl`, `branches`, `tree`: the drafter works on while the target verifies; what differs is what it prepares.

For the coordinator all three are one policy. A drafter answers an order at once with what was prepared for the
verdict, and says how many rows it has to draft from scratch: the rest of its answer. Each part is waited for only
while that is cheaper than going on without it.
"""

from __future__ import annotations

from actors.policy.base import WholeBatch


class AheadPipeline(WholeBatch):
    """Orders drafts like `sync`; a miss never stalls the rest for longer than it is worth."""
