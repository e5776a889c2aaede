"""The contract of drafters: four required methods, and the capabilities that a drafter may declare.

A drafter continues committed text with a draft. Required are `open` (a request arrived), `propose` (draft), `observe`
(the verdict on the last draft) and `release` (the request ended). Everything else is a capability: an object of a small
protocol in the drafter's `Capabilities`, usually the drafter itself. A wrong, short or missing draft costs speed, never
correctness.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from actors.protocol.messages import (
    HASH_SEED,
    UNKNOWN_COSTS,
    Admit,
    Commit,
    DraftPreview,
    LearningWork,
    LevelWork,
    MeasuredCosts,
    SamplingKind,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    TopTokens,
    extend_hash,
    retract_hash,
)
from parallel.kv.prefix_tree import Text

if TYPE_CHECKING:
    from torch import Tensor

    from actors.drafters.draft_ahead.width import Step, WidthChooser
    from parallel.runtime.decoder_runner import DecoderRunner


@dataclass(slots=True, eq=False)
class Context:
    """The text of one request as the draft role knows it. Drafters read it; only the role changes it.

    For the drafter whose proposals the target verifies, all of it is committed. Below another level of a cascade, the
    tokens after the first `settled_len` are provisional; None: all are committed.
    """

    request_id: int
    epoch: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    prefix_hash: int = HASH_SEED
    admission: int = 0  # differs between admissions of the request in one epoch
    num_cuts: int = 0  # how often provisional text was taken back
    settled_len: int | None = None
    vocab_size: int | None = None  # of the drafter; tokens beyond it are clamped
    drafter: str | None = None  # the one that the request names, of those that the drafter consists of
    rows_scope: Hashable = None  # KV rows of its text may be shared within it; None: not
    scope: int = 0  # of the client and its `cache_salt`; what is remembered of ended requests is kept apart by it
    reference: tuple[int, ...] = ()  # a text of the request that its output may follow
    source: tuple[int, ...] = ()  # what the target's encoder reads; empty where it has none
    costs: MeasuredCosts = UNKNOWN_COSTS  # what its drafts are weighed against
    is_unverified: bool = False  # no pass verifies the next draft, and none is to be run for it

    @classmethod
    def admitted(cls, admit: Admit, vocab_size: int | None) -> Context:
        """The context of a request at its admission, for a drafter that knows `vocab_size` tokens (None: any)."""
        context = cls(
            admit.request_id,
            admit.epoch,
            [],
            admit.prompt_len,
            _without_tokens_beyond(admit.sampling, vocab_size),
            admission=admit.admission,
            settled_len=admit.prompt_len,
            vocab_size=vocab_size,
            drafter=admit.drafter,
            rows_scope=admit.rows_scope,
            scope=admit.memory_scope,
            reference=_clamped(admit.reference, vocab_size),
            source=_clamped(admit.source, vocab_size),
        )
        context.extend(admit.token_ids)
        return context

    @property
    def text(self) -> Text | None:
        """The text, for a runner that shares rows of texts that begin alike."""
        return None if self.rows_scope is None else Text(self.token_ids, self.rows_scope)

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt, a copy."""
        return self.token_ids[: self.prompt_len]

    @property
    def readmitted_len(self) -> int:
        """The tokens, in `open`, of a request that had generated some before, as after a preemption; else 0."""
        return len(self.token_ids) if len(self.token_ids) > self.prompt_len else 0

    @property
    def step(self) -> int:
        """Key of the noise of the next draft: a position that is drafted again gets other noise."""
        return extend_hash(HASH_SEED, (self.admission, self.epoch, self.num_cuts, len(self.token_ids)))

    def cut(self, length: int) -> None:
        """Take back all but the first `length` tokens."""
        self.prefix_hash = retract_hash(self.prefix_hash, self.token_ids[length:])
        del self.token_ids[length:]
        self.num_cuts += 1

    def extend(self, token_ids: tuple[int, ...] | list[int]) -> None:
        """Append tokens; the digest is of the tokens as they came, before they are clamped to the vocabulary.

        Models of one family pad their vocabularies differently. A proposal whose root is such a
        clamped token does not match the committed text and is dropped as stale; later drafts are a little worse.
        """
        self.token_ids.extend(_clamped(token_ids, self.vocab_size))
        self.prefix_hash = extend_hash(self.prefix_hash, token_ids)


def _clamped(token_ids: tuple[int, ...] | list[int], vocab_size: int | None) -> tuple[int, ...]:
    return tuple(token_ids if vocab_size is None else [min(token, vocab_size - 1) for token in token_ids])


def _known(token: int | None, vocab_size: int) -> int | None:
    return token if token is not None and token < vocab_size else None


def _without_tokens_beyond(sampling: SamplingParams, vocab_size: int | None) -> SamplingParams:
    """The parameters without the tokens that the drafter lacks."""
    if vocab_size is None:
        return sampling
    return replace(
        sampling,
        logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias if token < vocab_size),
        bad_words=tuple(word for word in sampling.bad_words if max(word, default=0) < vocab_size),
        # if it lacks them all, it drafts freely and in vain
        allowed_token_ids=tuple(token for token in sampling.allowed_token_ids if token < vocab_size),
        stop_token_ids=tuple(token for token in sampling.stop_token_ids if token < vocab_size),
        forced_bos_token_id=_known(sampling.forced_bos_token_id, vocab_size),
        forced_eos_token_id=_known(sampling.forced_eos_token_id, vocab_size),
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree and how its nodes were drawn; fields as in `Proposal`.

    `sampling_kinds` has one entry per node. `distributions` has the distribution of each node's children, None where
    they were not drawn at random. Both are empty under the coupled rule, which needs neither.
    """

    tree: TokenTree
    sampling_kinds: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution | None, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def nothing(context: Context) -> Draft:
        """The empty draft."""
        return Draft.chosen(TokenTree.root(context.token_ids[-1]))

    @staticmethod
    def chosen(tree: TokenTree) -> Draft:
        """A tree whose tokens were chosen without randomness."""
        kinds = (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * tree.num_draft_tokens)
        return Draft(tree, kinds, (None,) * len(tree.parents))


class Prefills(Protocol):
    """Builds per-request state, such as KV rows or an index, before the first draft is wanted."""

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Bring the state up to the text, while the target reads it too.

        Called for requests that are known but not drafted for in this round, once, often or never: `propose` brings
        the state up itself where this was not called.
        """


class Truncates(Protocol):
    """Takes provisional text back; a drafter without this gets `release` and `open`, with the context already cut.

    Only below another level of a cascade, and never into the prompt.
    """

    def truncate(self, context: Context) -> None:
        """The context was cut; `observe` follows."""


class DraftsAhead(Protocol):
    """Drafts while the target verifies."""

    @property
    def may_work_ahead(self) -> bool:
        """Whether it should before the next record, by the coordinator's policy; else `propose` drafts in full."""
        ...

    @may_work_ahead.setter
    def may_work_ahead(self, may: bool) -> None: ...

    @property
    def wants_work(self) -> bool:
        """Whether a step has something to do before the next record arrives."""
        ...

    @property
    def waits_for_child(self) -> bool:
        """Whether the next step has to wait for an answer of the child level."""
        ...

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        """Nodes for each request in the next step, chosen from measured costs and `time_s` until the verdict; 0: as
        configured."""
        ...

    def work(self, width: int = 0, num_passes: int = 1) -> Step:
        """One step over at most `width` nodes for each request, 0: as configured; about one pass, or up to `num_passes`
        of which none depends on what the host reads of the one before."""
        ...

    def prepared(self, context: Context) -> bool:
        """Whether `propose` would answer for this context without a pass."""
        ...


class DraftsByPass(Protocol):
    """Makes drafts pass by pass, so that those of requests that are ordered meanwhile join at the next pass."""

    def begin(self, contexts: Sequence[Context], budgets: Sequence[int]) -> None:
        """Begin drafts of those that were not prepared and have room."""
        ...

    def is_drafting(self, request_id: int) -> bool:
        """Whether its draft takes another pass; once it does not, `propose` returns it without one."""
        ...

    def advance(self, width: int | None) -> Step:
        """One pass for all drafts that were begun, and, with `width`, a step of draft-ahead in it; its rows are those
        of draft-ahead alone."""
        ...


class SendsPreviews(Protocol):
    """Shows what it prepared before the verdict arrives, so that the coordinator can read proposals off it."""

    def previews(self) -> Sequence[DraftPreview]:
        """The prepared trees that changed since the last call."""
        ...

    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None:
        """The coordinator read `tree` off a preview; its verdict comes as if `propose` had returned it."""


class ReadsTopTokens(Protocol):
    """Learns from the likeliest tokens at the rows of the passes that verify, whichever request they are of.

    Its record says how many (`target_top_k`) and whether of prompts too (`reads_prompts`).
    """

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        """Those of one pass, before the next `propose`; some may be missing."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """The target's features [n, size] at committed positions from `start` on; what they are, the drafter has asked."""

    request_id: int
    start: int
    rows: Tensor


class ReadsFeatures(Protocol):
    """Drafts from hidden states of the target; its record says which (`taps`)."""

    @property
    def feature_size(self) -> int:
        """Numbers of one token's features, as the target has them."""
        ...

    def read_features(self, features: FeatureRows) -> None:
        """Those of the tokens that a pass committed, before the next `propose`: in order, none left out."""


class SharesRows(Protocol):
    """Drafts in the target's own pool of KV rows, on its ranks. When it drafts, the target has committed the rows of
    all text but the last token."""

    def verifying(self, target: DecoderRunner) -> DecoderRunner:
        """The runner with which the target verifies: itself, or one that uses what drafting computed."""
        ...

    def release_rows(self) -> None:
        """Give all rows back: the target is about to change its own and to reserve those of a pass."""
        ...


class HasLevels(Protocol):
    """Consists of levels that draft for each other."""

    def level_stats(self) -> tuple[LevelWork, ...]:
        """Work and acceptance of the levels since the last call."""
        ...

    def forget(self) -> None:
        """Every request was released: so are those of the levels below in this process."""
        ...


class TimesReading(Protocol):
    """Decides itself which texts it reads, and when."""

    def reading_s(self) -> float:
        """Seconds since the last call in which `propose` read more than `MOST_READ_WITH_DRAFT` tokens of a text."""
        ...


class LearnsWhenIdle(Protocol):
    """Changes its own weights by small steps, each shorter than a pass of the target."""

    idle_share: float
    """The most that is spent on steps, as a share of the time in which its rank waits for records."""

    @property
    def wants_learning(self) -> bool:
        """Whether there is something to learn."""
        ...

    def learn(self) -> None:
        """One step."""
        ...

    def learning(self) -> LearningWork:
        """What was learned so far."""
        ...

    def save(self) -> None:
        """Keep what was learned; the rank ends."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a drafter can do besides the required verbs; None: it cannot."""

    vocab_size: int | None = None
    """Tokens that it knows; None: it reads any token."""
    prefills: Prefills | None = None
    truncates: Truncates | None = None
    works_ahead: DraftsAhead | None = None
    sends_previews: SendsPreviews | None = None
    has_levels: HasLevels | None = None
    times_reading: TimesReading | None = None
    reads_top_tokens: ReadsTopTokens | None = None
    reads_features: ReadsFeatures | None = None
    learns: LearnsWhenIdle | None = None
    shares_rows: SharesRows | None = None
    drafts_by_pass: DraftsByPass | None = None


class Drafter(Protocol):
    """What every drafter implements."""

    capabilities: Capabilities
    """Fixed when the drafter is built."""

    def open(self, context: Context) -> None:
        """A request arrived, or came back after a preemption."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """One draft per context, of at most `budgets[i]` >= 1 draft tokens; fewer or none are allowed."""
        ...

    def observe(self, context: Context, commit: Commit) -> None:
        """The verdict on the last draft: KV rows of `commit.path` stay valid. Called before the context is extended.

        Also for tokens that were committed without a draft of this drafter; `commit.path` is then empty.
        """

    def release(self, request_id: int) -> None:
        """The request ended: drop its state."""


class RequestwiseDrafter(Drafter, Protocol):
    """Base of drafters that run no passes: each request is drafted for by itself. What such a drafter keeps of a
    request it says by the functions that it replaces: as they stand, nothing."""

    def prefill(self, contexts: Sequence[Context]) -> None:
        """`Prefills.prefill`, for a drafter that says so in `capabilities`."""
        for context in contexts:
            self._read(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def truncate(self, context: Context) -> None:
        """Nothing is kept of provisional text: `Truncates.truncate`."""

    def _read(self, context: Context) -> object:
        """The text of a request, as far as it has not been read."""

    @abstractmethod
    def _propose(self, context: Context, budget: int) -> Draft:
        """One draft of at most `budget` tokens."""
