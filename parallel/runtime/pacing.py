"""Passes that take at least a given time, whatever they compute: a GPU's pass times with the tokens of a small model.

The pass is real. Behind it the host sleeps for the rest of the time, as it idles beside a device that computes, so two
roles that share cores overlap as they would on devices of their own. Knows no role, and no option but the cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.pass_cost import PassCost
from parallel.runtime.interface import PassOutput, Runner, StepChoice


def pace(runner: Runner, pace_ms: float | Mapping[int, float]) -> None:
    """Make every pass of `runner` take at least `pace_ms` milliseconds from now on, a number or a table by the rows of
    all its sequences; 0 leaves the runner as it is.

    Replaces the methods of this one runner: passes that others make with its layers (`DecoderRunner.run`) keep their
    own pace.
    """
    if not pace_ms:
        return
    cost, forward, extend = PassCost.of_ms(pace_ms), runner.forward, runner.extend

    def paced_forward(
        spans: Sequence[Span], token_ids: Tensor | Sequence[int], *taps: Sequence[int], **options: Any
    ) -> PassOutput:
        with _lasting(cost(len(token_ids))):
            return forward(spans, token_ids, *taps, **options)

    def paced_extend(
        spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice, **options: Any
    ) -> Tensor:
        with _lasting(cost(len(token_ids)) + (len(choice) - 1) * cost(len(spans))):  # a chain may be one call
            return extend(spans, token_ids, choice, **options)

    for name, paced in (("forward", paced_forward), ("extend", paced_extend)):
        setattr(runner, name, paced)


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """A block that ends no sooner; waits nest, and then do not add up."""
    end = time.perf_counter() + seconds
    yield
    if (left := end - time.perf_counter()) > 0:
        time.sleep(left)
