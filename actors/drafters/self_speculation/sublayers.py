"""Sublayers of a decoder as bits of a mask, their names on the command line, and what a pass over the others costs."""

from __future__ import annotations

from dataclasses import dataclass

from actors.drafters.self_speculation.mask_search import Mask
from actors.policy.cascade_model import tokens_per_round
from parallel.model.decoder import Decoder
from parallel.model.layer_plan import LayerPlan

_FEWEST_FOR_ENDS = 4
"""Layers of a target from which on the first and the last one always run: skipping them costs most acceptance."""


@dataclass(frozen=True, slots=True)
class Sublayers:
    """The sublayers (layer, 0 for attention or 1 for the MLP) that a search may skip, in order."""

    num_layers: int
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def inner(num_layers: int) -> Sublayers:
        """All but those of the first and the last layer; all of them in a target of few layers."""
        first = int(num_layers >= _FEWEST_FOR_ENDS)
        return Sublayers(num_layers, tuple((i, part) for i in range(first, num_layers - first) for part in (0, 1)))

    @staticmethod
    def every(num_layers: int) -> Sublayers:
        return Sublayers(num_layers, tuple((i, part) for i in range(num_layers) for part in (0, 1)))

    def plan(self, mask: Mask) -> LayerPlan:
        """What runs if the sublayers of the mask are skipped."""
        skipped = {place for place, bit in zip(self.places, mask, strict=True) if bit}
        parts = ([layer for layer, part in skipped if part == kind] for kind in (0, 1))
        return LayerPlan.skipping(self.num_layers, **dict(zip(("attention", "mlp"), parts, strict=True)))


def names_of_skipped(num_layers: int, layers: LayerPlan) -> list[str]:
    """The sublayers that do not run, as `drafter.skip` names them."""
    parts = ((i, "a", layers.attention) for i in range(num_layers)), ((i, "m", layers.mlp) for i in range(num_layers))
    return [f"{i}{kind}" for pair in zip(*parts, strict=True) for i, kind, runs in pair if i not in runs]


class PassShares:
    """Bytes of weights that a pass over a row reads, as a share of those of the whole model: what decides its time
    where weights are read from memory for every pass. The same on every rank."""

    def __init__(self, decoder: Decoder) -> None:
        self._attention = [0 if layer.attention is None else layer.attention.nbytes() for layer in decoder.layers]
        self._mlp = [layer.mlp.nbytes() for layer in decoder.layers]
        self._head = decoder.lm_head.nbytes()

    def of(self, layers: LayerPlan) -> float:
        read = sum(self._attention[i] for i in layers.attention) + sum(self._mlp[i] for i in layers.mlp)
        return (read + self._head) / (sum(self._attention) + sum(self._mlp) + self._head)


def best_speed(acceptance: float, share: float, longest: int) -> tuple[float, int]:
    """Tokens per pass of the target in the time of one, over plain decoding's one, and the draft length for that: the
    best of E(k) / (1 + k * share), E the expected tokens of a round, up to `longest` draft tokens."""
    speeds = [(tokens_per_round(acceptance, k) / (1 + k * share), k) for k in range(1, longest + 1)]
    return max(speeds, key=lambda found: found[0])
