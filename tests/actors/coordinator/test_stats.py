"""What the coordinator counts, in vLLM's conventions."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from actors.coordinator.sequence import Sequence
from actors.coordinator.stats import MESSAGES, SPAN_LIMIT, CoordinatorStats, RequestTimes
from actors.policy.decision import Mode
from actors.protocol.messages import Proposal, ProposalBatch, Request, TokenTree, Verdict, VerdictBatch

CHAIN = Proposal(1, 0, 3, 0, TokenTree.chain(5, (6, 7, 8)))
TREE = Proposal(1, 0, 3, 0, TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1)))


def drafted(stats, batch):
    """An answer that arrived at once."""
    stats.add_drafts(batch, batch.started, batch.finished)


def judged(stats, batch, *, speculated):
    stats.add_pass(batch, batch.started, batch.finished, speculated=speculated)


@pytest.mark.parametrize(
    ("speculated", "rows", "num_verdicts", "name"),
    [(True, 9, 2, "verify"), (False, 2, 2, "decode"), (False, 9, 2, "prefill")],
)
def test_spans_say_what_a_pass_was(speculated, rows, num_verdicts, name):
    stats = CoordinatorStats()
    verdicts = tuple(Verdict(i, 0, 9, (1, 2), 5) for i in range(num_verdicts))
    judged(stats, VerdictBatch(3, verdicts, 1.0, 1.5, rows), speculated=speculated)
    facts = {"round": 3, "rows": rows, "requests": num_verdicts, "tokens": 3 * num_verdicts}
    assert list(stats.spans) == [("target", name, 1.0, 1.5, facts)]
    assert stats.target_busy_s == 0.5 and stats.num_rounds == 1


def test_keeping_the_rows_of_the_last_verdict_is_a_span_of_its_own():
    stats = CoordinatorStats()
    judged(stats, VerdictBatch(3, (), 1.0, 1.5, 4, committed=1.1), speculated=True)
    (lane, name, start, end, _), (_, _, begun, ended, _) = stats.spans
    assert (lane, name, start, end, begun, ended) == ("target", "commit", 1.0, 1.1, 1.1, 1.5)
    assert stats.target_busy_s == 0.5, "both are work"


def test_a_prepared_draft_is_a_hit_and_any_that_was_not_a_miss():
    stats = CoordinatorStats()
    prepared, late = replace(CHAIN, prepared=True), replace(CHAIN, prepared=False)
    for proposals in ((prepared,), (late,), (prepared, late)):
        drafted(stats, ProposalBatch(3, proposals, 1.0, 1.25))
    drafted(stats, ProposalBatch(4, (), 2.0, 2.5, num_missing=1))
    assert [name for _, name, *_ in stats.spans] == ["hit", "miss", "miss"], "an announcement is no work"


def test_records_between_hosts_whose_clocks_differ_have_no_spans():
    stats = CoordinatorStats()
    stats.add_drafts(ProposalBatch(3, (), 1.25, 2.0, num_missing=1), 1.0, 1.5)
    assert list(stats.spans) == [(MESSAGES, "order", 1.0, 1.25, {"round": 3})]


def test_draft_spans_count_tokens_and_tell_reading_from_proposing():
    stats = CoordinatorStats()
    drafted(stats, ProposalBatch(3, (CHAIN, TREE), 1.0, 1.25))
    drafted(stats, ProposalBatch(4, (), 2.0, 2.5))
    (_, first, _, _, arguments), (_, second, *_) = stats.spans
    assert (first, second) == ("propose", "prefill")
    assert arguments == {"round": 3, "requests": 2, "tokens": 7, "hits": 0}
    assert stats.draft_busy_s == 0.75


def test_overhead_is_what_no_role_worked_and_never_negative():
    stats = CoordinatorStats()
    stats.add_round(1.0, 0.5, 0.25)
    stats.add_round(1.0, 1.5, 0.0)
    assert (stats.num_spec_rounds, stats.spec_round_s, stats.spec_round_overhead_s) == (2, 2.0, 0.25)
    assert (stats.wait_for_draft_s, stats.wait_for_messages_s) == (0.25, 0.25)


def test_a_report_holds_every_counter_and_the_length_of_its_window():
    stats = CoordinatorStats(since=10.0)
    drafted(stats, ProposalBatch(3, (CHAIN,), 1.0, 1.25))
    report = stats.report(12.5)
    names = {one.name for one in fields(CoordinatorStats)} - {"since", "phase", "mode", "switch", "ended", "spans"}
    assert set(report.counters) == names | {"window_s", "guard"}
    assert report.counters["window_s"] == 2.5 and len(report.spans) == 1


def test_times_of_an_ended_request_count_from_its_arrival():
    stats, sequence = CoordinatorStats(), Sequence.start(Request(1, (3, 4)), 50)
    sequence.arrived_at, sequence.admitted_at, sequence.first_token_at = 10.0, 10.5, 11.0
    sequence.token_ids += [5, 6, 7]
    sequence.finish_reason = "length"
    stats.add_request(sequence, 13.0)
    assert list(stats.ended) == [RequestTimes("length", 0.5, 1.0, 3.0, num_tokens=3)]
    assert stats.ended[0].per_token_s == 1.0
    never = Sequence.start(Request(2, (3,)), 50)
    never.arrived_at, never.finish_reason = 12.0, "abort"
    stats.add_request(never, 13.0)
    assert stats.ended[1] == RequestTimes("abort", None, None, 1.0, num_tokens=0)
    assert stats.ended[1].per_token_s is None
    assert (stats.num_requests_finished, stats.num_requests_aborted) == (1, 1)


def test_time_on_the_way_is_what_was_not_work():
    stats = CoordinatorStats()
    stats.add_link_trip("target", 0.75, 0.5)
    stats.add_link_trip("target", 0.25, 0.5)  # clocks of two hosts
    stats.add_link_trip("draft", 1.5, 0.5)
    assert (stats.num_link_trips, stats.link_s) == ({"target": 2, "draft": 1}, {"target": 0.25, "draft": 1.0})


def test_old_spans_fall_out():
    stats = CoordinatorStats()
    batch = ProposalBatch(3, (), 1.0, 1.25)
    for _ in range(SPAN_LIMIT + 10):
        drafted(stats, batch)
    assert len(stats.spans) == SPAN_LIMIT


def test_rounds_are_counted_by_what_they_were_for():
    stats = CoordinatorStats()
    for mode, seconds in ((Mode.speculate, 1.0), (Mode.probe, 0.5), (Mode.probe, 0.5), (Mode.speculate, 2.0)):
        stats.add_mode(mode, seconds, [0, 3] if mode is Mode.speculate else [0, 0])
    assert stats.seconds_by_mode == {"speculate": 3.0, "probe": 1.0}
    assert stats.num_by_mode == {"speculate": 2, "probe": 1}, "how often each was entered"
    assert stats.orders_by_length == [6, 0, 0, 2]
