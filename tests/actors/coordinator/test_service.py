"""The coordinator's loop behind its hub: who is gathered, greeted and sent to, and how it ends."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from actors.coordinator import service
from actors.coordinator.clients import CLIENT
from actors.coordinator.scheduler import Load
from actors.coordinator.service import LONGEST_FIELDS, CoordinatorService
from actors.coordinator.state_machine import Coordinator
from actors.policy import draft_wait
from actors.protocol.grammar import MOST_GRAMMAR_CHARACTERS, Grammar
from actors.protocol.membership import Alive, Hello, Join, RankLost, Ready, Recall, RoleBack, RoleLost, Stop, Weights
from actors.protocol.messages import (
    Abort,
    DraftBatch,
    Outputs,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    Tokens,
    UpdateWeights,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    WeightsUpdated,
)
from actors.transport.channel import CODEC, heart_of
from tests.actors.service_harness import FACTS, WAIT_S, link_to


def test_the_client_hears_of_all_ranks_once_the_last_is_there(open_stage):
    stage = open_stage(target_ranks=2)
    stage.send(CLIENT, Hello())
    stage.join("draft-0")
    stage.send_heartbeat("target-0")
    assert stage.receive(CLIENT, 0.1) is None and stage.receive("target-0", 0.1) is None, "not all wait"
    stage.send_heartbeat("target-1")
    for rank in range(2):
        order = stage.receive(f"target-{rank}")
        stage.send(f"target-{rank}", Ready("target", rank, FACTS, order.epoch))
    assert {(ready.role, ready.rank) for ready in (stage.receive(CLIENT) for _ in range(3))} == {
        ("target", 0),
        ("target", 1),
        ("draft", 0),
    }


@pytest.mark.parametrize("near", [False, True])
def test_every_rank_of_a_role_gets_its_records_and_the_client_the_tokens(open_stage, near):
    stage = open_stage(target_ranks=2, near=near)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=2)))
    first, second = stage.receive("target-0"), stage.receive("target-1")
    assert isinstance(first, VerifyBatch) and first == second
    drafts = stage.receive("draft-0")
    assert isinstance(drafts, DraftBatch)
    assert [admit.token_ids for admit in drafts.admits] == [admit.token_ids for admit in first.admits] == [(3, 4)]
    stage.send("draft-0", ProposalBatch(drafts.round, (), 0.0, 0.0))
    stage.send("target-0", VerdictBatch(first.round, (Verdict(1, 0, 2, (), (7,)),), 0.0, 0.0, 2))
    assert stage.receive(CLIENT) == Outputs((Tokens(1, 0, (7,)),))


def test_an_error_in_the_thread_of_a_rank_ends_the_service_and_not_the_rank(open_stage, monkeypatch):
    stage = open_stage(near=True)
    stage.get_ready()
    monkeypatch.setattr(Coordinator, "on", lambda *_: 1 / 0)
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=2)))
    stage.thread.join(WAIT_S)
    assert isinstance(stage.ended[0], ZeroDivisionError)


def test_a_wait_for_drafts_that_begins_while_the_loop_goes_to_sleep_ends_in_time(open_stage, monkeypatch):
    """The thread of a rank begins it after the loop has asked how long it may sleep."""
    has_asked, may_sleep, wait_until = threading.Event(), threading.Event(), CoordinatorService._wait_until

    def ask_slowly(self) -> float:
        answer = wait_until(self)
        if threading.current_thread() is stage.thread and service.HEARTBEAT_S > 1:
            has_asked.set()
            assert may_sleep.wait(WAIT_S)
        return answer

    monkeypatch.setattr(draft_wait, "HANG_S", 0.2)
    stage = open_stage(near=True)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    prompt, drafts = stage.receive("target-0"), stage.receive("draft-0")
    stage.send("draft-0", ProposalBatch(drafts.round, (), 0.0, 0.0))
    monkeypatch.setattr(CoordinatorService, "_wait_until", ask_slowly)
    monkeypatch.setattr(service, "HEARTBEAT_S", 1e4)  # from its next sleep on nothing else ends it
    assert has_asked.wait(WAIT_S)
    stage.send("target-0", VerdictBatch(prompt.round, (Verdict(1, 0, 2, (), (7,)),), 0.0, 0.0, 2))
    assert stage.receive("draft-0").orders and stage.links["target-0"].receive(0) is None, "a draft is waited for"
    may_sleep.set()
    assert isinstance(stage.receive("target-0"), VerifyBatch)


def test_a_level_hears_nothing_that_was_meant_for_an_epoch_it_has_left(open_stage):
    """What a level says while the coordinator is dead reaches its successor, when both have met anew."""
    stage = open_stage(level_ranks=(1,))
    first = stage.join("draft2-0")
    stage.join("draft-0")
    while (record := stage.receive("draft-0")) == RoleLost("draft2"):
        pass  # its `Ready` overtook that of the level
    assert record == RoleBack("draft2", first)
    stage.send("draft-0", DraftBatch(1, epoch=first))
    assert stage.receive("draft2-0") == DraftBatch(1, epoch=first)
    stage.send_heartbeat("draft2-0", epoch=first)
    while (record := stage.receive("draft-0")) == RoleBack("draft2", first):
        pass  # sent to the ranks that are there, and again once the role is complete
    assert record == RoleLost("draft2")
    second = stage.join("draft2-0")
    assert second > first and stage.receive("draft-0") == RoleBack("draft2", second)
    stage.send("draft-0", DraftBatch(2, epoch=first))
    stage.send("draft-0", DraftBatch(3, epoch=second))
    assert stage.receive("draft2-0") == DraftBatch(3, epoch=second)


@pytest.mark.extended
def test_a_level_that_joins_counts_its_rounds_from_the_start(open_stage):
    """The drafter above it may be new as well and begins at 0; rounds of the coordinator are those of lead roles."""
    stage = open_stage(level_ranks=(1,))
    first = stage.join("draft2-0")
    stage.join("target-0")
    stage.join("draft-0")
    stage.send(CLIENT, Hello())
    for _ in stage.ranks:  # a request that overtakes the drafter's `Ready` is decoded plainly until a verdict
        assert isinstance(stage.receive(CLIENT), Ready)
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    batch = next(one for _ in range(60) if isinstance(one := stage.receive("draft-0", 1), DraftBatch))
    assert batch.round > 0
    stage.send_heartbeat("draft2-0", epoch=first)
    stage.send_heartbeat("draft2-0")
    orders = [one for _ in range(3) if isinstance(one := stage.receive("draft2-0", 1), Join)]
    assert orders[-1].epoch > first and {order.round for order in orders} == {0}


def test_the_scheduler_is_sized_by_what_the_target_measured(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3,) * FACTS["max_model_len"]))
    assert "context of 50" in stage.receive(CLIENT).tokens[0].error


def test_a_second_hello_is_answered_and_forgets_no_request(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=1)))
    batch = stage.receive("target-0")
    stage.send(CLIENT, Hello())
    assert isinstance(stage.receive(CLIENT), Ready)
    stage.send("target-0", VerdictBatch(batch.round, (Verdict(1, 0, 2, (), (7,)),), 0.0, 0.0, 2))
    assert stage.receive(CLIENT).tokens[0].token_ids == (7,)


def test_reports_reach_the_client(open_stage):
    stage = open_stage()
    stage.get_ready()
    stage.send(CLIENT, ReportOrder())
    assert isinstance(stage.receive(CLIENT), Report)


def test_without_its_drafter_the_target_goes_on_and_a_successor_gets_all_texts(open_stage):
    stage = open_stage()
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    first = stage.receive("target-0")
    stage.send("target-0", VerdictBatch(first.round, (Verdict(1, 0, 2, (), (7,)),), 0.0, 0.0, 2))
    assert stage.receive(CLIENT) == Outputs((Tokens(1, 0, (7,)),))
    stage.send(CLIENT, RankLost("draft", 0, 0))
    second = stage.receive("target-0")
    assert second.items[0].proposal is None and second.after == first.round
    stage.links["draft-0"].close()
    stage.links["draft-0"] = link_to(stage.hub.address, "draft-0#1")
    stage.send_heartbeat("draft-0", incarnation=1)
    order = stage.receive("draft-0")
    assert order == Join(2, first.round)
    stage.send("draft-0", Ready("draft", 0, FACTS, order.epoch, 1))
    stage.receive(CLIENT)
    stage.send("target-0", VerdictBatch(second.round, (Verdict(1, 0, 3, (), (8,)),), 0.0, 0.0, 1))
    drafts = stage.receive("draft-0")
    (admit,) = drafts.admits
    tokens = [*admit.token_ids, *(token for commit in drafts.commits for token in commit.token_ids)]
    assert tokens == [3, 4, 7, 8] and drafts.after == order.round


def test_a_target_that_is_replaced_serves_the_weights_that_it_had_whatever_was_ordered_since(open_stage):
    """Another order came while these were loaded, and its weights are lost with the process that loads them."""
    stage = open_stage(draft_ranks=0, weights=Weights("start"))
    stage.get_ready()
    served, later = Weights("served", 1), Weights("later", 2)
    stage.send(CLIENT, UpdateWeights(served))
    loading = stage.receive("target-0")
    assert loading.weights == served
    stage.send(CLIENT, UpdateWeights(later))
    stage.send(CLIENT, ReportOrder())
    assert isinstance(stage.receive(CLIENT), Report), "the order has arrived"
    stage.send("target-0", VerdictBatch(loading.round, (), 0.0, 0.0))
    assert stage.receive(CLIENT) == WeightsUpdated(1) and stage.receive("target-0").weights == later
    stage.links["target-0"].close()
    stage.links["target-0"] = link_to(stage.hub.address, "target-0#1")
    stage.send_heartbeat("target-0", incarnation=1)
    assert stage.receive("target-0").weights == served
    assert stage.receive(CLIENT).is_lost


def test_what_a_replaced_process_still_says_is_nobodys_word(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    batch = stage.receive("target-0")
    late = stage.links["target-0"]
    stage.links["target-0"] = link_to(stage.hub.address, "target-0#1")
    stage.send_heartbeat("target-0", incarnation=1)
    order = stage.receive("target-0")
    stage.send("target-0", Ready("target", 0, FACTS, order.epoch, 1))
    assert isinstance(stage.receive(CLIENT), Ready)
    again = stage.receive("target-0")
    assert again.admits[0].epoch == 1 and again.round > batch.round
    late.send(VerdictBatch(again.round, (Verdict(1, 1, 2, (), (8,)),), 0.0, 0.0, 2))
    late.send(Alive("target", 0, 0, 7))
    assert stage.receive(CLIENT, 0.2) is None
    late.close()
    stage.send("target-0", VerdictBatch(again.round, (Verdict(1, 1, 2, (), (7,)),), 0.0, 0.0, 2))
    assert stage.receive(CLIENT).tokens[0].token_ids == (7,)


def test_a_successor_gathers_whom_it_hears_and_serves_without_a_drafter(open_stage):
    stage = open_stage(incarnation=1)
    stage.send(CLIENT, Hello())
    stage.send_heartbeat("target-0", epoch=3, waiting=False)
    recall = stage.receive("target-0")
    assert isinstance(recall, Recall) and recall.epoch > 3
    stage.send_heartbeat("target-0", epoch=3)
    order = stage.receive("target-0")
    assert order.epoch == recall.epoch and order.round > 0
    stage.send("target-0", Ready("target", 0, FACTS, order.epoch))
    assert isinstance(stage.receive(CLIENT), Ready)
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9), generated=(5, 6)))
    batch = stage.receive("target-0")
    (admit,) = batch.admits
    assert admit.token_ids == (3, 4, 5, 6) and admit.prompt_len == 2 and batch.after == order.round
    stage.send("target-0", VerdictBatch(batch.round, (Verdict(1, 0, 4, (), (7,)),), 0.0, 0.0, 4))
    assert stage.receive(CLIENT) == Outputs((Tokens(1, 2, (7,)),))


def test_stop_ends_everyone(open_stage):
    """Heartbeats too, before the next one is due."""
    stage = open_stage(target_ranks=2)
    heart = stage.links["heart"] = link_to(stage.hub.address, heart_of("target-0#0"), keeps="newest")
    stage.get_ready()
    stage.send_heartbeat("target-1", epoch=1, waiting=False)
    heart.send(Alive("target", 0, 0, 7, epoch=1))
    assert stage.receive("target-1") == Recall(2)  # so the heart's connection stands, and rank 0 left the epoch
    stage.send(CLIENT, Stop("closed"))
    assert [stage.receive(name) for name in (*stage.ranks, CLIENT, "heart")] == [Stop("closed")] * 5
    stage.thread.join(WAIT_S)
    assert stage.ended == ["closed"]


def test_a_service_that_raises_leaves_the_ranks_to_its_successor(open_stage, monkeypatch):
    stage = open_stage()
    stage.get_ready()
    monkeypatch.setattr(Coordinator, "on", lambda *_: 1 / 0)
    stage.send(CLIENT, ReportOrder())
    stage.thread.join(WAIT_S)
    (error,) = stage.ended
    assert isinstance(error, ZeroDivisionError)
    assert [stage.receive(name, 0.05) for name in stage.ranks] == [None, None]


def test_records_without_a_meaning_here_stop_no_request(open_stage):
    stage = open_stage()
    stage.get_ready()
    for record in (
        Outputs((Tokens(1, 0, ()),)),
        Alive("unknown", 0, 0, 1),
        Ready("unknown", 3, {}),
        RankLost("unknown", 1, 1),
    ):
        stage.send(CLIENT, record)
    stage.send(CLIENT, ReportOrder())
    assert isinstance(stage.receive(CLIENT), Report)


def test_the_watch_gets_the_stats_about_once_a_second(open_stage):
    seen = []
    stage = open_stage(draft_ranks=0, watches=[lambda snapshot: seen.append(snapshot.stats.num_prompt_tokens)])
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4, 5)))
    assert isinstance(stage.receive("target-0"), VerifyBatch)
    deadline = time.monotonic() + WAIT_S
    while seen[-1:] != [3]:  # the first may be of the time before the request
        assert time.monotonic() < deadline
        stage.send(CLIENT, Abort(99))
        time.sleep(0.1)


def test_a_watch_misses_no_window(open_stage):
    """However short: it looks before every reset, and once more at the end."""
    seen = []
    stage = open_stage(draft_ranks=0, watches=[lambda snapshot: seen.append((snapshot.stats.phase, snapshot.load))])
    stage.get_ready()
    for phase in ("first", "second", "third"):
        stage.send(CLIENT, ReportOrder(reset=True, phase=phase))
        assert isinstance(stage.receive(CLIENT), Report)
    stage.stop()
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["", "first", "second", "third"]
    assert seen[-1][1] == Load(num_running=0, num_waiting=0, kv_slots_used=0, kv_slots=FACTS["kv_slots"])


def test_link_time_is_the_time_away_beside_the_pass(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=1)))
    batch = stage.receive("target-0")
    time.sleep(0.1)
    stage.send("target-0", VerdictBatch(batch.round, (Verdict(1, 0, 2, (), (7,)),), 1.0, 1.06, 2))
    assert stage.receive(CLIENT).tokens[0].token_ids == (7,)
    stage.send(CLIENT, ReportOrder())
    counters = stage.receive(CLIENT).counters
    assert counters["num_link_trips"] == {"target": 1} and counters["link_s"]["target"] >= 0.04


@pytest.mark.parametrize(("idle_s", "trips"), [(0.5, {"draft": 1}), (0.0, {})])
def test_an_order_that_waited_for_a_pass_does_not_measure_the_line(open_stage, idle_s, trips):
    stage = open_stage()
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=1)))
    batch = stage.receive("draft-0")
    stage.send("draft-0", ProposalBatch(batch.round, (), 2.0, 2.1, ahead=((1.0, 2.0 - idle_s, False),)))
    counters = {"draft_busy_s": 0.0}
    while not counters["draft_busy_s"]:  # two links: records may arrive in another order
        stage.send(CLIENT, ReportOrder())
        counters = stage.receive(CLIENT).counters
    assert counters["num_link_trips"] == trips


def test_the_longest_request_fits_the_limit_of_clients_and_a_longer_record_does_not(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    name = "client:other"
    stage.links[name] = link_to(stage.hub.client_address, name)
    widest = 2**32 - 1
    sampling = SamplingParams(
        logit_bias=tuple((widest, 0.01 * number) for number in range(300)),
        bad_words=((widest,) * 27,) * 300,
        stop=("\U0001f40d" * 128,) * 64,
        stop_token_ids=(widest,) * 128,
    )
    text = (widest,) * FACTS["max_model_len"]
    grammar = Grammar("lark", "\U0001f40d" * MOST_GRAMMAR_CHARACTERS)
    longest = Request(1, text[1:], sampling, None, text[:1], reference=text, grammar=grammar)
    assert 2 * len(CODEC.encode(longest)) > LONGEST_FIELDS
    stage.send(name, longest)
    assert "token" in stage.receive(name).tokens[0].error, "it is read, and has tokens that the target lacks"
    stage.send(name, replace(longest, prompt=(widest,) * 80_000))
    deadline = time.monotonic() + WAIT_S
    while stage.hub.num_unreadable < 2:
        assert stage.receive(name, 0.1) is None and time.monotonic() < deadline
    assert stage.receive(name, 0.1) is None and stage.hub.num_unreadable == 2
