"""The contract every drafter fulfils.

A drafter turns committed text into a guess. It is told of requests (`open`), of what became of its guesses
(`observe`) and of their end (`release`); `propose` never changes the text. Everything a drafter says is only a
guess: a wrong, short or missing one costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.protocol.messages import (
    HASH_SEED,
    Commit,
    DraftPreview,
    LevelWork,
    SamplingKind,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    extend_hash,
    retract_hash,
)


@dataclass(slots=True, eq=False)
class Context:
    """The text of one request as the drafting side knows it. Drafters read it; only the role changes it.

    For the drafter that the target listens to it is committed. ChildLevel a level of a cascade its end is provisional.
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
    sampling_kinds: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution | None, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def nothing(context: Context) -> Draft:
        """The empty proposal."""
        return Draft.chosen(TokenTree.root(context.token_ids[-1]))

    @staticmethod
    def chosen(tree: TokenTree) -> Draft:
        """A tree whose tokens were chosen without randomness."""
        return Draft(
            tree,
            (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * tree.num_draft_tokens),
            (None,) * len(tree.parents),
        )


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

    def previews(self) -> Sequence[DraftPreview]:
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

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
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

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        return 0

    def work(self, width: int = 0) -> Step:
        assert False, "nothing was wanted"

    def previews(self) -> Sequence[DraftPreview]:
        return ()

    def take(self, context: Context, budget: int, taken: TokenTree) -> None:
        assert False, "nothing was prepared"

    def truncate(self, context: Context) -> None:
        """Start afresh: right for every drafter, and cheap for one without a model."""
        self.release(context.request_id)
        self.open(context)

    def account(self) -> tuple[LevelWork, ...]:
        return ()
