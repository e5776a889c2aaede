"""What records of a round cost on their way between two processes of one machine: `python -m docs.measurements.hops`.

Each process has a core. One computes over 40 MB between two rounds, as a target's pass does, so that neither code nor
records are in its caches; the other one waits. A round is a verdict to the hub and the next batch back. The ways are
ZeroMQ and the Unix socket (`actors/transport`), in turn.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from actors.protocol.messages import Commit, Proposal, TokenTree, Verdict, VerdictBatch, VerifyBatch, VerifyItem
from actors.transport.channel import Hub, open_link
from actors.transport.keys import HubKeys
from docs.measurements import lines

KEYS = HubKeys(bytes(32), ("target-0",))
DRAFT = Proposal.deterministic(5, 1, 300, 2**63, TokenTree.chain(7, [8, 9, 10, 11, 12]))
VERDICT = VerdictBatch(4, (Verdict(5, 1, 300, (1, 2, 3), (11,)),), 1.5, 2.5, 3)
BATCH = VerifyBatch(4, commits=(Commit(5, 1, 300, (1, 2, 3), (8, 9, 10, 11)),), items=(VerifyItem(5, 1, DRAFT),))
WARM_UP = 20


def wait_for_verdicts(end: Connection, core: int, folder: str, num_rounds: int) -> None:
    """The coordinator's process: sends when each verdict was received, and when the next batch was sent."""
    os.sched_setaffinity(0, {core})
    hub = Hub("tcp://127.0.0.1:*", KEYS, folder=folder)
    end.send(hub.address)
    times = []
    for _ in range(num_rounds):
        assert hub.receive(30.0) is not None
        received = time.monotonic()
        hub.send(["target-0"], BATCH)
        times.append((received, time.monotonic()))
    end.send(times)
    end.recv()
    hub.close()


def measure(cores: list[int], folder: str, num_rounds: int) -> list[float]:
    """Median µs: from the verdict to the hub, the hub's sending, from there to the rank, and all of it."""
    context = get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=wait_for_verdicts, args=(its, cores[-1], folder, num_rounds))
    process.start()
    os.sched_setaffinity(0, {cores[0]})
    link = open_link(mine.recv(), "target-0", KEYS.of("target-0"), folder=folder)
    weights, own = np.ones(10**7, np.float32), []
    for _ in range(num_rounds):
        weights.sum()
        sent = time.monotonic()
        link.send(VERDICT)
        assert link.receive(30.0) is not None
        own.append((sent, time.monotonic()))
    there = mine.recv()
    mine.send(None)
    link.close()
    process.join()
    parts = [
        (received - sent, replied - received, back - replied, back - sent)
        for (sent, back), (received, replied) in zip(own, there, strict=True)
    ]
    return [1e6 * median(part) for part in zip(*parts[WARM_UP:], strict=True)]


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    for _ in range(options.starts):
        for way in ("ZeroMQ", "Unix socket"):
            with tempfile.TemporaryDirectory() as folder:
                times = measure(cores, folder if way != "ZeroMQ" else "", options.rounds)
            there, sending, back, whole = [f"{one:.0f}" for one in times]
            sys.stdout.write(f"{way}: to the hub {there} µs, its sending {sending}, to the rank {back}, all {whole}\n")


if __name__ == "__main__":
    main()
