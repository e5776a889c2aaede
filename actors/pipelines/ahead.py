"""`pearl`, `branches`, `tree`: the drafter works on while the target verifies; what differs is what it prepares.

For the coordinator all three are one policy. A drafter answers an order at once with what was prepared for the
verdict, and says how many rows it has to draft from scratch. Those are waited for only while that is cheaper than
verifying them without a draft.
"""

from __future__ import annotations

from actors.pipelines.cost import Costs
from actors.pipelines.policy import WholeBatch


class AheadPipeline(WholeBatch):
    """Orders drafts like `sync`, but never lets a miss stall the rest for longer than it is worth."""

    def may_verify(self, num_expecting: int, num_ready: int, answered: bool, costs: Costs) -> bool:
        if not num_expecting:
            return True
        if not answered:
            return False  # what is prepared arrives within a message's time
        return not costs.worth_waiting(num_expecting, num_ready)
