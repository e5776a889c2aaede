"""What the coordinator counts, in vLLM's conventions."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

from actors.coordinator.sequence import Sequence
from actors.coordinator.stats import MESSAGES, SPAN_LIMIT, CoordinatorStats, RequestTimes
from actors.policy.decision import Mode
from actors.protocol.messages import (
    Commit,
    FeatureExport,
    LearningWork,
    LevelWork,
    Proposal,
    ProposalBatch,
    Request,
    TokenTree,
    Verdict,
    VerdictBatch,
)

CHAIN = Proposal(1, 0, 3, 0, TokenTree.chain(5, (6, 7, 8)))
TREE = Proposal(1, 0, 3, 0, TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1)))


def judged(stats, batch, *, speculated):
    stats.add_pass(batch, batch.started, batch.finished, speculated=speculated)


@pytest.mark.parametrize(
    ("speculated", "rows", "num_verdicts", "name"),
    [(True, 9, 2, "verify"), (False, 2, 2, "decode"), (False, 9, 2, "prefill")],
)
def test_spans_say_what_a_pass_was(speculated, rows, num_verdicts, name):
    stats = CoordinatorStats()
    verdicts = tuple(Verdict(i, 0, 9, (1, 2), (5,)) for i in range(num_verdicts))
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
        stats.add_drafts(ProposalBatch(3, proposals, 1.0, 1.25))
    stats.add_drafts(ProposalBatch(4, (), 2.0, 2.5, num_missing=1))
    assert [name for _, name, *_ in stats.spans] == ["hit", "miss", "miss"], "an announcement is no work"


def test_records_between_hosts_whose_clocks_differ_have_no_spans():
    stats = CoordinatorStats()
    stats.add_exchange(ProposalBatch(3, (), 1.25, 2.0, num_missing=1), 1.0, 1.5)
    assert list(stats.spans) == [(MESSAGES, "order", 1.0, 1.25, {"round": 3})]


def test_draft_spans_count_tokens_and_tell_reading_from_proposing():
    stats = CoordinatorStats()
    stats.add_drafts(ProposalBatch(3, (CHAIN, TREE), 1.0, 1.25))
    stats.add_drafts(ProposalBatch(4, (), 2.0, 2.5))
    (_, first, _, _, arguments), (_, second, *_) = stats.spans
    assert (first, second) == ("propose", "prefill")
    assert arguments == {"round": 3, "requests": 2, "tokens": 7, "hits": 0}
    assert stats.draft_busy_s == 0.75


def test_overhead_is_what_no_role_worked_and_never_negative():
    stats = CoordinatorStats()
    stats.add_spec_round(1.0, 0.5, 0.25)
    stats.add_spec_round(1.0, 1.5, 0.0)
    assert (stats.num_spec_rounds, stats.spec_round_s, stats.spec_round_overhead_s) == (2, 2.0, 0.25)
    assert (stats.wait_for_draft_s, stats.wait_for_messages_s) == (0.25, 0.25)


def test_a_report_holds_every_counter_and_the_length_of_its_window():
    stats = CoordinatorStats(since=10.0)
    stats.add_drafts(ProposalBatch(3, (CHAIN,), 1.0, 1.25))
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
    stats.add_link_trips("target", [0.25, 0.0])
    stats.add_link_trips("target", [])
    stats.add_link_trips("draft", [1.0])
    assert (stats.num_link_trips, stats.link_s) == ({"target": 2, "draft": 1}, {"target": 0.25, "draft": 1.0})


def test_old_spans_fall_out():
    stats = CoordinatorStats()
    batch = ProposalBatch(3, (), 1.0, 1.25)
    for _ in range(SPAN_LIMIT + 10):
        stats.add_drafts(batch)
    assert len(stats.spans) == SPAN_LIMIT


def test_rounds_are_counted_by_what_they_were_for():
    stats = CoordinatorStats()
    for mode, seconds in ((Mode.speculate, 1.0), (Mode.probe, 0.5), (Mode.probe, 0.5), (Mode.speculate, 2.0)):
        stats.add_mode(mode, seconds, [0, 3] if mode is Mode.speculate else [0, 0])
    assert stats.seconds_by_mode == {"speculate": 3.0, "probe": 1.0}
    assert stats.num_by_mode == {"speculate": 2, "probe": 1}, "how often each was entered"
    assert stats.orders_by_length == [6, 0, 0, 2]


def test_all_of_a_drafters_answer_is_counted():
    """It received tensors first, worked ahead, and two of its proposals had been read off previews."""
    learning = LearningWork(1, True, 2, 3, 4, 5, 0.5, 0.25, 0.125, 1.0, 2.0)
    levels = (LevelWork("low", 3, 0.5, 2, 7, 4, ((4.0, 4.5),)), LevelWork("low", 1, 0.25, 1, 1, 1))
    proposals = (replace(CHAIN, prepared=True), replace(CHAIN, prepared=False), CHAIN)
    ahead = ((2.0, 2.25, True), (2.5, 2.75, False))
    batch = ProposalBatch(3, proposals, 3.0, 3.5, 0, ahead, levels, (2.8, 2.9), learning)
    stats = CoordinatorStats()
    stats.add_exchange(batch, 1.0, 4.0)
    stats.add_drafts(batch, num_prefetched=2)
    lanes = {
        (MESSAGES, "order"): (1.0, 2.8, {"round": 3}),
        (MESSAGES, "proposal"): (3.5, 4.0, {"round": 3}),
        ("draft", "features"): (2.8, 2.9, {"round": 3}),
        ("draft", "kv_refresh"): (2.0, 2.25, {"round": 3}),
        ("draft", "ahead"): (2.5, 2.75, {"round": 3}),
        ("low", "draft"): (4.0, 4.5, {"round": 3}),
        ("draft", "miss"): (3.0, 3.5, {"round": 3, "requests": 5, "tokens": 9, "hits": 3}),
    }
    assert {span[:2]: span[2:] for span in stats.spans} == lanes and len(stats.spans) == len(lanes)
    assert (stats.num_prefetched, stats.num_branch_hits, stats.num_branch_lookups) == (2, 3, 4)
    assert stats.draft_busy_s == 0.5 + 0.25 + 0.25 and stats.learning == asdict(learning)
    work = {"num_passes": 4, "busy_s": 0.75, "num_drafts": 3, "num_draft_tokens": 8, "num_accepted_tokens": 5}
    assert stats.levels == {"low": work}


def test_drafts_that_were_all_read_off_previews_are_a_hit():
    stats = CoordinatorStats()
    stats.add_drafts(ProposalBatch(3, (), 1.0, 1.5), num_prefetched=2)
    assert list(stats.spans) == [("draft", "hit", 1.0, 1.5, {"round": 3, "requests": 2, "tokens": 0, "hits": 2})]


@pytest.mark.parametrize("proposals", [(), (CHAIN, TREE)])
def test_drafts_on_the_targets_ranks_are_counted_like_others(proposals):
    stats, levels = CoordinatorStats(), (LevelWork("low", 3, 0.5),)
    stats.add_drafts(ProposalBatch(3, proposals, 1.0, 1.25, levels=levels))
    assert stats.draft_busy_s == 0.25 and stats.levels["low"]["num_passes"] == 3
    work = ("propose", 1.0, 1.25, {"round": 3, "requests": 2, "tokens": 7, "hits": 0})
    assert list(stats.spans) == [("draft", *(work if proposals else ("prefill", 1.0, 1.25, {"round": 3})))]


def test_guessed_states_of_blocks_are_counted():
    stats = CoordinatorStats()
    for guesses in ((5, 3), (2, 0), (0, 0)):
        stats.add_pass(VerdictBatch(3, (), 1.0, 1.5, guesses=guesses), 0.25, 2.0, speculated=False)
    counters = stats.report(2.0).counters
    assert (counters["num_guessed_states"], counters["num_accepted_states"]) == (7, 3)


def test_passes_ahead_and_dropped_ones_are_counted():
    stats = CoordinatorStats()
    for ran_ahead, dropped_s in ((True, 0.0), (False, 0.25), (False, 0.5), (True, 0.0), (True, 0.0)):
        batch = VerdictBatch(3, (), 1.0, 1.5, ran_ahead=ran_ahead, dropped_s=dropped_s)
        stats.add_pass(batch, 1.25, 2.0, speculated=False)
    assert (stats.num_passes_ahead, stats.dropped_pass_s, stats.num_rounds, stats.target_busy_s) == (3, 0.75, 5, 2.5)
    assert "verify" not in {name for lane, name, *_ in stats.spans if lane == MESSAGES}, (
        "it began before its batch left"
    )


def test_what_a_pass_sends_over_a_bridge_is_counted():
    stats = CoordinatorStats()
    export = FeatureExport(1, 1, 5, "float32", ((1, 0, 2), (2, 0, 1)))
    batch = VerdictBatch(3, (), 1.0, 1.5, export=export, exported=(0.5, 0.75))
    stats.add_pass(batch, 0.25, 2.0, speculated=True)
    stats.add_pass(replace(batch, exported=None), 1.0, 1.5, speculated=True)
    assert (stats.num_exports, stats.exported_rows, stats.exported_bytes) == (2, 6, 2 * export.num_bytes)
    assert [span[:4] for span in stats.spans] == [
        (MESSAGES, "verify", 0.25, 1.0),
        (MESSAGES, "verdict", 1.5, 2.0),
        ("target", "verify", 1.0, 1.5),
        ("target", "export", 0.5, 0.75),
        ("target", "verify", 1.0, 1.5),
    ]


def test_a_role_that_was_lost_is_away_until_its_first_answer():
    stats = CoordinatorStats()
    for role, seconds in (("draft", 1.0), ("target", 2.0), ("draft", 0.5)):
        stats.add_outage(role, seconds)
    assert stats.resume_s == {"draft": [1.0, 0.5], "target": [2.0]}


@pytest.mark.parametrize(("num_tokens", "per_token_s"), [(0, None), (1, None), (2, 2.0), (3, 1.0)])
def test_seconds_per_token_are_those_after_the_first(num_tokens, per_token_s):
    assert RequestTimes("stop", 0.5, 1.0, 3.0, num_tokens).per_token_s == per_token_s


def test_accepted_tokens_are_those_that_were_committed():
    """The last verdict of a request is cut at its limit; an empty draft is none."""
    stats = CoordinatorStats()
    stats.add_commit(CHAIN, Commit(1, 0, 3, (1, 2, 3), (6, 7)), "far")
    stats.add_commit(None, Commit(1, 0, 5, (), (6,)))
    stats.add_commit(replace(CHAIN, tree=TokenTree.root(5)), Commit(1, 0, 6, (), (6,)), "local")
    assert (stats.num_tokens, stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 1, 3, 2)
    assert (stats.num_drafted_per_pos, stats.num_accepted_per_pos) == ([1, 1, 1], [1, 1, 0])
    stats.add_commit(TREE, Commit(1, 0, 7, (1, 3), (6, 8, 9)))
    assert (stats.num_drafted_per_pos, stats.num_accepted_per_pos) == ([2, 2, 1], [2, 2, 0])
    counts = {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_tokens": 2}
    assert stats.report(1.0).counters["drafts_by_source"] == {"far": counts}, "where there are several"
    stats.add_commit(CHAIN, Commit(1, 0, 10, (1,), (6, 7)), "far")
    stats.add_commit(CHAIN, Commit(1, 0, 12, (), (7,)), "local")
    of_far, of_local = (list(stats.drafts_by_source[source].values()) for source in ("far", "local"))
    assert (of_far, of_local) == ([2, 6, 3], [1, 3, 0])
