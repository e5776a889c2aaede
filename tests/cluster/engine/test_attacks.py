"""What a client with valid credentials can try against an engine, while others decode: a table of attacks.

Each runs beside the owner and another client. The engine and its roles stay, the tokens of the others are those of
plain decoding, and all of their requests end. How much slower they are `docs/measurements/attacks.py` measures.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from math import nan
from typing import Any

import pytest

from actors.coordinator import clients
from actors.options import VerifyConfig, VerifyRule
from actors.protocol.membership import Hello
from actors.protocol.messages import Abort, Outputs, ReportOrder, Request, SamplingParams, Tokens
from actors.protocol.sampling_params import MOST_ALLOWED, MOST_BAD_WORDS, MOST_BIASES
from actors.transport.channel import CODEC, Link
from actors.transport.keys import LinkKey
from tests.cluster.engine.test_clients import connect_with_own_key

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=10**6, ignore_eos=True)
EVERY_TOKEN = tuple((token,) for token in range(257))
QUOTA = 50
WAIT_S = 60


class Attacker:
    """Links with the key of a client, over the network, without what `Client` checks before it sends."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address.replace("127.0.0.1", "localhost")  # not through the memory of this process
        self.key = LinkKey.read(secret)
        self.links: list[Link] = []
        self.link = self.open("bad")

    def open(self, name: str) -> Link:
        self.links.append(Link(self.address, f"{self.key.peer}:{name}", self.key))
        self.links[-1].send(Hello())
        return self.links[-1]

    def send(self, *records) -> None:
        for record in records:
            self.link.send(record)

    def request(self, number: int, prompt=(5, 6), sampling: SamplingParams = SHORT, **fields) -> None:
        self.send(Request(number, tuple(prompt), sampling, **fields))

    def ends(self, *numbers: int) -> dict[int, Tokens]:
        """How these requests ended."""
        ends: dict[int, Tokens] = {}
        deadline = time.monotonic() + WAIT_S
        while not ends.keys() >= set(numbers):
            assert time.monotonic() < deadline, f"no end of {set(numbers) - ends.keys()}"
            record = self.link.receive(1.0)
            news = record.tokens if isinstance(record, Outputs) else ()
            ends |= {tokens.request_id: tokens for tokens in news if tokens.finish_reason is not None}
        return ends

    def close(self) -> None:
        for link in self.links:
            link.close()


def impossible_parameters(attacker: Attacker) -> None:
    numbers = itertools.count(1)
    impossible: tuple[dict[str, Any], ...] = (
        dict(bad_words=((),)),
        dict(logit_bias=((5, nan),)),
        dict(logit_bias=((5, 1e308),), top_p=0.9),
        dict(repetition_penalty=1e-300),
        dict(temperature=1e-300),
    )
    for parameters in impossible:
        attacker.request(next(numbers), sampling=SamplingParams(max_tokens=9, **parameters))
    ends = attacker.ends(*range(1, 6))
    assert {end.finish_reason for end in ends.values()} == {"error"}


def impossible_distributions(attacker: Attacker) -> None:
    numbers = itertools.count(1)
    ruled_out: tuple[dict[str, Any], ...] = (
        dict(bad_words=EVERY_TOKEN),
        dict(bad_words=EVERY_TOKEN[128:], stop_token_ids=tuple(range(128)), min_tokens=9),
        dict(bad_words=tuple((5, token) for token in range(257)), top_p=0.9),
    )
    for temperature, parameters in itertools.product((0.0, 0.8), ruled_out):
        sampling = SamplingParams(temperature, max_tokens=9, **parameters)
        attacker.request(next(numbers), (6, 5), sampling)
    ends = attacker.ends(*range(1, next(numbers)))
    assert {end.finish_reason for end in ends.values()} == {"error"}


def thousands_of_biases(attacker: Attacker) -> None:
    """As many as a request may have."""
    biases = tuple((token % 257, 0.5) for token in range(MOST_BIASES))
    lists = dict(bad_words=((5, 6),) * MOST_BAD_WORDS, allowed_token_ids=(*range(256),) * (MOST_ALLOWED // 256))
    sampling = SamplingParams(max_tokens=9, logit_bias=biases, **lists)
    for number in range(1, 9):
        attacker.request(number, sampling=sampling)
    attacker.ends(*range(1, 9))


def long_messages(attacker: Attacker) -> None:
    for _ in range(2):
        attacker.link._post(bytes(1 << 24))
        attacker.link._post(CODEC.encode(Request(1, (5,), SamplingParams(bad_words=((3,),) * 300_000))))
        attacker.link._socket.send_multipart([bytes(1 << 20)] * 5)


def records_without_pause(attacker: Attacker) -> None:
    for number in range(20_000):
        attacker.send(Abort(number))


def report_orders_over_many_links(attacker: Attacker) -> None:
    links = [attacker.open(f"bad{i}") for i in range(20)]
    for _ in range(150):
        for link in links:
            link.send(ReportOrder(reset=True, phase="mine"))


def phases_without_end(attacker: Attacker) -> None:
    for number in range(1000):
        attacker.send(ReportOrder(reset=True, phase=f"phase {number}"))


def more_tokens_than_asked_for(attacker: Attacker) -> None:
    for number in range(1, 71):
        attacker.request(number, generated=(7,) * 9)
    assert {end.finish_reason for end in attacker.ends(*range(1, 71)).values()} == {"error"}


def the_numbers_of_others(attacker: Attacker) -> None:
    """Taken before the owner uses them, then ended."""
    for number in range(1, QUOTA):
        attacker.request(number, sampling=ENDLESS)
    for number in range(1, 1500):
        attacker.send(Abort(number))


def more_requests_than_its_quota(attacker: Attacker) -> None:
    for number in range(1, 3 * QUOTA):
        attacker.request(number)
    ends = attacker.ends(*range(1, 3 * QUOTA))
    assert {end.finish_reason for end in ends.values()} <= {"length", "refused"}
    attacker.request(9999)
    assert attacker.ends(9999)[9999].finish_reason == "length", "it is served again"


def requests_over_many_connections(attacker: Attacker) -> None:
    for i in range(10):
        link = attacker.open(f"bad{i}")
        for number in range(1, QUOTA):
            link.send(Request(number, (5, 6), GREEDY))


def never_reading(attacker: Attacker) -> None:
    for number in range(1, QUOTA):
        attacker.request(number, sampling=GREEDY)
    for _ in range(500):
        attacker.send(ReportOrder())


def prompts_of_any_length(attacker: Attacker) -> None:
    for number, length in enumerate((0, 512, 10_000, 1_000_000), start=1):
        attacker.request(number, (5,) * length)
    assert {end.finish_reason for end in attacker.ends(1, 2).values()} == {"error"}


def what_ranks_and_owners_send(attacker: Attacker) -> None:
    from tests.actors.transport.test_channel import RECORDS

    attacker.send(*[record for record in RECORDS if not isinstance(record, Request)])


ATTACKS: dict[str, tuple[Callable[[Attacker], None], tuple[str, ...]]] = {
    attack.__name__: (attack, rules)
    for attack, rules in (
        (impossible_parameters, (VerifyRule.coupled,)),
        (impossible_distributions, (VerifyRule.coupled, VerifyRule.rejection)),
        (thousands_of_biases, (VerifyRule.coupled,)),
        (long_messages, (VerifyRule.coupled,)),
        (records_without_pause, (VerifyRule.coupled,)),
        (report_orders_over_many_links, (VerifyRule.coupled,)),
        (phases_without_end, (VerifyRule.coupled,)),
        (more_tokens_than_asked_for, (VerifyRule.coupled,)),
        (the_numbers_of_others, (VerifyRule.coupled,)),
        (more_requests_than_its_quota, (VerifyRule.coupled,)),
        (requests_over_many_connections, (VerifyRule.coupled,)),
        (never_reading, (VerifyRule.coupled,)),
        (prompts_of_any_length, (VerifyRule.coupled,)),
        (what_ranks_and_owners_send, (VerifyRule.coupled,)),
    )
}
"""Each attack, and the rules under which it is tried."""


LIKE_OTHERS = {
    attack.__name__
    for attack in (
        *(records_without_pause, thousands_of_biases, requests_over_many_connections),
        *(impossible_parameters, impossible_distributions, more_tokens_than_asked_for, what_ranks_and_owners_send),
    )
}
"""Not by default: floods of other records, requests that are dear and many connections come in other attacks; what
impossible requests do beside others is in `test_harmful_requests.py`, and what records of others do in
`test_hostile_neighbours.py`."""


def attacks_under_rules() -> Iterator[Any]:
    """By default under the first rule."""
    for name, (_, rules) in ATTACKS.items():
        for rule in rules:
            is_usual = rule is rules[0] and name not in LIKE_OTHERS
            yield pytest.param(name, rule, marks=[] if is_usual else pytest.mark.slow, id=f"{name}-{rule}")


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(clients, "MOST_IN_FLIGHT", QUOTA)
    monkeypatch.setattr(clients, "ABSENT_S", 0.1)


def serve_round(engine, other, plain) -> None:
    """Requests of the owner and of the other client at the same time, which get the tokens of plain decoding."""
    submitted = [one.submit(prompt, GREEDY) for prompt in PROMPTS for one in (engine, other)]
    tokens = tokens_of(completion.result(WAIT_S) for completion in submitted)
    assert tokens[0::2] == tokens[1::2] == plain


def rounds_beside(attack: Callable[[Attacker], None], engine, other, plain, least: int = 1) -> Iterator[None]:
    """Rounds of requests, until the attack is over."""
    attacker, failures = Attacker(engine.address, engine.secret), []

    def run() -> None:
        try:
            attack(attacker)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for count in itertools.count(1):
            yield serve_round(engine, other, plain)
            if not thread.is_alive() and count >= least:
                break
    finally:
        thread.join()
        attacker.close()
    if failures:
        raise failures[0]


def check_nothing_was_lost(engine) -> None:
    counters = engine.report().counters
    assert not engine.supervisor.incidents and not counters["num_role_losses"]


@pytest.mark.extended
@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(("name", "rule"), list(attacks_under_rules()))
def test_the_others_are_served_as_without_the_attack(open_engine, name, rule):
    engine = open_engine(verify=VerifyConfig(rule))
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    engine.report(reset=True, phase="attacked")
    with connect_with_own_key(engine) as other:
        served = [*rounds_beside(ATTACKS[name][0], engine, other, plain)]
        assert tokens_of(other.generate(PROMPTS, GREEDY)) == plain
    check_nothing_was_lost(engine)
    counted = engine.report().counters
    assert counted["num_tokens"] >= len(served) * 2 * len(PROMPTS) * GREEDY.max_tokens, "its window was not reset"


def test_the_end_of_the_engine_is_noticed(open_engine):
    """The control: an attack that ends the engine fails the same check."""
    engine = open_engine(verify=VerifyConfig(VerifyRule.coupled))
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    with connect_with_own_key(engine) as other, pytest.raises(Exception, match="engine was closed"):
        for _ in rounds_beside(lambda _: engine.close(), engine, other, plain, least=2):
            pass
