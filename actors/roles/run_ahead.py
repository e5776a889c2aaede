"""Running ahead: the next batch is predicted from the last one and its verdicts, and its pass made before it comes.

While verdicts are on their way to the coordinator and the next batch on its way back, the target would idle. In a
steady batch that record says nothing new to a rank that drafts itself: every request goes on, with the draft that was
just made for it. What was computed is used only for a batch of exactly the predicted rows; for any other one it is
dropped and costs the time of a pass, so nothing is computed ahead where batches have lately come otherwise. Predicts
and compares; must not know how a pass is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from actors.protocol.messages import Admit, Commit, Verdict, VerdictBatch, VerifyBatch, VerifyItem

PRICE = 8
"""Batches that came as predicted which pay for one that did not: a pass that is dropped takes about as long as so many
waits for a batch."""
MOST_CREDIT = 2 * PRICE
"""Batches' worth that is remembered: so many as predicted make up for all before."""


class RunAhead:
    """Predicts for a rank whose requests end at these tokens and with texts of `max_model_len`. `has_streams`: what is
    drafted behind a pass begins in it, so that its rows depend on whether drafts are ordered."""

    def __init__(
        self, eos_token_ids: Collection[int], max_model_len: int, price: int = PRICE, *, has_streams: bool = False
    ) -> None:
        self._price = price
        self._has_streams = has_streams
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._credit = 0
        self._predicted: VerifyBatch | None = None

    @property
    def pays(self) -> bool:
        """Whether predicted batches come often enough for their passes to be made ahead."""
        return self._credit >= 0

    def predict(self, batch: VerifyBatch, answer: VerdictBatch, admit_of: Callable[[int], Admit]) -> VerifyBatch | None:
        """The batch after this one and its answer, if no request joins or is aborted and the policy keeps its choice;
        None where a request is known to end or still reads its text."""
        self._predicted = None
        items = {item.request_id: item for item in batch.items}
        if not answer.verdicts or len(answer.verdicts) < len(items):
            return None
        drafts = () if answer.drafts is None or batch.unverified else answer.drafts.proposals
        proposals = {proposal.request_id: proposal for proposal in drafts}
        commits, following = list[Commit](), list[VerifyItem]()
        for verdict in answer.verdicts:
            request_id, item = verdict.request_id, items[verdict.request_id]
            accepted = [item.proposal.tree.token_ids[node] for node in verdict.path] if item.proposal else []
            token_ids = (*accepted, *verdict.token_ids)
            if not self._goes_on(admit_of(request_id), verdict, token_ids):
                return None
            commits.append(Commit(request_id, verdict.epoch, verdict.prefix_len, verdict.path, token_ids))
            proposal = proposals.get(request_id)
            following.append(VerifyItem(request_id, 1, proposal, item.num_draft_tokens, item.reads_text))
        self._predicted = VerifyBatch(
            batch.round + 1,
            commits=tuple(commits),
            items=tuple(following),
            after=batch.round,
            may_draft=batch.may_draft,
        )
        return self._predicted

    def matches(self, batch: VerifyBatch) -> bool:
        """Whether this batch, the next one, has the rows of the predicted one. What is drafted behind its verdicts may
        differ."""
        predicted, self._predicted = self._predicted, None
        if predicted is None:
            return False
        is_true = self._rows_of(batch) == self._rows_of(predicted)
        self._credit = min(self._credit + 1, MOST_CREDIT) if is_true else max(self._credit - self._price, -MOST_CREDIT)
        return is_true

    def forget(self) -> None:
        """The next batch follows from nothing."""
        self._predicted = None

    def _goes_on(self, admit: Admit, verdict: Verdict, token_ids: tuple[int, ...]) -> bool:
        """Whether the coordinator will want a pass of this request right after it has committed these tokens, and no
        other draft than was made here."""
        if verdict.none_follows or verdict.forced or not verdict.token_ids:
            return False
        sampling, length = admit.sampling, verdict.prefix_len + len(token_ids)
        if length >= min(admit.prompt_len + sampling.max_tokens, self._max_model_len):
            return False
        return not any(sampling.stops(token, self._eos_token_ids) for token in token_ids)

    def _rows_of(self, batch: VerifyBatch) -> tuple[object, ...]:
        """All that a pass and the state before it depend on."""
        rows = [(one.request_id, one.num_tokens, one.proposal) for one in batch.items]
        drafted = [one.num_draft_tokens > 0 for one in batch.items] if self._has_streams else []
        changes = batch.admits, batch.commits, batch.releases, batch.weights
        return (*changes, batch.bridge, batch.may_draft, rows, drafted)
