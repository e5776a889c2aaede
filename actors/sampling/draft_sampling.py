"""Random draws of a drafter for the ratio tests, with the distribution that they were really drawn from.

The draft distribution is cut to its `top_m` likeliest tokens and renormalised, and children are drawn from exactly
that, so that the small distribution in the proposal keeps every ratio test exact. Noise comes from the DRAFT stream,
keyed by (seed, step, node): a position that is drafted again in the next step gets new noise, as block and traversal
verification require. Knows no model and no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from actors.protocol.messages import SamplingParams, SparseDistribution
from actors.sampling.logits import is_greedy
from actors.sampling.noise import NoiseStream, gumbel, noise_key
from parallel.transfers import to_host


@dataclass(frozen=True, slots=True)
class DrawnChildren:
    """Children of one node in draw order, which is also the order of their tests, and their distribution.

    `log_probs` are those of the tokens under it; `scores` those of `draw_beam`, else 0.
    """

    token_ids: tuple[int, ...]
    distribution: SparseDistribution
    log_probs: tuple[float, ...]
    scores: tuple[float, ...]


_CHILDLESS = DrawnChildren((), SparseDistribution((), ()), (), ())


def draw_without_replacement(
    scores: Tensor, params: Sequence[SamplingParams], steps: Sequence[int], nodes: Sequence[int], width: int, top_m: int
) -> list[DrawnChildren]:
    """Up to `width` different children per row of processed logits [n, V]: Gumbel-top-k, in decreasing order of
    perturbed log-probability, which is sequential sampling without replacement (RSD-C, arXiv 2402.14160). A row that is
    no distribution, because every token is ruled out or a number is NaN, has no children.

    Row i belongs to node `nodes[i]` of the proposal of step `steps[i]`. A distribution over fewer than `width` tokens
    yields all of them.
    """
    keys = _keys(params, steps, nodes)
    return _race(scores, params, keys, top_m, lambda raced, _: (np.argsort(-raced[0], kind="stable")[:width], None))


def draw_iid(
    scores: Tensor, params: Sequence[SamplingParams], steps: Sequence[int], nodes: Sequence[int], width: int, top_m: int
) -> list[DrawnChildren]:
    """`width` independent children per row, duplicates kept (SpecInfer, arXiv 2305.09781): one race for each."""
    keys = [
        noise_key(p.seed, NoiseStream.DRAFT, step, node, draw)
        for p, step, node in zip(params, steps, nodes, strict=True)
        for draw in range(width)
    ]
    return _race(scores, params, keys, top_m, lambda raced, _: (np.argmax(raced, axis=-1), None))


def draw_beam(
    scores: Tensor,
    params: Sequence[SamplingParams],
    steps: Sequence[int],
    nodes: Sequence[int],
    width: int,
    top_m: int,
    paths: Sequence[tuple[float, float]],
) -> list[DrawnChildren]:
    """The children of beams in a stochastic beam search (Kool et al., arXiv 1903.06059; RSD-S, 2402.14160).

    `paths[i]` is the log-probability of row i's path and its score, a Gumbel perturbation of it; both are 0 at the
    root. A child's score is its own perturbed log-probability, given that the largest of all children's is the score
    of their parent. The `width` paths with the highest scores of a level are paths drawn without replacement.
    """

    def highest(raced: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
        log_prob, score = paths[row]
        perturbed = log_prob + raced[0]
        with np.errstate(divide="ignore"):  # of the largest child, whose score is its parent's
            gap = score - perturbed + np.log1p(-np.exp(perturbed - perturbed.max()))
        given = score - np.maximum(gap, 0.0) - np.log1p(np.exp(-np.abs(gap)))
        order = np.argsort(-given, kind="stable")[:width]
        return order, given[order]

    return _race(scores, params, _keys(params, steps, nodes), top_m, highest)


def _keys(params: Sequence[SamplingParams], steps: Sequence[int], nodes: Sequence[int]) -> list[int]:
    rows = zip(params, steps, nodes, strict=True)
    return [noise_key(one.seed, NoiseStream.DRAFT, step, node) for one, step, node in rows]


def truncate_distribution(scores: Tensor, params: SamplingParams, top_m: int) -> SparseDistribution:
    """The distribution of one row of processed logits [1, V], cut to its `top_m` likeliest tokens and renormalised;
    where it is impossible, one token has it all, as good a draft as any."""
    (log_weights,), (token_ids,) = to_host(scores.topk(min(top_m, scores.shape[-1]), dim=-1))
    return _distribution(log_weights.astype(np.float64), token_ids, is_greedy(params))


def _race(
    scores: Tensor,
    params: Sequence[SamplingParams],
    keys: list[int],
    top_m: int,
    winners: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray | None]],
) -> list[DrawnChildren]:
    """Children of every row: `winners` of its perturbed log-probabilities [races, m], where a row has as many races as
    keys, and their scores."""
    log_weights, token_ids = scores.topk(min(top_m, scores.shape[-1]), dim=-1)
    noise = gumbel(keys, token_ids.repeat_interleave(len(keys) // len(scores), dim=0)).reshape(len(scores), -1)
    log_weights, token_ids, noise = to_host([log_weights, token_ids, noise])
    noise = noise.astype(np.float64).reshape(len(scores), -1, log_weights.shape[1])
    log_weights = log_weights.astype(np.float64)
    drawn = []
    for row, p in enumerate(params):
        if not np.isfinite(log_weights[row, 0]):
            drawn.append(_CHILDLESS)
            continue
        distribution = _distribution(log_weights[row], token_ids[row], is_greedy(p))
        log_probs = np.log(distribution.probs)
        order, given = winners(log_probs + noise[row, :, : len(log_probs)], row)
        chosen = tuple(distribution.token_ids[i] for i in order)
        ranks = tuple(given.tolist()) if given is not None else (0.0,) * len(chosen)
        drawn.append(DrawnChildren(chosen, distribution, tuple(log_probs[order].tolist()), ranks))
    return drawn


def _distribution(log_weights: np.ndarray, token_ids: np.ndarray, greedy: bool) -> SparseDistribution:
    """Softmax over the candidates that can occur at all; one-hot when greedy, and where none can."""
    if greedy or not np.isfinite(log_weights[0]):
        return SparseDistribution((int(token_ids[0]),), (1.0,))
    probs = np.exp(log_weights - log_weights[0])
    probs = probs[probs > 0]
    probs = probs / probs.sum()
    support = int(np.count_nonzero(probs))  # the division rounds what can hardly occur to zero
    probs = probs[:support]
    return SparseDistribution(tuple(token_ids[:support].tolist()), tuple(probs.tolist()))
