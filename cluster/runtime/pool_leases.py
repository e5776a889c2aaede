"""Keeps a lease of an engine on one draft pool of those that its configuration names.

Orders the lease about once a second, which renews it. Of several pools the one from which drafts come soonest is asked
first: by the time to it and back and that of its latest drafts. A pool that does not answer, has lost the lease or
refuses it makes way for the next one; after the last, and when a lease was lost, all are compared again. Every lease
has a number of its own, which is that of the draft rank's process at the coordinator, so what an earlier lease still
sends is ignored there.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from actors.protocol.leases import LeaseAnswer, LeaseOrder, LeaseQuery, LeaseTerms
from actors.protocol.membership import Ready
from actors.tokenizer_file import tokenizer_digest
from actors.transport.channel import Link
from actors.transport.keys import CLIENTS, LinkKey
from cluster.config.schema import LaunchConfig
from cluster.runtime.backend import Backend
from parallel.model.families.registry import read_config

log = logging.getLogger(__name__)

RENEW_S = 1.0
PATIENCE_S = 3.0
"""Seconds without an answer after which the next pool is asked."""
FASTER_S = 5e-3
"""Seconds by which drafts must come sooner for a pool to go before one that the configuration names earlier."""
_LEASE_S = 5.0
"""Seconds for which the start waits for a draft pool; decoding is plain until one lends its drafter."""
_REFUSED_S = 0.5
"""Seconds in which a key that is refused is noticed."""
_QUERIES = 4
_QUERY_S = 1.0


def host_towards(address: str) -> str:
    """The address of this machine from which tcp://HOST:PORT is reached; nothing is sent."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"drafter.pools={address}: cannot be reached ({error})") from error
    return f"[{found}]" if ":" in found else found


def host_for(pools: Sequence[str]) -> str:
    """The address of this machine at which all these pools find an engine: one that only this machine reaches if they
    are all on it. ValueError if none of them can be reached."""
    hosts, error = list[str](), ValueError("no pools")
    for address in pools:
        try:
            hosts.append(host_towards(address))
        except ValueError as unreachable:
            error = unreachable
    if not hosts:
        raise error
    return next((host for host in hosts if not ip_address(host.strip("[]")).is_loopback), hosts[0])


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Address of a pool, and the key that it admits."""

    address: str
    key: LinkKey

    @staticmethod
    def read(address: str, key_file: str) -> PoolPlace:
        """ValueError, one line, for a file without a key."""
        try:
            return PoolPlace(address, LinkKey.read(Path(key_file).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(f"drafter.key_files={key_file}: holds no key of a pool ({error})") from error

    def open(self) -> Link:
        return Link(self.address, f"{self.key.peer}:{secrets.token_hex(8)}", self.key)


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """What a pool would grant, and the seconds in which its drafts come: of the least of some exchanges with it, and of
    its latest drafts. `answer` None: it does not answer."""

    answer: LeaseAnswer | None = None
    delay_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.delay_s + (self.answer.draft_s if self.answer is not None else 0.0)

    @property
    def is_usable(self) -> bool:
        return self.answer is not None and not self.answer.why


def offer_of(place: PoolPlace, query: LeaseQuery) -> PoolOffer:
    """Ask the pool, for a second at most where it does not answer."""
    link, offer = place.open(), PoolOffer()
    try:
        for _ in range(_QUERIES):
            asked_at = time.monotonic()
            link.send(query)
            if (answer := _answer_of(link.receive(_QUERY_S))) is None:
                break
            delay_s = time.monotonic() - asked_at
            offer = PoolOffer(answer, delay_s if offer.answer is None else min(delay_s, offer.delay_s))
    finally:
        link.close()
    return offer


def _answer_of(record: object) -> LeaseAnswer | None:
    """A record of a pool, if it is an answer that makes sense."""
    if not isinstance(record, LeaseAnswer):
        return None
    try:
        record.check()
    except ValueError as error:
        log.warning("an answer of a pool makes no sense: %s", error)
        return None
    return record


def ranked(offers: Sequence[PoolOffer]) -> list[int]:
    """Places of the offers, the best first: a usable one, whose drafts come soonest; an earlier one where none comes
    `FASTER_S` sooner."""
    usable = [i for i, offer in enumerate(offers) if offer.is_usable]
    order = []
    while usable:
        soonest = min(offers[i].seconds for i in usable)
        best = next(i for i in usable if offers[i].seconds <= soonest + FASTER_S)
        usable.remove(best)
        order.append(best)
    return order + [i for i, offer in enumerate(offers) if not offer.is_usable]


class PoolLeases:
    """A thread from construction to `close`. `order` is the lease without its number, as of now."""

    def __init__(self, pools: Sequence[PoolPlace], order: Callable[[], LeaseOrder]) -> None:
        self._pools = pools
        self._order = order
        self._place = 0
        self._number = 1
        self._granted = threading.Event()
        self._stopped = threading.Event()
        self._was_lost = threading.Event()
        self._is_over = threading.Event()
        self._warned = set[str]()
        self.refusal: LeaseAnswer | None = None
        """The last answer, if it was a refusal."""
        self._thread = threading.Thread(target=self._run, name="pool-leases", daemon=True)
        self._thread.start()

    @property
    def pool(self) -> str:
        """The address of the pool that is asked now."""
        return self._pools[self._place].address

    def wait(self, timeout_s: float) -> bool:
        """Whether a lease was granted by then; at once after a refusal that stays one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._granted.wait(0.05):
            if self.refusal is not None and self.refusal.is_final and len(self._pools) == 1:
                break
        return self._granted.is_set()

    def lost(self, number: int | None) -> None:
        """The coordinator has given up the draft rank of the lease of this number, or knows no process of it: another
        lease is needed. From any thread."""
        if number is None:
            self._was_lost.set()
        elif number == self._number:
            self._is_over.set()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        lost: int | None = None
        while not self._stopped.is_set():
            for place in self._ranking(lost):
                self._place, lost = place, None
                link = self._pools[place].open()
                try:
                    self._hold(link)
                finally:
                    link.close()
                self._number += 1
                if self._granted.is_set():
                    self._granted.clear()
                    lost = place
                if lost is not None or self._stopped.is_set():
                    break

    def _ranking(self, lost: int | None) -> list[int]:
        """Places of the pools in the order in which they are asked for a lease, the one that was `lost` last: it may
        answer while its drafts do not arrive."""
        if len(self._pools) == 1:
            return [0]
        order = self._order()
        query = LeaseQuery(order.terms, order.num_draft_tokens)
        with ThreadPoolExecutor(len(self._pools), thread_name_prefix="pool-query") as workers:
            offers = list(workers.map(offer_of, self._pools, [query] * len(self._pools)))
        for pool, offer in zip(self._pools, offers, strict=True):
            why = "does not answer" if offer.answer is None else offer.answer.why
            log.info("%s: %s", pool.address, why or f"its drafts would take {1e3 * offer.seconds:.1f} ms")
        return sorted(ranked(offers), key=lambda place: place == lost)

    def _hold(self, link: Link) -> None:
        """Order and renew at one pool, until it is no use any more."""
        heard_at, granted_at = time.monotonic(), math.inf
        self._is_over.clear()
        while not self._stopped.is_set():
            link.send(replace(self._order(), number=self._number, is_renewal=self._granted.is_set()))
            answer = self._answer(link)
            now = time.monotonic()
            if answer is not None:
                heard_at = now
            if answer is not None and answer.why:
                self._refused(answer)
                return
            if answer is None and not self._granted.is_set() and link.is_refused(_REFUSED_S, 2):
                key = self._pools[self._place].key.peer.removeprefix(CLIENTS)
                why = f"the pool does not admit this key {key}; it was taken away, or is of another pool"
                self._refused(LeaseAnswer(self._number, why=why))
                return
            if now - heard_at > PATIENCE_S:
                self._warn("does not answer")
                return
            was_lost = self._was_lost.is_set()
            self._was_lost.clear()
            was_lost &= now - granted_at > PATIENCE_S  # until its rank is there that is reported again and again
            if was_lost or self._is_over.is_set():  # whatever the pool answers
                self._warn("its drafter was lost")
                return
            if answer is not None:
                if not self._granted.is_set():
                    shared = f", one of {answer.num_leases}" if answer.num_leases > 1 else ""
                    level = logging.WARNING if self._warned else logging.INFO  # who read of a loss reads of its end
                    log.log(level, "%s: lends drafter=%s%s", self.pool, answer.drafter, shared)
                    granted_at = now
                self.refusal = None
                self._warned.clear()
                self._granted.set()
            self._stopped.wait(RENEW_S)

    def _answer(self, link: Link) -> LeaseAnswer | None:
        deadline = time.monotonic() + RENEW_S
        while (left_s := deadline - time.monotonic()) > 0:
            answer = _answer_of(link.receive(left_s))
            if answer is not None and answer.number == self._number:
                return answer
        return None

    def _refused(self, answer: LeaseAnswer) -> None:
        self._warn(answer.why)
        self.refusal = answer
        self._stopped.wait(RENEW_S)

    def _warn(self, line: str) -> None:
        """Once until a lease is granted, however often the pools are asked meanwhile."""
        line = f"{self.pool}: {line}"
        if line not in self._warned:
            self._warned.add(line)
            log.warning("%s", line)


class DraftLease:
    """An engine's lease of its drafter, from `obtain` to `close`. ValueError if the pools' keys cannot be read."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._pools = [PoolPlace.read(address, file) for address, file in config.drafter.lenders]
        self._leases: dict[str, PoolLeases] = {}

    def obtain(self, backend: Backend, ranks: Sequence[str], target: Ready, progress: Callable[[str], None]) -> None:
        """Wait a while for pools to lend these draft ranks to the engine of this backend; decoding is plain until one
        does. ValueError for a pool that drafts for other engines than this one."""
        config, checkpoint = self._config, Path(self._config.target.path)
        agreed = str(config.verify.rule), str(config.pipeline.name), tokenizer_digest(checkpoint)
        terms = LeaseTerms(*agreed, streams=config.pipeline.local_drafter != "none")
        vocab_size, longest = read_config(checkpoint).vocab_size, int(target.facts["max_model_len"])

        def order(seat: int) -> LeaseOrder:
            key = backend.keys.of(ranks[seat])
            wanted = terms, vocab_size, longest, config.drafter.num_draft_tokens
            return LeaseOrder(1, backend.hub_address("draft"), key.hub, *wanted, key.private, seat)

        pools = [self._pools[seat :: len(ranks)] for seat in range(len(ranks))]
        for seat, rank in enumerate(ranks):
            self._leases[rank] = PoolLeases(pools[seat], partial(order, seat))
        deadline = time.monotonic() + _LEASE_S
        missing: list[str] = []
        for own, leases in zip(pools, self._leases.values(), strict=True):
            progress(f"asking {own[0].address} for its drafter")
            if leases.wait(deadline - time.monotonic()):
                continue
            refusal, where = leases.refusal, f"drafter.pools={own[0].address}"
            if refusal is not None and refusal.is_final:
                raise ValueError(f"{where}: {refusal.why}")
            missing.append(f"{where}: {refusal.why if refusal is not None else 'does not answer'}")
        until = "; decoding is plain until a pool lends its drafter" if len(missing) == len(ranks) else ""
        for line in missing:
            progress(line + until)

    def lost(self, rank: str, number: int | None) -> None:
        """The coordinator has given up this draft rank's process of this number, or knows none: another lease is
        needed. From any thread."""
        if (leases := self._leases.get(rank)) is not None:
            leases.lost(number)

    def close(self) -> None:
        for leases in self._leases.values():
            leases.close()
