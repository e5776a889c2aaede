"""The two roles with scripted passes: the engine's draft role and drafters over a runner that computes nothing.

A pass costs what the scenario gives, and its "logits" are positions of the text, from which the drafter reads ranked
choices. The target answers with the text itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from actors.drafters.config import ModelOptions
from actors.drafters.draft_ahead.tree import AHEAD
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.model.ahead_drafter import AheadDrafter
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.tree_growth import Candidate
from actors.protocol.messages import TokenTree, Verdict, VerdictBatch, VerifyBatch, VerifyItem
from actors.roles.draft import DraftRole
from actors.verification.coupled import verify_coupled
from cluster.tools.simulation.clock import QUIET, Disturbances, LaneClock
from cluster.tools.simulation.language import RequestText
from parallel.kv.pass_plan import PendingRows, Span
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.pass_cost import PassCost
from parallel.runtime.interface import Runner

TextOf = Callable[[Any], RequestText]
"""Request id -> its text."""


class ScriptedRow(NamedTuple):
    """One row of a pass: where in the text its ranked choices are read."""

    text: RequestText
    position: int
    distance: int

    def children(self, count: int) -> tuple[list[int], list[float]]:
        return self.text.children(self.position, self.distance, count)


class ScriptedOutput(NamedTuple):
    """A pass's output, named as the real one's."""

    logits: list[ScriptedRow]


class ScriptedConfig(NamedTuple):
    """The part of a model's configuration that drafters read."""

    max_positions: int
    vocab_size: int | None = None


@dataclass(slots=True)
class _ScriptedSequence:
    """The KV rows of one sequence; the first `exact_len` of the `cached_len` committed rows come from exact passes."""

    cached_len: int = 0
    exact_len: int = 0
    pending: PendingRows = field(default_factory=PendingRows)
    is_fuzzy: list[bool] = field(default_factory=list)
    """Which pending rows come from fuzzy passes."""
    root_depth: int = -1
    """Depth of the root among the pending rows, -1 where it is cached."""


class ScriptedRunner:
    """The methods of `Runner` that drafters call: rows and their positions, and time instead of arithmetic.

    `exact`: cost of an exact pass of a layer-parallel model, whose other passes are fuzzy; None for other models.
    `most_seen`: rows of a sequence that a pass reads, at most; None: all. `kv_slots`: rows of all sequences, at most,
    which may change; None: any number.
    """

    reads_drafts = True

    def __init__(
        self,
        text_of: TextOf,
        time: LaneClock,
        cost: Callable[[int, int], float],
        max_positions: int,
        exact: PassCost | None = None,
        disturbances: Disturbances = QUIET,
        most_seen: int | None = None,
        kv_slots: int | None = None,
    ) -> None:
        self.config = ScriptedConfig(max_positions)
        self._most_seen = max_positions if most_seen is None else most_seen
        self._text_of = text_of
        self._time = time
        self._cost = cost
        self._exact = exact
        self.kv_slots = kv_slots
        self._disturbances = disturbances
        self._sequences: dict[SeqId, _ScriptedSequence] = {}

    @property
    def longest_draft(self) -> int:
        return self.config.max_positions

    @property
    def longest_text(self) -> int:
        return self.config.max_positions

    @property
    def drops_rows(self) -> bool:
        return False

    def open(self, request_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        self._sequences[request_id] = _ScriptedSequence()

    def close(self, request_id: SeqId) -> None:
        del self._sequences[request_id]

    def cached_len(self, request_id: SeqId) -> int:
        return self._sequences[request_id].cached_len

    def can_reserve(self, num_rows: int) -> bool:
        if self.kv_slots is None:
            return True
        used = sum([one.cached_len + len(one.pending.depths) for one in self._sequences.values()])
        return used + num_rows <= self.kv_slots

    def commit(self, request_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        sequence = self._sequences[request_id]
        for row in keep:
            sequence.exact_len += not sequence.is_fuzzy[row] and sequence.exact_len == sequence.cached_len
            sequence.cached_len += 1
        sequence.is_fuzzy = [sequence.is_fuzzy[row] for row in retain]
        sequence.pending = sequence.pending.after_commit(keep, retain)
        sequence.root_depth = -1

    def drop_fuzzy(self, request_id: SeqId) -> bool:
        sequence = self._sequences[request_id]
        if sequence.exact_len == sequence.cached_len:
            return False
        sequence.cached_len = sequence.exact_len
        sequence.pending, sequence.is_fuzzy = PendingRows(), []
        return True

    def forward(self, spans: Sequence[Span], token_ids: Sequence[int], *, fuzzy: bool = False) -> ScriptedOutput:
        """`fuzzy` passes are over draft tokens, the others start with committed text whose last token is the root."""
        sequences = [self._sequences[span.seq_id] for span in spans]
        after_fuzzy = any(sequence.exact_len < sequence.cached_len for sequence in sequences)
        is_fuzzy = self._exact is not None and (fuzzy or after_fuzzy)
        cost = self._cost if self._exact is None or is_fuzzy else self._exact
        context = sum([min(sequence.cached_len, self._most_seen) for sequence in sequences])
        self._time.now += self._disturbances.seconds(self._time.now, cost(len(token_ids), context))
        rows = []
        for span, sequence in zip(spans, sequences, strict=True):
            text, pending = self._text_of(span.seq_id), sequence.pending
            pending.append(span.num_tokens, span.parents)
            sequence.is_fuzzy += [is_fuzzy] * span.num_tokens
            first = len(pending.depths) - span.num_logits
            if not fuzzy and span.num_logits:
                sequence.root_depth = pending.depths[first]
            start, root_depth = sequence.cached_len + 1, sequence.root_depth
            rows += [ScriptedRow(text, start + depth, depth - root_depth) for depth in pending.depths[first:]]
        return ScriptedOutput(rows)


class ScriptedDrafter(ModelDrafter):
    """Reads candidates off scripted rows."""

    def _keeps_tokens_on_device(self, able: Any) -> bool:  # noqa: ARG002  there is no device
        return False

    def _draw_candidates(self, drafts: Any, logits: Any) -> list[list[Candidate]]:
        rows, reads_leads = iter(logits), self._chain_rule is not None and self._chain_rule.reads_leads
        offered: list[list[Candidate]] = [[] for _ in drafts]
        for one, candidates in zip(drafts, offered, strict=True):
            width = self._growth.width(one.level)
            for node in one.frontier:
                token_ids, log_probs = next(rows).children(max(width, 2 * reads_leads))
                if reads_leads:
                    one.predicted.append(log_probs[0] - log_probs[1])
                candidates += [Candidate(node, *child) for child in zip(token_ids[:width], log_probs, strict=False)]
        return offered


class ScriptedAheadDrafter(ScriptedDrafter, AheadDrafter):
    """Reads children off scripted rows."""

    def _expand(self, logits: Iterable[ScriptedRow], fed: Any) -> None:
        nodes = [(state.tree, node) for state, nodes in fed for node in nodes]
        self._add_children(nodes, (row.children(self._fan_out) for row in logits))


class ScriptedLookup(RequestwiseDrafter):
    """A drafter without passes, each of whose tokens is right with probability `acceptance`."""

    capabilities = Capabilities()

    def __init__(self, text_of: TextOf, acceptance: float) -> None:
        self._text_of = text_of
        self._acceptance = acceptance

    def _propose(self, context: Context, budget: int) -> Draft:
        text, start = self._text_of(context.request_id), len(context.token_ids)
        draft = []
        for position in range(start, start + budget):
            is_right = random.Random(f"{context.request_id} {position}").random() < self._acceptance
            draft.append(text.token(position) if is_right else text.token(position) + 1)
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], draft))


def draft_role(
    pipeline: str, config: ModelDrafterConfig, scripted: ScriptedRunner, time: LaneClock, *, adapts: bool
) -> DraftRole:
    """The role as `actors/worker/factory.py` would build it for this pipeline."""
    runner = cast(Runner, scripted)  # it has the methods that drafters call
    options = ModelOptions("coupled", law_size=0, eos_token_ids=(), prefill_chunk=512)
    if pipeline in AHEAD:
        drafter = ScriptedAheadDrafter(runner, config, options, pipeline)
        return DraftRole(drafter, clock=time, adapts=adapts)
    return DraftRole(ScriptedDrafter(runner, config, options), clock=time)


@dataclass(slots=True)
class _TargetRequest:
    """The target's state of one request; `cached_len` tokens have KV."""

    epoch: int
    prefix_len: int
    cached_len: int = 0


@dataclass(slots=True)
class ScriptedTarget:
    """Answers each `VerifyBatch` after the time its rows cost, and checks every committed token."""

    _text_of: TextOf
    _time: LaneClock
    _cost: PassCost
    _slowdown: Callable[[], float] = lambda: 1.0
    """Seconds of a pass over those beside an idle drafter."""
    _disturbances: Disturbances = QUIET
    _requests: dict[int, _TargetRequest] = field(default_factory=dict)

    def answer(self, batch: VerifyBatch) -> Iterator[VerdictBatch]:
        started = self._time.now
        for commit in batch.commits:
            request, prefix_len = self._requests[commit.request_id], commit.prefix_len
            assert (prefix_len, commit.epoch) == (request.prefix_len, request.epoch)
            request.cached_len = prefix_len + len(commit.path)
            request.prefix_len += len(commit.token_ids)
            written = map(self._text_of(commit.request_id).token, range(prefix_len, request.prefix_len))
            assert commit.token_ids == tuple(written), "a token was changed"
        for request_id in batch.releases:
            del self._requests[request_id]
        for admit in batch.admits:
            self._requests[admit.request_id] = _TargetRequest(admit.epoch, len(admit.token_ids))
        num_rows = sum(item.num_tokens + _tree(item).num_draft_tokens for item in batch.items)
        if num_rows:
            context = sum([self._requests[item.request_id].cached_len for item in batch.items])
            self._time.now += self._disturbances.seconds(started, self._cost(num_rows, context) * self._slowdown())
        verdicts = tuple(verdict for item in batch.items if (verdict := self._verify(item)) is not None)
        yield VerdictBatch(batch.round, verdicts, started, self._time.now, num_rows)

    def _verify(self, item: VerifyItem) -> Verdict | None:
        """None for a chunk of the prompt that does not complete it."""
        request, tree = self._requests[item.request_id], _tree(item)
        if request.cached_len + item.num_tokens < request.prefix_len:
            request.cached_len += item.num_tokens
            return None
        text = self._text_of(item.request_id)
        path, next_token = verify_coupled(tree, [text.token(request.prefix_len + depth) for depth in tree.depths()])
        return Verdict(item.request_id, request.epoch, request.prefix_len, path, (next_token,))


def _tree(item: VerifyItem) -> TokenTree:
    return item.proposal.tree if item.proposal is not None else TokenTree.root(0)
