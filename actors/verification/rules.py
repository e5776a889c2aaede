"""The ratio tests: which draft tokens are accepted, so that the output distribution stays exactly the target's.

Which rule is exact for which drafts is in `compatibility.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.verification.block import verify_block
from actors.verification.distributions import Accepted, DrawnTree, TargetRow
from actors.verification.kseq import verify_kseq
from actors.verification.random_source import RandomSource
from actors.verification.rejection import verify_rejection
from actors.verification.transport import verify_transport
from actors.verification.traversal import verify_traversal

Rule = Callable[[DrawnTree, TargetRow, RandomSource], Accepted]

RULES: dict[str, Rule] = {
    "rejection": verify_rejection,
    "block": verify_block,
    "traversal": verify_traversal,
    "kseq": verify_kseq,
    "transport": verify_transport,
}
"""Ratio tests, which need draft distributions and randomness. `verify_coupled` needs only the target's own draws."""
