"""The two roles with scripted passes: the real draft role and drafters on a model that only knows the language.

Everything that decides is the engine's own: `DraftRole`, the drafters and the policies of `actors/protocol/draft_tree.py`. A
pass costs what the scenario says, and its "logits" are positions of the text, from which the drafter reads its ranked
choices. The target answers with the text itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from actors.drafters.draft_ahead.drafter import AheadDrafter
from actors.drafters.draft_ahead.tree import AHEAD
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.tree_growth import Candidate
from actors.protocol.messages import Admit, Commit, TokenTree, Verdict, VerdictBatch, VerifyBatch, VerifyItem
from actors.roles.draft import DraftRole
from actors.verification.coupled import verify_coupled
from cluster.tools.simulation.clock import LaneTime
from cluster.tools.simulation.costs import PassCost
from cluster.tools.simulation.language import Text
from parallel.kv.pass_plan import PendingRows, Span

Texts = Callable[[int], Text]
"""The text of a request."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One row of a pass: what the drafter thinks follows there."""

    text: Text
    position: int
    distance: int

    def children(self, count: int) -> tuple[list[int], list[float]]:
        return self.text.children(self.position, self.distance, count)


@dataclass(frozen=True, slots=True)
class Guesses:
    """A pass's output, named as the real one's."""

    logits: list[Guess]


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """The part of a model's configuration that drafters read."""

    max_positions: int
    vocab_size: int | None = None


class ScriptedRunner:
    """The surface of `ModelRunner` that drafters use: rows and their positions, and time instead of arithmetic.

    `exact` is what an exact pass of a layer-parallel model costs, whose other passes are fuzzy; None for other models.
    """

    def __init__(
        self, texts: Texts, time: LaneTime, cost: PassCost, max_positions: int, exact: PassCost | None = None
    ) -> None:
        self.config = ScriptedConfig(max_positions)
        self._texts = texts
        self._time = time
        self._cost = cost
        self._exact = exact
        self._cached: dict[int, int] = {}
        self._exact_len: dict[int, int] = {}
        self._pending: dict[int, PendingRows] = {}
        self._is_fuzzy: dict[int, list[bool]] = {}  # of the pending rows
        self._root_depth: dict[int, int] = {}  # depth of the root among the pending rows, -1 where it is cached

    def open(self, request_id: int) -> None:
        self._cached[request_id] = self._exact_len[request_id] = 0
        self._pending[request_id], self._is_fuzzy[request_id] = PendingRows(), []
        self._root_depth[request_id] = -1

    def close(self, request_id: int) -> None:
        for rows in (self._cached, self._exact_len, self._pending, self._is_fuzzy, self._root_depth):
            del rows[request_id]

    def cached_len(self, request_id: int) -> int:
        return self._cached[request_id]

    def can_reserve(self, num_rows: int) -> bool:
        return True

    def commit(self, request_id: int, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        marks = self._is_fuzzy[request_id]
        for row in keep:
            if not marks[row] and self._exact_len[request_id] == self._cached[request_id]:
                self._exact_len[request_id] += 1
            self._cached[request_id] += 1
        self._is_fuzzy[request_id] = [marks[row] for row in retain]
        self._pending[request_id] = self._pending[request_id].after_commit(keep, retain)
        self._root_depth[request_id] = -1

    def drop_fuzzy(self, request_id: int) -> bool:
        if self._exact_len[request_id] == self._cached[request_id]:
            return False
        self._cached[request_id] = self._exact_len[request_id]
        self._pending[request_id], self._is_fuzzy[request_id] = PendingRows(), []
        return True

    def forward(self, spans: Sequence[Span], token_ids: Sequence[int], *, fuzzy: bool = False) -> Guesses:
        """`fuzzy` passes are over draft tokens, the others start with committed text whose last token is the root."""
        behind_fuzzy = any(self._exact_len[span.seq_id] < self._cached[span.seq_id] for span in spans)
        is_fuzzy = self._exact is not None and (fuzzy or behind_fuzzy)
        cost = self._cost if self._exact is None or is_fuzzy else self._exact
        self._time.spend(cost(len(token_ids)))
        guesses = []
        for span in spans:
            pending, text, cached_len = self._pending[span.seq_id], self._texts(span.seq_id), self._cached[span.seq_id]
            pending.append(span.num_tokens, span.parents)
            self._is_fuzzy[span.seq_id] += [is_fuzzy] * span.num_tokens
            first = len(pending.depths) - span.num_logits
            if not fuzzy and span.num_logits:
                self._root_depth[span.seq_id] = pending.depths[first]
            root_depth = self._root_depth[span.seq_id]
            guesses += [Guess(text, cached_len + depth + 1, depth - root_depth) for depth in pending.depths[first:]]
        return Guesses(guesses)


class _Ahead(AheadDrafter):
    """Reads children off guesses."""

    def _expand(self, logits, fed) -> None:
        self._add((guess.children(self._fan_out) for guess in logits), fed)


class _Synchronous(ModelDrafter):
    """Reads candidates off guesses."""

    def _keeps_tokens_on_device(self, able) -> bool:
        return False

    def _offer(self, contexts, trees, frontier, logits, level, distributions) -> list[list[Candidate]]:
        guesses, width = iter(logits), self._growth.width(level)
        return [
            [
                Candidate(node, token, log_prob)
                for node in nodes
                for token, log_prob in zip(*next(guesses).children(width), strict=True)
            ]
            for nodes in frontier
        ]


def draft_role(
    pipeline: str, config: ModelDrafterConfig, runner: ScriptedRunner, time: LaneTime, *, adapts: bool
) -> DraftRole:
    """The role as `actors/worker/factory.py` would build it for this pipeline."""
    options = {"rule": "coupled", "law_size": 0, "eos_token_ids": (), "prefill_chunk": 512}
    if pipeline in AHEAD:
        return DraftRole(_Ahead(runner, config, policy=pipeline, **options), clock=time, adapts=adapts)
    return DraftRole(_Synchronous(runner, config, **options), clock=time)


class ScriptedTarget:
    """Answers each `VerifyBatch` after the time its rows cost."""

    wants_work = False

    def __init__(self, texts: Texts, time: LaneTime, cost: PassCost) -> None:
        self._texts = texts
        self._time = time
        self._cost = cost
        self._epochs: dict[int, int] = {}
        self._prefix_len: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def answer(self, batch: VerifyBatch) -> Iterator[VerdictBatch]:
        started = self._time.now
        for request_id in batch.releases:
            del self._epochs[request_id], self._prefix_len[request_id], self._cached[request_id]
        for admit in batch.admits:
            self._admit(admit)
        for commit in batch.commits:
            self._commit(commit)
        num_rows = sum(item.num_tokens + _tree(item).num_draft_tokens for item in batch.items)
        if num_rows:
            self._time.spend(self._cost(num_rows))
        verdicts = tuple(verdict for item in batch.items if (verdict := self._judge(item)) is not None)
        yield VerdictBatch(batch.round, verdicts, started, self._time.now, num_rows)

    def width(self) -> int:
        return 0

    def work(self, width: int) -> None:
        assert False, "nothing was wanted"

    def _admit(self, admit: Admit) -> None:
        self._epochs[admit.request_id] = admit.epoch
        self._prefix_len[admit.request_id] = len(admit.token_ids)
        self._cached[admit.request_id] = 0

    def _commit(self, commit: Commit) -> None:
        prefix_len = self._prefix_len[commit.request_id]
        text = self._texts(commit.request_id)
        assert commit.prefix_len == prefix_len and commit.epoch == self._epochs[commit.request_id]
        self._prefix_len[commit.request_id] = prefix_len + len(commit.token_ids)
        self._cached[commit.request_id] = prefix_len + len(commit.path)
        assert commit.token_ids == text.tokens(prefix_len, prefix_len + len(commit.token_ids)), "a token was changed"

    def _judge(self, item: VerifyItem) -> Verdict | None:
        request_id, tree = item.request_id, _tree(item)
        prefix_len = self._prefix_len[request_id]
        if self._cached[request_id] + item.num_tokens < prefix_len:
            self._cached[request_id] += item.num_tokens  # a chunk of the prompt
            return None
        text = self._texts(request_id)
        choices = [text.token(prefix_len + depth) for depth in tree.depths()]
        path, next_token = verify_coupled(tree, choices)
        return Verdict(request_id, self._epochs[request_id], prefix_len, path, next_token)


def _tree(item: VerifyItem) -> TokenTree:
    return item.proposal.tree if item.proposal is not None else TokenTree.root(0)
