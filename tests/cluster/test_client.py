"""What a client sends to the coordinator's hub and to a successor of it, over a line in memory.

Its reader thread runs; `hear` returns once it has read a record, so that what it sends can be counted.
"""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordinator.stats import CoordinatorStats
from actors.protocol.membership import Alive, Hello, Ready, Stop
from actors.protocol.messages import Abort, Outputs, Report, ReportOrder, Request, SamplingParams, Tokens
from cluster import client as module
from cluster import completion as completion_module
from cluster.client import Client
from cluster.completion import EngineError, TooManyRequestsError
from cluster.io.text import load_tokenizer

READY = {"target-0": Ready("target", 0, {"max_model_len": 99, "vocab_size": 97, "drafters": ["ngram"]})}
DEFAULT = SamplingParams(max_tokens=50)


class Line:
    """A connection whose other end is the test."""

    address = "tcp://here:1"

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.num_closed = 0
        self.waited_s: list[float] = []
        self._coming: queue.Queue[object] = queue.Queue()
        self._is_read = False

    def send(self, record) -> None:
        self.sent.append(record)

    def receive(self, timeout_s):
        if self._is_read:
            self._coming.task_done()
        self.waited_s.append(timeout_s)
        try:
            record = self._coming.get(timeout=timeout_s)
        except queue.Empty:
            self._is_read = False
            return None
        self._is_read = True
        return record

    def close(self) -> None:
        self.num_closed += 1

    def hear(self, record) -> list[object]:
        """What the client sends because of this record, tokens as those of a round."""
        self.sent.clear()
        self._coming.put(Outputs((record,)) if isinstance(record, Tokens) else record)
        self._coming.join()
        return list(self.sent)


@pytest.fixture
def opened(tiny_checkpoint, monkeypatch):
    """A client and its line; time alone makes it send nothing."""
    monkeypatch.setattr(module, "_RESUME_S", 1e9)
    line: Any = Line()
    with Client(line, load_tokenizer(tiny_checkpoint("Llama")), DEFAULT, ready=dict(READY)) as client:
        yield client, line


def heartbeat(incarnation: int, *, waiting: bool = False) -> Alive:
    return Alive("coordinator", 0, incarnation, 7, waiting=waiting)


@pytest.mark.parametrize("seed", range(20))
def test_a_successor_is_sent_what_is_live_once_and_from_where_it_stands(opened, seed):
    client, line = opened
    draw, known = random.Random(seed), 0
    live: dict[int, tuple[Request, list[int]]] = {}
    aborted: set[int] = set()
    for _ in range(60):
        action = draw.choice(["submit", "tokens", "tokens", "end", "abort", "heartbeat", "heartbeat"])
        if action == "submit":
            line.sent.clear()
            client.submit([draw.randrange(90) for _ in range(draw.randint(1, 4))])
            (request,) = line.sent
            live[request.request_id] = request, []
        elif action == "heartbeat":
            number, waiting = known + draw.choice([-1, 0, 1, 2]), draw.random() < 0.4
            heard = line.hear(heartbeat(number, waiting=waiting))
            if number <= known:
                assert heard == []
            elif waiting:
                assert heard == [Hello()], "it cannot take requests yet"
            else:
                known = number
                expected = [
                    record
                    for request, tokens in live.values()
                    for record in (
                        replace(request, generated=tuple(tokens)),
                        *[Abort(request.request_id)] * (request.request_id in aborted),
                    )
                ]
                assert heard == expected
        elif live:
            request_id = draw.choice(list(live))
            _, tokens = live[request_id]
            if action == "abort":
                line.sent.clear()
                client._live[request_id].abort()
                assert line.sent == [Abort(request_id)]
                aborted.add(request_id)
            else:
                news = tuple(draw.randrange(90) for _ in range(draw.randint(1, 3)))
                end = "length" if action == "end" else None
                assert line.hear(Tokens(request_id, len(tokens), news, end)) == []
                tokens += news
                if end is not None:
                    del live[request_id]


def test_tokens_that_are_not_waited_for_may_wait(opened):
    client, line = opened
    first, second = client.submit([3, 4]), client.submit([3, 5])
    both = Outputs((Tokens(1, 1, (6,)), Tokens(2, 1, (6,))))
    line.hear(Tokens(1, 0, (5,)))
    assert not line.may_wait(both), "the second one begins"
    line.hear(Tokens(2, 0, (5,)))
    assert line.may_wait(both) and first.may_wait and second.may_wait
    assert not line.may_wait(Outputs((*both.tokens, Tokens(3, 0, (6,))))), "not one of ours"
    assert not line.may_wait(Outputs((Tokens(1, 1, (6,), "length"),))), "an end is waited for"
    assert not line.may_wait(heartbeat(1))


def test_a_gap_in_the_tokens_is_asked_for_again_and_old_tokens_are_not(opened):
    client, line = opened
    completion = client.submit([3, 4])
    (request,) = line.sent
    assert line.hear(Tokens(1, 0, (5, 6), None)) == []
    assert line.hear(Tokens(1, 1, (6, 7), None)) == [] and completion.token_ids == [5, 6, 7]
    assert line.hear(Tokens(1, 4, (9,), None)) == [replace(request, generated=(5, 6, 7))]
    assert completion.token_ids == [5, 6, 7]


def test_a_successor_is_asked_for_the_report_that_the_last_one_owed(opened):
    client, line = opened
    reports: list[object] = []
    asking = threading.Thread(target=lambda: reports.append(client.report(reset=True, phase="warm")))
    asking.start()
    while ReportOrder(True, "warm") not in line.sent:
        assert asking.is_alive()
    assert line.hear(heartbeat(1)) == [ReportOrder(True, "warm")]
    line.hear(report := CoordinatorStats(since=0.0).report(1.0))
    asking.join()
    assert reports == [report] and line.hear(heartbeat(2)) == []


OTHER = SamplingParams(temperature=0.5, seed=3, max_tokens=7)


@pytest.mark.parametrize("drafter", [None, "ngram", "none"])
@pytest.mark.parametrize("sampling", [None, OTHER])
@pytest.mark.parametrize("prompt", ["ab", (3, 4, 5)])
def test_a_request_is_what_was_asked_for(opened, prompt, sampling, drafter):
    client, line = opened
    token_ids = tuple(client.tokenizer.encode("ab").ids) if prompt == "ab" else prompt
    for number in (1, 2):
        completion = client.submit(prompt, sampling, drafter=drafter)
        assert line.sent[-1] == Request(number, token_ids, sampling or DEFAULT, drafter)
        assert (completion.prompt, completion.request_id) == (prompt, number)
    plain = threading.Thread(target=lambda: client.generate([prompt], sampling, drafter=drafter))
    plain.start()
    while len(line.sent) < 3:
        assert plain.is_alive()
    assert line.sent[-1] == Request(3, token_ids, sampling or DEFAULT, drafter)
    line.hear(Tokens(3, 0, (5,), "length"))
    plain.join(10)


def test_a_drafter_that_the_engine_has_not_is_refused_in_one_line_with_the_names(opened):
    client, line = opened
    with pytest.raises(ValueError, match=r"^drafter: this engine has no 'medusa'; name one of ngram, none, or leave"):
        client.submit("ab", drafter="medusa")
    assert not line.sent and client.drafters == ["ngram"]


def test_what_the_target_cannot_read_is_not_sent(opened):
    client, line = opened
    for prompt, reason in (((5,) * 99, "prompt: 99 tokens do not fit the context of 99"), ((), "prompt: is empty")):
        with pytest.raises(EngineError, match=f"^{reason}"):
            client.submit(prompt).result(0)
    for prompt, sampling in (((97,), None), ((5,), replace(OTHER, temperature=-1.0))):
        with pytest.raises(ValueError):
            client.submit(prompt, sampling)
    assert line.sent == [] and line.hear(heartbeat(1)) == [], "nor is it sent to a successor"
    client.submit((96,) * 98)
    assert len(line.sent) == 1


def test_generate_waits_for_all_and_raises_the_first_failure(opened):
    client, line = opened
    finished: list[Any] = []
    failures: list[EngineError] = []

    def ask():
        try:
            client.generate([(1,), (2,), (3,), (4,)], on_finished=finished.append)
        except EngineError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while len(line.sent) < 4:
        assert asking.is_alive()
    line.hear(Tokens(4, 0, (9,), "length"))
    line.hear(Tokens(3, 0, (), "refused", None, "later"))
    line.hear(Tokens(2, 0, (), "error", None, "first"))
    assert asking.is_alive() and not finished
    line.hear(Tokens(1, 0, (8,), "length"))
    asking.join(10)
    assert [completion.token_ids for completion in finished] == [[8], [9]], "in the order of the prompts"
    assert [str(error) for error in failures] == ["first"] and type(failures[0]) is EngineError
    refused = client.submit((3,))
    line.hear(Tokens(refused.request_id, 0, (), "refused", None, "later"))
    with pytest.raises(TooManyRequestsError, match="^later$"):
        refused.result(0)


def test_one_text_is_not_taken_for_a_list_of_letters(opened):
    client, line = opened
    with pytest.raises(ValueError, match=r"^prompts='def f': is one text; give a list of them$"):
        client.generate("def f")
    assert line.sent == []


def test_generate_returns_the_completions_of_all_prompts(opened):
    client, line = opened
    made: list[Any] = []
    asking = threading.Thread(target=lambda: made.extend(client.generate(["a", "b"])))
    asking.start()
    while len(line.sent) < 2:
        assert asking.is_alive()
    line.hear(Tokens(2, 0, (9,), "length"))
    line.hear(Tokens(1, 0, (8,), "length"))
    asking.join(10)
    assert [(one.prompt, one.token_ids) for one in made] == [("a", [8]), ("b", [9])]


def test_tokens_of_a_request_that_ended_ask_for_nothing(opened):
    client, line = opened
    completion = client.submit((3,))
    line.hear(Tokens(1, 0, (5,), "length"))
    assert line.hear(Tokens(1, 4, (6,))) == [] and line.hear(Tokens(9, 4, (6,))) == []
    assert completion.token_ids == [5]


def test_closing_aborts_what_runs_and_ends_everything_once(opened):
    client, line = opened
    ended, running, other = (client.submit((token,)) for token in (1, 2, 3))
    line.hear(Tokens(1, 0, (5,), "length"))
    line.sent.clear()
    client.close()
    client.close()
    assert line.sent == [Abort(2), Abort(3)] and line.num_closed == 1
    assert ended.result(0).token_ids == [5]
    for completion in (running, other):
        with pytest.raises(EngineError, match="^the client was closed$"):
            completion.result(0)
    for ask in (lambda: client.submit((1,)), client.report):
        with pytest.raises(EngineError, match="^the client was closed$"):
            ask()
    assert line.sent == [Abort(2), Abort(3)]


def test_the_end_of_the_engine_ends_requests_reports_and_what_is_asked_later(opened):
    client, line = opened
    completion, failures = client.submit((3,)), list[str]()

    def ask():
        with pytest.raises(EngineError) as caught:
            client.report()
        failures.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    while ReportOrder() not in line.sent:
        assert asking.is_alive()
    line._coming.put(Stop("the engine was closed"))
    asking.join(10)
    assert failures == ["the engine was closed"]
    for late in (lambda: completion.result(10), lambda: client.submit((1,))):
        with pytest.raises(EngineError, match="^the engine was closed$") as caught:
            late()
        assert caught.value.__cause__ is None


def test_a_report_is_the_answer_to_its_own_order(opened, monkeypatch):
    """What came unasked is not taken for it, and without an answer it ends."""
    client, line = opened
    line.hear(Report({"stale": 1}))
    reports: list[Report] = []
    asking = threading.Thread(target=lambda: reports.append(client.report()))
    asking.start()
    while ReportOrder(False, "") not in line.sent:
        assert asking.is_alive()
    assert not reports
    line.hear(Report({"fresh": 1}))
    asking.join(10)
    assert reports == [Report({"fresh": 1})]
    monkeypatch.setattr(module, "_REPORT_S", 0.01)
    with pytest.raises(EngineError, match="^the coordinator does not answer$"):
        client.report(reset=True, phase="x")
    assert line.sent[-1] == ReportOrder(True, "x")
    assert line.hear(heartbeat(1)) == [], "an order that was given up is not repeated"


def test_threads_that_ask_for_a_report_at_once_get_one_each(opened, monkeypatch):
    monkeypatch.setattr(module, "_REPORT_S", 5.0)
    client, line = opened
    reports: list[Report] = []
    asking = [threading.Thread(target=lambda: reports.append(client.report())) for _ in range(2)]
    for thread in asking:
        thread.start()
    for number in range(2):
        while ReportOrder(False, "") not in line.sent:
            assert any(thread.is_alive() for thread in asking)
        line.hear(Report({"number": number}))
        while len(reports) == number:
            assert any(thread.is_alive() for thread in asking) or len(reports) > number  # it may end meanwhile
    for thread in asking:
        thread.join(10)
    assert reports == [Report({"number": 0}), Report({"number": 1})]


def test_what_ranks_measured_is_known_by_their_identity(opened):
    client, line = opened
    assert client.ready == READY and client.address == "tcp://here:1"
    again = Ready("target", 0, {"max_model_len": 3, "vocab_size": 97}, epoch=1)
    for record in (Ready("draft", 1, {"kv": 4}), again):
        line.hear(record)
    assert client.ready == {"target-0": again, "draft-1": Ready("draft", 1, {"kv": 4})}
    with pytest.raises(EngineError, match="do not fit the context of 3"):
        client.submit((1, 2, 3)).result(0)


@pytest.fixture
def impatient(tiny_checkpoint, monkeypatch):
    """Opens a client that looks up every few milliseconds."""
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    opened: list[Client] = []

    def open_(line: Any, **options: Any) -> Client:
        opened.append(Client(line, load_tokenizer(tiny_checkpoint("Llama")), DEFAULT, ready=dict(READY), **options))
        return opened[-1]

    yield open_
    for client in opened:
        client.close()


def test_a_request_without_tokens_is_sent_again_after_those_it_has(impatient, monkeypatch):
    line = Line()
    client = impatient(line)
    client.submit((3,))
    client.submit((4,)).abort()
    line.hear(Tokens(1, 0, (5, 6)))
    line.sent.clear()
    monkeypatch.setattr(module, "_RESUME_S", 0.05)
    first, second = Request(1, (3,), DEFAULT, generated=(5, 6)), Request(2, (4,), DEFAULT)
    while not {first, second, Abort(2)} <= set(line.sent):
        assert client._reader.is_alive()
    assert line.sent[line.sent.index(second) + 1] == Abort(2), "what was to end is to end there, too"
    assert Abort(1) not in line.sent
    for request_id in (1, 2):
        line.hear(Tokens(request_id, 0, (), "abort"))
    line.sent.clear()
    client._stopped.wait(0.2)
    assert line.sent == [], "what ended is sent no more"


def test_once_a_second_what_had_no_tokens_for_five_is_sent_again(tiny_checkpoint, monkeypatch):
    now = [100.0]
    for module_ in (module, completion_module):
        monkeypatch.setattr(module_, "time", SimpleNamespace(monotonic=lambda: now[0]))
    line: Any = Line()
    with Client(line, load_tokenizer(tiny_checkpoint("Llama")), DEFAULT, ready=dict(READY)) as client:
        line.hear(heartbeat(1))
        client.submit((3,))
        request = line.sent[-1]
        for moment, sent in ((101.0, []), (105.0, []), (105.9, []), (106.0, []), (106.2, [request]), (107.5, [])):
            now[0] = moment
            assert line.hear(heartbeat(1)) == sent, moment


def test_a_reader_looks_up_a_few_times_a_second_and_keeps_no_process_alive(opened):
    client, line = opened
    line.hear(heartbeat(1))
    assert all(0 < wait_s < 1 for wait_s in line.waited_s), "or closing takes longer"
    assert client._reader.daemon


def test_silence_of_the_engine_ends_the_client(impatient, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    line = Line()
    client = impatient(line, silence_s=0.3)
    for number in range(8):
        now[0] += 0.2
        line.hear(heartbeat(number))
    completion = client.submit((3,))
    now[0] += 0.4
    with pytest.raises(EngineError, match="^tcp://here:1: no heartbeat of the engine for 0 s$"):
        completion.result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_reader_ends_the_client_with_its_name(opened, monkeypatch):
    client, line = opened
    completion = client.submit((3,))

    def broken(timeout_s):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(line, "receive", broken)
    line._coming.put(heartbeat(1))
    with pytest.raises(EngineError, match="^engine: ZeroDivisionError: by nothing$"):
        completion.result(10)
