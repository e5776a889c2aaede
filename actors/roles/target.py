"""The target role: reads prompts, verifies whole batches of proposals in one flat pass, keeps KV by table edits.

Every rank of the role receives the same records and runs the same pass; only rank 0 reads the logits, and follows the
grammars of requests. The outcome of a verdict (`Commit`) arrives with the next batch, so the ranks agree without
messages of their own. What else a pass does for the drafter is behind `AfterVerdicts`. A pass may be made ahead of its
batch (`run_ahead.py`). Knows one runner and one verification rule; must not know drafters, pipelines or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from actors.drafters.interface import FeatureRows
from actors.protocol.membership import Weights
from actors.protocol.messages import (
    NO_TOKEN,
    Admit,
    Commit,
    TopTokens,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.protocol.records import replace
from actors.roles.after_verdicts import AfterVerdicts
from actors.roles.served_weights import ServedWeights
from actors.verification.verifier import Verifier, VerifyInput
from parallel.kv.prefix_tree import Text
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.device import wait_for

if TYPE_CHECKING:
    from actors.grammars.masks import GrammarMasks
    from actors.roles.run_ahead import RunAhead
    from actors.verification.features import FeatureReader
    from actors.verification.top_tokens import TopTokensReader


@dataclass(slots=True, eq=False)
class TargetContext:
    """One request as the target knows it: how it was admitted, and its committed text since."""

    admit: Admit
    token_ids: list[int]
    num_fed: int = 0  # rows of the uncached suffix in the last pass, still pending in the pool


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """One that was made, and of whose results nothing was read yet."""

    inputs: list[VerifyInput]
    logits: Tensor
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _PassAhead:
    """One that was made for a predicted batch."""

    batch: VerifyBatch
    made: _Pass
    seconds: float


class TargetRole:
    """Answers each `VerifyBatch` with a `VerdictBatch`, or with two if an attached drafter reads much text first. With
    `ahead` the next pass is made as soon as an answer was taken; for a rank alone, whose drafter keeps rows at once:
    ranks would have to agree that they do."""

    def __init__(
        self,
        runner: DecoderRunner,
        rule: str,
        eos_token_ids: Sequence[int],
        *,
        is_lead: bool,
        top_tokens: TopTokensReader | None = None,
        features: FeatureReader | None = None,
        drafter: AfterVerdicts | None = None,
        grammars: Callable[[], GrammarMasks] | None = None,
        weights: Weights | None = None,
        ahead: RunAhead | None = None,
    ) -> None:
        self._drafter = drafter or AfterVerdicts()
        assert ahead is None or self._drafter.keeps_at_once, "rows that a commit keeps later cannot be dropped before"
        self._ahead = ahead
        self._pass_ahead: _PassAhead | Exception | None = None  # or what it raised
        self.runner = runner = self._drafter.verifying(runner)
        self._verifier = Verifier(
            runner, rule, eos_token_ids, top_tokens=top_tokens, features=features, splits_choice=True
        )
        self._reads_later = top_tokens is not None and top_tokens.is_late
        self._of_last_pass: TopTokens | None = None
        self._features = features
        self._is_lead = is_lead
        self._open_grammars = grammars
        self._grammars: GrammarMasks | None = None  # from the first request with one on
        self._weights = ServedWeights(runner, weights)
        self.contexts: dict[int, TargetContext] = {}

    @property
    def splits_choice(self) -> bool:
        """Whether ranks choose among their own tokens where the sampling permits it."""
        return self._verifier.splits_choice

    def answer(self, batch: VerifyBatch) -> Iterator[VerdictBatch]:
        started = time.monotonic()
        ahead, dropped_s = self._take_ahead(batch)
        if ahead is None:
            hits, kept = self._update(batch), time.monotonic()
            answer = VerdictBatch(batch.round, (), started, kept, committed=kept, hits=hits, dropped_s=dropped_s)
        else:  # as if it had begun when the batch had just come
            began = started - ahead.seconds
            answer = VerdictBatch(batch.round, (), began, started, committed=began, ran_ahead=True)
        if batch.weights is not None:
            self.forget()  # every row that is kept was made of the weights before
            refusal = self._weights.take(batch.weights)
            yield replace(answer, finished=time.monotonic(), refusal=refusal)
            return
        has_left = False
        if batch.items:
            made = self._make_pass(batch) if ahead is None else ahead.made
            answer, features = self._answer_pass(batch, answer, made)
            has_left = self._drafter.reads_much(batch, answer.verdicts, self.contexts)
            if has_left:
                yield replace(answer, top_tokens=None, drafts_follow=True)
            answer = self._drafter.follow(batch, answer, features, self.contexts)
        if self._reads_later:
            answer = replace(answer, top_tokens=self._of_last_pass)
            self._of_last_pass = None
        if has_left:
            yield replace(answer, verdicts=(), hits=(), prompt_logprobs=(), follows_verdicts=True)
        else:
            yield answer
        self._drafter.answered()
        if self._reads_later and batch.items:
            self._of_last_pass = self._verifier.top_tokens()
        if self._ahead is not None:
            self._run_ahead(self._ahead, batch, answer)

    def rejoin(self, weights: Weights | None) -> None:
        if weights is not None:
            self._weights.use(weights)
        self._drafter.rejoin()

    def _update(self, batch: VerifyBatch) -> tuple[tuple[int, int], ...]:
        """Bring requests and rows up to the batch, last commits before releases: (request, rows it had) of the hits."""
        self._drafter.begin(batch)
        for commit in batch.commits:
            self._commit(commit)
        for request_id in batch.releases:
            self._drafter.ended(request_id, self.contexts.pop(request_id).token_ids)
            if self._grammars is not None:
                self._grammars.close(request_id)
            self.runner.close(request_id)
        found = [(admit.request_id, self._admit(admit)) for admit in batch.admits]
        return tuple([hit for hit in found if hit[1]])

    def _make_pass(self, batch: VerifyBatch) -> _Pass:
        inputs = [self._verify_input(item, exports=batch.bridge > 0) for item in batch.items]
        return _Pass(inputs, *self._verifier.forward(inputs, keeps_top_tokens=batch.may_draft))

    def _answer_pass(
        self, batch: VerifyBatch, answer: VerdictBatch, made: _Pass
    ) -> tuple[VerdictBatch, list[FeatureRows]]:
        """The answer with the verdicts of the pass, and the hidden states that the drafter reads."""
        drafter, reads = self._drafter, self._features is not None and self._drafter.wants_features(batch)
        inputs, num_rows = made.inputs, made.num_rows
        verdicts = self._verify(inputs, made.logits, may_draft=batch.may_draft) if self._is_lead else ()
        top_tokens = self._verifier.top_tokens() if self._is_lead and not self._reads_later else None
        finished = time.monotonic()
        verdicts = drafter.agree(verdicts, batch.items, is_lead=self._is_lead)
        features = self._committed_features(inputs, verdicts) if reads else []
        features = [*(self._known_features(answer.hits) if reads else ()), *features]
        self._commit_chunks(inputs)
        if drafter.keeps_at_once:
            self._commit_rows(verdicts)
        answer = VerdictBatch(
            batch.round,
            verdicts,
            answer.started,
            finished,
            num_rows,
            answer.committed,
            top_tokens,
            hits=answer.hits,
            prompt_logprobs=tuple(self._verifier.prompt_logprobs()),
            ran_ahead=answer.ran_ahead,
            dropped_s=answer.dropped_s,
        )
        return answer, features

    def _committed_features(self, inputs: Sequence[VerifyInput], verdicts: Sequence[Verdict]) -> list[FeatureRows]:
        """The features of the tokens that this pass committed, whose rows are still pending, for requests that are
        drafted for."""
        assert self._features is not None
        first_positions = [self.runner.cached_len(one.seq_id) for one in inputs]
        paths = {verdict.request_id: verdict.path for verdict in verdicts}
        found = self._features.rows(inputs, first_positions, paths)
        return [rows for rows in found if self.contexts[rows.request_id].admit.speculates]

    def _known_features(self, hits: Sequence[tuple[int, int]]) -> list[FeatureRows]:
        """The features of the rows that requests of this batch found."""
        assert self._features is not None
        known = self._features.known
        return [known(self.runner, *hit) for hit in hits if self.contexts[hit[0]].admit.speculates]

    def forget(self) -> None:
        """Drop every request and its rows."""
        self._pass_ahead = None
        if self._ahead is not None:
            self._ahead.forget()
        self._drafter.forget()
        for request_id in self.contexts:
            self.runner.close(request_id)
        self.contexts.clear()
        if self._grammars is not None:
            self._grammars.clear()
        self.runner.forget_texts()
        self._of_last_pass = None

    def _admit(self, admit: Admit) -> int:
        """Returns how many rows of the text there are already."""
        token_ids = [*admit.token_ids]
        self.contexts[admit.request_id] = TargetContext(admit, token_ids)
        scope = admit.rows_scope
        may_share = scope is not None and (self._features is None or self._features.keeps)
        self.runner.open(admit.request_id, Text(token_ids, scope) if may_share else None)
        if admit.source:
            self.runner.set_source(admit.request_id, admit.source)
        if admit.grammar is not None and self._grammars is None and self._open_grammars is not None:
            self._grammars = self._open_grammars()
        if self._grammars is not None:
            self._grammars.open(admit.request_id, admit.grammar, admit.scope)
        return self.runner.cached_len(admit.request_id)

    def _commit(self, commit: Commit) -> None:
        context = self.contexts[commit.request_id]
        assert (commit.epoch, commit.prefix_len) == (context.admit.epoch, len(context.token_ids))
        if not self._drafter.keeps_at_once:
            self._keep(commit)
        context.token_ids.extend(commit.token_ids)

    def _commit_rows(self, verdicts: Sequence[Verdict]) -> None:
        """Keep the rows of the verdicts' paths; the text follows with the `Commit`. A verdict that the coordinator cuts
        ends its request."""
        for verdict in verdicts:
            if not verdict.none_follows:
                self._keep(verdict)

    def _keep(self, outcome: Verdict | Commit) -> None:
        num_fed = self.contexts[outcome.request_id].num_fed
        self.runner.commit(outcome.request_id, [*range(num_fed), *(num_fed - 1 + node for node in outcome.path)])

    def _verify_input(self, item: VerifyItem, *, exports: bool) -> VerifyInput:
        context = self.contexts[item.request_id]
        admit, token_ids = context.admit, context.token_ids
        context.num_fed = min(item.num_tokens, len(token_ids) - self.runner.cached_len(item.request_id))
        return VerifyInput(
            item.request_id,
            token_ids,
            admit.prompt_len,
            admit.sampling,
            context.num_fed,
            item.proposal,
            drafts_follow=exports or item.num_draft_tokens > 0,
            scope=admit.memory_scope,
            is_masked=admit.grammar is not None,
            logprobs=admit.logprobs,
            prompt_logprobs=admit.prompt_logprobs,
        )

    def _verify(self, inputs: Sequence[VerifyInput], logits: Tensor, *, may_draft: bool) -> tuple[Verdict, ...]:
        verified = [one for one in inputs if self._verifier.reaches_root(one)]
        if self._grammars is not None:
            logits = self._grammars.masked(verified, logits)
        verdicts = []
        for one, result in zip(verified, self._verifier.verify(verified, logits), strict=True):
            epoch, prefix_len = self.contexts[one.seq_id].admit.epoch, len(one.token_ids)
            none_follows = result.next_token == NO_TOKEN
            token_ids = () if none_follows else (result.next_token,)
            verdict = Verdict(one.seq_id, epoch, prefix_len, result.path, token_ids, none_follows, result.logprobs)
            verdicts.append(self._with_forced(one, verdict) if may_draft and one.is_masked else verdict)
        if not verdicts:
            wait_for(logits.device)  # nothing was read, and the end of the answer is to be that of the pass
        return tuple(verdicts)

    def _with_forced(self, text: VerifyInput, verdict: Verdict) -> Verdict:
        """The verdict with the tokens that the grammar of its request forces next."""
        if self._grammars is None or verdict.none_follows or not self.contexts[text.seq_id].admit.speculates:
            return verdict
        path_tokens = [text.tree.token_ids[node] for node in verdict.path]
        return replace(verdict, forced=self._grammars.forced(text, [*path_tokens, *verdict.token_ids]))

    def _commit_chunks(self, inputs: Sequence[VerifyInput]) -> None:
        """Rows of a prompt chunk are committed text already; no verdict follows for them."""
        for one in inputs:
            if not self._verifier.reaches_root(one):
                self.runner.commit(one.seq_id, range(one.num_fed))

    # --- ahead of the batch -------------------------------------------------------------------------------------------

    def _run_ahead(self, ahead: RunAhead, batch: VerifyBatch, answer: VerdictBatch) -> None:
        """Make the pass of the batch that is predicted, if there is room for its rows. What it raises is kept until the
        batch is here to which the coordinator puts it down."""
        predicted = ahead.predict(batch, answer, lambda request_id: self.contexts[request_id].admit)
        if predicted is None or not ahead.pays:
            return
        proposals = [item.proposal for item in predicted.items]
        if not self.runner.can_reserve(sum([1 if one is None else len(one.tree.token_ids) for one in proposals])):
            return
        started = time.monotonic()
        try:
            self._update(predicted)
            made = self._make_pass(predicted)
            wait_for(made.logits.device)
            self._pass_ahead = _PassAhead(predicted, made, time.monotonic() - started)
        except Exception as error:
            self._pass_ahead = error

    def _take_ahead(self, batch: VerifyBatch) -> tuple[_PassAhead | None, float]:
        """The pass of this batch, if it is made, and the seconds of one for another batch, which is taken back."""
        is_true = self._ahead is not None and self._ahead.matches(batch)
        ahead, self._pass_ahead = self._pass_ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is None or is_true:
            return ahead, 0.0
        for commit in ahead.batch.commits:
            del self.contexts[commit.request_id].token_ids[commit.prefix_len :]
            self.runner.commit(commit.request_id, ())
        return None, ahead.seconds
