"""Which tokens a grammar allows at each node of the drafts of a pass, and logits without the others.

Each request with a grammar has a matcher, which follows its committed text; the nodes of a draft are visited from there
and taken back. Both are the host's work, done while a GPU still computes the logits. What the target verifies against
is the masked distribution, so a draft that the grammar rejects is rejected as any other, and tokens do not depend on
drafts. Nodes below a rejected one are left as they are: no path reaches them. A grammar that failed allows nothing,
which ends its request. Knows texts and trees; knows no verification rule.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from actors.grammars.compiler import GrammarCompiler
from actors.protocol.grammar import Grammar
from actors.protocol.messages import MOST_FORCED, TokenTree
from actors.transport.token_bucket import TokenBucket
from parallel.transfers import to_device

if TYPE_CHECKING:
    from llguidance import LLMatcher

_READY_S = 10.0
"""A pass waits so long for a grammar, at most: the first one of a process also reads the tokenizer."""
_WAITING_SHARE = 0.025
"""Share of all time that passes may wait for the grammars of one client, after `_READY_S` at once; without that, a
grammar that is not ready ends its request."""


class MaskedText(Protocol):
    """One sequence of a pass, with logits at every node of its tree: `actors.verification.verifier.VerifyInput`."""

    @property
    def seq_id(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def tree(self) -> TokenTree: ...


class TextMatcher:
    """Follows the generated text of one request."""

    def __init__(self, compiling: Future[LLMatcher], waiting: TokenBucket) -> None:
        self._compiling = compiling
        self._waiting = waiting
        self._num_read = 0
        self._failed = False

    def masks(self, generated: Sequence[int], tree: TokenTree) -> list[bytes | None]:
        """A bit for each token, the lowest of a byte first, at each node of a tree behind the generated text; b""
        allows nothing, None stands for a node that cannot be reached."""
        num_nodes = len(tree.parents)
        matcher = self._at(generated)
        if matcher is None:
            return [b""] * num_nodes
        masks: list[bytes | None] = [None] * num_nodes
        path: list[int] = []  # nodes that the matcher has read
        for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if node and not _allows(masks[parent], token):
                continue
            wanted = list(tree.path_to(node))
            shared = next((i for i, (a, b) in enumerate(zip(path, wanted, strict=False)) if a != b), len(path))
            shared = min(shared, len(wanted))
            matcher.rollback(len(path) - shared)
            missing = [tree.token_ids[one] for one in wanted[shared:]]
            num_read = matcher.try_consume_tokens(missing) if missing else 0
            path = wanted[: shared + num_read]
            if path == wanted:
                masks[node] = matcher.compute_bitmask()
        matcher.rollback(len(path))
        if matcher.is_error():
            self._failed = True
            return [b""] * num_nodes
        return masks

    def forced(self, generated: Sequence[int], token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the only text that may follow `token_ids` behind the generated text; none where several may."""
        matcher = self._at(generated)
        if matcher is None:
            return ()
        num_read = matcher.try_consume_tokens(list(token_ids))
        found = matcher.compute_ff_tokens() if num_read == len(token_ids) and not matcher.is_stopped() else []
        matcher.rollback(num_read)
        return tuple(found[:MOST_FORCED])

    def _at(self, generated: Sequence[int]) -> LLMatcher | None:
        """The matcher behind this text; None if it has failed."""
        if self._failed:
            return None
        try:
            matcher = self._compiled()
        except Exception:  # whatever it is, it ends this request alone
            self._failed = True
            return None
        unread = list(generated[self._num_read :])
        self._failed = bool(unread) and not matcher.consume_tokens(unread)
        self._num_read += len(unread)
        return None if self._failed else matcher

    def _compiled(self) -> LLMatcher:
        if self._compiling.done():
            return self._compiling.result()
        started = time.monotonic()
        try:
            return self._compiling.result(0.0 if self._waiting.wait_s(started) else _READY_S)
        finally:
            self._waiting.spend(time.monotonic() - started)

    def close(self) -> None:
        self._compiling.cancel()


class GrammarMasks:
    """The grammars of a role's requests. What their compilation delays passes by is counted for each client."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, TextMatcher] = {}
        self._waiting: dict[int, TokenBucket] = {}  # by scope

    def open(self, request_id: int, grammar: Grammar | None, scope: int = 0) -> None:
        """A request of the client with this scope arrived, or arrived again; its grammar is compiled beside the
        passes."""
        self.close(request_id)
        if grammar is not None:
            if scope not in self._waiting:
                self._waiting[scope] = TokenBucket(_WAITING_SHARE, _READY_S, time.monotonic())
            self._matchers[request_id] = TextMatcher(self._compiler.start(grammar), self._waiting[scope])

    def close(self, request_id: int) -> None:
        if (matcher := self._matchers.pop(request_id, None)) is not None:
            matcher.close()

    def clear(self) -> None:
        for request_id in list(self._matchers):
            self.close(request_id)

    def forced(self, text: MaskedText, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that a text's grammar leaves no other text for, once it goes on with `token_ids`."""
        matcher = self._matchers.get(text.seq_id)
        return () if matcher is None else matcher.forced(text.token_ids[text.prompt_len :], token_ids)

    def masked(self, inputs: Sequence[MaskedText], logits: Tensor) -> Tensor:
        """Logits [N, V] of all nodes of the inputs, where what a grammar does not allow is -inf; the same tensor if
        none of them has a grammar."""
        rows, masks = list[int](), list[bytes]()
        starts = accumulate((len(one.tree.parents) for one in inputs), initial=0)
        for one, start in zip(inputs, starts, strict=False):
            matcher = self._matchers.get(one.seq_id)
            if matcher is not None:
                own = matcher.masks(one.token_ids[one.prompt_len :], one.tree)
                reached = [(start + node, mask) for node, mask in enumerate(own) if mask is not None]
                rows += [row for row, _ in reached]
                masks += [mask for _, mask in reached]
        return _without_banned(logits, rows, masks) if rows else logits


def _allows(mask: bytes | None, token: int) -> bool:
    """A matcher that is given a token which its tokenizer does not have, as padded models do, fails for good."""
    return mask is not None and token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _without_banned(logits: Tensor, rows: Sequence[int], masks: Sequence[bytes]) -> Tensor:
    """Logits where those `rows` have -inf at every token whose bit is not set, or that its mask does not name."""
    vocab_size = logits.shape[1]
    packed = np.zeros((len(rows), -(-vocab_size // 8)), dtype=np.uint8)
    for own, mask in zip(packed, masks, strict=True):
        bits = np.frombuffer(mask, dtype=np.uint8)[: len(own)]
        own[: len(bits)] = bits
    where, bits = to_device([np.array(rows), packed], logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = (bits[:, :, None] >> places).bitwise_and_(1).reshape(len(rows), -1)[:, :vocab_size] == 0
    return logits.index_copy(0, where, logits.index_select(0, where).masked_fill_(banned, -torch.inf))
