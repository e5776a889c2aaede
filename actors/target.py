"""The target role: reads prompts, verifies whole batches of proposals in one flat pass, keeps KV by table edits.

Every rank of the role receives the same records and runs the same pass; only the lead looks at the logits. What a
verdict became (`Commit`) arrives with the next batch, so the ranks need not agree on anything by themselves. Knows
one runner and one verification rule; has never heard of drafters, pipelines or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from actors.messages import Admit, Commit, SamplingParams, TokenTree, Verdict, VerdictBatch, VerifyBatch, VerifyItem
from actors.sampling import NodeRows, choose_batch, probabilities, process_logits
from actors.verification import RULES
from actors.verification.coins import HashCoins
from actors.verification.coupled import verify_coupled
from parallel.runner import ModelRunner, Span


@dataclass(slots=True, eq=False)
class TargetContext:
    """The committed text of one request as the target knows it."""

    epoch: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    num_fed: int = 0  # rows of the uncached suffix in the last pass, still pending in the pool


class TargetRole:
    """Answers each `VerifyBatch` with a `VerdictBatch`; never works on its own."""

    wants_work = False

    def __init__(self, runner: ModelRunner, rule: str, eos_token_ids: Sequence[int], *, is_lead: bool) -> None:
        self.runner = runner
        self._rule = rule
        self._eos_token_ids = tuple(eos_token_ids)
        self._is_lead = is_lead
        self.contexts: dict[int, TargetContext] = {}

    def answer(self, batch: VerifyBatch) -> Iterator[VerdictBatch]:
        started = time.monotonic()
        for request_id in batch.releases:
            del self.contexts[request_id]
            self.runner.close(request_id)
        for admit in batch.admits:
            self._admit(admit)
        for commit in batch.commits:
            self._commit(commit)
        verdicts, num_rows = (), 0
        if batch.items:
            logits, num_rows = self._forward(batch.items)
            verdicts = self._judge(batch.items, logits) if self._is_lead else ()
            self._keep_chunks(batch.items)
        yield VerdictBatch(batch.round, verdicts, started, time.monotonic(), num_rows)

    def _admit(self, admit: Admit) -> None:
        self.contexts[admit.request_id] = TargetContext(
            admit.epoch, list(admit.token_ids), admit.prompt_len, admit.sampling
        )
        self.runner.open(admit.request_id)

    def _commit(self, commit: Commit) -> None:
        context = self.contexts[commit.request_id]
        assert commit.epoch == context.epoch and commit.prefix_len == len(context.token_ids)
        root_row = context.num_fed - 1
        self.runner.commit(commit.request_id, [*range(context.num_fed), *(root_row + node for node in commit.path)])
        context.token_ids.extend(commit.token_ids)

    def _forward(self, items: Sequence[VerifyItem]) -> tuple[Tensor, int]:
        """One pass over all items: logits [sum of asked rows, V] and the number of rows fed."""
        spans, token_ids = [], []
        for item in items:
            context, tree = self.contexts[item.request_id], _tree(item)
            cached_len = self.runner.cached_len(item.request_id)
            fed = context.token_ids[cached_len : cached_len + item.num_tokens]
            context.num_fed = len(fed)
            reaches_root = cached_len + len(fed) == len(context.token_ids)
            if tree is None or not tree.num_draft_tokens:
                spans.append(Span(item.request_id, len(fed), num_logits=int(reaches_root)))
                token_ids += fed
                continue
            assert reaches_root, "a proposal hangs below the root"
            parents = None
            if not tree.is_chain:
                root_row = len(fed) - 1
                parents = [*range(-1, root_row), *(root_row + parent for parent in tree.parents[1:])]
            num_nodes = len(tree.parents)
            spans.append(Span(item.request_id, len(fed) + num_nodes - 1, parents, num_nodes))
            token_ids += [*fed, *tree.token_ids[1:]]
        return self.runner.forward(spans, token_ids).logits, len(token_ids)

    def _judge(self, items: Sequence[VerifyItem], logits: Tensor) -> tuple[Verdict, ...]:
        judged = [item for item in items if self._reached_root(item)]
        rows = [self._node_rows(item) for item in judged]
        if self._rule == "coupled":
            choices = choose_batch(logits, rows, self._eos_token_ids).tolist() if rows else []
        verdicts, start = [], 0
        for item, node_rows in zip(judged, rows, strict=True):
            where = slice(start, start + len(node_rows.tree.parents))
            start = where.stop
            if self._rule == "coupled":
                path, next_token = verify_coupled(node_rows.tree, choices[where])
            else:
                path, next_token = self._test(item, node_rows, logits[where])
            context = self.contexts[item.request_id]
            verdicts.append(Verdict(item.request_id, context.epoch, len(context.token_ids), path, next_token))
        return tuple(verdicts)

    def _test(self, item: VerifyItem, rows: NodeRows, logits: Tensor) -> tuple[tuple[int, ...], int]:
        """A rejection rule: ratio tests against the laws the proposal was drawn from."""
        scores = process_logits(logits, rows.params, self._eos_token_ids, rows.prompt_len, rows.token_ids, rows.tree)

        def target_row(node: int) -> np.ndarray:  # most rules visit few nodes of a tree
            return probabilities(scores[node : node + 1], rows.params)[0].cpu().numpy()

        proposal = item.proposal
        draws, laws = (proposal.draws, proposal.laws) if proposal else ((0,), (None,))
        coins = HashCoins(rows.params.seed, step=len(rows.token_ids))
        return RULES[self._rule](rows.tree, draws, laws, target_row, coins)

    def _node_rows(self, item: VerifyItem) -> NodeRows:
        context = self.contexts[item.request_id]
        tree = _tree(item) or TokenTree.root(context.token_ids[-1])
        return NodeRows(context.sampling, context.prompt_len, context.token_ids, tree)

    def _reached_root(self, item: VerifyItem) -> bool:
        context = self.contexts[item.request_id]
        return self.runner.cached_len(item.request_id) + context.num_fed == len(context.token_ids)

    def _keep_chunks(self, items: Sequence[VerifyItem]) -> None:
        """Rows of a prompt chunk are committed text already; no verdict will follow for them."""
        for item in items:
            if not self._reached_root(item):
                self.runner.commit(item.request_id, range(self.contexts[item.request_id].num_fed))


def _tree(item: VerifyItem) -> TokenTree | None:
    return item.proposal.tree if item.proposal is not None else None
