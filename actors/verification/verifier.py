"""A verifying pass: one model reads committed text and the proposals below it, one rule says what stands.

The target verifies with this, and so does every level of a cascade that has a level beneath it. A `Verifier` keeps no
text and commits nothing; the caller owns both. Knows one runner and one rule, never who proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from actors.protocol.messages import Proposal, SamplingParams, SparseDistribution, TokenTree
from actors.sampling.draft_sampling import truncate_distribution
from actors.sampling.logits import NodeRows, choose_batch, probabilities, process_logits
from actors.verification.coupled import verify_coupled
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.rules import RULES
from parallel.kv.pool import SeqId
from parallel.runtime.runner import ModelRunner, Span


@dataclass(frozen=True, slots=True)
class Subject:
    """One sequence of a pass: `num_fed` tokens of its uncached suffix are fed and, once the root is, the proposal."""

    seq_id: SeqId
    token_ids: Sequence[int]
    prompt_len: int
    sampling: SamplingParams
    num_fed: int
    proposal: Proposal | None = None

    @property
    def tree(self) -> TokenTree:
        return self.proposal.tree if self.proposal is not None else TokenTree.root(self.token_ids[-1])


@dataclass(frozen=True, slots=True)
class Ruling:
    """The accepted `path` and the model's own `next_token`; `distributions` of all these tokens where the model's was cut."""

    path: tuple[int, ...]
    next_token: int
    distributions: tuple[SparseDistribution, ...] = ()


class Verifier:
    """`law_size` cuts the model's law to its likeliest tokens, for a model whose tokens are tested by ratio in turn."""

    def __init__(
        self, runner: ModelRunner, rule: str, eos_token_ids: Sequence[int], *, law_size: int | None = None
    ) -> None:
        self.runner = runner
        self._rule = rule
        self._eos_token_ids = tuple(eos_token_ids)
        self._law_size = law_size

    def reaches_root(self, subject: Subject) -> bool:
        """Whether the pass (still pending) feeds, or fed, the last token of the text."""
        return self.runner.cached_len(subject.seq_id) + subject.num_fed == len(subject.token_ids)

    def forward(self, subjects: Sequence[Subject]) -> tuple[Tensor, int]:
        """One pass: logits behind all nodes of those whose root is reached [N, V], and the number of rows fed."""
        spans, token_ids = [], []
        for subject in subjects:
            cached_len, tree = self.runner.cached_len(subject.seq_id), subject.tree
            fed = subject.token_ids[cached_len : cached_len + subject.num_fed]
            if not tree.num_draft_tokens:
                spans.append(Span(subject.seq_id, len(fed), num_logits=int(self.reaches_root(subject))))
                token_ids += fed
                continue
            assert self.reaches_root(subject), "a proposal hangs below the root"
            parents = None
            if not tree.is_chain:
                root_row = len(fed) - 1
                parents = [*range(-1, root_row), *(root_row + parent for parent in tree.parents[1:])]
            num_nodes = len(tree.parents)
            spans.append(Span(subject.seq_id, len(fed) + num_nodes - 1, parents, num_nodes))
            token_ids += [*fed, *tree.token_ids[1:]]
        return self.runner.forward(spans, token_ids).logits, len(token_ids)

    def judge(
        self, subjects: Sequence[Subject], logits: Tensor, make_coins: Callable[[Subject], RandomSource] | None = None
    ) -> list[Ruling]:
        """Rulings on those whose root was reached; `make_coins` gives a ratio rule its randomness."""
        rows = [NodeRows(one.sampling, one.prompt_len, one.token_ids, one.tree) for one in subjects]
        coupled = self._rule == "coupled"
        choices = choose_batch(logits, rows, self._eos_token_ids).tolist() if coupled and rows else []
        rulings, start = [], 0
        for subject, node_rows in zip(subjects, rows, strict=True):
            where = slice(start, start + len(node_rows.tree.parents))
            start = where.stop
            if coupled:
                rulings.append(Ruling(*verify_coupled(node_rows.tree, choices[where])))
            else:
                random_source = (
                    make_coins(subject)
                    if make_coins
                    else HashRandomSource(subject.sampling.seed, len(subject.token_ids))
                )
                rulings.append(self._test(subject, node_rows, logits[where], random_source))
        return rulings

    def _test(self, subject: Subject, rows: NodeRows, logits: Tensor, random_source: RandomSource) -> Ruling:
        """A rejection rule: ratio tests against the laws the proposal was drawn from."""
        scores = process_logits(logits, rows.params, self._eos_token_ids, rows.prompt_len, rows.token_ids, rows.tree)
        cut: dict[int, SparseDistribution] = {}

        def target_row(node: int) -> np.ndarray:  # most rules visit few nodes of a tree
            if self._law_size is None:
                return probabilities(scores[node : node + 1], rows.params)[0].cpu().numpy()
            if node not in cut:
                cut[node] = truncate_distribution(scores[node : node + 1], rows.params, self._law_size)
            row = np.zeros(scores.shape[-1])
            row[list(cut[node].token_ids)] = cut[node].probs
            return row

        proposal = subject.proposal
        sampling_kinds, distributions = (
            (proposal.sampling_kinds, proposal.distributions) if proposal else ((0,), (None,))
        )
        path, next_token = RULES[self._rule](rows.tree, sampling_kinds, distributions, target_row, random_source)
        return Ruling(path, next_token, tuple(cut[node] for node in (0, *path)) if cut else ())
