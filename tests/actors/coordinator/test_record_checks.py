"""No record from any link ends the coordinator or changes what it must not; a scripted round goes on beside it."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from math import inf, nan
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordinator import clients
from actors.coordinator.clients import CLIENT
from actors.coordinator.service import CoordinatorService
from actors.coordinator.spec import CoordinatorSpec
from actors.protocol.logprobs import Logprobs, PromptLogprobs
from actors.protocol.membership import Alive, Hello, PassFailed, RankLost, Ready, Recall, Stop
from actors.protocol.messages import (
    HASH_SEED,
    Abort,
    DraftBatch,
    DraftPreview,
    DraftPreviewBatch,
    FeatureExport,
    LevelWork,
    Outputs,
    Proposal,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    SparseDistribution,
    Tokens,
    TokenTree,
    Verdict,
    VerdictBatch,
    extend_hash,
)
from actors.transport.channel import CODEC, Hub
from tests.actors.service_harness import FACTS, KEYS
from tests.actors.transport.test_codec import values_of
from tests.examples import examples

OTHER = "client:2"
LINKS = (
    CLIENT,
    f"{CLIENT}/out",
    OTHER,
    "target-0#0",
    "target-0#0/heart",
    "draft-0#0",
    "target-1#0",
    "draft--1#0",
    "",
    "x",
)
REQUEST = Request(1, (3, 4), SamplingParams(max_tokens=9))
SMALL = {
    int: st.integers(-2, 6) | st.just(10**9),
    float: st.sampled_from([0.0, 1.5, nan, inf]),
    str: st.sampled_from(["draft", "target", "x"]),
}


class Table:
    """A coordinator service without a thread, whose links are played by calls; `sent` is what it has sent."""

    def __init__(self) -> None:
        self.hub, self.sent = Hub("tcp://127.0.0.1:*", KEYS), []
        self.hub.send = lambda names, record: self.sent.extend((name, record) for name in names)
        self.service = CoordinatorService(CoordinatorSpec("sync", 4, 1, 1, (1,)), self.hub)
        self._dropped = list[object]()
        for name in ("_drop", "_refuse"):
            setattr(self.service, name, self._noting(getattr(self.service, name)))
        for link, record in (
            (CLIENT, Hello()),
            *((f"{role}-0#0", Alive(role, 0, 0, 7)) for role in ("target", "draft")),
            *((f"{role}-0#0", Ready(role, 0, FACTS, 1)) for role in ("target", "draft")),
            (CLIENT, REQUEST),
        ):
            self.receive(link, record)
        assert self.hub.num_unreadable == 0 and len(self.to("target-0#0")) == 2

    def _noting(self, drop):
        return lambda link, record, *why: self._dropped.append(record) or drop(link, record, *why)

    def receive(self, link, record) -> bool:
        """As the service's loop does; whether the record was accepted."""
        self._dropped.clear()
        self.service._take(link, record)
        return not self._dropped

    def rejoin(self, role, epoch) -> None:
        link = f"{role}-0#0"
        self.receive(link, Alive(role, 0, 0, 7, epoch - 1))
        assert self.to(link)[-1].epoch == epoch
        self.receive(link, Ready(role, 0, FACTS, epoch))

    def to(self, name) -> list[object]:
        """What a link was sent, the tokens of a round one after the other."""
        found = []
        for record in [record for receiver, record in self.sent if receiver == name]:
            found += record.tokens if isinstance(record, Outputs) else [record]
        return found


@pytest.fixture
def table():
    table = Table()
    yield table
    table.hub.close()


CHAIN = TokenTree((4, 5), (-1, 0))


def proposal(tree=CHAIN, **changes):
    return replace(Proposal.deterministic(1, 0, 2, 0, tree), **changes)


def proposals(*made, **changes):
    return replace(ProposalBatch(1, made, 0.0, 0.0), **changes)


def verdicts(*made, **changes):
    return replace(VerdictBatch(1, made, 0.0, 0.0), **changes)


def preview(tree, values=()):
    return DraftPreviewBatch((DraftPreview(1, 0, 2, 0, tree, values),))


RIGHT = Verdict(1, 0, 2, (), (7,))


@st.composite
def altered(draw):
    """A record that is right, but for one field of any value."""
    record = draw(st.sampled_from(ALMOST))
    field = draw(st.sampled_from(fields(record)))
    value = draw(values_of(get_type_hints(type(record))[field.name], SMALL))
    return replace(record, **{field.name: value})


RECORDS = st.one_of([values_of(record_type, SMALL) for record_type in CODEC.record_types])
ALMOST = (
    REQUEST,
    verdicts(RIGHT),
    proposals(proposal()),
    preview(CHAIN),
    Alive("target", 0, 0, 7),
    Ready("draft", 0, {}, 1),
)


some = st.sampled_from
PLACE = (st.just(1), some([0, 0, 1]), some([2, 2, 3]))
PATH, OWN = (st.lists(some(ids), max_size=2).map(tuple) for ids in ([1, 2, -1], [7, 97, -1]))
BAD_TREES = [TokenTree((), ()), TokenTree((4, 5), (-1, 3)), TokenTree((4, -5), (-1, 0)), TokenTree((4,), (-1, 0))]
PREFIX = st.just(extend_hash(HASH_SEED, [3, 4]))


def batches(batch_type, parts):
    times = SMALL[float], SMALL[float]
    return st.builds(batch_type, some([1, 2]), st.lists(parts, max_size=2).map(tuple), *times)


VERDICTS = batches(VerdictBatch, st.builds(Verdict, *PLACE, PATH, OWN, st.booleans()))
PROPOSALS = batches(ProposalBatch, st.builds(Proposal, *PLACE, PREFIX, some([CHAIN, *BAD_TREES]), some([(), (9,)])))
PLAUSIBLE = st.tuples(st.just("target-0#0"), VERDICTS) | st.tuples(st.just("draft-0#0"), PROPOSALS)


@pytest.mark.extended
@settings(max_examples=examples(60, share=8), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LINKS), RECORDS | altered()) | PLAUSIBLE | PLAUSIBLE, max_size=30))
def test_no_record_ends_the_coordinator(records):
    table = Table()
    try:
        for link, record in records:
            table.receive(link, record)
        assert table.receive(CLIENT, ReportOrder())
    finally:
        table.hub.close()


LARGE = TokenTree.chain(4, [5] * 5)
EXPORT = FeatureExport(1, 1, 8, "float32", ((1, 0, 2),))
WIDE = (None, SparseDistribution((96,), (1.5,)))
REFUSED = {
    "a client's verdict": (OTHER, verdicts(RIGHT)),
    "a client's end": (OTHER, Stop("foreign")),
    "a client's death of a rank": (OTHER, RankLost("target", 0, 0)),
    "a client's heartbeat": (OTHER, Alive("target", 0, 0, 7)),
    "the owner's verdict": (CLIENT, verdicts(RIGHT)),
    "a drafter's verdict": ("draft-0#0", verdicts(RIGHT)),
    "a failure of another rank": ("draft-0#0", PassFailed("target", 0, 0, 1, "RuntimeError")),
    "a drafter's end": ("draft-0#0", Stop("foreign")),
    "the target's request": ("target-0#0", Request(2, (3,))),
    "an unknown sender": ("unknown", Hello()),
    "a rank that does not exist": ("target-1#0", Alive("target", 1, 0, 7)),
    "a rank as another": ("draft-0#0", Alive("target", 0, 0, 7)),
    "a process as its successor": ("target-0#0", Alive("target", 0, 1, 7)),
    "a heartbeat of the coordinator": (CLIENT, Alive("coordinator", 0, 0, 7)),
    "the loss of no rank": (CLIENT, RankLost("target", 1, 0)),
    "the loss of a negative rank": (CLIENT, RankLost("target", -1, 0)),
    "what only the coordinator sends": (CLIENT, Outputs((Tokens(1, 0, (3,)),))),
    "sizes of another type": ("target-0#0", Ready("target", 0, FACTS | {"kv_slots": "many"}, 1)),
    "a token beyond the vocabulary": (OTHER, Request(2, (3, 10**9))),
    "a negative token": (OTHER, Request(2, (-3,))),
    "a generated token beyond the vocabulary": (OTHER, Request(2, (3,), generated=(97,))),
    "a bias that is no number": (OTHER, Request(2, (3,), SamplingParams(logit_bias=((3, nan),)))),
    "a temperature without end": (OTHER, Request(2, (3,), SamplingParams(temperature=inf))),
    "an empty bad word": (OTHER, Request(2, (3,), SamplingParams(bad_words=((),)))),
    "a bias beyond any logit": (OTHER, Request(2, (3,), SamplingParams(logit_bias=((3, 1e308),)))),
    "a penalty next to zero": (OTHER, Request(2, (3,), SamplingParams(repetition_penalty=1e-300))),
    "more tokens than it asked for": (OTHER, Request(2, (3,), SamplingParams(max_tokens=1), generated=(4, 5))),
    "a prompt beyond the context": (OTHER, Request(2, (3,) * 50)),
    "an empty prompt": (OTHER, Request(2, ())),
    "a source for a target without an encoder": (OTHER, Request(2, (3,), source=(4,))),
    "a phase of any length": (OTHER, ReportOrder(True, "x" * 100)),
    "a phase of several lines": (CLIENT, ReportOrder(True, "a\nb")),
    "a verdict of another prefix": ("target-0#0", verdicts(replace(RIGHT, prefix_len=1))),
    "a verdict of another epoch": ("target-0#0", verdicts(replace(RIGHT, epoch=1))),
    "a verdict twice": ("target-0#0", verdicts(RIGHT, RIGHT)),
    "a verdict on a node without a proposal": ("target-0#0", verdicts(replace(RIGHT, path=(1,)))),
    "a token of its own beyond the vocabulary": ("target-0#0", verdicts(replace(RIGHT, token_ids=(97,)))),
    "a time that is no number": ("target-0#0", verdicts(RIGHT, finished=nan)),
    "a dropped pass that took less than no time": ("target-0#0", verdicts(RIGHT, dropped_s=-1.0)),
    "a dropped pass that took no number": ("target-0#0", verdicts(RIGHT, dropped_s=nan)),
    "more states accepted than were guessed": ("target-0#0", verdicts(RIGHT, guesses=(2, 3))),
    "fewer than no states accepted": ("target-0#0", verdicts(RIGHT, guesses=(2, -1))),
    "hidden states of more rows than were fed": ("target-0#0", verdicts(RIGHT, num_tokens=1, export=EXPORT)),
    "hidden states of no type": ("target-0#0", verdicts(RIGHT, num_tokens=2, export=replace(EXPORT, dtype="text"))),
    "hidden states before a text": (
        "target-0#0",
        verdicts(RIGHT, num_tokens=2, export=replace(EXPORT, spans=((1, -1, 2),))),
    ),
    "hidden states from a drafter": ("draft-0#0", DraftBatch(1, exports=(EXPORT,))),
    "no tree": ("draft-0#0", proposals(proposal(TokenTree((4, 5), (-1, 7))))),
    "an empty tree": ("draft-0#0", proposals(proposal(TokenTree((), ())))),
    "a draft token beyond the vocabulary": ("draft-0#0", proposals(proposal(TokenTree.chain(4, [97])))),
    "more than was ordered": ("draft-0#0", proposals(proposal(LARGE))),
    "sampling kinds of other nodes": ("draft-0#0", proposals(proposal(sampling_kinds=(0,)))),
    "a sampling kind that does not exist": ("draft-0#0", proposals(proposal(sampling_kinds=(0, 9)))),
    "a probability above one": ("draft-0#0", proposals(proposal(distributions=WIDE))),
    "a draft that lasts without end": ("draft-0#0", proposals(proposal(), finished=inf)),
    "a pass that lasts without end": ("draft-0#0", proposals(ahead=((0.0, nan, False),))),
    "a text that took no time to read": ("draft-0#0", proposals(proposal(), read_s=-1.0)),
    "a text that is read without end": ("draft-0#0", proposals(proposal(), read_s=inf)),
    "work of a level without end": ("draft-0#0", proposals(levels=(LevelWork("ngram", busy_s=inf),))),
    "work of a level at no time": ("draft-0#0", proposals(levels=(LevelWork("ngram", spans=((0.0, nan),)),))),
    "a preview that is no tree": ("draft-0#0", preview(TokenTree((4, 5), (0, 0)))),
    "a preview without a value per node": ("draft-0#0", preview(TokenTree.chain(4, [5]), (0.0,))),
}


@pytest.mark.parametrize(("link", "record"), REFUSED.values(), ids=REFUSED)
def test_what_the_sender_may_not_say_is_counted_and_changes_nothing(table, link, record):
    table.sent.clear()
    assert not table.receive(link, record) and table.hub.num_unreadable == 1
    if link in ("target-0#0", "draft-0#0"):
        assert not table.to(CLIENT) and table.service._coordinator.stats.num_refused == {link[:-4]: 1}
        table.rejoin(link[:-4], epoch=2)
    elif isinstance(record, Request):
        (answer,) = table.to(link)
        assert answer.finish_reason == "error" and answer.error and "\n" not in answer.error
    else:
        assert not table.sent
    last = table.service._coordinator.last_round("target")
    assert table.receive("target-0#0", verdicts(replace(RIGHT, epoch=link == "target-0#0"), round=last))
    assert table.to(CLIENT)[-1] == Tokens(1, 0, (7,))


def test_a_rank_whose_record_was_refused_starts_anew_and_its_answer_comes_too_late(table):
    """What it says from then on is of an epoch that has ended."""
    table.receive("target-0#0", verdicts(replace(RIGHT, token_ids=(97,))))
    assert table.to("target-0#0")[-1] == Recall(2)
    assert table.receive("target-0#0", verdicts(RIGHT)) and not table.to(CLIENT)


def test_a_request_on_which_every_answer_is_refused_ends(table):
    """The first refusal came in company, for all that is known; the second does not."""
    for epoch in (0, 1):
        last = table.service._coordinator.last_round("target")
        wrong = replace(RIGHT, epoch=epoch, token_ids=(97,))
        assert not table.receive("target-0#0", verdicts(wrong, round=last))
        table.rejoin("target", epoch=epoch + 2)
    (end,) = [answer for answer in table.to(CLIENT) if isinstance(answer, Tokens)]
    assert end.finish_reason == "error"
    assert end.error.startswith("target: 2 passes with this request failed (sent a record that was refused (token_ids:")


def test_a_client_learns_why_its_request_is_refused(table):
    table.receive(OTHER + "/out", Request(2, (3, 10**9)))
    (answer,) = table.to(OTHER)
    assert (answer.request_id, answer.finish_reason) == (2, "error")
    assert answer.error == "prompt: names token 1000000000, but the target has 97 tokens"


def test_a_client_over_its_quota_is_answered_and_served_again_once_a_request_has_ended(table, monkeypatch):
    monkeypatch.setattr(clients, "MOST_IN_FLIGHT", 5)
    for number in range(10, 215):
        table.receive(OTHER, Request(number, (3, 4)))
    refused = [answer for answer in table.to(OTHER) if answer.finish_reason == "refused"]
    assert [answer.request_id for answer in refused] == list(range(15, 215)), "the hundredth is answered as the first"
    assert refused[0].error == "this client has 5 requests in flight: submit this one again once some have ended"
    assert table.hub.num_unreadable == 0, "there is nothing wrong with them"
    assert table.receive(OTHER, Request(10, (3, 4))), "a repetition is no further request"
    assert table.receive("client:3", Request(30, (3, 4))) and table.receive(CLIENT, Request(31, (3, 4)))
    assert table.receive(OTHER, Abort(12)) and table.receive(OTHER, Request(214, (3, 4)))


def test_more_connections_with_one_key_give_neither_a_larger_quota_nor_more_turns(table, monkeypatch):
    monkeypatch.setattr(clients, "MOST_IN_FLIGHT", 4)
    monkeypatch.setattr(clients, "MOST_TOKENS", 40)
    connections = [f"{OTHER}:{number}" for number in range(5)]
    taken = [table.receive(connection, Request(1, (5, 6), REQUEST.sampling)) for connection in connections]
    assert [bool(one) for one in taken] == [True] * 4 + [False]
    assert table.to(connections[4])[-1].finish_reason == "refused"
    assert table.receive("client:3", Request(1, (3,), REQUEST.sampling)) and table.receive(CLIENT, Abort(1))
    assert table.receive("target-0#0", verdicts(RIGHT))
    *_, batch = table.to("target-0#0")
    assert [admit.token_ids for admit in batch.admits][:2] == [(5, 6), (3,)], "the turn of the other key"
    for connection in connections[:4]:
        table.receive(connection, Abort(1))
    assert table.receive(connections[4], Request(1, (5,) * 39)) and not table.receive(OTHER, Request(9, (5, 6)))
    assert not table.receive(f"{OTHER}:0", Request(2, (5, 6)))


def test_the_tokens_that_come_with_requests_are_counted_too_but_one_request_is_always_taken(table, monkeypatch):
    monkeypatch.setattr(clients, "MOST_TOKENS", 5)
    assert table.receive(OTHER, Request(1, (3,) * 6))
    assert not table.receive(OTHER, Request(2, (3,)))
    assert table.receive(OTHER, Abort(1)) and table.receive(OTHER, Request(3, (3, 4), generated=(5,)))
    assert not table.receive(OTHER, Request(4, (3, 4, 5))) and table.receive(OTHER, Request(5, (3, 4)))
    *_, last = [answer for answer in table.to(OTHER) if answer.finish_reason == "refused"]
    assert "requests in flight have prompts of 3 tokens" in last.error
    assert table.receive(CLIENT, Request(2, (3,) * 6)), "the owner's jobs submit all of their prompts at once"


def test_the_owner_has_a_bound_too(table, monkeypatch):
    monkeypatch.setattr(clients, "MOST_OF_OWNER", 2)
    assert table.receive(CLIENT, Request(2, (3,))) and not table.receive(CLIENT, Request(3, (3,)))
    assert table.to(CLIENT)[-1].finish_reason == "refused"


def test_every_client_numbers_its_requests_by_itself(table):
    """One that takes the number that the owner uses, or will use next, has a request of its own."""
    for number in (1, 2):
        assert table.receive(OTHER, Request(number, (5, 6, 7), REQUEST.sampling))
    assert table.receive(CLIENT, Request(2, (3,), REQUEST.sampling)) and table.receive(CLIENT, Abort(1))
    assert table.receive("target-0#0", verdicts(RIGHT))
    *_, batch = table.to("target-0#0")
    assert [admit.token_ids for admit in batch.admits] == [(5, 6, 7), (3,), (5, 6, 7)], "clients take turns"
    table.sent.clear()
    answers = [Verdict(admit.request_id, 0, len(admit.token_ids), (), (8 + i,)) for i, admit in enumerate(batch.admits)]
    assert table.receive("target-0#0", verdicts(*answers, round=batch.round))
    news = [record for receiver, record in table.sent if receiver == OTHER]
    assert news == [Outputs((Tokens(1, 0, (8,)), Tokens(2, 0, (10,))))], (
        "all that a round brings a client, in one record"
    )
    assert table.to(OTHER) == [Tokens(1, 0, (8,)), Tokens(2, 0, (10,))] and table.to(CLIENT) == [Tokens(2, 0, (9,))]
    assert table.receive(OTHER, Abort(2)), "ends the client's own request"
    assert table.to(OTHER)[-1].finish_reason == "abort" and table.to(CLIENT)[-1].finish_reason is None


def test_another_request_under_a_number_in_flight_is_refused_and_the_first_goes_on(table):
    assert not table.receive(CLIENT, Request(1, (9,))) and table.hub.num_unreadable == 1
    assert "another request in flight" in table.to(CLIENT)[-1].error
    assert table.receive("target-0#0", verdicts(RIGHT)) and table.to(CLIENT)[-1] == Tokens(1, 0, (7,))


def test_only_the_owner_begins_a_window(table):
    stats = table.service._coordinator.stats
    table.sent.clear()
    assert table.receive(OTHER, ReportOrder(reset=True, phase="mine"))
    assert table.service._coordinator.stats is stats
    assert table.receive(CLIENT, ReportOrder(reset=True, phase="ours"))
    assert table.service._coordinator.stats is not stats and table.service._coordinator.stats.phase == "ours"
    assert len(table.to(CLIENT)) == 1


def test_orders_of_reports_by_others_share_one_at_the_next_heartbeat(table, monkeypatch):
    """However many orders come over however many links; the spans, which cost most, are the owner's."""
    made = []
    right = type(table.service._coordinator)._report
    monkeypatch.setattr(type(table.service._coordinator), "_report", lambda *a: made.append(1) or right(*a))
    table.receive("target-0#0", verdicts(RIGHT, finished=2.0))
    table.sent.clear()
    names = [f"client:{i}" for i in range(20)]
    for _ in range(50):
        for name in names:
            assert table.receive(name, ReportOrder())
    assert not made and not table.sent
    table.service._watch_others(time.monotonic())
    reports = [(name, record) for name, record in table.sent if isinstance(record, Report)]
    assert len(made) == 1 and sorted(name for name, _ in reports) == sorted(names)
    assert all(report.counters["num_tokens"] == 1 and not report.spans for _, report in reports)
    table.receive(CLIENT, ReportOrder())
    assert table.to(CLIENT)[-1].spans


def test_a_verdict_on_a_request_that_was_aborted_is_stale_though_its_number_is_used_again(table):
    """Refused, it would cost the role its epoch."""
    assert table.receive(CLIENT, Abort(1)) and table.receive(CLIENT, replace(REQUEST, prompt=(3, 4, 5)))
    table.sent.clear()
    assert table.receive("target-0#0", verdicts(RIGHT))
    assert table.service._coordinator.stats.num_stale == 1 and not table.to(CLIENT)


def said_of(token=7, value=-0.5, rank=1, num_tokens=1, k=0):
    """Log-probabilities of so many equal tokens."""
    arrays = np.array([token], "<i4"), np.array([value], "<f4"), np.array([rank], "<i4")
    cells = [array.tobytes() * num_tokens * (1 + k) for array in arrays[:2]]
    return Logprobs(k, *cells, arrays[2].tobytes() * num_tokens)


LOGPROBS = [
    (said_of(), True),
    (None, False),
    (said_of(value=0.0005), True),
    (said_of(value=0.1), False),
    (said_of(value=nan), False),
    (said_of(value=-inf), True),
    (said_of(token=FACTS["vocab_size"]), False),
    (said_of(token=-1), False),
    (said_of(rank=0), False),
    (said_of(rank=FACTS["vocab_size"] + 1), False),
    (said_of(num_tokens=2), False),
    (said_of(k=2), True),
    (said_of(k=3), False),
    (replace(said_of(), k=-1), False),
    (replace(said_of(), ranks=b"\1\0"), False),
]


@pytest.mark.parametrize(("said", "good"), LOGPROBS)
def test_log_probabilities_that_were_asked_for_come_as_they_must(said, good):
    table = Table()
    table.receive(CLIENT, Request(2, (5, 6), REQUEST.sampling, logprobs=2))
    table.receive(CLIENT, Abort(1))
    table.receive("target-0#0", verdicts(RIGHT))
    *_, batch = table.to("target-0#0")
    (admit,) = [one for one in batch.admits if one.token_ids == (5, 6)]
    assert (admit.logprobs, admit.prompt_logprobs) == (2, None)
    answer = Verdict(admit.request_id, 0, 2, (), (7,), logprobs=said)
    assert table.receive("target-0#0", verdicts(answer, round=batch.round)) == good
    if good:
        assert table.to(CLIENT)[-1] == Tokens(2, 0, (7,), logprobs=said)
    table.hub.close()


def test_log_probabilities_without_being_asked_for_are_refused(table):
    assert not table.receive("target-0#0", verdicts(replace(RIGHT, logprobs=said_of())))
    part = PromptLogprobs(1, 1, said_of())
    table.rejoin("target", 2)
    assert not table.receive("target-0#0", verdicts(prompt_logprobs=(part,), round=table.to("target-0#0")[-1].round))


@pytest.mark.parametrize(
    ("parts", "good"),
    [
        ([(1, 3)], True),
        ([(1, 2)], False),
        ([(1, 4)], False),
        ([(2, 2)], False),
        ([], False),
        ([(1, 3), (1, 3)], False),
    ],
)
def test_a_first_token_comes_with_all_of_its_prompt(parts, good):
    table = Table()
    table.receive(CLIENT, Request(2, (5, 6, 7, 8), REQUEST.sampling, prompt_logprobs=0))
    table.receive(CLIENT, Abort(1))
    table.receive("target-0#0", verdicts(RIGHT))
    *_, batch = table.to("target-0#0")
    (admit,) = [one for one in batch.admits if one.token_ids == (5, 6, 7, 8)]
    read = tuple([PromptLogprobs(admit.request_id, first, said_of(num_tokens=count)) for first, count in parts])
    answer = Verdict(admit.request_id, 0, 4, (), (7,))
    assert table.receive("target-0#0", verdicts(answer, round=batch.round, prompt_logprobs=read)) == good
    if good:
        assert table.to(CLIENT)[-1] == Tokens(2, 0, (7,), prompt_logprobs=said_of(num_tokens=3))
        table.receive(CLIENT, Request(2, (5, 6, 7, 8), REQUEST.sampling, prompt_logprobs=0))
        assert table.to(CLIENT)[-1] == table.to(CLIENT)[-2], "a client that missed it may ask again"
    table.hub.close()
