"""Long prompts beside requests that decode: how long these wait for a token, and that no token changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from actors.coordinator.port import open_port
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.options import SchedulerConfig
from actors.policy.policy import Policy
from actors.protocol.messages import Request, SamplingParams, Tokens, VerifyBatch
from tests.actors.scripted_roles import ScriptedTarget

PLAIN_S, ROW_S = 0.002, 0.001
NUM_STREAMS, NUM_PROMPTS, PROMPT_LEN = 4, 6, 600


class Served:
    """A target whose passes take seconds by their rows; `news` has each token of a request and when it came."""

    def __init__(self, text_pass_ms: float, *, prefix_cache: bool = False) -> None:
        limits = SchedulerConfig(text_pass_ms=text_pass_ms, prefix_cache=prefix_cache)
        policy = Policy("plain", 0)
        port = open_port(policy, limits.prefill_chunk, drafts=False)
        self.coordinator = Coordinator(Scheduler(limits, Capacity(1 << 15, 1 << 12)), policy, (), port)
        self.target, self.clock = ScriptedTarget(1 << 15), 0.0
        self.news: dict[int, list[tuple[float, int]]] = {}
        self.rows: list[int] = []
        self.waiting: VerifyBatch | None = None

    def deliver(self, record: object) -> None:
        for answer in self.coordinator.on(record, self.clock):
            if isinstance(answer, VerifyBatch):
                self.waiting = answer
            elif isinstance(answer, Tokens):
                self.news.setdefault(answer.request_id, []).extend((self.clock, one) for one in answer.token_ids)
        self.coordinator.learn()

    def submit(self, request_id: int, prompt_len: int, max_tokens: int, *, shared_len: int = 0) -> None:
        """`shared_len`: its prompt begins with as many tokens that others begin with, too."""
        prompt = tuple(2 + (place + request_id * (place >= shared_len)) % 9 for place in range(prompt_len))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.deliver(Request(request_id, prompt, sampling))

    def take_a_pass(self) -> None:
        assert self.waiting is not None
        started, batch, self.waiting = self.clock, self.waiting, None
        answer = self.target.answer(batch)
        self.rows.append(answer.num_tokens)
        self.clock += PLAIN_S + ROW_S * answer.num_tokens
        self.deliver(replace(answer, started=started, finished=self.clock))

    def longest_gap_s(self) -> float:
        times = [[at for at, _ in self.news[stream]] for stream in range(NUM_STREAMS)]
        return max(after - before for each in times for before, after in pairwise(each))


def serve(text_pass_ms: float) -> Served:
    served = Served(text_pass_ms)
    for stream in range(NUM_STREAMS):
        served.submit(stream, 40, 120)
    for number in range(40):
        served.take_a_pass()
        if number in (20, 30):
            for place in range(NUM_PROMPTS // 2):
                served.submit(NUM_STREAMS + number + place, PROMPT_LEN, 4)
    while served.coordinator.num_requests:
        served.take_a_pass()
    return served


@pytest.fixture(scope="module")
def unbounded() -> Served:
    return serve(0)


@pytest.mark.parametrize("text_pass_ms", [50, 100])
def test_streams_wait_as_long_as_is_set_and_get_the_same_tokens(unbounded: Served, text_pass_ms):
    served = serve(text_pass_ms)
    assert served.longest_gap_s() < 1.2e-3 * text_pass_ms < unbounded.longest_gap_s() / 4
    assert sum(served.rows) == sum(unbounded.rows) and served.clock < 1.05 * unbounded.clock
    for request_id, news in unbounded.news.items():
        assert [token for _, token in served.news[request_id]] == [token for _, token in news]


def test_prompts_without_streams_are_read_at_once():
    served = Served(50)
    for number in range(3):
        served.submit(number, PROMPT_LEN, 2)
    for _ in range(2):
        served.take_a_pass()
    assert served.rows[0] == SchedulerConfig().prefill_chunk, "it is alone"
    assert served.rows[1] > 2 * SchedulerConfig().prefill_chunk


@pytest.mark.parametrize("text_pass_ms", [0, 50])
def test_a_shared_prompt_of_two_thousand_tokens_is_read_once(text_pass_ms):
    """Of eight requests that come at once, beside one that decodes and would have them read in small parts."""
    served = Served(text_pass_ms, prefix_cache=True)
    served.submit(100, 40, 200)
    for _ in range(3):
        served.take_a_pass()
    before, num_requests, own = sum(served.rows), 8, 10
    for number in range(1, 1 + num_requests):
        served.submit(number, 2000 + own, 4, shared_len=2000)
    passes = len(served.rows)
    while len(served.news) < 1 + num_requests:
        served.take_a_pass()
    decoded = (1 + num_requests) * (len(served.rows) - passes)  # at most
    assert 2000 + num_requests * own <= sum(served.rows) - before <= 2000 + num_requests * own + decoded
