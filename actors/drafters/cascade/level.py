"""One level of a cascade: a model that drafts by verifying the drafts of a cheaper level, with the target's own code.

    target  <-  CascadeDrafter(model)  <-  CascadeDrafter(smaller model)  <-  n-gram

Vertically a level asks the one beneath, verifies what it gets, adds a token of its own and asks again, until it has
the draft tokens it was ordered; horizontally it lets the level beneath add a `tail` behind its own tokens. To the
level beneath it is a target whose text may be taken back, to the level above an ordinary drafter, so levels nest to
any depth; one whose lower level is silent drafts by itself, token by token, and one whose length is 0 passes on what
the level beneath says, as a tail behind no tokens of its own.

Under the coupled rule nothing more is needed. Under a ratio rule a token that was accepted, recovered or added
follows this level's own law m, whatever the level beneath drew from; m (cut to its likeliest tokens, and verified
against exactly so) is the law that travels upwards, and never the lower level's. Whether a further token is drafted
depends on counts only, never on a token's value.

Sources: Chen et al., Cascade Speculative Drafting (arXiv 2312.11462); Spector and Re, Staged Speculative Decoding
(2308.04623); run-ahead between levels: PipeSpec (2505.01572).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from actors.drafters.cascade.child import ChildLevel
from actors.drafters.cascade.draft_lengths import FixedLengths, LengthControl
from actors.drafters.cascade.level_stats import LevelStatsRecorder
from actors.drafters.cascade.request_state import Stream, common_prefix
from actors.drafters.cascade.tree_merge import merge_trees
from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import Context, Draft
from actors.protocol.messages import Commit, DraftPreview, LevelWork, Proposal, SamplingKind, TokenTree
from actors.sampling.logits import is_greedy
from actors.sampling.noise import Stream as NoiseStream
from actors.sampling.noise import noise_key
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.verifier import Ruling, Subject, Verifier
from parallel.runtime.runner import ModelRunner, Span


class CascadeDrafter:
    """`level` numbers the levels from 0, the cheapest; `tail` tokens of a draft come unverified from beneath.

    `merge` nodes of what the level beneath said first are added beside this level's own tokens, where they differ.
    `is_last` says that the target judges it, and not another level, which keeps account of that itself.
    """

    def __init__(
        self,
        runner: ModelRunner,
        beneath: ChildLevel,
        *,
        level: int,
        name: str,
        rule: str,
        law_size: int,
        eos_token_ids: Sequence[int],
        prefill_chunk: int,
        lengths: FixedLengths | LengthControl,
        tail: int = 0,
        merge: int = 0,
        is_last: bool = True,
        works_ahead: bool = False,
        make_coins: Callable[[int, int], RandomSource] = HashRandomSource,
    ) -> None:
        self.runner = runner
        self.vocab_size = runner.config.vocab_size
        self.works_ahead = works_ahead
        self._beneath = beneath
        self._level = level
        self._name = name
        self._coupled = rule == "coupled"
        # A level may verify by any exact rule; k-SEQ is not exact for what lookups and levels beneath draw.
        inner_rule = "rejection" if rule == "kseq" else rule
        self._verifier = Verifier(runner, inner_rule, eos_token_ids, law_size=None if self._coupled else law_size)
        self._prefill_chunk = prefill_chunk
        self._tail = tail
        self._merge = merge
        self._lengths = lengths
        self._is_last = is_last
        self._control = lengths if is_last and isinstance(lengths, LengthControl) else None
        self._make_coins = make_coins
        self._streams: dict[int, Stream] = {}
        self._asked: list[tuple[Stream, int, int]] = []  # stream, its version, draft tokens asked of the level beneath
        self._account = LevelStatsRecorder(
            name, level, beneath.name, lengths if isinstance(lengths, LengthControl) else None
        )

    # --- the drafter's contract ---------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        self.runner.open(context.request_id)
        self._streams[context.request_id] = Stream(context, list(context.token_ids))
        self._beneath.open(context)
        if self._control is not None:
            self._control.interrupted()

    def prepare(self, contexts: Sequence[Context]) -> None:
        self._settle()
        streams = [self._streams[context.request_id] for context in contexts]
        self._beneath.post([(stream.request_id, stream.text, 0) for stream in streams])
        for stream in streams:
            self._catch_up(stream, leave=1)
        self._beneath.collect()

    def prepared(self, context: Context) -> bool:
        return self.works_ahead and self._streams[context.request_id].is_prepared

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._settle()
        if self._control is not None:
            self._control.ordered({context.request_id: len(context.token_ids) for context in contexts})
        asked = [(self._streams[context.request_id], budget) for context, budget in zip(contexts, budgets, strict=True)]
        missed = [(stream, budget) for stream, budget in asked if not self.prepared(stream.context)]
        for stream, budget in missed:
            stream.share = min(max(1, budget - self._tail - self._merge), self._lengths.lengths[self._level])
        able = self._with_room([(stream, stream.share) for stream, _ in missed])
        while short := [(stream, stream.share - stream.num_drafted) for stream in able if not stream.is_full]:
            self._ask(short)
            self._review()
        tails = self._draw_tails([(stream, budget - self._merge) for stream, budget in missed if stream in able])
        drafts = [self._offer(stream, budget, tails.get(stream.request_id)) for stream, budget in asked]
        if self._control is not None:
            self._control.answered(sum(draft.tree.num_draft_tokens for draft in drafts) / len(drafts))
        return drafts

    def previews(self) -> Sequence[DraftPreview]:
        return ()  # what lies behind a draft is only known once the levels have agreed on it

    def take(self, context: Context, budget: int, taken: TokenTree) -> None:
        assert False, "nothing was told"

    def observe(self, context: Context, commit: Commit) -> None:
        stream, token_ids = self._streams[context.request_id], list(commit.token_ids)
        own, tail = stream.num_offered, stream.num_tail
        if self._is_last:
            told = token_ids if self._coupled or is_greedy(context.sampling) else ()
            self._account.verified(stream, self._lengths.source(self._level), commit.path[: len(token_ids)], told)
        base = len(context.token_ids)
        drafted = stream.text[base:]
        # A ratio rule has looked at every token it was offered: none of them may be offered again.
        fresh = self._coupled or len(token_ids) > own + tail
        if drafted[: len(token_ids)] == token_ids and fresh:
            del stream.distributions[: len(token_ids)]
            stream.first_guess = None
        else:
            agreed = sum(1 for _ in common_prefix(drafted, token_ids))
            self._take_back(stream, base + agreed, token_ids[agreed:])
            if tail and agreed == own:
                path = tuple(node - own for node in commit.path if own < node <= own + tail)
                self._beneath.accepted(stream.request_id, path)
        stream.num_offered, stream.num_tail, stream.in_flight = 0, 0, False

    def truncate(self, context: Context) -> None:
        stream = self._streams[context.request_id]
        self._take_back(stream, len(context.token_ids), [])
        stream.num_offered, stream.num_tail = 0, 0

    def release(self, request_id: int) -> None:
        del self._streams[request_id]
        self.runner.close(request_id)
        self._beneath.release(request_id)

    def account(self) -> tuple[LevelWork, ...]:
        work = self._account.close(self._beneath.account())
        if self._control is not None:
            self._control.update(work)
        return work

    # --- working ahead: as if the whole proposal were going to be accepted --------------------------------------------

    @property
    def wants_work(self) -> bool:
        return any(stream.in_flight for stream in self._streams.values())

    @property
    def waits(self) -> bool:
        return self._beneath.is_silent

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        return 0  # reviews are of chains

    def work(self, width: int = 0) -> Step:
        """Ask the level beneath, or review what it has sent; about one pass."""
        if not self._beneath.is_awaited:
            # What is offered, the token the target adds, and one more proposal behind them.
            wanting = [
                (stream, stream.num_offered + stream.num_tail + 1 + stream.share)
                for stream in self._streams.values()
                if stream.in_flight
            ]
            able = self._with_room(wanting)
            for stream, want in wanting:
                stream.in_flight = stream in able and stream.num_drafted < want
            short = [(stream, want - stream.num_drafted) for stream, want in wanting if stream.in_flight]
            if short:
                self._ask(short)
        self._review(wait=False)
        return Step()

    def _settle(self) -> None:
        """Hear the level beneath out, and use what it says, before it is told anything else."""
        if self._beneath.is_awaited:
            self._review()

    # --- one review: the level beneath drafts, this level's model verifies --------------------------------------------

    def _ask(self, short: list[tuple[Stream, int]]) -> None:
        """Order drafts for streams that lack so many tokens; this level adds the last of them itself."""
        wanted = [(stream, min(self._lengths.longest(self._level), missing - 1)) for stream, missing in short]
        self._asked = [(stream, stream.version, num_tokens) for stream, num_tokens in wanted]
        orders = [(stream.request_id, stream.text, num_tokens) for stream, num_tokens in wanted if num_tokens]
        if orders:
            self._beneath.post(orders)

    def _review(self, *, wait: bool = True) -> None:
        """Verify what the level beneath has drafted; every stream gets at least one token."""
        proposals = self._beneath.collect(wait=wait)
        if proposals is None:
            return
        asked, self._asked = self._asked, []
        started = time.monotonic()
        subjects, streams, orders = [], [], []
        for stream, version, num_tokens in asked:
            if self._streams.get(stream.request_id) is stream and stream.version == version:
                self._catch_up(stream, leave=self._prefill_chunk)
                streams.append(stream)
                orders.append(num_tokens)
                subjects.append(self._subject(stream, proposals.get(stream.request_id), num_tokens))
        if not subjects:  # every text that was asked about has changed meanwhile
            return
        if not self.runner.can_reserve(sum(one.num_fed + one.tree.num_draft_tokens for one in subjects)):
            for stream in streams:  # another request's prompt has taken the room
                stream.in_flight = False
            return
        logits, _ = self._verifier.forward(subjects)
        rulings = self._verifier.judge(subjects, logits, self._coins)
        for stream, subject, ruling, num_tokens in zip(streams, subjects, rulings, orders, strict=True):
            self._account.reviewed(subject, self._lengths.source(self._level), num_tokens, ruling.path)
            self._keep(stream, subject, ruling)
        self._account.passed(time.monotonic() - started)

    def _subject(self, stream: Stream, proposal: Proposal | None, num_tokens: int) -> Subject:
        fits = proposal is not None and (
            proposal.prefix_len == len(stream.text)
            and proposal.tree.token_ids[0] == stream.text[-1]
            and proposal.tree.num_draft_tokens <= num_tokens
            and _largest_token(proposal) < self.vocab_size  # families pad their vocabularies differently
        )
        num_fed = len(stream.text) - self.runner.cached_len(stream.request_id)
        context = stream.context
        return Subject(
            stream.request_id, stream.text, context.prompt_len, context.sampling, num_fed, proposal if fits else None
        )

    def _coins(self, subject: Subject) -> RandomSource:
        """New for every review of every level, also after the request was forgotten and told again in one epoch.

        Positions that are drafted again must not meet the same numbers.
        """
        stream = self._streams[subject.seq_id]
        stream.num_reviews += 1
        context = stream.context
        seed = noise_key(subject.sampling.seed, NoiseStream.DRAFT, self._level, context.epoch, context.admission)
        return self._make_coins(seed, stream.num_reviews)

    def _keep(self, stream: Stream, subject: Subject, ruling: Ruling) -> None:
        num_fed, tree = subject.num_fed, subject.tree
        if not stream.num_drafted:
            stream.first_guess = tree
        self.runner.commit(stream.request_id, [*range(num_fed), *(num_fed - 1 + node for node in ruling.path)])
        stream.text += [*(tree.token_ids[node] for node in ruling.path), ruling.next_token]
        stream.distributions += ruling.distributions
        if tree.num_draft_tokens:
            self._beneath.accepted(stream.request_id, ruling.path)

    # --- what goes up -------------------------------------------------------------------------------------------------

    def _draw_tails(self, asked: list[tuple[Stream, int]]) -> dict[int, Proposal]:
        """Later positions of one draft, from the level beneath as they are."""
        for stream, budget in asked:
            most = self._tail if stream.share else self._lengths.longest(self._level)
            stream.num_ordered = max(0, min(most, budget - stream.num_drafted))
        orders = [(stream.request_id, stream.text, stream.num_ordered) for stream, _ in asked if stream.num_ordered]
        if not orders:
            return {}
        self._beneath.post(orders)
        return self._beneath.collect() or {}

    def _offer(self, stream: Stream, budget: int, tail: Proposal | None) -> Draft:
        base = len(stream.context.token_ids)
        own = stream.text[base : base + max(1, budget - self._merge)]
        tree = TokenTree.chain(stream.text[base - 1], own)
        stream.parts = ((self._name, len(own)),) if own else ()
        if tail is not None and 0 < tail.tree.num_draft_tokens <= budget - len(own):
            below = tail.tree
            parents = (*tree.parents, *(parent + len(own) for parent in below.parents[1:]))
            tree = TokenTree((*tree.token_ids, *below.token_ids[1:]), parents)
            stream.parts += self._account.parts_from_beneath(tail)
        else:
            tail = None
        stream.num_offered, stream.num_tail = len(own), tree.num_draft_tokens - len(own)
        if self._merge and stream.first_guess is not None:
            tree = merge_trees(tree, stream.first_guess, min(self._merge, budget - tree.num_draft_tokens))
        stream.num_merged = tree.num_draft_tokens - stream.num_offered - stream.num_tail
        stream.in_flight = self.works_ahead and bool(own)
        if self._coupled:
            return Draft(tree, parts=stream.parts)
        if is_greedy(stream.context.sampling):
            return replace(Draft.chosen(tree), parts=stream.parts)
        sampling_kinds = (SamplingKind.ROOT, *[SamplingKind.IID] * len(own), *(tail.sampling_kinds[1:] if tail else ()))
        distributions = (*stream.distributions[: len(own)], *(tail.distributions if tail else (None,)))
        return Draft(tree, sampling_kinds, distributions, stream.parts)

    # --- keeping up with the text -------------------------------------------------------------------------------------

    def _take_back(self, stream: Stream, length: int, token_ids: list[int]) -> None:
        """The text behind the first `length` tokens does not stand; `token_ids` follow them."""
        stream.text[length:] = token_ids
        stream.first_guess = None
        stream.distributions.clear()
        stream.in_flight = False
        stream.version += 1
        kept = min(self.runner.cached_len(stream.request_id), length, len(stream.text) - 1)
        self.runner.truncate(stream.request_id, max(0, kept))
        self._beneath.cut(stream.request_id, length)

    def _with_room(self, wanting: Iterable[tuple[Stream, int]]) -> list[Stream]:
        """Those whose drafts of so many tokens fit the context, and together the pool, first come first served."""
        able, rows, below = [], 0, self._beneath.num_draft_tokens
        for stream, want in wanting:
            length = max(len(stream.text), len(stream.context.token_ids) + want)
            asked = length + below - self.runner.cached_len(stream.request_id)
            if length + below <= self.runner.config.max_positions and self.runner.can_reserve(rows + asked):
                able.append(stream)
                rows += asked
        return able

    def _catch_up(self, stream: Stream, leave: int) -> None:
        """Cache text until at most `leave` tokens of it are uncached, or pool or context are full."""
        end = min(len(stream.text) - leave, self.runner.config.max_positions)
        while (missing := end - (start := self.runner.cached_len(stream.request_id))) > 0:
            chunk = stream.text[start : start + min(missing, self._prefill_chunk)]
            if not self.runner.can_reserve(len(chunk)):
                return
            self.runner.forward([Span(stream.request_id, len(chunk), num_logits=0)], chunk)
            self.runner.commit(stream.request_id, range(len(chunk)))


def _largest_token(proposal: Proposal) -> int:
    return max(
        *proposal.tree.token_ids,
        *(max(distribution.token_ids) for distribution in proposal.distributions if distribution is not None),
        0,
    )
