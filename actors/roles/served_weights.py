"""The weights that a rank of the target serves, and their replacement by those of another checkpoint.

Knows neither requests nor rows: its role drops both before.
"""

from __future__ import annotations

from actors.protocol.membership import Weights
from parallel.runtime.decoder_runner import DecoderRunner


class ServedWeights:
    """Those of `runner`; None: of a checkpoint that no other follows."""

    def __init__(self, runner: DecoderRunner, weights: Weights | None = None) -> None:
        self._runner = runner
        self._present = weights

    def use(self, weights: Weights) -> None:
        """Serve these, as the other ranks do or will. ValueError if they cannot be had."""
        if weights != self._present:
            self._replace(weights, alone=True)

    def take(self, weights: Weights) -> str:
        """Serve these on every rank, which returns "", or on none, which returns why."""
        try:
            self._replace(weights, alone=False)
        except ValueError as error:
            return str(error)
        return ""

    def _replace(self, weights: Weights, *, alone: bool) -> None:
        from parallel.runtime.weight_update import update_weights  # most engines serve the weights they start with

        update_weights(self._runner, weights.path, alone=alone)
        self._present = weights
