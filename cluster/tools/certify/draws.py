"""Many seeded verifications behind a few texts, at the models' own vocabulary, counted against the target's exact law.

Drafts are drawn and verified by the functions the engine uses, with logits that were computed once: behind a text, and
behind every token a draft may begin with. Every seed is a request of its own. Of each the first two tokens are looked
at: what the rule emits first, and what follows the likeliest of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.protocol.messages import Proposal, SamplingKind, SamplingParams, TokenTree
from actors.sampling.draft_sampling import Drawn, draw_iid, draw_without_replacement, truncate_distribution
from actors.sampling.logits import probabilities, process_logits, top_children
from actors.verification.random_source import HashRandomSource
from actors.verification.verifier import Ruling, Subject, Verifier
from cluster.tools.certify.goodness import Fit, fit_distribution, fit_share
from cluster.tools.certify.reader import Reader

CHUNK = 128
"""Requests verified together."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How drafts are drawn: `width` children below the root, one below each of those."""

    rule: str
    kind: SamplingKind
    width: int
    law_size: int


class Scene:
    """One text, with the logits of both models behind it and behind each of `starts`, tokens a draft may begin with."""

    def __init__(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        scheme: Scheme,
        target: Reader,
        draft: Reader | None,
    ) -> None:
        self.token_ids, self.params = tuple(token_ids), params
        self._eos_token_ids, self._scheme = tuple(eos_token_ids), scheme
        self._verifier = Verifier(None, scheme.rule, eos_token_ids)  # judges logits it is given, runs no pass
        reader = draft or target
        root = self._scores(_guess(reader.behind(token_ids), draft, target.vocab_size), ())
        num_starts = min(scheme.law_size, int(root.isfinite().sum()))
        self.starts = root[0].topk(num_starts).indices.tolist()
        self._place = {token: 1 + i for i, token in enumerate(self.starts)}
        self._logits = _padded(target.behind(token_ids, self.starts))
        guesses = _guess(reader.behind(token_ids, self.starts), draft, target.vocab_size)
        self._guesses = self._scores(guesses, self.starts)
        outside = torch.ones(self._guesses.shape[-1], dtype=torch.bool)
        outside[self.starts] = False
        self._guesses[0, outside] = -torch.inf
        self.distributions = probabilities(self._scores(self._logits[:-1], self.starts), params).numpy()

    def draft_distribution(self) -> np.ndarray:
        """What drafts begin with, dense [V]; for tokens that were chosen, the ones that are chosen."""
        distribution = np.zeros(self._guesses.shape[-1])
        if self._scheme.kind is SamplingKind.DETERMINISTIC:
            distribution[self.starts[: self._scheme.width]] = 1.0
        else:
            cut = truncate_distribution(self._guesses[:1], self.params, self._scheme.law_size)
            distribution[list(cut.token_ids)] = cut.probs
        return distribution

    def verify(self, seeds: Sequence[int]) -> list[tuple[Proposal, Ruling]]:
        """One draft and one verification per seed."""
        params = [replace(self.params, seed=seed) for seed in seeds]
        proposals = self._propose(params)
        length = len(self.token_ids)
        subjects = [
            Subject(proposal.request_id, self.token_ids, length, one, 1, proposal)
            for proposal, one in zip(proposals, params, strict=True)
        ]
        rows = [self._row(proposal.tree, node) for proposal in proposals for node in range(len(proposal.tree.parents))]
        rulings = self._verifier.judge(subjects, self._logits[rows])
        return list(zip(proposals, rulings, strict=True))

    def _row(self, tree: TokenTree, node: int) -> int:
        """Of the logits; what lies below the second token is never looked at."""
        return 0 if node == 0 else self._place[tree.token_ids[node]] if tree.parents[node] == 0 else -1

    def _propose(self, params: list[SamplingParams]) -> list[Proposal]:
        length = len(self.token_ids)
        firsts = self._draw(self._guesses[:1].expand(len(params), -1), params, [0] * len(params), 0, self._scheme.width)
        owners = [(i, node) for i, drawn in enumerate(firsts) for node in range(1, 1 + len(drawn.token_ids))]
        rows = [self._place[firsts[i].token_ids[node - 1]] for i, node in owners]
        nodes = [node for _, node in owners]
        seconds = iter(self._draw(self._guesses[rows], [params[i] for i, _ in owners], nodes, 1, 1))
        proposals = []
        for i, first in enumerate(firsts):
            below = [next(seconds) for _ in first.token_ids]
            tokens = (self.token_ids[-1], *first.token_ids, *(drawn.token_ids[0] for drawn in below))
            parents = (-1, *[0] * len(below), *range(1, 1 + len(below)))
            draws = (SamplingKind.ROOT, *[self._scheme.kind] * (len(tokens) - 1))
            distributions = (first.distribution, *(drawn.distribution for drawn in below), *[None] * len(below))
            proposals.append(Proposal(i, 0, length, 0, TokenTree(tokens, parents), draws, distributions))
        return proposals

    def _draw(
        self, scores: Tensor, params: list[SamplingParams], nodes: list[int], depth: int, width: int
    ) -> list[Drawn]:
        """Children of every row, as the drafters of this kind draw them; laws only where they were drawn at random."""
        steps = [len(self.token_ids)] * len(params)
        match self._scheme.kind:
            case SamplingKind.IID:
                return draw_iid(scores, params, steps, nodes, width, self._scheme.law_size)
            case SamplingKind.WITHOUT_REPLACEMENT:
                return draw_without_replacement(scores, params, steps, nodes, width, self._scheme.law_size)
            case SamplingKind.DETERMINISTIC:
                params = [replace(one, temperature=0.0) for one in params]
        width = min(width, len(self.starts))
        chosen, _ = top_children(scores, params, [step + depth for step in steps], width)
        return [Drawn(tuple(row), None) for row in chosen.tolist()]

    def _scores(self, logits: Tensor, starts: Sequence[int]) -> Tensor:
        tree = TokenTree((self.token_ids[-1], *starts), (-1, *[0] * len(starts)))
        length = len(self.token_ids)
        return process_logits(logits, self.params, self._eos_token_ids, length, self.token_ids, tree).clone()


def _guess(logits: Tensor, draft: Reader | None, vocab_size: int) -> Tensor:
    """The draft model's logits; without one, what is second best to the target stands in for what was looked up."""
    if draft is not None:
        return F.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)
    return logits.scatter(1, logits.argmax(dim=-1, keepdim=True), -torch.inf)


def _padded(logits: Tensor) -> Tensor:
    """One more row, for nodes nobody asks about."""
    return torch.cat([logits, torch.zeros_like(logits[:1])])


def fit_draws(name: str, scene: Scene, num_draws: int, on_chunk: Callable[[int], None]) -> list[Fit]:
    """Verify `num_draws` requests and compare: first tokens; how often a likely draft came first; second tokens."""
    first_law = scene.distributions[0]
    known = max(range(len(scene.starts)), key=lambda i: first_law[scene.starts[i]])
    start, second_law = scene.starts[known], scene.distributions[1 + known]
    first, second = np.zeros(len(first_law)), np.zeros(len(first_law))
    for begin in range(0, num_draws, CHUNK):
        seeds = range(begin, min(begin + CHUNK, num_draws))
        for seed, (proposal, ruling) in zip(seeds, scene.verify(seeds), strict=True):
            tokens = [*(proposal.tree.token_ids[node] for node in ruling.path), ruling.next_token]
            first[tokens[0]] += 1
            if tokens[0] == start:  # a round that ended here is followed by another
                random_source = HashRandomSource(seed, len(scene.token_ids) + 1)
                second[tokens[1] if len(tokens) > 1 else random_source.sample(second_law, 0)] += 1
        on_chunk(len(seeds))
    fits = [fit_distribution(f"{name}, first token", first, first_law)]
    favoured = scene.draft_distribution() > first_law
    share = float(first_law[favoured].sum())
    if 0.0 < share < 1.0:
        fits.append(fit_share(f"{name}, tokens the drafter favours", int(first[favoured].sum()), num_draws, share))
    if second.sum():
        fits.append(fit_distribution(f"{name}, second token", second, second_law))
    return fits
