"""The records that clients, the coordinator, the target and the drafter exchange in a round.

Standard library only, every record frozen; none holds a tensor. A record that arrives late, twice or out of order is
recognised by (request, epoch, prefix_len, prefix_hash) and costs speed, never correctness.

Glossary
    target          the model whose output distribution is preserved
    drafter         an algorithm that proposes tokens; it need not have a model
    committed       tokens that no longer change; `prefix_len` is their count
    root            node 0 of a token tree: the last committed token, whose KV the target has not computed yet
    token tree      `token_ids` + `parents`; a chain is the degenerate tree, the empty proposal is the root alone
    path            accepted node indices in order, root excluded
    accepted        draft tokens that were kept (the bonus is not one of them)
    draft           what a drafter returns: a token tree
    proposal        a draft for one request, with the prefix it assumes
    verdict         the target's answer to a proposal: the accepted path and its own tokens after it, which for one that
                    writes token by token are one: a correction or, after a full path, a bonus
    preview         the drafter's whole tree, sent before the verdict
    lead            rank 0 of a role; only the lead sends records of a round
    acceptance length   tokens a round emits = accepted + 1 (the convention of vLLM)
    uncached suffix committed tokens whose KV is missing, of any length; the root is always its last token
    epoch           of a request: counts its preemptions, including those by a lost target; older records are stale
    round           from one verdict of the target to the next; `round` in a record numbers the batches
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from itertools import accumulate, groupby
from math import inf, isfinite
from operator import lt
from typing import Any

from actors.protocol.grammar import Grammar
from actors.protocol.logprobs import MOST_LOGPROBS, Logprobs, PromptLogprobs
from actors.protocol.membership import Weights
from actors.protocol.sampling_params import SamplingParams
from parallel.ranges import LARGEST

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


NO_TOKEN = -1
"""Stands for a token drawn from an impossible distribution: a logit is NaN or infinite, or every token is ruled out.
To a rule it is a token like any other, so that rules stay exact; no record has it among a request's tokens."""


def check_tokens(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError for a token that the target does not have."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        token = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name}: names token {token}, but the target has {vocab_size} tokens")


MOST_PRIORITY = 100
"""The largest of a request, and the least is its negative: it bounds the wait for others that came later."""

LONGEST_SALT = 128
"""Characters of a `cache_salt`."""
SCOPE_BYTES = 7
"""Bytes of the number of a client, or of a client and a `cache_salt`."""

NO_TOKEN_FOLLOWS = "target: no token can follow"
"""How the error of a request begins whose next token has no probability, whatever it is."""

PLAIN_DECODING = "none"
"""The drafter's name of a request that is decoded plainly, whatever the engine's pipeline is."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens in topological order: `parents[i] < i`, `parents[0] == -1`; siblings are in the order they are tested."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def root(token: int) -> TokenTree:
        """The empty proposal, which decodes plainly."""
        return TokenTree((token,), (-1,))

    @staticmethod
    def chain(root: int, draft: tuple[int, ...] | list[int]) -> TokenTree:
        return TokenTree((root, *draft), tuple(range(-1, len(draft))))

    @property
    def num_draft_tokens(self) -> int:
        return len(self.token_ids) - 1

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """Distance of the farthest node from the root."""
        return len(self.parents) - 1 if self.is_chain else max(self.depths())

    def depths(self) -> list[int]:
        """Distance of every node from the root."""
        if self.is_chain:
            return [*range(len(self.parents))]
        depths = [0] * len(self.parents)
        for i in range(1, len(self.parents)):
            depths[i] = depths[self.parents[i]] + 1
        return depths

    def children(self) -> list[list[int]]:
        """Child indices of every node, in test order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for i in range(1, len(self.parents)):
            children[self.parents[i]].append(i)
        return children

    def path_to(self, node: int) -> list[int]:
        """Node indices from the first node below the root to `node`; empty for the root."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def agreed_path(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The nodes below the root that a walk down by these tokens finds."""
        children, path = self.children(), list[int]()
        for token in token_ids:
            below = children[path[-1] if path else 0]
            child = next((child for child in below if self.token_ids[child] == token), None)
            if child is None:
                break
            path.append(child)
        return tuple(path)

    def agreed_depth(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens a walk down from the root finds."""
        if not self.is_chain:
            return len(self.agreed_path(token_ids))
        agreed = 0
        for own, token in zip(self.token_ids[1:], token_ids, strict=False):
            if own != token:
                break
            agreed += 1
        return agreed

    def has_path(self, nodes: tuple[int, ...]) -> bool:
        """Whether each of these nodes is a child of the one before it, the first of them of the root."""
        parents = self.parents
        if not nodes or not 0 < min(nodes) <= max(nodes) < len(parents):
            return not nodes
        return [*map(parents.__getitem__, nodes)] == [0, *nodes[:-1]]

    def check(self) -> None:
        """Raise ValueError unless this is a tree in topological order."""
        parents, num_nodes = self.parents, len(self.token_ids)
        if num_nodes and parents == tuple(range(-1, num_nodes - 1)):
            return  # a chain
        if not num_nodes or num_nodes != len(parents) or parents[0] != -1:
            raise ValueError("a token tree needs a root and one parent per node")
        if min(parents[1:], default=0) < 0 or not all(map(lt, parents, range(num_nodes))):
            node = next(node for node in range(1, num_nodes) if not 0 <= parents[node] < node)
            raise ValueError(f"node {node} of the token tree names parent {parents[node]}")


class SamplingKind(IntEnum):
    """How a node's token was drawn; decides which verification rules are exact for it."""

    ROOT = 0
    DETERMINISTIC = 1  # chosen without randomness: top-k, n-gram, beams; its distribution is one-hot
    COUPLED = 2  # arg-max under the noise shared with the target (any rule but `coupled` reads it as DETERMINISTIC)
    IID = 3  # drawn from the distribution of its parent context, siblings independent, duplicates kept
    WITHOUT_REPLACEMENT = 4  # drawn from it with the earlier siblings removed and the rest renormalised


_KINDS = frozenset(SamplingKind)
_ROUNDING = 1e-3
"""Amount by which a probability that was computed in half precision may exceed one."""
_LONGEST_LEVEL = 64
GRAMMAR = "grammar"
"""Named as the proposer of what a grammar forces."""


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A draft distribution on its support: `probs` sum to one, and tokens were drawn from exactly these probabilities.

    Truncating to the top m and sampling from the truncated distribution keeps every rejection rule exact.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's guess for one request, and the prefix it assumes. Entry i of a field by node is of node i."""

    request_id: int
    epoch: int
    prefix_len: int
    prefix_hash: int
    tree: TokenTree
    sampling_kinds: tuple[int, ...] = ()
    """How each node was drawn; may be empty under the coupled rule."""
    distributions: tuple[SparseDistribution | None, ...] = ()
    """The distribution from which the children of each node were drawn, None where they were not drawn at random; may
    be empty under the coupled rule."""
    prepared: bool | None = None
    """Whether the draft was there before the verdict that it follows, a branch hit; None if the drafter does not work
    ahead."""
    parts: tuple[tuple[str, int], ...] = ()
    """(Level, number of nodes that it drafted) of a cascade, in node order; empty without levels."""
    is_forced: bool = False
    """It was made of a grammar, so its path says nothing of the drafter."""

    def proposers(self, path: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """The sources of the nodes of a path, as runs of (name, number of nodes): levels by their names, what a grammar
        forced `GRAMMAR`, "" where nothing is known."""
        if self.is_forced:
            return ((GRAMMAR, len(path)),)
        if not self.parts:
            return (("", len(path)),) if path else ()
        ends = [*accumulate([count for _, count in self.parts])]
        names = [self.parts[part][0] if (part := bisect_left(ends, node)) < len(ends) else "" for node in path]
        return tuple([(name, len([*run])) for name, run in groupby(names)])

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless the tree is one of this vocabulary, and what is given for its nodes fits it."""
        self.tree.check()
        check_tokens("tree", self.tree.token_ids, vocab_size)
        num_nodes = len(self.tree.token_ids)
        if len(self.sampling_kinds) not in (0, num_nodes) or len(self.distributions) not in (0, num_nodes):
            raise ValueError("sampling_kinds, distributions: must be one per node")
        if not _KINDS.issuperset(self.sampling_kinds):
            raise ValueError(f"sampling_kinds: {self.sampling_kinds} names one that does not exist")
        num_named = 0
        for name, count in self.parts:
            num_named += count
            if count < 0 or num_named >= num_nodes:
                raise ValueError("parts: must not be of more nodes than there are")
            if not name.isprintable() or len(name) > _LONGEST_LEVEL:
                raise ValueError(f"parts: a name must be at most {_LONGEST_LEVEL} printable characters")
        for distribution in filter(None, self.distributions):
            check_tokens("distributions", distribution.token_ids, vocab_size)
            if len(distribution.probs) != len(distribution.token_ids):
                raise ValueError("distributions: must give one probability per token")
            if not all(0 <= probability <= 1 + _ROUNDING for probability in distribution.probs):
                raise ValueError("distributions: a probability is not between 0 and 1")

    @staticmethod
    def deterministic(request_id: int, epoch: int, prefix_len: int, prefix_hash: int, tree: TokenTree) -> Proposal:
        """A prepared tree whose tokens were chosen without randomness."""
        num_nodes = len(tree.token_ids)
        kinds = (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * (num_nodes - 1))
        return Proposal(request_id, epoch, prefix_len, prefix_hash, tree, kinds, (None,) * num_nodes, prepared=True)


MOST_FORCED = 64
"""Tokens that a verdict may name as forced."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer to a proposal: the accepted `path`, and the target's own tokens after it."""

    request_id: int
    epoch: int
    prefix_len: int
    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The target's own: one where it writes token by token; where it writes in blocks none yet, or several."""
    none_follows: bool = False
    """The distribution after all of them is impossible: the request ends with an error unless one of them ends it."""
    logprobs: Logprobs | None = None
    """Those of path and tokens, if the request asks for them."""
    forced: tuple[int, ...] = ()
    """The only text that the request's grammar allows next, `MOST_FORCED` tokens at most: a draft without a pass."""


_OF_ONE_ORDER = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "min_tokens",
    "no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
"""Fields of `SamplingParams` that say of a token what the ones before it allow."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it. A client that misses tokens sends the request again, with those it has; a
    repetition does no harm. Positions, and with them noise, count prompt and generated tokens."""

    request_id: int
    """A number of the client's own; the coordinator replaces it by one of its own."""
    prompt: tuple[int, ...]
    """What the decoder of an encoder-decoder starts with."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafter: str | None = None
    """The name of one of the engine's drafters or `PLAIN_DECODING`; None leaves the choice to the engine."""
    generated: tuple[int, ...] = ()
    """Tokens that the client has already."""
    scope: int = 0
    """The same number for all requests of a client, set by the coordinator. What drafters remember, and KV rows, are
    shared within one scope and `cache_salt`."""
    num_draft_tokens: int | None = None
    """The longest draft for it; None: the engine's own bound alone."""
    reference: tuple[int, ...] = ()
    """A text that the output may follow, from which drafters that copy may draft."""
    priority: int = 0
    """While requests of a client wait, those of lower priority come first."""
    expected_tokens: int = 0
    """Tokens that will be generated, by estimate; 0: not known. While requests of a client wait, longer ones come
    first, since a batch ends with its longest text."""
    grammar: Grammar | None = None
    """What is generated follows it, up to the end token with which it ends."""
    cache_salt: str = ""
    logprobs: int | None = None
    """Asks for the log-probability of each generated token and of so many of the likeliest there; None: for none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    source: tuple[int, ...] = ()
    """The text that an encoder reads; empty for a target without one."""

    @property
    def speculates(self) -> bool:
        return self.drafter != PLAIN_DECODING

    @property
    def rules_out(self) -> bool:
        """Whether it says of any token that it must not come."""
        asked = self.sampling
        lists = asked.bad_words, asked.logit_bias, asked.stop_token_ids, asked.allowed_token_ids
        return bool(self.grammar or asked.min_tokens or any(lists))

    @property
    def memory_scope(self) -> int:
        """Another number for every client and `cache_salt`."""
        if not self.cache_salt:
            return self.scope
        salted = f"{self.scope}:{self.cache_salt}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(salted, digest_size=SCOPE_BYTES).digest())

    def check(
        self,
        vocab_size: int,
        max_model_len: int = LARGEST,
        drafters: Collection[str] | None = None,
        max_source_len: int | None = None,
    ) -> None:
        """Raise ValueError naming the first field that is out of range, or names a token the target does not have or a
        drafter that is none of these (None: any is). Sizes are compared before tokens are looked through."""
        if drafters is not None and self.drafter not in (None, PLAIN_DECODING, *drafters):
            names = ", ".join((*drafters, PLAIN_DECODING))
            raise ValueError(f"drafter: this engine has no {self.drafter!r:.40}; name one of {names}, or leave it out")
        if not 0 <= self.request_id < 1 << 63:
            raise ValueError(f"request_id: {self.request_id} must be 0 or above and fit 63 bits")
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens <= LARGEST:
            remedy = f"must be at least 1; for none choose the drafter {PLAIN_DECODING}"
            raise ValueError(f"num_draft_tokens: {self.num_draft_tokens} {remedy}")
        if abs(self.priority) > MOST_PRIORITY:
            raise ValueError(f"priority: {self.priority} must be between {-MOST_PRIORITY} and {MOST_PRIORITY}")
        if not 0 <= self.expected_tokens <= LARGEST:
            remedy = f"must be 0 (not known) or above, at most {LARGEST}"
            raise ValueError(f"expected_tokens: {self.expected_tokens} {remedy}")
        if len(self.cache_salt) > LONGEST_SALT:
            raise ValueError(f"cache_salt: has {len(self.cache_salt)} characters; give at most {LONGEST_SALT}")
        self._check_logprobs()
        self.sampling.check()
        if self.grammar is not None:
            self.grammar.check()
            if self.sampling.ignore_eos:
                raise ValueError("sampling.ignore_eos: a grammar ends with an end token; leave one of them out")
        if len(self.generated) > self.sampling.max_tokens:
            remedy = f"give at most sampling.max_tokens={self.sampling.max_tokens}"
            raise ValueError(f"generated: has {len(self.generated)} tokens; {remedy}")
        if (misfit := self.misfit(max_model_len, max_source_len)) is not None:
            raise ValueError(misfit)
        named = (
            ("source", self.source),
            ("prompt", self.prompt),
            ("generated", self.generated),
            ("reference", self.reference),
            ("sampling.logit_bias", [token for token, _ in self.sampling.logit_bias]),
            ("sampling.bad_words", [token for word in self.sampling.bad_words for token in word]),
            ("sampling.allowed_token_ids", self.sampling.allowed_token_ids),
            ("sampling.stop_token_ids", self.sampling.stop_token_ids),
            ("sampling.forced_bos_token_id, forced_eos_token_id", self.sampling.forced_token_ids),
        )
        for name, token_ids in named:
            check_tokens(name, token_ids, vocab_size)

    def _check_logprobs(self) -> None:
        for name, k in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if k is not None and not 0 <= k <= MOST_LOGPROBS:
                raise ValueError(f"{name}: {k} must be between 0 and {MOST_LOGPROBS}; for none leave it out")
        if self.source and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: what an encoder reads has none; leave it out")

    def misfit(self, max_model_len: int, max_source_len: int | None) -> str | None:
        """One line why a context of so many tokens cannot hold its text, or an encoder its source (0: there is none,
        None: not known), or None; looks at lengths only."""
        if max_source_len is not None and (why := self._source_misfit(max_source_len)) is not None:
            return why
        size, remedy = len(self.prompt), "shorten it or raise target.max_model_len"
        if not size:
            return "prompt: is empty; give at least one token"
        if size >= max_model_len:
            return f"prompt: {size} tokens do not fit the context of {max_model_len}; {remedy}"
        if (size := size + len(self.generated)) > max_model_len:
            return f"generated: {size} tokens with the prompt do not fit the context of {max_model_len}; {remedy}"
        if len(self.reference) > max_model_len:
            return f"reference: {len(self.reference)} tokens do not fit the context of {max_model_len}; {remedy}"
        return None

    def block_misfit(self) -> str | None:
        """One line what of it a target that fills blocks in an order of its own cannot do, or None: all that follows
        from the text before a token."""
        plain, sampling = SamplingParams(), self.sampling
        asked = [f"sampling.{name}" for name in _OF_ONE_ORDER if getattr(sampling, name) != getattr(plain, name)]
        asked += [name for name in ("grammar", "logprobs", "prompt_logprobs") if getattr(self, name) is not None]
        if not asked:
            return None
        return f"{asked[0]}: is for targets that write token by token, and this one fills masks; leave it out"

    def _source_misfit(self, max_source_len: int) -> str | None:
        if self.source and not max_source_len:
            return "source: this target has no encoder; give the text as the prompt"
        if max_source_len and not self.source:
            return "source: is empty; give at least one token"
        if len(self.source) > max_source_len:
            return f"source: {len(self.source)} tokens do not fit the encoder's {max_source_len}; shorten it"
        return None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Speculation of one request; names as in vLLM's per-request metrics."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()  # rounds that accepted 0, 1, 2, ... draft tokens
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # leading tokens of the prompt whose KV rows the target had


@dataclass(frozen=True, slots=True)
class Tokens:
    """Part of `Outputs`: tokens of one request in order, and, with the last ones, why it ended."""

    request_id: int
    position: int
    """Index of the first of them among the generated tokens; a client recognises a repetition by it."""
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """None, "stop", "length", "abort", "error", or "refused": its client has too many requests in flight."""
    stats: RequestStats | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    """Those of these tokens, where the request asks for them."""
    prompt_logprobs: Logprobs | None = None
    """Those of all tokens of the prompt but the first, which come with the first tokens."""
    proposers: tuple[tuple[str, int], ...] = ()
    """Who drafted the first of them, as `Proposal.proposers` says it; the others are the target's own."""
    versions: tuple[tuple[int, int], ...] = ()
    """(Index among the generated tokens, version of the weights), in order, each of the tokens from there on; those
    before have version 0."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Coordinator to a client: what a round brought its requests, in one record however many there are."""

    tokens: tuple[Tokens, ...]


# --- what a drafter may learn from the target ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The `k` likeliest next tokens after each of n rows of a verifying pass, for a drafter that learns from them.

    `contexts` [n, 2] are the token before a row's own, -1 if there is none, and the row's own; `token_ids` [n, k] the
    likeliest first and `probs` [n, k] are the model's, before sampling parameters apply. Arrays are bytes, little
    endian: int32, int32 and float32. `spans` are (request, length of its text, number of rows) in the order of the
    rows; where a proposal was verified, the last rows of its request are those of its nodes, the root first. `scopes`
    are those of the requests of `spans`; empty: all 0.
    """

    k: int
    contexts: bytes
    token_ids: bytes
    probs: bytes
    spans: tuple[tuple[int, int, int], ...]
    scopes: tuple[int, ...] = ()

    def by_scope(self) -> list[tuple[int, TopTokens]]:
        """(scope, its rows) of the requests of each client."""
        if len(set(self.scopes)) < 2:
            return [(self.scopes[0] if self.scopes else 0, self)]
        rows: dict[int, list[slice]] = {}
        spans: dict[int, list[tuple[int, int, int]]] = {}
        start = 0
        for scope, span in zip(self.scopes, self.spans, strict=True):
            rows.setdefault(scope, []).append(slice(start, start := start + span[2]))
            spans.setdefault(scope, []).append(span)
        return [(scope, self._of_rows(rows[scope], tuple(spans[scope]))) for scope in rows]

    def _of_rows(self, rows: list[slice], spans: tuple[tuple[int, int, int], ...]) -> TopTokens:
        def cut(array: bytes, size: int) -> bytes:
            return b"".join([array[one.start * size : one.stop * size] for one in rows])

        cell = 4 * self.k
        return TopTokens(self.k, cut(self.contexts, 8), cut(self.token_ids, cell), cut(self.probs, cell), spans)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless the arrays fit together and hold tokens of this vocabulary and probabilities."""
        num_rows, cell = len(self.contexts) // 8, 4 * self.k
        sizes = len(self.contexts), len(self.token_ids), len(self.probs)
        if self.k < 1 or sizes != (8 * num_rows, cell * num_rows, cell * num_rows):
            raise ValueError(f"top tokens: {sizes} bytes are not rows of {self.k} tokens")
        if min((size for *_, size in self.spans), default=0) < 0 or sum(size for *_, size in self.spans) != num_rows:
            raise ValueError(f"top tokens: {self.spans} do not divide {num_rows} rows")
        if len(self.scopes) not in (0, len(self.spans)):
            raise ValueError(f"top tokens: {len(self.scopes)} scopes are not one for each of {len(self.spans)} spans")
        if num_rows:
            contexts, token_ids = (memoryview(part).cast("i").tolist() for part in (self.contexts, self.token_ids))
            probs = memoryview(self.probs).cast("f").tolist()
            check_tokens("top tokens", [*contexts[1::2], *token_ids], vocab_size)
            check_tokens("top tokens", [token for token in contexts[::2] if token != NO_TOKEN], vocab_size)
            if not (isfinite(sum(probs)) and 0 <= min(probs) <= max(probs) <= 1 + _ROUNDING):
                raise ValueError("top tokens: a probability is not between 0 and 1")


@dataclass(frozen=True, slots=True)
class FeatureExport:
    """What a tensor holds that the target's lead sends over a bridge: hidden states at committed tokens.

    It is the `number`-th of this bridge, [rows, size] of type `dtype`. `spans` are (request, first position, number of
    rows) in the order of the rows; the request is None for rows that are not wanted any more.
    """

    bridge: int
    number: int
    size: int
    dtype: str
    spans: tuple[tuple[int | None, int, int], ...]

    @property
    def num_rows(self) -> int:
        return sum([count for *_, count in self.spans])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.size * _BYTES[self.dtype]

    def check(self, most_rows: int) -> None:
        """Raise ValueError unless it is a tensor of at most so many rows."""
        if self.dtype not in _BYTES or not 0 < self.size <= _WIDEST_FEATURES or self.number < 1:
            raise ValueError(f"export: there is no tensor {self.number} of {self.size} {self.dtype} a row")
        if min((min(start, count - 1) for _, start, count in self.spans), default=-1) < 0 or self.num_rows > most_rows:
            raise ValueError(f"export: {self.spans} are not of a pass of {most_rows} rows")


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WIDEST_FEATURES = 1 << 20


# --- the four records of a round, and one ahead of it -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Open a request at a role, at first or again. Fields that a `Request` has too are those of the request."""

    request_id: int
    epoch: int
    token_ids: tuple[int, ...]
    """Its committed tokens, the first `prompt_len` of them the prompt."""
    prompt_len: int
    sampling: SamplingParams
    admission: int = 0
    """Another number for every admission of the request, within an epoch too, so that no draw is made twice."""
    drafter: str | None = None
    scope: int = 0
    reference: tuple[int, ...] = ()
    grammar: Grammar | None = None
    cache_salt: str | None = None
    """KV rows are shared between requests with the same `scope` and `cache_salt`; None: not with any."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """None if they are known already."""
    source: tuple[int, ...] = ()
    memory_scope: int = 0
    """What drafters remember of ended requests is shared within it."""

    @property
    def speculates(self) -> bool:
        return self.drafter != PLAIN_DECODING

    @property
    def rows_scope(self) -> tuple[int, str] | None:
        """That of its text in a prefix tree."""
        return None if self.cache_salt is None else (self.scope, self.cache_salt)


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of the last proposal: KV rows of `path` are kept and `token_ids` follow the first `prefix_len`.

    Text from a level of a cascade is provisional: a commit to the level below may name a `prefix_len` smaller than the
    length of its text; then the tokens after it are dropped, and `path` is empty. The first `settled_len` tokens are
    the target's own and stay; None: all of them.
    """

    request_id: int
    epoch: int
    prefix_len: int
    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    settled_len: int | None = None


MOST_READ_WITH_DRAFT = 32
"""Tokens of a text that a drafter reads along with a draft, as a part of its price; a longer rest is read, and counted,
apart."""
FAR_REACH = 64
"""Tokens that a drafter whose previews stream works ahead of a proposal, while another one is worth it: those of all
the verdicts that come until it hears of this one, and of the draft after them."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What the coordinator has measured of rounds, for a drafter to weigh its drafts against; 0: not known."""

    round_s: float = 0.0
    """Seconds of a round without drafts."""
    row_s: float = 0.0
    """What a row more, of a draft token, adds to the target's pass."""
    least_chance: float = 0.0
    """A draft token that is accepted less often is not worth a row of the target's pass."""

    def check(self) -> None:
        """Raise a ValueError unless all are finite and none is negative."""
        for number in (self.round_s, self.row_s, self.least_chance):
            if not 0 <= number < inf:
                raise ValueError(f"costs: {number} is not a number of 0 or more")


UNKNOWN_COSTS = MeasuredCosts()


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Draft for this request at most so many tokens; 0 only brings its KV up to date.

    `prefetched` was read off a `DraftPreview` and is being verified already: no proposal is expected for this prefix.
    """

    request_id: int
    num_draft_tokens: int
    prefetched: TokenTree | None = None


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Coordinator to every draft rank: results of the last drafts, then orders for the next."""

    round: int
    admits: tuple[Admit, ...] = ()
    commits: tuple[Commit, ...] = ()
    releases: tuple[int, ...] = ()
    orders: tuple[DraftOrder, ...] = ()
    after: int = 0
    """The round of the role's previous batch: a rank that has not seen that one has missed a batch."""
    epoch: int = 0
    """The epoch of the role, in a batch from a level of a cascade to the level below."""
    works_ahead: bool = True
    """Whether a drafter that can may work until the next batch."""
    top_tokens: tuple[TopTokens, ...] = ()
    """Those of the passes since the last batch, of any requests, if the drafter asks for them."""
    exports: tuple[FeatureExport, ...] = ()
    """The tensors that the target has sent to rank 0 since the last batch, in order."""
    seat: int = 0
    """The seat of the role that it is for, where several pools lend their drafters."""
    streams: bool = False
    """Whether the drafter shows what it has prepared all the time, for any later verdict."""
    costs: MeasuredCosts = UNKNOWN_COSTS
    unverified: bool = False
    """No pass verifies these drafts, which are compared with the tokens that follow: what takes a pass makes none."""


@dataclass(frozen=True, slots=True)
class LevelWork:
    """The work of one level of a cascade since its last `LevelWork`, and the level above's verdicts on its drafts.

    `spans` are (started, finished) of its work outside the batch that carries this record.
    """

    level: str
    num_passes: int = 0
    busy_s: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LearningWork:
    """What a drafter that learns while it serves has learned so far.

    `version` counts the weights it has served, adapted ones now if `is_served`. `num_held` positions are still to be
    learned. The shares are of recent positions at which a draft token of adapted and of shipped weights is accepted.
    `busy_s` were spent, by which answers were delayed by `delayed_s`.
    """

    version: int
    is_served: bool
    num_steps: int
    num_positions: int
    num_held: int
    num_rollbacks: int
    loss: float
    adapted_share: float
    shipped_share: float
    busy_s: float = 0.0
    delayed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """Draft lead to coordinator. Times are CLOCK_MONOTONIC seconds on the drafter's host."""

    round: int
    proposals: tuple[Proposal, ...]
    started: float
    finished: float
    num_missing: int = 0
    """Orders that are still being drafted for; another batch follows."""
    ahead: tuple[tuple[float, float, bool], ...] = ()
    """(Started, finished, refreshed) of the passes of draft-ahead since the last batch; a refreshed pass also fed
    committed text again, to make its KV rows exact."""
    levels: tuple[LevelWork, ...] = ()
    """The work of the levels of a cascade since the last batch."""
    imported: tuple[float, float] | None = None
    """(Started, finished) of the receipt of the order's tensors."""
    learning: LearningWork | None = None
    """All that was learned so far."""
    read_s: float = 0.0
    """Part of the time between `started` and `finished` in which text that the drafter had missed was read."""


@dataclass(frozen=True, slots=True)
class DraftPreview:
    """The tree that draft-ahead has prepared after the last committed token, for a verdict still to come.

    Siblings of `tree` are in order of likelihood. `values[i]` is the log-probability of the path to node i; without
    values a proposal is the likeliest chain, with them the likeliest nodes.
    """

    request_id: int
    epoch: int
    prefix_len: int
    prefix_hash: int
    tree: TokenTree
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftPreviewBatch:
    """Draft lead to coordinator, before the verdict: a hit then costs no exchange with the drafter.

    A preview that arrives after the verdict is ignored, but for those that stream (`DraftBatch.streams`), which are
    for any later verdict.
    """

    previews: tuple[DraftPreview, ...]


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """Feed `num_tokens` of the uncached suffix; if that reaches the root, verify `proposal` (or sample plainly).

    `proposal` is None for the empty proposal. A chunk that does not reach the root yields no verdict. An attached
    drafter then drafts at most `num_draft_tokens` after the verdict, or only brings its state up to the text
    (`reads_text`).
    """

    request_id: int
    num_tokens: int
    proposal: Proposal | None = None
    num_draft_tokens: int = 0
    reads_text: bool = False


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """Coordinator to every target rank: commits of the last verdicts, then what to verify."""

    round: int
    admits: tuple[Admit, ...] = ()
    commits: tuple[Commit, ...] = ()
    releases: tuple[int, ...] = ()
    items: tuple[VerifyItem, ...] = ()
    after: int = 0
    """The round of the previous batch, as in `DraftBatch`."""
    may_draft: bool = True
    """Whether a request of the batch allows speculation, so that a drafter may learn from its rows."""
    bridge: int = 0
    """The bridge over which hidden states of requests that speculate are sent to the drafter; 0: none are."""
    num_received: int = 0
    """Tensors of this bridge that have arrived: the first ones."""
    costs: MeasuredCosts = UNKNOWN_COSTS
    """Those for an attached drafter."""
    unverified: bool = False
    """Whether an attached drafter's drafts are, as in `DraftBatch`."""
    weights: Weights | None = None
    """A batch with weights has no items: it releases all requests and rows, and later passes are of these weights."""


@dataclass(frozen=True, slots=True)
class VerdictBatch:
    """Target lead to coordinator, sent as soon as the verdicts are known. Times are CLOCK_MONOTONIC seconds there."""

    round: int
    verdicts: tuple[Verdict, ...]
    started: float
    """When work on the batch began."""
    finished: float
    """When the verdicts were known, and an attached drafter began to draft."""
    num_tokens: int = 0
    """Rows of the pass."""
    committed: float = 0.0
    """When the commits of the round before were done."""
    top_tokens: TopTokens | None = None
    """Those of all its rows, if the drafter asks for them."""
    drafts: ProposalBatch | None = None
    """Those of an attached drafter, for the prefixes to which the verdicts lead."""
    drafts_follow: bool = False
    """The drafter reads text first: the verdicts leave alone, and its drafts in a further batch of this round, which
    has no verdicts."""
    follows_verdicts: bool = False
    """It is that further batch."""
    export: FeatureExport | None = None
    """What this batch sends over the bridge that it was given."""
    exported: tuple[float, float] | None = None
    """(Started, finished) of the sending for an earlier batch."""
    hits: tuple[tuple[int, int], ...] = ()
    """(Request, number of leading tokens) of the admitted requests for whose first tokens the target had KV rows."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Those of the prompts that it has read, of requests that ask for them."""
    refusal: str = ""
    """One line why the `weights` of its batch were not taken, on any rank; "": they were."""
    guesses: tuple[int, int] = (0, 0)
    """States of blocks that a target which fills masks guessed, and the number of them that it accepted."""
    ran_ahead: bool = False
    """The pass was made before its batch came. `started` is later then than it began, by the wait for the batch, so
    that the time to `finished` is that of the work."""
    dropped_s: float = 0.0
    """What a pass took that was made for another batch than came."""

    @property
    def left_at(self) -> float:
        """The time at which the lead sent it."""
        return self.finished if self.drafts is None else self.drafts.finished


# --- between a client and the coordinator ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request at once."""

    request_id: int


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """The owner of the engine: serve these weights from the next round on. Answered by `WeightsUpdated`."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """Tells the owner that the target serves weights of this version, or goes on with those it had, and why in a line:
    the checkpoint is refused or, if `is_lost`, a rank of the target was lost."""

    version: int
    refusal: str = ""
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class ReportOrder:
    """Ask the coordinator for its counters; `reset` starts a new measuring window, which metrics label `phase`. Without
    `spans` the answer is small."""

    reset: bool = False
    phase: str = ""
    spans: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """Counters and, when recorded, spans (lane, name, start, end, arguments) of the window. The counters hold the
    present load too, as `Load`."""

    counters: dict[str, Any]
    spans: tuple[tuple[str, str, float, float, dict[str, object]], ...] = ()
