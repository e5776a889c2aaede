"""One level of a cascade: a model that drafts by verifying the drafts of a cheaper level, with the target's own code.

    target  <-  CascadeDrafter(model)  <-  CascadeDrafter(smaller model)  <-  n-gram

Vertically a level orders drafts from its child level, verifies them, adds a token of its own and orders again, until it
has the draft tokens that its parent ordered; horizontally the child adds a `tail` after the level's own tokens. To its
child a level is a target whose text may be taken back, to its parent an ordinary drafter, so levels nest to any depth.
A level whose child is lost drafts by itself, token by token. What a level hands up is a chain, or a tree: the chain
with runners-up of its tokens. A level of length 0 forwards its child's drafts, as a tail
after no tokens of its own.

Under the coupled rule nothing more is needed. Under a ratio rule a token that was accepted, recovered or added follows
this level's own distribution m, whatever the child drew from; m, cut to its likeliest tokens and verified against
exactly so, is the distribution that travels upwards, and never the child's. Whether a further token is drafted depends
on counts only, never on a token's value.

Sources: Chen et al., Cascade Speculative Drafting (arXiv 2312.11462); Spector and Re, Staged Speculative Decoding
(2308.04623); run-ahead between levels: PipeSpec (2505.01572).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from actors.drafters.cascade.child import ChildLevel
from actors.drafters.cascade.draft_lengths import LengthControl, PassedLengths
from actors.drafters.cascade.level_stats import LevelStatsRecorder
from actors.drafters.cascade.request_state import RequestState
from actors.drafters.cascade.runners_up import best_runners_up, drawn_runners_up, num_own, with_siblings
from actors.drafters.config import ModelOptions
from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import Capabilities, Context, Draft
from actors.drafters.model.prefill import prefill
from actors.drafters.path_tree import merge_trees
from actors.options import INDEPENDENT_ONLY
from actors.protocol.messages import Commit, LevelWork, Proposal, SamplingKind, TokenTree
from actors.sampling.logits import is_greedy
from actors.sampling.noise import NoiseStream, noise_key
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.top_tokens import TopTokensReader
from actors.verification.verifier import Verifier, VerifyInput, VerifyResult
from parallel.runtime.interface import Runner
from parallel.self_speculation.runner import SelfDraftRunner

_RULES_OF_LEVELS = {"kseq": "rejection", "transport": "rejection", "block": "traversal"}
"""A level may verify by any exact rule: the first two are not exact for the draws of lookups and of levels, and what a
level below proposes may branch, where traversal is what block verification is on a chain."""


@dataclass(frozen=True, slots=True)
class LevelSpec:
    """The place of a level in its cascade; levels are numbered from 0, the cheapest."""

    number: int
    name: str
    tail: int = 0
    """Unverified tokens of the child after the level's own."""
    merge: int = 0
    """Nodes of the child's first draft that are added beside the level's own tokens, where the two differ."""
    width: int = 1
    """Nodes beside each other: a token of the level's own and its runners-up; 1: the level proposes chains."""
    child_width: int = 1
    """The same of the child, whose drafts have so many nodes for each token of their path."""
    is_last: bool = True
    """The target verifies this level's drafts, so the level counts their acceptance; else its parent does."""
    works_ahead: bool = False
    child_top_k: int = 0
    """Likeliest tokens of this level's distributions that the child learns from; 0: none."""


class CascadeDrafter:
    """A level over its child; `make_random_source(seed, step)` gives a ratio rule its randomness."""

    def __init__(
        self,
        runner: Runner,
        child: ChildLevel,
        spec: LevelSpec,
        options: ModelOptions,
        lengths: PassedLengths,
        make_random_source: Callable[[int, int], RandomSource] = HashRandomSource,
    ) -> None:
        self.runner = runner
        self.capabilities = Capabilities(
            runner.config.vocab_size,
            prefills=self,
            truncates=self,
            works_ahead=self if spec.works_ahead else None,
            has_levels=self,
            shares_rows=runner if isinstance(runner, SelfDraftRunner) else None,
        )
        self._child = child
        self._spec = spec
        self._coupled = options.rule == "coupled"
        rule = _RULES_OF_LEVELS.get(options.rule, options.rule)
        law_size = None if self._coupled else options.law_size
        reader = TopTokensReader(spec.child_top_k) if spec.child_top_k else None
        self._independent = options.rule in INDEPENDENT_ONLY
        self._eos_token_ids = tuple(options.eos_token_ids)
        self._verifier = Verifier(runner, rule, options.eos_token_ids, law_size=law_size, top_tokens=reader)
        self._prefill_chunk = options.prefill_chunk
        self._lengths = lengths
        control = lengths if isinstance(lengths, LengthControl) else None
        self._control = control if spec.is_last else None
        self.may_work_ahead = True
        self._make_random_source = make_random_source
        self._states: dict[int, RequestState] = {}
        self._ordered: list[tuple[RequestState, int, int]] = []  # state, its version, tokens ordered from the child
        self._stats = LevelStatsRecorder(spec.name, spec.number, child.name, control)

    # --- the contract of drafters -------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        self.runner.open(context.request_id)  # its rows run ahead of the text
        if context.source:
            self.runner.set_source(context.request_id, context.source)
        self._states[context.request_id] = RequestState(context, list(context.token_ids))
        self._child.open(context)
        if self._control is not None:
            self._control.request_opened()

    def prefill(self, contexts: Sequence[Context]) -> None:
        self._settle()
        states = [self._states[context.request_id] for context in contexts]
        self._child.post([(state.request_id, state.text, 0) for state in states])
        for state in states:
            self._prefill(state, leave=1)
        self._child.collect()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._settle()
        if self._control is not None:
            self._control.drafts_ordered({context.request_id: len(context.token_ids) for context in contexts})
        orders = [(self._states[one.request_id], budget) for one, budget in zip(contexts, budgets, strict=True)]
        missed = [(state, budget) for state, budget in orders if not self.prepared(state.context)]
        spec = self._spec
        for state, budget in missed:
            num_nodes = min(max(1, budget - spec.tail - spec.merge), self._lengths.lengths[spec.number])
            state.share = num_own(num_nodes, spec.width)
        able = self._with_room([(state, state.share) for state, _ in missed])
        while short := [(state, state.share - state.num_drafted) for state in able if not state.is_full]:
            self._order(short)
            self._review()
        tails = self._order_tails([(state, budget - spec.merge) for state, budget in missed if state in able])
        drafts = [self._offer(state, budget, tails.get(state.request_id)) for state, budget in orders]
        if self._control is not None:
            self._control.drafts_sent(sum(draft.tree.num_draft_tokens for draft in drafts) / len(drafts))
        return drafts

    def observe(self, context: Context, commit: Commit) -> None:
        state, token_ids = self._states[context.request_id], list(commit.token_ids)
        own, tail = state.num_offered, state.num_tail
        if self._spec.is_last:
            # Under the coupled rule, and greedily, the target's tokens do not depend on the draft.
            target_tokens = token_ids if self._coupled or is_greedy(context.sampling) else ()
            source = self._lengths.source(self._spec.number)
            self._stats.record_verdict(state, source, commit.path[: len(token_ids)], target_tokens)
        base = len(context.token_ids)
        drafted = state.text[base:]
        # A ratio rule has tested every token of the proposal: none of them may be offered again.
        fresh = self._coupled or len(token_ids) > own + tail
        if drafted[: len(token_ids)] == token_ids and fresh:
            del state.distributions[: len(token_ids)]
            del state.siblings[: len(token_ids)]
            state.first_draft = None
        else:
            agreed = _common_prefix_len(drafted, token_ids)
            self._replace(state, base + agreed, token_ids[agreed:])
            if tail and agreed == own:
                path = tuple(node - own for node in commit.path if own < node <= own + tail)
                self._child.accept(state.request_id, path)
        state.num_offered, state.num_tail, state.in_flight = 0, 0, False

    def truncate(self, context: Context) -> None:
        state = self._states[context.request_id]
        self._replace(state, len(context.token_ids), [])
        state.num_offered, state.num_tail = 0, 0

    def release(self, request_id: int) -> None:
        del self._states[request_id]
        self.runner.close(request_id)
        self._child.release(request_id)

    def forget(self) -> None:
        self._child.forget()

    def level_stats(self) -> tuple[LevelWork, ...]:
        work = self._stats.flush(self._child.level_stats())
        if self._control is not None:
            self._control.record_work(work)
        return work

    # --- working ahead, on the assumption that the whole proposal is accepted -----------------------------------------

    @property
    def wants_work(self) -> bool:
        return self.may_work_ahead and any(state.in_flight for state in self._states.values())

    @property
    def waits_for_child(self) -> bool:
        return self._child.is_silent

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        return 0  # a level drafts chains

    def work(self, width: int = 0, num_passes: int = 1) -> Step:
        """Order from the child, or review what it has sent."""
        if not self._child.is_awaited:
            # Wanted are the proposal, the token that the target adds, and one more proposal after them.
            wanted = [
                (state, state.num_offered + state.num_tail + 1 + state.share)
                for state in self._states.values()
                if state.in_flight
            ]
            able = self._with_room(wanted)
            for state, num_tokens in wanted:
                state.in_flight = state in able and state.num_drafted < num_tokens
            short = [(state, num_tokens - state.num_drafted) for state, num_tokens in wanted if state.in_flight]
            if short:
                self._order(short)
        self._review(wait=False)
        return Step()

    def prepared(self, context: Context) -> bool:
        return self._spec.works_ahead and self._states[context.request_id].is_prepared

    def _settle(self) -> None:
        """Review the outstanding answer of the child before the next record is sent to it."""
        if self._child.is_awaited:
            self._review()

    # --- one review: the child drafts, this level's model verifies ----------------------------------------------------

    def _order(self, short: list[tuple[RequestState, int]]) -> None:
        """Order drafts for requests that lack so many tokens; this level adds the last of them itself."""
        longest = self._lengths.longest(self._spec.number)
        wanted = [(state, min(longest, (missing - 1) * self._spec.child_width)) for state, missing in short]
        self._ordered = [(state, state.version, num_tokens) for state, num_tokens in wanted]
        orders = [(state.request_id, state.text, num_tokens) for state, num_tokens in wanted if num_tokens]
        if orders:
            self._child.post(orders)

    def _review(self, *, wait: bool = True) -> None:
        """Verify the child's drafts in one pass; every request gets at least one token."""
        proposals = self._child.collect(wait=wait)
        if proposals is None:
            return
        ordered, self._ordered = self._ordered, []
        started = time.monotonic()
        inputs: list[VerifyInput] = []
        reviewed: list[tuple[RequestState, int]] = []
        for state, version, num_tokens in ordered:
            if self._states.get(state.request_id) is state and state.version == version:
                self._prefill(state, leave=self._prefill_chunk)
                reviewed.append((state, num_tokens))
                inputs.append(self._verify_input(state, proposals.get(state.request_id), num_tokens))
        if not inputs:  # every text has changed since its draft was ordered
            return
        if not self.runner.can_reserve(sum(one.num_fed + one.tree.num_draft_tokens for one in inputs)):
            for state, _ in reviewed:  # the prompt of another request has filled the pool
                state.in_flight = False
            return
        logits, _ = self._verifier.forward(inputs)
        sources: dict[int, RandomSource] = {}

        def random_source(verified: VerifyInput) -> RandomSource:
            return sources.setdefault(verified.seq_id, self._random_source(verified))

        results = self._verifier.verify(inputs, logits, random_source)
        self._child.add_top_tokens(self._verifier.top_tokens())
        source = self._lengths.source(self._spec.number)
        start = 0
        for (state, num_tokens), verified, result in zip(reviewed, inputs, results, strict=True):
            rows = logits[start : (start := start + len(verified.tree.parents))]
            if self._spec.width > 1:
                state.siblings += self._runners_up(rows, verified, result, sources.get(verified.seq_id))
            self._stats.record_review(verified, source, num_tokens, result.path)
            self._keep(state, verified, result)
        self._stats.record_pass(time.monotonic() - started)

    def _runners_up(
        self, logits: Tensor, verified: VerifyInput, result: VerifyResult, source: RandomSource | None
    ) -> list[tuple[int, ...]]:
        width = self._spec.width
        if source is None or is_greedy(verified.sampling):
            return best_runners_up(logits, verified, result, self._eos_token_ids, width)
        return drawn_runners_up(verified, result, source, width, independent=self._independent)

    def _verify_input(self, state: RequestState, proposal: Proposal | None, num_tokens: int) -> VerifyInput:
        """The uncached text and the proposal, or none if the proposal is not for this text."""
        fits = proposal is not None and (
            proposal.prefix_len == len(state.text)
            and proposal.tree.token_ids[0] == state.text[-1]
            and proposal.tree.num_draft_tokens <= num_tokens
            and _largest_token(proposal) < self.runner.config.vocab_size  # models pad their vocabularies differently
        )
        num_fed = len(state.text) - self.runner.cached_len(state.request_id)
        context = state.context
        return VerifyInput(
            state.request_id, state.text, context.prompt_len, context.sampling, num_fed, proposal if fits else None
        )

    def _random_source(self, verified: VerifyInput) -> RandomSource:
        """One per review and level, and another after each admission within an epoch: no numbers are used twice."""
        state = self._states[verified.seq_id]
        state.num_reviews += 1
        context, level = state.context, self._spec.number
        seed = noise_key(context.sampling.seed, NoiseStream.DRAFT, level, context.epoch, context.admission)
        return self._make_random_source(seed, state.num_reviews)

    def _keep(self, state: RequestState, verified: VerifyInput, result: VerifyResult) -> None:
        num_fed, tree = verified.num_fed, verified.tree
        if not state.num_drafted:
            state.first_draft = tree
        self.runner.commit(state.request_id, [*range(num_fed), *(num_fed - 1 + node for node in result.path)])
        state.text += [*(tree.token_ids[node] for node in result.path), max(0, result.next_token)]
        state.distributions += result.distributions
        if tree.num_draft_tokens:
            self._child.accept(state.request_id, result.path)

    # --- the proposal -------------------------------------------------------------------------------------------------

    def _order_tails(self, orders: list[tuple[RequestState, int]]) -> dict[int, Proposal]:
        """The child's unverified tokens after this level's own."""
        for state, budget in orders:
            most = self._spec.tail if state.share else self._lengths.longest(self._spec.number)
            state.num_ordered = max(0, min(most, budget - state.num_drafted))
        wanted = [(state.request_id, state.text, state.num_ordered) for state, _ in orders if state.num_ordered]
        if not wanted:
            return {}
        self._child.post(wanted)
        return self._child.collect() or {}

    def _offer(self, state: RequestState, budget: int, tail: Proposal | None) -> Draft:
        spec, base = self._spec, len(state.context.token_ids)
        # More than its share where an earlier, longer draft has left some: these are verified, a tail is not.
        own = state.text[base : base + num_own(max(1, budget - spec.merge), spec.width)]
        tree = TokenTree.chain(state.text[base - 1], own)
        state.parts = ((spec.name, len(own)),) if own else ()
        if tail is not None and 0 < tail.tree.num_draft_tokens <= budget - len(own):
            below = tail.tree
            parents = (*tree.parents, *(parent + len(own) for parent in below.parents[1:]))
            tree = TokenTree((*tree.token_ids, *below.token_ids[1:]), parents)
            state.parts += self._stats.parts_of(tail)
        else:
            tail = None
        state.num_offered, state.num_tail = len(own), tree.num_draft_tokens - len(own)
        num_siblings = 0
        if spec.width > 1 and own:  # such a level has no tail and merges nothing
            token_ids, parents = list(tree.token_ids), list(tree.parents)
            num_siblings = with_siblings(token_ids, parents, len(own), state.siblings, budget - len(own))
            tree = TokenTree(tuple(token_ids), tuple(parents))
            state.parts = ((spec.name, len(own) + num_siblings),)
        state.num_merged = 0
        if spec.merge and state.first_draft is not None:
            tree = merge_trees(tree, state.first_draft, min(spec.merge, budget - tree.num_draft_tokens))
            state.num_merged = tree.num_draft_tokens - state.num_offered - state.num_tail
        state.in_flight = spec.works_ahead and bool(own)
        if self._coupled:
            return Draft(tree, parts=state.parts)
        if is_greedy(state.context.sampling):
            return replace(Draft.chosen(tree), parts=state.parts)
        kind = SamplingKind.IID if spec.width == 1 or self._independent else SamplingKind.WITHOUT_REPLACEMENT
        drawn = [kind] * (len(own) + num_siblings)
        sampling_kinds = (SamplingKind.ROOT, *drawn, *(tail.sampling_kinds[1:] if tail else ()))
        below = tail.distributions if tail else (None,) * (1 + num_siblings)
        distributions = (*state.distributions[: len(own)], *below)
        return Draft(tree, sampling_kinds, distributions, state.parts)

    # --- the text -----------------------------------------------------------------------------------------------------

    def _replace(self, state: RequestState, length: int, token_ids: list[int]) -> None:
        """Take back all but the first `length` tokens of the text, and append `token_ids`."""
        state.text[length:] = token_ids
        state.first_draft = None
        state.distributions.clear()
        state.siblings.clear()
        state.in_flight = False
        state.version += 1
        kept = min(self.runner.cached_len(state.request_id), length, len(state.text) - 1)
        self.runner.truncate(state.request_id, max(0, kept))
        self._child.cut(state.request_id, length)

    def _with_room(self, wanted: Iterable[tuple[RequestState, int]]) -> list[RequestState]:
        """The requests, in order, whose drafts of so many tokens fit the context and together the pool."""
        able, rows, below = [], 0, self._child.num_draft_tokens
        for state, num_tokens in wanted:
            length = max(len(state.text), len(state.context.token_ids) + num_tokens)
            needed = length + below - self.runner.cached_len(state.request_id)
            if self.runner.drops_rows:
                needed = min(needed, self._prefill_chunk + below + num_tokens)
            if length + below <= self.runner.longest_text and self.runner.can_reserve(rows + needed):
                able.append(state)
                rows += needed
        return able

    def _prefill(self, state: RequestState, leave: int) -> None:
        if self.capabilities.shares_rows is None:  # else the target reads the text
            prefill(self.runner, state.request_id, state.text, leave=leave, chunk=self._prefill_chunk)


def _common_prefix_len(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of leading tokens that both have in common."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _largest_token(proposal: Proposal) -> int:
    return max(
        *proposal.tree.token_ids,
        *(max(distribution.token_ids) for distribution in proposal.distributions if distribution is not None),
        0,
    )
