"""Gradient steps of a draft model on what the target said, a small one at a time (Online Speculative Decoding, arXiv
2310.07177, with the rule of R-Adapter, arXiv 2408.05749).

Adapters A are trained live; their average A_bar is what is served: weights (I + strength * A_bar) W. The loss is the
cross entropy with the target's distribution: its likeliest tokens, and the mass of the others as one event. While it
trains, an adapter is left out with probability `DROPPED` and the others are scaled up.

Every window is also a test before it is learned: the share of its positions at which a draft token of the shipped
model, and of A_bar, would be accepted (greedy: their first choices agree; else the overlap of the distributions).
Positions of a text are all tested, whatever was drafted for them, so that the two means compare the models without bias
and without rounds drafted by the worse of them. Where A_bar falls below the shipped model, by more than chance,
strength goes to 0: the shipped weights are served again, what was learned is dropped, and learning starts anew. Knows
no requests and no clock.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from actors.drafters.online.saved_state import SavedCounts, read_state, write_state
from actors.drafters.online.windows import TargetWindow, WindowMemory
from actors.policy.estimators import Ewma
from parallel.training.adapted import AdaptedModel, Adapter

RANK = 32
"""The highest rank of the adapters; never more than a matrix has outputs."""
DROPPED = 0.1
"""Probability with which an adapter is left out of a pass that trains."""
WINDOWS_PER_STEP = 2
"""Windows whose gradients make one step of AdamW."""
STEPS_PER_VERSION = 8
"""Steps of AdamW from one set of served weights to the next."""
TESTED = 2
"""Every so many new windows are tested before they are learned."""
WORSE = 0.02
"""Accepted share by which A_bar may fall below the shipped model."""
STANDARD_ERRORS = 2.0
"""The fall counts from so many standard errors on: shares of a few windows differ by more than `WORSE` by chance, and a
restart drops all that was learned."""
FEWEST_TESTS = 6
"""Tests before the two are compared."""
_MOST_AVERAGED = 0.99
"""Weight of the past in the average; 0.999 as published, for sessions longer than a few hundred steps."""
_TEST_MEMORY = 0.85


class OnlineLearner:
    """`learn` takes one small step; `take_weights` hands over new weights to serve when there are some."""

    def __init__(self, model: AdaptedModel, *, rate: float, strength: float, num_positions: int, seed: int = 0) -> None:
        self._model = model
        self._device = model.weights[0].device
        self._rate = rate
        self._strength = strength
        self._seed = seed
        self.memory = WindowMemory(num_positions, seed)
        self._random = random.Random(seed)
        self._staged: list[Tensor] | None = None
        self._to_train: TargetWindow | None = None  # tested, and to be learned next
        self._num_new = 0
        self.version = 0
        """How often the weights that are served were replaced."""
        self.serves = False
        """Whether the served weights are adapted ones."""
        self.num_steps = 0
        self.num_positions = 0
        """Learned positions, those of repeated windows counted again."""
        self.num_rollbacks = 0
        self.loss = Ewma(0.9)
        self._begin(model.zero_adapters(seed))

    def _begin(self, adapters: list[Adapter], average: list[Adapter] | None = None) -> None:
        """Learn from these adapters on; the tests of earlier ones do not count."""
        self._live = [(up.requires_grad_(), down.requires_grad_()) for up, down in adapters]
        kept = self._live if average is None else average
        self._average: list[Adapter] = [(up.detach().clone(), down.detach().clone()) for up, down in kept]
        parameters = [part for pair in self._live for part in pair]
        self._optimizer = torch.optim.AdamW(parameters, lr=self._rate, weight_decay=0.0)
        self._num_averaged = 0
        self._num_gradients = 0
        self._num_tests = 0
        self.shipped_share, self.adapted_share = Ewma(_TEST_MEMORY), Ewma(_TEST_MEMORY)
        self._squared_gain = Ewma(_TEST_MEMORY)

    @property
    def wants_step(self) -> bool:
        return self._to_train is not None or len(self.memory) > 0

    def learn(self) -> None:
        """One pass: a test of a new window, or gradients; a step of AdamW follows every few of these."""
        if self._to_train is None:
            window = self.memory.take()
            if window.num_uses == 1:
                self._num_new += 1
                if self._num_new % TESTED == 1:
                    self._test(window)
                    self._to_train = window
                    return
        else:
            window, self._to_train = self._to_train, None
        self._add_gradients(window)
        if self._num_gradients % WINDOWS_PER_STEP == 0:
            self._step()
            if self.num_steps % STEPS_PER_VERSION == 0 and not self.is_worse and self._strength:
                self._staged = self._model.folded(self._average, self._strength)

    def take_weights(self) -> list[Tensor] | None:
        """Matrices to serve from now on, if there are new ones; `version` counts them."""
        staged, self._staged = self._staged, None
        if staged is not None:
            self.version += 1
            self.serves = staged is not self._model.weights
        return staged

    # --- one pass -----------------------------------------------------------------------------------------------------

    @property
    def is_worse(self) -> bool:
        """Whether what was learned drafts worse than the shipped model."""
        gain = self.adapted_share.mean - self.shipped_share.mean
        variance = max(0.0, self._squared_gain.mean - gain**2)
        num_averaged = min(self._num_tests, (1 + _TEST_MEMORY) / (1 - _TEST_MEMORY))
        needed = max(WORSE, STANDARD_ERRORS * (variance / max(1, num_averaged)) ** 0.5)
        return self._num_tests >= FEWEST_TESTS and gain < -needed

    def _test(self, window: TargetWindow) -> None:
        with torch.no_grad():
            shares = [self._accepted_share(window, adapters) for adapters in (None, self._average)]
        self.shipped_share.update(shares[0])
        self.adapted_share.update(shares[1])
        self._squared_gain.update((shares[1] - shares[0]) ** 2)
        self._num_tests += 1
        if self.is_worse:
            self.roll_back()

    def roll_back(self) -> None:
        """Serve the shipped weights from the next draft on, and learn from nothing."""
        self.num_rollbacks += 1
        self._staged = self._model.weights if self.serves else None
        self._begin(self._model.zero_adapters(self._seed + self.num_rollbacks))

    def _accepted_share(self, window: TargetWindow, adapters: Sequence[Adapter] | None) -> float:
        logits = self._logits(window, adapters, [self._strength] * len(self._model.weights))
        likely, probs = self._likely_of(window)
        if window.greedy:
            return float((logits.argmax(-1) == likely[:, 0]).float().mean())
        known = likely < logits.shape[-1]
        own = logits.softmax(-1).gather(1, likely.clamp(max=logits.shape[-1] - 1))
        return float((torch.minimum(own, probs) * known).sum(1).mean())

    def _add_gradients(self, window: TargetWindow) -> None:
        kept = [self._random.random() >= DROPPED for _ in self._live]
        scales = [one / (1 - DROPPED) for one in kept]
        loss = likely_loss(self._logits(window, self._live, scales), *self._likely_of(window))
        (loss / WINDOWS_PER_STEP).backward()
        self.loss.update(float(loss.detach()))
        self.num_positions += len(window)
        self._num_gradients += 1

    def _logits(self, window: TargetWindow, adapters: Sequence[Adapter] | None, scales: Sequence[float]) -> Tensor:
        tokens = window.token_ids.to(self._device)[None]
        features = None if window.features is None else window.features.to(self._device)[None]
        return self._model.logits(tokens, len(window), adapters, scales, features)

    def _likely_of(self, window: TargetWindow) -> tuple[Tensor, Tensor]:
        """The columns of the likely tokens and their probabilities, [n, k] each."""
        return self._model.columns(window.likely.to(self._device)), window.probs.to(self._device)

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        kept = min(_MOST_AVERAGED, (1 + self._num_averaged) / (10 + self._num_averaged))
        self._num_averaged += 1
        with torch.no_grad():
            for average, live in zip(self._average, self._live, strict=True):
                for mean, now in zip(average, live, strict=True):
                    mean.lerp_(now, 1 - kept)

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write adapters, average and counters; a reader finds the old file or the new one."""
        counts = SavedCounts(
            model=self._fingerprint(),
            serves=self.serves,
            num_averaged=self._num_averaged,
            num_steps=self.num_steps,
            num_positions=self.num_positions,
            num_rollbacks=self.num_rollbacks,
        )
        write_state(path, counts, live=self._live, average=self._average)

    def restore(self, path: Path) -> None:
        """Continue from a saved state; ValueError, one line, if it is none of this model."""
        counts, adapters = read_state(path, self._fingerprint(), live=self._live, average=self._average)
        self._begin(adapters["live"], adapters["average"])
        self._num_averaged = counts.num_averaged
        self.num_steps, self.num_positions = counts.num_steps, counts.num_positions
        self.num_rollbacks = counts.num_rollbacks
        if counts.serves and self._strength:
            self._staged = self._model.folded(self._average, self._strength)

    def _fingerprint(self) -> str:
        """A checksum of the shipped model, and the shape of the adapters."""
        shapes = [list(weight.shape) for weight in self._model.weights]
        first = self._model.weights[0].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return f"{self._model.rank} {shapes} {zlib.crc32(first):08x}"


def likely_loss(logits: Tensor, likely: Tensor, probs: Tensor) -> Tensor:
    """Mean cross entropy of distributions with logits [n, V] with those whose `likely` tokens [n, k] have `probs`; the
    other tokens are one event. Tokens beyond V count among the others."""
    known = likely < logits.shape[-1]
    log_q = logits.log_softmax(-1).gather(1, likely.clamp(max=logits.shape[-1] - 1))
    p = probs * known
    rest_q = (1 - (log_q.exp() * known).sum(1)).clamp(min=1e-6)
    rest_p = (1 - p.sum(1)).clamp(min=0)
    return -((p * log_q).sum(1) + rest_p * rest_q.log()).mean()
