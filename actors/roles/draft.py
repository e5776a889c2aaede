"""The contract every drafter fulfils, and the role that speaks for it.

A drafter turns committed text into a guess. It is told of requests (`open`), of what became of its guesses
(`observe`) and of their end (`release`); `propose` never changes the text. Everything a drafter says is only a
guess: a wrong, short or missing one costs speed, never correctness. The role keeps the committed text and its
digest, so that a drafter without a model is a single function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.drafters.draft_ahead.timing import Patience
from actors.drafters.draft_ahead.width import Breadth, Step
from actors.protocol.messages import (
    HASH_SEED,
    Commit,
    DraftBatch,
    Draw,
    LevelWork,
    Outlook,
    OutlookBatch,
    Proposal,
    ProposalBatch,
    SamplingParams,
    SparseLaw,
    TokenTree,
    extend_hash,
    retract_hash,
)

LEVEL_WAIT_S = 0.5
"""How long at a time a rank listens for the level beneath, which wakes it."""


@dataclass(slots=True, eq=False)
class Context:
    """The text of one request as the drafting side knows it. Drafters read it; only the role changes it.

    For the drafter that the target listens to it is committed. Beneath a level of a cascade its end is provisional.
    """

    request_id: int
    epoch: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    prefix_hash: int = HASH_SEED
    admission: int = 0  # tells this time of being told of the request from those before
    num_cuts: int = 0  # how often provisional text was taken back
    settled_len: int | None = None  # tokens that are known to stay; None: all

    @property
    def num_returned(self) -> int:
        """Tokens that a request which comes back, as after a preemption, had said before; read when it is opened."""
        return len(self.token_ids) if len(self.token_ids) > self.prompt_len else 0

    @property
    def step(self) -> int:
        """Key of this draft's own noise: positions that are drafted again never meet the same numbers."""
        return extend_hash(HASH_SEED, (self.admission, self.epoch, self.num_cuts, len(self.token_ids)))

    def cut(self, length: int) -> None:
        """Take back what stands behind the first `length` tokens."""
        self.prefix_hash = retract_hash(self.prefix_hash, self.token_ids[length:])
        del self.token_ids[length:]
        self.num_cuts += 1

    def extend(self, token_ids: Sequence[int], vocab_size: int | None = None) -> None:
        self.token_ids.extend(_readable(token_ids, vocab_size))
        self.prefix_hash = extend_hash(self.prefix_hash, token_ids)


def _readable(token_ids: Sequence[int], vocab_size: int | None) -> list[int]:
    """The tokens as a drafter reads them that has fewer: families pad their vocabularies differently.

    Behind one that it lacks nothing is proposed, since that would be the root; further on the guess is a little worse.
    """
    return list(token_ids) if vocab_size is None else [min(token, vocab_size - 1) for token in token_ids]


def _readable_sampling(sampling: SamplingParams, vocab_size: int | None) -> SamplingParams:
    """Without what it says of tokens that the drafter does not have."""
    if vocab_size is None:
        return sampling
    return replace(
        sampling,
        logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias if token < vocab_size),
        bad_words=tuple(word for word in sampling.bad_words if max(word, default=0) < vocab_size),
        stop_token_ids=tuple(token for token in sampling.stop_token_ids if token < vocab_size),
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess: the tree, how each node was drawn, and the law behind each node's children (None if not random).

    `parts` as in a `Proposal`.
    """

    tree: TokenTree
    draws: tuple[int, ...] = ()
    laws: tuple[SparseLaw | None, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def nothing(context: Context) -> Draft:
        """The empty proposal."""
        return Draft.chosen(TokenTree.root(context.token_ids[-1]))

    @staticmethod
    def chosen(tree: TokenTree) -> Draft:
        """A tree whose tokens were chosen without randomness."""
        return Draft(tree, (Draw.ROOT, *[Draw.DETERMINISTIC] * tree.num_draft_tokens), (None,) * len(tree.parents))


class Drafter(Protocol):
    """What a family of drafters implements."""

    vocab_size: int | None
    """Tokens it knows; None for one that knows none and so copes with any."""

    def open(self, context: Context) -> None:
        """A request arrived (or came back after a preemption)."""

    def prepare(self, contexts: Sequence[Context]) -> None:
        """Bring private state, such as KV, up to the committed text, in the time the target reads it too."""

    def prepared(self, context: Context) -> bool:
        """Whether `propose` would answer for this context without a pass."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """One draft per context, with at most `budgets[i]` >= 1 draft tokens; fewer or none is always allowed."""

    def outlooks(self) -> Sequence[Outlook]:
        """What draft-ahead prepared for verdicts that are awaited, as far as it was not given yet."""

    def take(self, context: Context, budget: int, taken: TokenTree) -> None:
        """A proposal was read off an outlook: its verdict is awaited as if `propose` had given it."""

    def observe(self, context: Context, commit: Commit) -> None:
        """The verdict on the last draft: rows of `commit.path` stay valid. Called before the context is extended."""

    def truncate(self, context: Context) -> None:
        """Text that a level of a cascade had added was taken back: the context was cut; `observe` follows."""

    def release(self, request_id: int) -> None:
        """The request ended; forget it."""

    def account(self) -> tuple[LevelWork, ...]:
        """What the levels of a cascade did since this was last asked; nothing for a drafter without levels."""

    @property
    def wants_work(self) -> bool:
        """Whether draft-ahead has something left to do until the next record arrives."""

    waits: bool
    """Whether work can only go on once the level beneath has said something."""

    works_ahead: bool
    """Whether this drafter uses the time while the target verifies."""

    def width(self, breadth: Breadth, time_s: float) -> int:
        """Nodes for each request in the next step of draft-ahead, if what was measured should decide."""

    def work(self, width: int = 0) -> Step:
        """One short step of draft-ahead, about one pass; at most `width` nodes for each request, 0: as configured."""


class IdleDrafter:
    """Base of drafters that never work ahead and have no levels."""

    works_ahead = False
    wants_work = False
    vocab_size: int | None = None
    waits = False

    def prepared(self, context: Context) -> bool:
        return False

    def width(self, breadth: Breadth, time_s: float) -> int:
        return 0

    def work(self, width: int = 0) -> Step:
        assert False, "nothing was wanted"

    def outlooks(self) -> Sequence[Outlook]:
        return ()

    def take(self, context: Context, budget: int, taken: TokenTree) -> None:
        assert False, "nothing was prepared"

    def truncate(self, context: Context) -> None:
        """Start afresh: right for every drafter, and cheap for one without a model."""
        self.release(context.request_id)
        self.open(context)

    def account(self) -> tuple[LevelWork, ...]:
        return ()


@dataclass(slots=True)
class DraftRole:
    """Answers each `DraftBatch`, first with what is prepared, then with what had to be drafted; works ahead between."""

    drafter: Drafter
    clock: Callable[[], float] = time.monotonic
    adapts: bool = False  # the width of draft-ahead to what its passes cost
    contexts: dict[int, Context] = field(default_factory=dict)
    _ahead: list[tuple[float, float, bool]] = field(default_factory=list)
    _patience: Patience = field(default_factory=Patience)
    _breadth: Breadth = field(default_factory=Breadth)

    @property
    def wants_work(self) -> bool:
        return self.drafter.wants_work

    def width(self) -> int:
        """Of the next step: its argument. What was measured here decides for all ranks of the role."""
        return self.drafter.width(self._breadth, self._patience.distance_s) if self.adapts else 0

    def work(self, width: int = 0) -> None:
        started = self.clock()
        step = self.drafter.work(width)
        finished = self.clock()
        self._ahead.append((started, finished, step.glued))
        self._patience.stepped(started, finished)
        if step.num_rows and not step.glued:
            self._breadth.saw(step.num_rows, finished - started)

    def pause_s(self) -> float:
        """Seconds to wait for the next record before another step, which might keep it waiting, or lead nowhere."""
        return LEVEL_WAIT_S if self.drafter.waits else self._patience.pause_s(self.clock())

    def outlook(self, *, last: bool) -> OutlookBatch | None:
        """What is prepared and not told yet, if it is time for that; `last` if nothing more will be prepared."""
        if not last and not self._patience.is_time_to_tell(self.clock()):
            return None
        outlooks = self.drafter.outlooks()
        return OutlookBatch(tuple(outlooks)) if outlooks else None

    def answer(self, batch: DraftBatch) -> Iterator[ProposalBatch]:
        self._patience.arrived(self.clock())
        yield from self._answers(batch)
        if any(order.num_draft_tokens for order in batch.orders):
            self._patience.answered(self.clock())

    def _answers(self, batch: DraftBatch) -> Iterator[ProposalBatch]:
        started = self.clock()
        asked = self._follow_all(batch)
        hits = [(context, budget) for context, budget in asked if self.drafter.prepared(context)]
        misses = [(context, budget) for context, budget in asked if not self.drafter.prepared(context)]
        ahead, self._ahead = tuple(self._ahead), []
        if hits:
            self._patience.told_too_late()
        if hits or (misses and self.drafter.works_ahead):
            proposals = self._propose(hits, prepared=True)
            levels = self.drafter.account()
            yield ProposalBatch(batch.round, proposals, started, self.clock(), len(misses), ahead, levels)
            if not misses:
                return
            started, ahead = self.clock(), ()
        proposals = self._propose(misses, prepared=False)
        yield ProposalBatch(batch.round, proposals, started, self.clock(), 0, ahead, self.drafter.account())

    def forget(self) -> None:
        """Drop every request; the drafter keeps its model."""
        for request_id in self.contexts:
            self.drafter.release(request_id)
        self.contexts.clear()
        self._ahead.clear()

    def _follow_all(self, batch: DraftBatch) -> list[tuple[Context, int]]:
        """Bring the contexts up to the batch; returns what to propose for."""
        for request_id in batch.releases:
            if self.contexts.pop(request_id, None) is not None:
                self.drafter.release(request_id)
        for admit in batch.admits:
            if admit.request_id in self.contexts:  # told again by a level above that cannot know whether it was heard
                self.drafter.release(admit.request_id)
            context = Context(
                admit.request_id,
                admit.epoch,
                _readable(admit.token_ids, self.drafter.vocab_size),
                admit.prompt_len,
                _readable_sampling(admit.sampling, self.drafter.vocab_size),
                extend_hash(HASH_SEED, admit.token_ids),
                admit.admission,
                settled_len=admit.prompt_len,
            )
            self.contexts[admit.request_id] = context
            self.drafter.open(context)
        for commit in batch.commits:
            self._follow(commit)
        wanted = []
        for order in batch.orders:
            context = self.contexts[order.request_id]
            if order.taken is not None:
                self.drafter.take(context, order.num_draft_tokens, order.taken)
                self._patience.told_in_time()
            else:
                wanted.append((context, order.num_draft_tokens))
        idle = [context for context, budget in wanted if not budget]
        if idle:
            self.drafter.prepare(idle)
        return [(context, budget) for context, budget in wanted if budget]

    def _propose(self, asked: list[tuple[Context, int]], *, prepared: bool | None) -> tuple[Proposal, ...]:
        if not asked:
            return ()
        contexts, budgets = zip(*asked, strict=True)
        drafts = self.drafter.propose(contexts, budgets)
        if not self.drafter.works_ahead:
            prepared = None
        return tuple(_proposal(context, draft, prepared) for context, draft in zip(contexts, drafts, strict=True))

    def _follow(self, commit: Commit) -> None:
        context = self.contexts[commit.request_id]
        assert commit.epoch == context.epoch and commit.prefix_len <= len(context.token_ids)
        if commit.prefix_len < len(context.token_ids):
            context.cut(commit.prefix_len)
            self.drafter.truncate(context)
        self.drafter.observe(context, commit)
        context.extend(commit.token_ids, self.drafter.vocab_size)
        context.settled_len = len(context.token_ids) if commit.settled_len is None else commit.settled_len


def _proposal(context: Context, draft: Draft, prepared: bool | None) -> Proposal:
    return Proposal(
        context.request_id,
        context.epoch,
        len(context.token_ids),
        context.prefix_hash,
        draft.tree,
        tuple(int(draw) for draw in draft.draws),
        draft.laws,
        prepared,
        draft.parts,
    )
