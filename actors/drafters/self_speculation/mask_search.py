"""Search for the best mask of sublayers by as few evaluations as possible: at random, and by a Gaussian process.

A mask is a tuple of bits, True where a sublayer is skipped. The process models an evaluation as a smooth function of
the mask plus noise, with the covariance exp(-d / scale), d the number of bits in which two masks differ; the next mask
is the one whose expected improvement over the best is largest. Forty lines of linear algebra on at most `_REMEMBERED`
masks need no optional dependency. Knows neither models nor what is evaluated; its proposals follow from its seed and
the values alone.

Sources: Draft & Verify (arXiv 2309.08168), section 3.2; SWIFT (2410.06916), section 4.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Mask = tuple[bool, ...]

_REMEMBERED = 192
"""Evaluations that the process is fitted to, the newest."""
_CANDIDATES = 256
"""Masks of which the one with the largest expected improvement is evaluated, beside neighbours of the best ones."""
_PARENTS = 4
_SCALES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Length scales to choose from, as shares of the number of bits."""
_NOISES = (1e-3, 1e-2, 1e-1, 5e-1)
"""Variances of the noise to choose from, as shares of the variance of the values."""


@dataclass(frozen=True, slots=True)
class MaskSpace:
    """Masks of `size` bits with `num_skipped` ones, None for any number; at least one bit is 0."""

    size: int
    num_skipped: int | None = None

    def spread(self) -> Mask:
        """The mask whose skipped sublayers lie evenly; half of them where their number is open."""
        count = self.size // 2 if self.num_skipped is None else self.num_skipped
        return tuple((i + 1) * count // self.size > i * count // self.size for i in range(self.size))

    def at_random(self, draw: random.Random) -> Mask:
        count = draw.randrange(self.size) if self.num_skipped is None else self.num_skipped
        skipped = set(draw.sample(range(self.size), count))
        return tuple(i in skipped for i in range(self.size))

    def neighbours(self, mask: Mask) -> Iterator[Mask]:
        """Masks with one bit flipped, or with a bit moved where the number is fixed."""
        for i in range(self.size):
            flipped = (*mask[:i], not mask[i], *mask[i + 1 :])
            if self.num_skipped is None:
                if not all(flipped):
                    yield flipped
            elif mask[i]:
                for j in range(self.size):
                    if not mask[j]:
                        yield (*flipped[:j], True, *flipped[j + 1 :])


class MaskSearch:
    """`propose` a mask, evaluate it, `record` its value; larger is better.

    The first mask is evenly spread, then `num_random` masks are drawn; then every `model_every`th proposal is the
    process's, and those between are drawn at random among the neighbours of the best mask.
    """

    def __init__(self, space: MaskSpace, *, seed: int = 0, num_random: int = 12, model_every: int = 1) -> None:
        self.space = space
        self._draw = random.Random(seed)
        self._num_random = num_random
        self._model_every = model_every
        self.values: dict[Mask, float] = {}
        """The newest evaluation of every mask."""
        self.num_evaluated = 0

    @property
    def best(self) -> Mask:
        """The best mask so far; before any evaluation, the evenly spread one."""
        return max(self.values, key=self.values.__getitem__, default=self.space.spread())

    @property
    def best_value(self) -> float:
        return self.values[self.best]

    def record(self, mask: Mask, value: float) -> None:
        self.values.pop(mask, None)
        self.values[mask] = value
        self.num_evaluated += 1

    def propose(self) -> Mask:
        """A mask to evaluate next, if possible one that has not been evaluated."""
        if not self.values:
            return self.space.spread()
        if self.num_evaluated <= self._num_random:
            return self._fresh(self.space.at_random(self._draw) for _ in range(_CANDIDATES))
        if (self.num_evaluated - self._num_random) % self._model_every:
            near = list(self.space.neighbours(self.best))
            self._draw.shuffle(near)
            return self._fresh(near)
        return self._likeliest_improvement()

    def _fresh(self, masks: Iterator[Mask] | list[Mask]) -> Mask:
        last = self.best
        for mask in masks:
            last = mask
            if mask not in self.values:
                break
        return last

    def _likeliest_improvement(self) -> Mask:
        """The mask with the largest expected improvement, of random ones and neighbours of the best."""
        parents = sorted(self.values, key=self.values.__getitem__, reverse=True)[:_PARENTS]
        candidates = {self.space.at_random(self._draw) for _ in range(_CANDIDATES)}
        for parent in parents:
            near = list(self.space.neighbours(parent))
            candidates.update(self._draw.sample(near, min(len(near), _CANDIDATES)))
        fresh = sorted(candidates - self.values.keys())
        if not fresh:
            return self._draw.choice(sorted(candidates))
        known = list(self.values)[-_REMEMBERED:]
        gains = expected_improvement(known, [self.values[mask] for mask in known], fresh)
        return fresh[int(gains.argmax())]


def expected_improvement(known: list[Mask], values: list[float], candidates: list[Mask]) -> Tensor:
    """How much each candidate is expected to exceed the largest value, in standard deviations of the values."""
    seen, asked = _bits(known), _bits(candidates)
    y = torch.tensor(values, dtype=torch.float64)
    y = (y - y.mean()) / y.std().clamp(min=1e-12) if len(values) > 1 else y - y
    apart = torch.cdist(seen, seen, p=1)
    scale, noise = _likeliest_hyperparameters(apart, y)
    factor = torch.linalg.cholesky((-apart / scale).exp() + noise * torch.eye(len(y), dtype=torch.float64))
    across = (-torch.cdist(asked, seen, p=1) / scale).exp()
    mean = across @ torch.cholesky_solve(y[:, None], factor)[:, 0]
    explained = torch.linalg.solve_triangular(factor, across.T, upper=False).square().sum(dim=0)
    deviation = (1 - explained).clamp(min=1e-12).sqrt()
    ahead = mean - y.max()
    ratio = ahead / deviation
    density = (-ratio.square() / 2).exp() / (2 * torch.pi) ** 0.5
    return ahead * torch.special.ndtr(ratio) + deviation * density


def _likeliest_hyperparameters(apart: Tensor, y: Tensor) -> tuple[float, float]:
    """The length scale and the noise under which the values are likeliest."""
    best, found = -torch.inf, (1.0, _NOISES[-1])
    size = max(1.0, float(apart.max()))
    for share in _SCALES:
        covariance = (-apart / (share * size)).exp()
        for noise in _NOISES:
            factor, failed = torch.linalg.cholesky_ex(covariance + noise * torch.eye(len(y), dtype=torch.float64))
            if failed:
                continue
            fit = torch.linalg.solve_triangular(factor, y[:, None], upper=False).square().sum()
            likelihood = float(-fit / 2 - factor.diagonal().log().sum())
            if likelihood > best:
                best, found = likelihood, (share * size, noise)
    return found


def _bits(masks: list[Mask]) -> Tensor:
    return torch.tensor(masks, dtype=torch.float64)
