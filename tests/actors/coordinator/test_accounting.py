"""What the coordinator counts, against a second set of books kept from the records that went in and came out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from actors.coordinator.stats import RequestTimes
from actors.options import SchedulerConfig
from actors.protocol.messages import Abort, ProposalBatch, ReportOrder, Request, Tokens, VerdictBatch, VerifyBatch
from tests.actors.scripted_policy import MoodyPolicy
from tests.actors.scripted_roles import World
from tests.actors.small_language import requests_of

WORK_S = {VerdictBatch: 0.5, ProposalBatch: 0.25}


class Books(World):
    """Every role works just before its answer arrives, which takes 0.125 s; records come a second apart."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.counts = Counter()
        self.histogram, self.drafted_at, self.accepted_at = Counter(), Counter(), Counter()
        self.by_mode, self.lengths = Counter(), Counter()
        self.arrived, self.admitted, self.first, self.order = {}, {}, {}, {}
        self.times: list[RequestTimes] = []
        self.proposals = {}
        self.round_began = self.active_since = None
        self.waited_s = 0.0

    def deliver(self, record) -> None:
        now, counts = self.clock + self.tick_s, self.counts
        work_s = WORK_S.get(type(record))
        if isinstance(record, ProposalBatch) and record.num_missing and not record.proposals:
            work_s = 0.0  # it only says that drafts will come
        if work_s is not None:
            record = replace(record, started=now - 0.125 - work_s, finished=now - 0.125)
        if isinstance(record, Request):
            self.arrived[record.request_id] = now
            counts["num_prompt_tokens"] += len(record.prompt)
            if self.active_since is None:
                self.active_since = self.round_began = now
        if isinstance(record, VerdictBatch):
            self.end_round(record, now)
        if isinstance(record, ProposalBatch):
            counts["draft_busy_s"] += work_s
            self.waited_s += work_s * (not self.proposals)
        super().deliver(record)

    def end_round(self, batch, now) -> None:
        counts = self.counts
        counts["num_rounds"] += 1
        counts["target_busy_s"] += 0.5
        for verdict in batch.verdicts:
            proposal = self.proposals.get(verdict.request_id)
            if verdict.request_id not in self.ends and proposal is not None and proposal.tree.num_draft_tokens:
                self.order[verdict.request_id] = proposal.tree, len(verdict.path)
        if any(proposal is not None for proposal in self.proposals.values()):
            round_s = now - self.round_began
            idle_s = round_s - 0.5
            counts["num_spec_rounds"] += 1
            counts["spec_round_s"] += round_s
            counts["wait_for_draft_s"] += min(idle_s, self.waited_s)
            counts["wait_for_messages_s"] += max(0, idle_s - self.waited_s)
            counts["spec_round_overhead_s"] += max(0, idle_s - self.waited_s)
        self.proposals, self.waited_s, self.round_began = {}, 0.0, now

    def post(self, answers) -> None:
        for answer in answers:
            if isinstance(answer, VerifyBatch):
                for admit in answer.admits:
                    self.admitted.setdefault(admit.request_id, self.clock)
                self.proposals = {item.request_id: item.proposal for item in answer.items}
                if all(item.proposal is None for item in answer.items):
                    self.proposals[None] = None  # a pass is out, though nothing is verified
        super().post(answers)
        if len(self.ends) == len(self.arrived) and self.active_since is not None:
            self.counts["active_s"] += self.clock - self.active_since
            self.active_since = None

    def receive(self, news: Tokens) -> None:
        super().receive(news)
        counts, request_id, now = self.counts, news.request_id, self.clock
        counts["num_tokens"] += len(news.token_ids)
        if news.token_ids:
            self.first.setdefault(request_id, now)
        if request_id in self.order:
            tree, length = self.order.pop(request_id)
            accepted = min(length, len(news.token_ids))
            counts["num_spec_steps"] += 1
            counts["num_draft_tokens"] += tree.num_draft_tokens
            counts["num_accepted_tokens"] += accepted
            self.histogram[accepted] += 1
            self.drafted_at.update(range(max(tree.depths())))
            self.accepted_at.update(range(accepted))
        if news.finish_reason is not None:
            counts["num_requests_aborted" if news.finish_reason == "abort" else "num_requests_finished"] += 1
            since = [
                None if (at := times.get(request_id)) is None else at - self.arrived[request_id]
                for times in (self.admitted, self.first)
            ]
            latency = now - self.arrived[request_id]
            self.times.append(RequestTimes(news.finish_reason, *since, latency, len(self.tokens[request_id])))


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i >= 10)) for i in range(24)])
def test_the_books_agree(seed):
    choose = random.Random(seed)
    pipeline = choose.choice(["plain", "sync", "pearl", "tree"])
    policy = MoodyPolicy(choose, pipeline) if seed % 3 == 0 else None
    limits = choose.choice([SchedulerConfig(), SchedulerConfig(3, 20, 6)])
    world = Books(choose, pipeline, ("right", "bushy", "missing"), limits, policy=policy, splits=0.3)
    coming = requests_of(choose, 6)
    while coming:
        if choose.random() < 0.3:
            world.deliver(coming.pop(0))
        elif choose.random() < 0.03:
            world.deliver(Abort(choose.randrange(6)))
        elif not world.deliver_one():
            world.deliver(coming.pop(0))
    world.settle()
    stats = world.coordinator.stats
    assert {name: getattr(stats, name) for name in world.counts} == pytest.approx(dict(world.counts))
    for found, expected in (
        (stats.acceptance_histogram, world.histogram),
        (stats.num_drafted_per_pos, world.drafted_at),
        (stats.num_accepted_per_pos, world.accepted_at),
    ):
        assert {i: count for i, count in enumerate(found) if count} == expected
    assert list(stats.ended) == world.times
    for lane, busy_s in (("target", stats.target_busy_s), ("draft", stats.draft_busy_s)):
        assert sum(end - start for name, _, start, end, _ in stats.spans if name == lane) == pytest.approx(busy_s)
    (report,) = world.coordinator.on(ReportOrder(reset=True), 1000.0)
    assert report.counters["window_s"] == 1000.0 and report.counters["num_tokens"] == sum(
        map(len, world.tokens.values())
    )
    assert world.coordinator.stats.since == 1000.0 and world.coordinator.stats.num_tokens == 0
