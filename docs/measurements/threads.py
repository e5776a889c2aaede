"""What a neighbour on the same cores does to single tokens: `python -m docs.measurements.threads OUT.jsonl [options]`.

Decodes plainly with two threads in this process while another one computes for half of each period, then without it,
in turn, and appends one line for each window: median, 99th percentile and worst time of a token after the first ten.
`--table` prints what the file has, medians of the windows and the worst token of all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

from actors.worker import openmp
from docs.measurements import lines

Decode = Callable[[list[int], int], list[float]]
"""Prompt and number of tokens -> milliseconds of each token."""
NEIGHBOUR = """
import sys, time
busy_s, period_s = float(sys.argv[1]), float(sys.argv[2])
while True:
    end = time.perf_counter() + busy_s
    while time.perf_counter() < end:
        pass
    time.sleep(period_s - busy_s)
"""


def measure(options: argparse.Namespace) -> None:
    openmp.configure_threads(shared=False)
    from cluster import pocket
    from cluster.io.prompts import read_prompts
    from cluster.io.text import load_tokenizer

    ids = load_tokenizer(pocket.TARGET).encode(read_prompts(pocket.PROMPTS, 1)[0].text).ids
    decode = decoder(options.threads)
    decode(ids, 50)
    for window in range(options.windows):
        for period_ms in [0.0, *options.periods_ms]:
            times_ms = decode(ids, options.tokens) if not period_ms else beside(period_ms, decode, ids, options.tokens)
            line = {"label": options.label, "neighbour": period_ms, "window": window}
            line |= {"median_ms": median(times_ms), "p99_ms": quantiles(times_ms, n=100)[-1], "worst_ms": max(times_ms)}
            lines.append(options.file, line)


def beside(period_ms: float, decode: Decode, ids: list[int], num_tokens: int) -> list[float]:
    """The same with the neighbour, which has half a core."""
    arguments = [str(period_ms / 2e3), str(period_ms / 1e3)]
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, *arguments])
    try:
        time.sleep(0.5)
        return decode(ids, num_tokens)
    finally:
        neighbour.kill()
        neighbour.wait()


def decoder(num_threads: int) -> Decode:
    """Decodes greedily with the bundled target; returns the milliseconds of each token."""
    import torch

    from cluster import pocket
    from parallel.comm.group import SINGLE
    from parallel.kv.pass_plan import Span
    from parallel.runtime.runner import open_model

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])
    openmp.set_num_threads(num_threads)
    runner = open_model(pocket.TARGET, SINGLE, "cpu", torch.float32, 4096, weights=torch.bfloat16)

    def decode(ids: list[int], num_tokens: int) -> list[float]:
        runner.open(0)
        fed, times_ms = ids, []
        for _ in range(num_tokens + 10):
            started = time.perf_counter()
            logits = runner.forward([Span(0, len(fed), None, 1)], fed).logits
            runner.commit(0, range(len(fed)))
            fed = [int(logits[-1].argmax())]
            times_ms.append(1e3 * (time.perf_counter() - started))
        runner.close(0)
        return times_ms[10:]

    return decode


def table(found: Sequence[lines.Line]) -> str:
    """Medians over the windows; the worst token is that of all."""
    rows = [lines.head("", "neighbour's period, ms", "median, ms", "p99, ms", "worst, ms", "worst / median")]
    for (label, period), own in lines.grouped(found, "label", "neighbour").items():
        middle, p99 = (median([line[key] for line in own]) for key in ("median_ms", "p99_ms"))
        worst = max(line["worst_ms"] for line in own)
        beside = f"{period:g}" if period else "none"
        times = [f"{one:.2f}" for one in (middle, p99, worst)]
        rows.append(lines.row(label, beside, *times, f"{worst / middle:.1f}"))
    return "\n".join(rows)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--label", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--periods-ms", type=float, nargs="*", default=[2.0, 20.0])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(lines.read(options.file)))
    else:
        measure(options)


if __name__ == "__main__":
    main()
