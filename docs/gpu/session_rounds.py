"""Steps of the GPU session (`session.py`) about what a request is made of: reading its prompt, and one round."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from parallel.kv.pass_plan import Span

if TYPE_CHECKING:
    from docs.gpu.session import Machine

Row = dict[str, Any]
PROMPTS = [512, 2048, 8192, 32768]


def prompts(machine: Machine, shape: dict[str, Any]) -> Iterator[Row]:
    """Prompts of the 8B shape, whole and in chunks of 2,048 rows, their attention by PyTorch's flash kernels and by the
    own one."""
    lengths = [60] if machine.tiny else PROMPTS
    runner = machine.runner(shape, max(lengths) + 8)
    chunk = 16 if machine.tiny else 2048
    kinds = {"flash": True, "own": False} if runner.attention == "triton" else {runner.attention: False}
    for length, size, kind in itertools.product(lengths, (chunk, max(lengths)), kinds):
        if size > chunk and length <= chunk:
            continue  # one chunk is the whole
        if runner.attention == "triton":
            runner._backend.flash = kinds[kind]

        def read(length: int = length, size: int = size) -> None:
            runner.open(0)
            for start in range(0, length, size):
                count = min(size, length - start)
                runner.forward([Span(0, count)], [1] * count)
                runner.commit(0, range(count))
            runner.close(0)

        read()
        repeats, machine.repeats = machine.repeats, 3
        seconds = machine.seconds(read)
        machine.repeats = repeats
        row = {"prompt": length, "chunks of": min(size, length), "attention": kind, "ms": round(1e3 * seconds, 2)}
        yield row | {"tokens/s": round(length / seconds)}


def round_of_two(machine: Machine, shapes: Mapping[str, dict[str, Any]]) -> Iterator[Row]:
    """A whole round without a coordinator: a 1B drafter's chain and an 8B target's verifying pass on one device, with
    the choice of tokens and the host's part of both. The tokens are random, so none is accepted."""
    from actors.protocol.messages import SamplingParams, TokenTree
    from actors.sampling.logits import ChoicesAhead, LogitRows, choose_batch

    length, context = (3, 40) if machine.tiny else (5, 2048)
    target, drafter = (machine.runner(shapes[name], context + 32) for name in ("8b", "1b"))
    kinds = {"greedy": SamplingParams(), "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95)}
    for runner in (target, drafter):
        runner.open(0)
        runner.pool.reserve(0, context)
        runner.pool.commit(0, range(context))
    for name, params in kinds.items():
        times: dict[str, list[float]] = {"draft ms": [], "verify ms": [], "round ms": []}
        for _ in range(machine.repeats):
            started = time.perf_counter()
            start = torch.zeros(1, dtype=torch.int64, device=machine.device)
            choice = ChoicesAhead.of([params], [context], length, machine.device)
            drafted = [int(token) for token in runner_chain(drafter, start, choice)]
            drafter.drop_pending(0)
            middle = time.perf_counter()
            rows = [0, *drafted]
            logits = target.forward([Span(0, len(rows), num_logits=len(rows))], rows).logits
            choose_batch(logits, [LogitRows(params, 1, [1, 2, 3], TokenTree.chain(0, drafted))], ()).tolist()
            target.drop_pending(0)
            ended = time.perf_counter()
            for label, seconds in zip(times, (middle - started, ended - middle, ended - started), strict=True):
                times[label].append(1e3 * seconds)
        medians = {label: round(statistics.median(found), 3) for label, found in times.items()}
        yield {"sampling": name, "draft tokens": length, "captured": drafter.captures, **medians}


def runner_chain(runner: Any, start: torch.Tensor, choice: Any) -> list[int]:
    """The tokens of one drafted chain."""
    return runner.extend([Span(0, 1)], start, choice).flatten().tolist()
