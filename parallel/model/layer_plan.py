"""Which sublayers of a decoder a pass runs: all of them, those before an exit, or all but some that are skipped.

The rows of such a pass are those of another, cheaper model that shares the decoder's weights. Knows layer numbers, not
weights, rows or why a sublayer is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The layers, ascending and from 0, whose attention and whose MLP runs; the residual stream passes the others
    unchanged."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    @staticmethod
    def span(start: int, stop: int) -> LayerPlan:
        """The layers from `start` up to `stop`, which is not one of them."""
        layers = tuple(range(start, stop))
        return LayerPlan(layers, layers)

    @staticmethod
    def whole(num_layers: int) -> LayerPlan:
        return LayerPlan.span(0, num_layers)

    @staticmethod
    def prefix(stop: int) -> LayerPlan:
        """An early exit: the first `stop` layers."""
        return LayerPlan.span(0, stop)

    @staticmethod
    def skipping(num_layers: int, *, attention: Collection[int] = (), mlp: Collection[int] = ()) -> LayerPlan:
        """All sublayers but these."""
        return LayerPlan.whole(num_layers).without(attention=attention, mlp=mlp)

    def without(self, *, attention: Collection[int] = (), mlp: Collection[int] = ()) -> LayerPlan:
        """The plan less these sublayers."""
        return LayerPlan(
            tuple(layer for layer in self.attention if layer not in attention),
            tuple(layer for layer in self.mlp if layer not in mlp),
        )

    @property
    def stop(self) -> int:
        """The number of the last layer of which anything runs, plus one."""
        return max((*self.attention, *self.mlp), default=-1) + 1

    @property
    def exact_stop(self) -> int:
        """Leading layers that run whole: what they write and pass on is what the whole decoder would."""
        num_layers = 0
        for attention, mlp in zip(self.attention, self.mlp, strict=False):
            if attention != num_layers or mlp != num_layers:
                break
            num_layers += 1
        return num_layers

    @property
    def num_sublayers(self) -> int:
        return len(self.attention) + len(self.mlp)

    def steps(self) -> tuple[tuple[int, bool, bool], ...]:
        """(layer, whether its attention runs, whether its MLP runs) of all layers of which something runs."""
        return _steps(self)


@cache
def _steps(plan: LayerPlan) -> tuple[tuple[int, bool, bool], ...]:
    attention, mlp = set(plan.attention), set(plan.mlp)
    return tuple((layer, layer in attention, layer in mlp) for layer in sorted(attention | mlp))
