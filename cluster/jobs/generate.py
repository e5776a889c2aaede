"""`job=generate`: complete prompts, show how speculation went, and time plain decoding of the same prompts beside it.

Files: `completions.jsonl` grows by a line as each request ends; `report.json`, `timeline.json` and `timeline.png`
follow at the end, also after Ctrl-C, of what there is by then. Until then `report.json` is of the requests so far, and
`interrupted`: who is killed writes no more. `job.resume=true` goes on from an earlier `completions.jsonl`; the report
is then of the prompts of this run. `failure.txt` is the trace of what ended the engine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO

from actors.protocol.messages import SamplingParams
from cluster.config.schema import GenerateConfig, LaunchConfig
from cluster.engine import Engine, EngineError
from cluster.io.console import Terminal, figure, percent
from cluster.io.prompts import Prompt, read_prompts
from cluster.io.resume import take_up
from cluster.observability import timeline
from cluster.observability.report import circumstances, figures, mean_draft_length, request_metrics, write_json
from cluster.observability.results import Run, Served
from cluster.run_prompts import serve_prompts

REPORT_EVERY_S = 5.0
WARMUP_TOKENS = 16
COMPLETIONS_SHOWN = 8


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read, EngineError if a request failed, KeyboardInterrupt."""
    job: GenerateConfig = config.job
    prompts = read_prompts(Path(job.prompts), job.limit)
    completions, report_file, terminal = run_dir / "completions.jsonl", run_dir / "report.json", Terminal()
    finished = take_up(completions, prompts) if job.resume else set()
    indices = [index for index in range(len(prompts)) if index not in finished]
    if finished:
        terminal.line(f"{len(finished)} of {len(prompts)} prompts are already in {completions}")
    if not indices:
        if not report_file.exists():  # whoever finished them was killed
            nothing = {"num_resumed": len(finished), **figures(Run()), **circumstances(config, [], {})}
            write_json(report_file, {"job": job.name, **nothing, "interrupted": False})
        return
    prompts = [prompts[index] for index in indices]
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    with engine:
        sampling = config.sampling_params(engine.tokenizer)
        first_token_s = _warm_up(engine, prompts, sampling)
        num_spec_tokens = getattr(config.drafter, "num_draft_tokens", 0)
        log_event = partial(_report, engine, len(finished), first_token_s)
        so_far, started, told_at = Run(interrupted=True), time.monotonic(), -math.inf
        with completions.open("a" if finished else "w", encoding="utf-8") as file:

            def record(served: Served) -> None:
                nonlocal told_at
                _append(file, completion_record(replace(served, index=indices[served.index]), num_spec_tokens))
                so_far.requests.append(served)
                so_far.wall_s = time.monotonic() - started
                if so_far.wall_s > told_at + REPORT_EVERY_S:
                    told_at = so_far.wall_s
                    write_json(report_file, log_event(so_far))

            speculative = _timed(engine, prompts, sampling, terminal, speculate=True, on_finished=record)
        plain = None
        if job.baseline and not speculative.interrupted:
            write_json(report_file, {**log_event(speculative), "interrupted": True})
            plain = _timed(engine, prompts, sampling, terminal, speculate=False, on_finished=lambda served: None)
        # Before the engine ends: where all of a job's processes are told to stop at once, there may be no after.
        report = log_event(speculative, plain)
        write_json(report_file, report)
        if engine.trace:
            (run_dir / "failure.txt").write_text(engine.trace)
        if job.trace and speculative.spans:
            _trace(engine, speculative, report, run_dir)
    _show(terminal, speculative)
    _summarise(terminal, report, run_dir)
    if report["interrupted"]:
        raise KeyboardInterrupt
    if speculative.failed:
        first, count = speculative.failed[0], len(speculative.failed)
        raise EngineError(
            f"{count} of {len(prompts)} requests failed; prompt {indices[first.index] + 1}: {first.error}"
        )


def _report(
    engine: Engine, num_resumed: int, first_token_s: float | None, speculative: Run, plain: Run | None = None
) -> dict[str, object]:
    job: GenerateConfig = engine.config.job
    return {
        "job": job.name,
        "concurrency": job.concurrency,
        "num_resumed": num_resumed,
        "startup_s": engine.startup.seconds(first_token_s),
        **figures(speculative, plain),
        "plain": figures(plain) if plain else None,
        "incidents": [asdict(incident) for incident in engine.supervisor.incidents],
        **circumstances(engine.config, engine.places, engine.ready),
        "interrupted": speculative.interrupted or (plain is not None and plain.interrupted),
    }


def _warm_up(engine: Engine, prompts: list[Prompt], sampling: SamplingParams) -> float | None:
    """First passes allocate and choose kernels; they are nobody's fault and not measured.

    Returns how long the very first token took.
    """
    short = replace(sampling, min_tokens=0, max_tokens=min(WARMUP_TOKENS, sampling.max_tokens))
    first_token_s: list[float | None] = []
    for speculate in (False, True):
        run = serve_prompts(engine, prompts[:1], short, speculate=speculate, concurrency=1, phase="warm-up")
        if run.interrupted:
            raise KeyboardInterrupt
        first_token_s += [served.ttft_s for served in run.requests]
    return first_token_s[0]


def _timed(
    engine: Engine,
    prompts: list[Prompt],
    sampling: SamplingParams,
    terminal: Terminal,
    *,
    speculate: bool,
    on_finished: Callable[[Served], None],
) -> Run:
    """All prompts once, under a progress bar."""
    job: GenerateConfig = engine.config.job
    with terminal.counting("completing" if speculate else "plain decoding, to compare", len(prompts)) as bar:

        def finished(served: Served) -> None:
            on_finished(served)
            bar.advance()

        return serve_prompts(
            engine,
            prompts,
            sampling,
            speculate=speculate,
            concurrency=job.concurrency,
            phase="speculative" if speculate else "plain",
            on_finished=finished,
        )


def _trace(engine: Engine, run: Run, report: dict, run_dir: Path) -> None:
    trace, picture = run_dir / "timeline.json", run_dir / "timeline.png"
    timeline.write_trace(trace, run.spans)
    timeline.draw(picture, run.spans, {"target": report["target_busy"], "draft": report["draft_busy"]})
    for file in (trace, picture):
        engine.publish(file)


def _append(file: IO[str], record: dict[str, object]) -> None:
    """A line is on disk before the next request ends."""
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


def completion_record(served: Served, num_spec_tokens: int) -> dict[str, object]:
    """One line of `completions.jsonl`; `index` is the prompt's place among those that were read."""
    return {
        "index": served.index,
        "prompt": served.prompt.text,
        **served.prompt.labels(),
        "text": served.text,
        "token_ids": list(served.token_ids),
        "finish_reason": served.finish_reason,
        "error": served.error,
        "metrics": {
            "speculative_decoding": request_metrics(served, num_spec_tokens),
            "ttft_s": served.ttft_s,
            "latency_s": served.latency_s,
            "num_preemptions": served.stats.num_preemptions,
        },
    }


def _show(terminal: Terminal, run: Run) -> None:
    """Some completions; only now, because drawing them meanwhile would slow the run that is measured."""
    for served in sorted(run.requests, key=lambda served: served.index)[:COMPLETIONS_SHOWN]:
        ending = served.error or f"{len(served.token_ids)} tokens, {served.finish_reason}"
        terminal.completion(served.prompt.text, served.text, ending)
    if len(run.requests) > COMPLETIONS_SHOWN:
        terminal.line(f"and {len(run.requests) - COMPLETIONS_SHOWN} more in completions.jsonl\n")


def _summarise(terminal: Terminal, report: dict, run_dir: Path) -> None:
    plain = report["plain"] or {}
    round_ms, overhead_ms = report["round_ms"], report["round_overhead_ms"]
    share = overhead_ms / round_ms if round_ms else None
    equal = {True: "all equal", False: f"{report['num_unequal_requests']} requests differ", None: figure(None)}
    ttft = report["ttft_s"]["median"] if report["ttft_s"] else None
    rows = [
        ("requests", f"{report['num_requests']}" + f", {report['num_failed']} failed" * bool(report["num_failed"])),
        ("tokens", f"{report['tokens']:,} in {figure(report['wall_s'], 1)} s"),
        ("tokens/s", figure(report["tokens_per_s"], 1)),
        ("tokens/s, plain decoding", figure(report["plain_tokens_per_s"], 1)),
        ("speed-up", figure(report["speedup_vs_ar"], 2, "x")),
        ("tokens equal to plain decoding", equal[report["tokens_equal_plain"]]),
        ("mean acceptance length", figure(report["mean_acceptance_length"])),
        ("draft tokens accepted", percent(report["draft_acceptance_rate"])),
        ("draft length", _control(report)),
        ("ms per token behind the first", f"{figure(report['decode_ms_per_token'])}"),
        ("the same, plain decoding", figure(plain.get("decode_ms_per_token"))),
        ("ms to the first token, median", figure(None if ttft is None else ttft * 1e3, 1)),
        ("round", f"{figure(round_ms)} ms, of it {figure(overhead_ms)} ms ({percent(share)}) nobody's work"),
        ("busy", f"target {percent(report['target_busy'])}, drafter {percent(report['draft_busy'])}"),
        ("waiting", _waiting(report)),
    ]
    terminal.table("Summary", ("", ""), rows)
    for note in report["notes"]:
        terminal.line(f"note: {note}")
    terminal.line(f"written to {run_dir}")


def _control(report: dict) -> str:
    """Draft lengths and what the never-slower guard did."""
    share = report["fallback_s"] / report["wall_s"] if report["wall_s"] else None
    chosen = f"{figure(mean_draft_length(report['draft_lengths']), 1)} ordered on average"
    fallback = f"plain decoding as a fallback {figure(report['fallback_s'], 1)} s ({percent(share)})"
    guard = report["guard"] or {}
    gain = f", speculation over plain decoding as it went {figure(guard['gain'], 2)}x" if guard.get("gain") else ""
    return f"{chosen}; {fallback}, {report['num_probes']} probes, {report['num_trials']} trials{gain}"


def _waiting(report: dict) -> str:
    """Who waited for whom, and what binds."""
    waits = report["waits"]
    if waits is None:
        return figure(None)
    drafter, messages = waits["target_for_drafter_s"], waits["target_for_messages_s"]
    hits = f", {percent(report['branch_hit_rate'])} of drafts prepared" if report["branch_hit_rate"] is not None else ""
    said = f"target for drafter {figure(drafter, 1)} s, for messages {figure(messages, 1)} s"
    return f"{said}; bound by: {report['bound_by']}{hits}"
