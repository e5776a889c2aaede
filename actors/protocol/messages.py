"""The words of the engine: what a coordinator, a target and a drafter say to each other.

Standard library only, every record frozen. No tensor ever travels in one of these: tensors have their own door
(`parallel/transport.py`). A record that arrives late, twice or out of order is *recognised* by
(request, epoch, prefix_len, prefix_hash) and costs speed, never correctness.

Glossary
    target          the model whose output law is preserved
    drafter         an algorithm that proposes tokens; it need not have a model
    committed       tokens fixed for ever; `prefix_len` is their count
    root            node 0 of a token tree: the last committed token, whose KV the target has not computed yet
    token tree      `token_ids` + `parents`; a chain is the degenerate tree, the empty proposal is the root alone
    path            accepted node indices in order, root excluded
    accepted        draft tokens that were kept (the bonus is not one of them)
    next_token      what the target itself adds behind the path: a correction or, after a full path, a bonus
    acceptance length   tokens a round emits = accepted + 1 (the convention of vLLM)
    uncached suffix committed tokens whose KV is missing, of any length; the root is always its last token
    epoch           counts preemptions and re-admissions of a request; records of an older epoch are stale
    round           one draft and one verify
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from actors.protocol.sampling_params import SamplingParams
from actors.protocol.token_tree import TokenTree

HASH_SEED = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_MASK_64 = (1 << 64) - 1
_HASH_PRIME_INVERSE = pow(_HASH_PRIME, -1, 1 << 64)


def extend_hash(digest: int, token_ids: tuple[int, ...] | list[int]) -> int:
    """Rolling 64-bit digest (FNV-1a over token ids) of a committed prefix; start from `HASH_SEED`."""
    for token in token_ids:
        digest = ((digest ^ (token + 1)) * _HASH_PRIME) & _MASK_64
    return digest


def retract_hash(digest: int, token_ids: tuple[int, ...] | list[int]) -> int:
    """The digest as it was before `token_ids` extended it."""
    for token in reversed(token_ids):
        digest = ((digest * _HASH_PRIME_INVERSE) & _MASK_64) ^ (token + 1)
    return digest


class SamplingKind(IntEnum):
    """How a node's token came to be; decides which verification rules are exact for it."""

    ROOT = 0
    DETERMINISTIC = 1  # chosen without randomness of its own: top-k, n-gram, beams; as a law, one-hot
    COUPLED = 2  # arg-max under the noise shared with the target (any rule but `coupled` reads it as DETERMINISTIC)
    IID = 3  # drawn from the law of its parent context, siblings independent, duplicates kept
    WITHOUT_REPLACEMENT = 4  # drawn from that law with the earlier siblings removed and the rest renormalised


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A draft law on its support: `probs` sum to one, and tokens were really drawn from exactly this law.

    Truncating to the top m and *sampling from the truncated law* keeps every rejection rule exact.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's guess for one request, and the prefix it assumes.

    `sampling_kinds[i]` says how node i was drawn; `distributions[i]` is the law from which the *children* of node i were drawn, None
    where they were not drawn at random. Under the coupled rule both may be empty tuples. `prepared` tells a branch hit
    (the draft was there before the verdict it follows) from a miss; None if the drafter does not work ahead. `parts`
    names the levels of a cascade and how many of the nodes, in order, each has drafted; empty if they have one drafter.
    """

    request_id: int
    epoch: int
    prefix_len: int
    prefix_hash: int
    tree: TokenTree
    sampling_kinds: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution | None, ...] = ()
    prepared: bool | None = None
    parts: tuple[tuple[str, int], ...] = ()


    @staticmethod
    def deterministic(request_id: int, epoch: int, prefix_len: int, prefix_hash: int, tree: TokenTree) -> Proposal:
        """A prepared tree whose tokens were chosen without randomness."""
        num_nodes = len(tree.token_ids)
        kinds = (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * (num_nodes - 1))
        return Proposal(request_id, epoch, prefix_len, prefix_hash, tree, kinds, (None,) * num_nodes, prepared=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a proposal: the accepted `path` and one token of its own behind it."""

    request_id: int
    epoch: int
    prefix_len: int
    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for. `speculate=False` decodes plainly, whatever the engine's pipeline is.

    A client that misses something asks again, with the tokens it has got: `generated`. To ask twice does no harm.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculate: bool = True
    generated: tuple[int, ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raise ValueError naming the first field that makes no sense, or names a token the target does not have."""
        self.sampling.check()
        named = (
            ("prompt", self.prompt),
            ("sampling.logit_bias", [token for token, _ in self.sampling.logit_bias]),
            ("sampling.bad_words", [token for word in self.sampling.bad_words for token in word]),
            ("sampling.stop_token_ids", self.sampling.stop_token_ids),
        )
        for name, token_ids in named:
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name}: names token {token}, but the target has {vocab_size} tokens")


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Speculation of one request, in the words of vLLM's per-request metrics."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()  # rounds that accepted 0, 1, 2, ... draft tokens
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """News of one request for its client: tokens in order, and, with the last ones, why it ended.

    `position` is the index of the first of them among the request's generated tokens, so that a client can tell a
    repetition from news. `finish_reason` is None, "stop", "length", "abort" or "error".
    """

    request_id: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stats: RequestStats | None = None
    error: str | None = None


# --- the four records of a round, and one ahead of it -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """A role learns of a request (again): all committed tokens so far, the first `prompt_len` of them the prompt.

    `admission` differs from admission to admission, within an epoch too, so that no draw is made twice.
    """

    request_id: int
    epoch: int
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    admission: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of the last proposal: KV rows of `path` are kept and `token_ids` follow the first `prefix_len`.

    Text from a level of a cascade is provisional: a commit to the level beneath may name a `prefix_len` below the
    length of its text, and then what came behind it is taken back, `path` being empty. `settled_len` tokens of it are
    the target's own and stay; None: all are.
    """

    request_id: int
    epoch: int
    prefix_len: int
    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    settled_len: int | None = None


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Propose for this request, at most so many tokens; zero asks only for its KV to be brought up to date.

    `taken` was read off an `DraftPreview` and is being verified already: nothing more is awaited for this prefix.
    """

    request_id: int
    num_draft_tokens: int
    taken: TokenTree | None = None


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Coordinator to every draft rank: verdicts first, then what to propose next.

    `after` is the round of the role's last batch: a rank that has not seen that one has missed something. What a level
    of a cascade says to the one beneath it is meant for one `epoch` of that role, whose ranks know what was said in it.
    """

    round: int
    admits: tuple[Admit, ...] = ()
    commits: tuple[Commit, ...] = ()
    releases: tuple[int, ...] = ()
    orders: tuple[DraftOrder, ...] = ()
    after: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LevelWork:
    """What one level of a cascade did since it was last asked, and how the level above judged its drafts.

    `spans` are (started, finished) of its work as far as it lies outside the batch that tells of it.
    """

    level: str
    num_passes: int = 0
    busy_s: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """Draft lead to coordinator. `started` and `finished` are CLOCK_MONOTONIC seconds on the drafter's host.

    `num_missing` orders are still being drafted for; another batch follows. `ahead` is the draft-ahead work since the
    last batch, as (started, finished, glued) of its passes, where `glued` says that a pass also read committed text
    exactly again; `levels` tells what the levels of a cascade did since then.
    """

    round: int
    proposals: tuple[Proposal, ...]
    started: float
    finished: float
    num_missing: int = 0
    ahead: tuple[tuple[float, float, bool], ...] = ()
    levels: tuple[LevelWork, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftPreview:
    """What a drafter that works ahead has prepared below the last committed token, for a verdict still to come.

    Siblings of `tree` stand likeliest first. `values[i]` is the log-probability of the path to node i; without them
    a proposal is the likeliest chain, with them the likeliest nodes.
    """

    request_id: int
    epoch: int
    prefix_len: int
    prefix_hash: int
    tree: TokenTree
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftPreviewBatch:
    """Draft lead to coordinator, unasked and before the verdict: a hit then costs no exchange with the drafter.

    One that comes too late is of no use and does no harm.
    """

    previews: tuple[DraftPreview, ...]


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """Feed `num_tokens` of the uncached suffix; if that reaches the root, verify `proposal` (or sample plainly).

    `proposal` is None for the empty proposal. A chunk that does not reach the root yields no verdict.
    """

    request_id: int
    num_tokens: int
    proposal: Proposal | None = None


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """Coordinator to every target rank: what the last verdicts became, then what to verify; `after` as for drafts."""

    round: int
    admits: tuple[Admit, ...] = ()
    commits: tuple[Commit, ...] = ()
    releases: tuple[int, ...] = ()
    items: tuple[VerifyItem, ...] = ()
    after: int = 0


@dataclass(frozen=True, slots=True)
class VerdictBatch:
    """Target lead to coordinator, sent before anything else is done with the result.

    `started` is when the batch was taken up, `committed` when all that it told of the round before was carried out.
    """

    round: int
    verdicts: tuple[Verdict, ...]
    started: float
    finished: float
    num_tokens: int = 0
    committed: float = 0.0


# --- between a client and the coordinator ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: int


@dataclass(frozen=True, slots=True)
class ReportOrder:
    """Ask the coordinator for its counters; `reset` starts a new measuring window, which metrics label `phase`."""

    reset: bool = False
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Counters and, when recorded, spans (lane, name, start, end, arguments) of the window."""

    counters: dict[str, Any]
    spans: tuple[tuple[str, str, float, float, dict[str, object]], ...] = ()
