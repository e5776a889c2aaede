"""One run of prompts through an engine, with so many requests in flight, in one measuring window of its counters.

Every job that measures uses it. It derives no figures (`cluster/observability/report.py` does) and writes no files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace

from actors.protocol.messages import PLAIN_DECODING, SamplingParams
from cluster.completion import Completion, EngineError
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.observability.results import Run, Served

WARMUP_TOKENS = 16


def warming(sampling: SamplingParams) -> SamplingParams:
    """Those of a request that warms up: the first passes allocate memory and choose kernels."""
    return replace(sampling, min_tokens=0, max_tokens=min(WARMUP_TOKENS, sampling.max_tokens))


def serve_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    speculate: bool,
    concurrency: int,
    phase: str = "",
    cache_salt: str = "",
    on_finished: Callable[[Served], None] = lambda _: None,
) -> Run:
    """Complete all prompts, `concurrency` at a time (0: all at once); a failed request does not end the others.

    Each prompt may name its drafter; without `speculate` all are decoded plainly. `phase` labels the run in the
    metrics. With a `cache_salt` of its own a run finds no rows and no drafts of those before it. Ctrl-C aborts the
    requests in flight; the run is then `interrupted`.
    """
    run = Run()
    live: dict[int, Completion] = {}

    def complete(index: int, prompt: Prompt) -> Served:
        error = None
        try:
            drafter = prompt.drafter if speculate else PLAIN_DECODING
            live[index] = engine.submit(prompt.content, sampling, drafter=drafter, cache_salt=cache_salt)
            if run.interrupted:  # submitted after the loop below aborted the others
                live[index].abort()
            live[index].result()
        except EngineError as failure:
            error = str(failure)
        return _served(index, prompt, live.pop(index, None), error)

    def end_all() -> None:
        run.interrupted = True
        engine.wind_down()
        pool.shutdown(wait=False, cancel_futures=True)
        for completion in list(live.values()):
            completion.abort()

    engine.report(reset=True, phase=phase)
    started = time.monotonic()
    pending: list[Future[Served]] = []
    with ThreadPoolExecutor(concurrency or len(prompts), "request") as pool:
        try:
            pending.extend(pool.submit(complete, index, prompt) for index, prompt in enumerate(prompts))
            for future in as_completed(pending):
                run.requests.append(future.result())
                on_finished(run.requests[-1])
        except KeyboardInterrupt:
            end_all()
        except OSError:  # what ended cannot be written down: nothing that ends later could be
            end_all()
            raise
    recorded = {served.index for served in run.requests}
    for served in [future.result() for future in pending if not future.cancelled()]:
        if served.index not in recorded:  # ended by the interrupt
            run.requests.append(served)
            on_finished(served)
    run.wall_s = time.monotonic() - started
    _count(engine, run)
    return run


def all_completed(run: Run) -> list[Served]:
    """The requests in the order of the prompts. Raises KeyboardInterrupt, and EngineError if a request failed."""
    if run.interrupted:
        raise KeyboardInterrupt
    if run.failed:
        raise EngineError(f"prompt {run.failed[0].index + 1}: {run.failed[0].error}")
    return run.completed


def _count(engine: Engine, run: Run) -> None:
    """Close the measuring window; a dead engine has no counters, and its requests hold the reason."""
    try:
        report = engine.report(reset=True)
    except EngineError:
        return
    run.counters, run.spans = dict(report.counters), report.spans


def _served(index: int, prompt: Prompt, completion: Completion | None, error: str | None) -> Served:
    if completion is None:
        return Served(index, prompt, error=error)
    submitted, first, finished = completion.submitted_at, completion.first_token_at, completion.finished_at
    return Served(
        index=index,
        prompt=prompt,
        token_ids=tuple(completion.token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason or "error",
        error=error,
        stats=completion.stats,
        ttft_s=None if first is None else first - submitted,
        latency_s=None if finished is None else finished - submitted,
    )
