"""What the coordinator counts, in vLLM's conventions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.coordinator.sequence import Sequence
from actors.coordinator.stats import MESSAGES, SPAN_LIMIT, RequestTimes, Tally
from actors.policy.speculation_switch import Mode
from actors.protocol.messages import Commit, Proposal, ProposalBatch, Request, TokenTree, Verdict, VerdictBatch

CHAIN = Proposal(1, 0, 3, 0, TokenTree.chain(5, (6, 7, 8)))
TREE = Proposal(1, 0, 3, 0, TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1)))


def commit(num_accepted, num_emitted=None):
    emitted = num_accepted + 1 if num_emitted is None else num_emitted
    return Commit(1, 0, 3, tuple(range(1, num_accepted + 1)), (9,) * emitted)


def test_positions_count_levels_and_the_histogram_accepted_tokens():
    tally = Tally()
    for num_accepted in (3, 0, 1):
        tally.verified(CHAIN, commit(num_accepted))
    tally.verified(TREE, commit(2))
    assert (tally.num_spec_steps, tally.num_draft_tokens, tally.num_accepted_tokens) == (4, 13, 6)
    assert tally.num_tokens == 10, "accepted tokens, and one of the target's own per round"
    assert tally.acceptance_histogram == [1, 1, 1, 1]
    assert tally.num_drafted_per_pos == [4, 4, 3] and tally.num_accepted_per_pos == [3, 2, 1]


def test_plain_rounds_are_no_speculation():
    tally = Tally()
    tally.verified(None, commit(0))
    tally.verified(Proposal(1, 0, 3, 0, TokenTree.root(5)), commit(0))
    assert tally.num_tokens == 2 and tally.num_spec_steps == 0 and tally.acceptance_histogram == []


def test_a_cut_round_counts_what_was_emitted():
    tally = Tally()
    tally.verified(CHAIN, commit(3, num_emitted=2))
    assert tally.num_tokens == 2 and tally.num_accepted_tokens == 2 and tally.acceptance_histogram == [0, 0, 1]


@pytest.mark.parametrize(
    ("speculated", "rows", "verdicts", "name"),
    [(True, 9, 2, "verify"), (False, 2, 2, "decode"), (False, 9, 2, "prefill")],
)
def test_spans_say_what_a_pass_was(speculated, rows, verdicts, name):
    tally = Tally()
    judged = tuple(Verdict(i, 0, 9, (1, 2), 5) for i in range(verdicts))
    tally.judged(VerdictBatch(3, judged, 1.0, 1.5, rows), speculated=speculated)
    told = {"round": 3, "rows": rows, "requests": verdicts, "tokens": 3 * verdicts}
    assert list(tally.spans) == [("target", name, 1.0, 1.5, told)]
    assert tally.target_busy_s == 0.5 and tally.num_rounds == 1


def test_keeping_the_rows_of_the_last_verdict_is_a_span_of_its_own():
    tally = Tally()
    tally.judged(VerdictBatch(3, (), 1.0, 1.5, 4, committed=1.1), speculated=True)
    (lane, name, start, end, _), (_, _, begun, ended, _) = tally.spans
    assert (lane, name, start, end, begun, ended) == ("target", "commit", 1.0, 1.1, 1.1, 1.5)
    assert tally.target_busy_s == 0.5, "both are work"


def test_a_prepared_draft_is_a_hit_and_any_that_was_not_a_miss():
    tally = Tally()
    prepared, late = replace(CHAIN, prepared=True), replace(CHAIN, prepared=False)
    for proposals in ((prepared,), (late,), (prepared, late)):
        tally.drafted(ProposalBatch(3, proposals, 1.0, 1.25))
    tally.drafted(ProposalBatch(4, (), 2.0, 2.5, num_missing=1))
    assert [name for _, name, *_ in tally.spans] == ["hit", "miss", "miss"], "an announcement is no work"


def test_records_between_hosts_whose_clocks_differ_have_no_spans():
    tally = Tally()
    tally.sent("order", 3, 1.0, 1.25)
    tally.sent("proposal", 3, 2.0, 1.5)
    assert list(tally.spans) == [(MESSAGES, "order", 1.0, 1.25, {"round": 3})]


def test_draft_spans_count_tokens_and_tell_reading_from_proposing():
    tally = Tally()
    tally.drafted(ProposalBatch(3, (CHAIN, TREE), 1.0, 1.25))
    tally.drafted(ProposalBatch(4, (), 2.0, 2.5))
    (_, first, _, _, arguments), (_, second, *_) = tally.spans
    assert (first, second) == ("propose", "prefill")
    assert arguments == {"round": 3, "requests": 2, "tokens": 7, "hits": 0}
    assert tally.draft_busy_s == 0.75


def test_overhead_is_what_no_role_worked_and_never_negative():
    tally = Tally()
    tally.round_ended(1.0, 0.5, 0.25)
    tally.round_ended(1.0, 1.5, 0.0)
    assert (tally.num_spec_rounds, tally.spec_round_s, tally.spec_round_overhead_s) == (2, 2.0, 0.25)
    assert (tally.wait_for_draft_s, tally.wait_for_messages_s) == (0.25, 0.25)


def test_a_report_holds_every_counter_and_the_length_of_its_window():
    tally = Tally(since=10.0)
    tally.drafted(ProposalBatch(3, (CHAIN,), 1.0, 1.25))
    report = tally.report(12.5)
    assert set(report.counters) == set(Tally.__slots__) - {"since", "phase", "mode", "ended", "spans"} | {"window_s"}
    assert report.counters["window_s"] == 2.5 and len(report.spans) == 1


def test_times_of_an_ended_request_count_from_its_arrival():
    tally, sequence = Tally(), Sequence.start(Request(1, (3, 4)), 50)
    sequence.arrived_at, sequence.admitted_at, sequence.first_token_at = 10.0, 10.5, 11.0
    sequence.token_ids += [5, 6, 7]
    sequence.finish_reason = "length"
    tally.request_ended(sequence, 13.0)
    assert list(tally.ended) == [RequestTimes("length", 0.5, 1.0, 3.0, num_tokens=3)]
    assert tally.ended[0].per_token_s == 1.0
    never = Sequence.start(Request(2, (3,)), 50)
    never.arrived_at, never.finish_reason = 12.0, "abort"
    tally.request_ended(never, 13.0)
    assert tally.ended[1] == RequestTimes("abort", None, None, 1.0, num_tokens=0)
    assert tally.ended[1].per_token_s is None
    assert (tally.num_requests_finished, tally.num_requests_aborted) == (1, 1)


def test_time_on_the_way_is_what_was_not_work():
    tally = Tally()
    tally.crossed("target", 0.75, 0.5)
    tally.crossed("target", 0.25, 0.5)  # clocks of two hosts
    tally.crossed("draft", 1.5, 0.5)
    assert (tally.num_link_trips, tally.link_s) == ({"target": 2, "draft": 1}, {"target": 0.25, "draft": 1.0})


def test_old_spans_fall_out():
    tally = Tally()
    batch = ProposalBatch(3, (), 1.0, 1.25)
    for _ in range(SPAN_LIMIT + 10):
        tally.drafted(batch)
    assert len(tally.spans) == SPAN_LIMIT


def test_rounds_are_counted_by_what_they_were_for():
    tally = Tally()
    for mode, seconds in ((Mode.speculate, 1.0), (Mode.probe, 0.5), (Mode.probe, 0.5), (Mode.speculate, 2.0)):
        tally.round_seen(mode, seconds, [0, 3] if mode is Mode.speculate else [0, 0])
    assert tally.seconds_by_mode == {"speculate": 3.0, "probe": 1.0}
    assert tally.num_by_mode == {"speculate": 2, "probe": 1}, "how often each was entered"
    assert tally.orders_by_length == [6, 0, 0, 2]
