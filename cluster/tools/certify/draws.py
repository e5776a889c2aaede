"""Many seeded verifications after a few texts, at the models' own vocabulary, against the target's exact distribution.

Drafts are drawn and verified by the functions the engine uses, with logits that were computed once: after a text, and
after every token a draft may begin with. Every seed is a request of its own. Its first two tokens are counted: the
first token that the rule emits, and the one that follows the likeliest first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.protocol.messages import Proposal, SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.sampling.draft_sampling import draw_iid, draw_without_replacement, truncate_distribution
from actors.sampling.logits import LogitRows, probabilities, process_logits, top_children
from actors.verification.random_source import HashRandomSource
from actors.verification.verifier import Verifier, VerifyInput, VerifyResult
from cluster.tools.certify.goodness import GoodnessOfFit, fit_distribution, fit_share
from cluster.tools.certify.scoring import TextReader

CHUNK = 128
"""Requests verified together."""

Children = tuple[tuple[int, ...], SparseDistribution | None]
"""Tokens of the children of one node, and the distribution they were drawn from at random."""


@dataclass(frozen=True, slots=True)
class DraftScheme:
    """How drafts are drawn: `width` children below the root, one below each of those."""

    rule: str
    kind: SamplingKind
    width: int
    law_size: int


class VerifiedText:
    """A text, with the logits of both models after it and after each of `starts`, the tokens a draft may begin with."""

    def __init__(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        scheme: DraftScheme,
        target: TextReader,
        draft: TextReader | None,
    ) -> None:
        self.token_ids, self.params = tuple(token_ids), params
        self._eos_token_ids, self._scheme = tuple(eos_token_ids), scheme
        self._verifier = Verifier(target.runner, scheme.rule, eos_token_ids)
        reader = draft or target
        root = self._scores(_draft_logits(reader.after(token_ids), draft, target.vocab_size), ())
        num_starts = min(scheme.law_size, int(root.isfinite().sum()))
        self.starts = root[0].topk(num_starts).indices.tolist()
        self._place = {token: 1 + i for i, token in enumerate(self.starts)}
        logits = target.after(token_ids, self.starts)
        self._logits = torch.cat([logits, torch.zeros_like(logits[:1])])  # the last row: see `_row`
        own = _draft_logits(reader.after(token_ids, self.starts), draft, target.vocab_size)
        self._draft_logits = self._scores(own, self.starts)
        outside = torch.ones(self._draft_logits.shape[-1], dtype=torch.bool)
        outside[self.starts] = False
        self._draft_logits[0, outside] = -torch.inf
        self.distributions = probabilities(self._scores(self._logits[:-1], self.starts), params).numpy()

    def draft_distribution(self) -> np.ndarray:
        """Distribution of a draft's first token, dense [V]; for deterministic drafts, 1 at every chosen token."""
        distribution = np.zeros(self._draft_logits.shape[-1])
        if self._scheme.kind is SamplingKind.DETERMINISTIC:
            distribution[self.starts[: self._scheme.width]] = 1.0
        else:
            cut = truncate_distribution(self._draft_logits[:1], self.params, self._scheme.law_size)
            distribution[list(cut.token_ids)] = cut.probs
        return distribution

    def verify(self, seeds: Sequence[int]) -> list[tuple[Proposal, VerifyResult]]:
        """One draft and one verification per seed."""
        params = [replace(self.params, seed=seed) for seed in seeds]
        proposals = self._propose(params)
        length = len(self.token_ids)
        subjects = [
            VerifyInput(proposal.request_id, self.token_ids, length, sampling, 1, proposal)
            for proposal, sampling in zip(proposals, params, strict=True)
        ]
        rows = [self._row(proposal.tree, node) for proposal in proposals for node in range(len(proposal.tree.parents))]
        rulings = self._verifier.verify(subjects, self._logits[rows])
        return list(zip(proposals, rulings, strict=True))

    def _row(self, tree: TokenTree, node: int) -> int:
        """Index into the logits; nodes after the second token, whose verdict is not counted, share the last row."""
        return 0 if node == 0 else self._place[tree.token_ids[node]] if tree.parents[node] == 0 else -1

    def _propose(self, params: list[SamplingParams]) -> list[Proposal]:
        length = len(self.token_ids)
        first_logits = self._draft_logits[:1].expand(len(params), -1)
        firsts = self._draw(first_logits, params, [0] * len(params), 0, self._scheme.width)
        owners = [(i, node) for i, (token_ids, _) in enumerate(firsts) for node in range(1, 1 + len(token_ids))]
        rows = [self._place[firsts[i][0][node - 1]] for i, node in owners]
        nodes = [node for _, node in owners]
        seconds = iter(self._draw(self._draft_logits[rows], [params[i] for i, _ in owners], nodes, 1, 1))
        proposals = []
        for i, (first_ids, distribution) in enumerate(firsts):
            below = [next(seconds) for _ in first_ids]
            tokens = (self.token_ids[-1], *first_ids, *(token_ids[0] for token_ids, _ in below))
            parents = (-1, *[0] * len(below), *range(1, 1 + len(below)))
            kinds = (SamplingKind.ROOT, *[self._scheme.kind] * (len(tokens) - 1))
            distributions = (distribution, *(second for _, second in below), *[None] * len(below))
            proposals.append(Proposal(i, 0, length, 0, TokenTree(tokens, parents), kinds, distributions))
        return proposals

    def _draw(
        self, scores: Tensor, params: list[SamplingParams], nodes: list[int], depth: int, width: int
    ) -> list[Children]:
        """Children of every row, as drafters of this kind draw them; distributions only of random draws."""
        steps, law_size = [len(self.token_ids)] * len(params), self._scheme.law_size
        if self._scheme.kind in (SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT):
            draw = draw_iid if self._scheme.kind is SamplingKind.IID else draw_without_replacement
            drawn = draw(scores, params, steps, nodes, width, law_size)
            return [(children.token_ids, children.distribution) for children in drawn]
        if self._scheme.kind is SamplingKind.DETERMINISTIC:
            params = [replace(sampling, temperature=0.0) for sampling in params]
        width = min(width, len(self.starts))
        chosen, _ = top_children(scores, params, [step + depth for step in steps], width)
        return [(tuple(row), None) for row in chosen.tolist()]

    def _scores(self, logits: Tensor, starts: Sequence[int]) -> Tensor:
        tree = TokenTree((self.token_ids[-1], *starts), (-1, *[0] * len(starts)))
        length = len(self.token_ids)
        return process_logits(logits, LogitRows(self.params, length, self.token_ids, tree), self._eos_token_ids).clone()


def _draft_logits(logits: Tensor, draft: TextReader | None, vocab_size: int) -> Tensor:
    """The draft model's logits; without one, the target's without its best token stand for those of a lookup."""
    if draft is not None:
        return F.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)
    return logits.scatter(1, logits.argmax(dim=-1, keepdim=True), -torch.inf)


def fit_draws(name: str, text: VerifiedText, num_draws: int, on_chunk: Callable[[], None]) -> list[GoodnessOfFit]:
    """Verify `num_draws` requests and compare: first tokens; how often a likely draft came first; second tokens."""
    first_distribution = text.distributions[0]
    known = max(range(len(text.starts)), key=lambda i: first_distribution[text.starts[i]])
    start, second_distribution = text.starts[known], text.distributions[1 + known]
    first, second = np.zeros(len(first_distribution)), np.zeros(len(first_distribution))
    for begin in range(0, num_draws, CHUNK):
        seeds = range(begin, min(begin + CHUNK, num_draws))
        for seed, (proposal, ruling) in zip(seeds, text.verify(seeds), strict=True):
            tokens = [*(proposal.tree.token_ids[node] for node in ruling.path), ruling.next_token]
            first[tokens[0]] += 1
            if tokens[0] == start:  # a round that ended here is followed by another
                random_source = HashRandomSource(seed, len(text.token_ids) + 1)
                second[tokens[1] if len(tokens) > 1 else random_source.sample(second_distribution, 0)] += 1
        on_chunk()
    fits = [fit_distribution(f"{name}, first token", first, first_distribution)]
    favoured = text.draft_distribution() > first_distribution
    share = float(first_distribution[favoured].sum())
    if 0.0 < share < 1.0:
        fits.append(fit_share(f"{name}, tokens the drafter favours", int(first[favoured].sum()), num_draws, share))
    if second.sum():
        fits.append(fit_distribution(f"{name}, second token", second, second_distribution))
    return fits
