"""What the records of all speculators share. Loads no PyTorch."""

from __future__ import annotations

FINAL = -1
"""The tap after the final norm, which the target's output layer reads. Tap i is the residual stream after i layers."""
