"""What attacks of a client with valid credentials cost the others: `python -m docs.measurements.attacks [NAME ...]`.

The attacks are those of `tests/cluster/engine/test_attacks.py`, each repeated without pause by a process of its own,
against an engine in this process with a tiny model and the limits as they are by default. Prints for each the time of
a round of the others' requests over one without the attack, each the median; and the same in seconds of this process's
CPU, which other work on the machine changes less.

An attack of records that are refused or dropped is compared with none: it should change nothing. One of requests that
a client may submit is compared with an ordinary client in its place as well, which has as many requests in flight, up
to a share of the batch: with whom one shares an engine one shares its time, and what matters is that no request takes
more.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from cluster.client import connect
from cluster.completion import Completion
from cluster.config import load_config
from cluster.engine import Engine
from docs.measurements import lines
from tests.cluster.engine.test_attacks import (
    ATTACKS,
    GREEDY,
    PROMPTS,
    WAIT_S,
    Attacker,
    check_nothing_was_lost,
    serve_round,
    tokens_of,
)
from tests.cluster.engine.test_clients import connect_with_own_key
from tests.conftest import save_checkpoint

LAUNCH = (
    "cluster=inprocess",
    "cluster.oversubscribe=true",
    "target=hf",
    "target.device=cpu",
    "pipeline.adaptive=false",
)
DRAFTER = ("drafter=model", "drafter.device=cpu", "drafter.num_draft_tokens=4")
ORDINARY = {
    "impossible_distributions": 6,
    "thousands_of_biases": 8,
    "the_numbers_of_others": 21,
    "more_requests_than_its_quota": 21,
    "requests_over_many_connections": 21,
    "never_reading": 21,
}
"""Requests in flight of the ordinary client that such an attack is compared with: its own number, or a third of the 64
places of the batch, which it shares with two others."""
Times = tuple[float, float]
"""Of a round: seconds, and seconds of this process's CPU."""


def attack_again_and_again(address: str, secret: str, name: str) -> Iterator[None]:
    """An attack whose records are not read, as it sent too many, fails here."""
    while True:
        yield
        attacker = Attacker(address, secret)
        with suppress(AssertionError):
            ATTACKS[name][0](attacker)
        attacker.close()


def ask_as_others_do(address: str, secret: str, name: str) -> Iterator[None]:
    """The ordinary client that the attack is compared with."""
    with connect(address, secret) as client:
        live: deque[Completion] = deque()
        for prompt in itertools.cycle(PROMPTS):
            yield
            live.append(client.submit(prompt, GREEDY))
            if len(live) >= ORDINARY[name]:
                live.popleft().result(WAIT_S)


def begin_when_asked(
    work: Callable[..., Iterator[None]], place: tuple[str, ...], is_ready: Any, may_begin: Any
) -> None:
    """The main function of a process, which works without pause."""
    steps = work(*place)
    next(steps)
    is_ready.set()
    may_begin.wait()
    deque(steps, maxlen=0)


@contextmanager
def elsewhere(work: Callable[..., Iterator[None]], *place: str) -> Iterator[Callable[[], None]]:
    """Work in a process of its own, which is ready and begins when what this gives is called."""
    spawn = multiprocessing.get_context("spawn")
    is_ready, may_begin = spawn.Event(), spawn.Event()
    process = spawn.Process(target=begin_when_asked, args=(work, place, is_ready, may_begin), daemon=True)
    process.start()
    while not is_ready.wait(1.0):
        if not process.is_alive():
            raise RuntimeError(f"the process of {work.__name__} ended before it began")
    yield may_begin.set
    process.terminate()
    process.join()


class Rounds:
    """Rounds of the owner and another client of an engine, timed."""

    def __init__(self, engine: Engine, num_rounds: int) -> None:
        self.engine, self.num_rounds = engine, num_rounds
        self._plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
        self._other = connect_with_own_key(engine)

    def beside(self, work: Callable[..., Iterator[None]], name: str) -> tuple[Times, Times]:
        """The median round before such work begins, and beside it."""
        with elsewhere(work, self.engine.address, self.engine.secret, name) as begin:
            before = self._medians()
            begin()
            return before, self._medians()

    def close(self) -> None:
        self._other.close()

    def _medians(self) -> Times:
        times = [self._time_round() for _ in range(self.num_rounds)]
        return median(wall for wall, _ in times), median(cpu for _, cpu in times)

    def _time_round(self) -> Times:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        serve_round(self.engine, self._other, self._plain)
        return time.monotonic() - wall_s, time.process_time() - cpu_s


def cost(folder: Path, name: str, num_rounds: int) -> str:
    """A line about one attack."""
    save_checkpoint(folder, "Llama", 0, {})
    overrides = (*LAUNCH, *DRAFTER, f"target.path={folder}", f"drafter.path={folder}")
    with Engine(load_config(overrides)) as engine:
        rounds = Rounds(engine, num_rounds)
        alone, attacked = rounds.beside(attack_again_and_again, name)
        others = {"no attack": alone}
        if name in ORDINARY:
            others["an ordinary client"] = rounds.beside(ask_as_others_do, name)[1]
        rounds.close()
        check_nothing_was_lost(engine)
    compared = [
        f"{attacked[0] / wall:.2f} times the time and {attacked[1] / cpu:.2f} times the CPU of {what}"
        for what, (wall, cpu) in others.items()
    ]
    return f"{name}: {'; '.join(compared)}"


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks; all by default")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if unknown := set(given.names) - ATTACKS.keys():
        parser.error(f"no attacks: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    for name in given.names or ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            print(cost(Path(folder), name, given.rounds), flush=True)


if __name__ == "__main__":
    main()
