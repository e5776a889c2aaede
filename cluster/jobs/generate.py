"""`job=generate`: complete prompts, show how speculation went, and time plain decoding of the same prompts.

Files: `completions.jsonl` grows by a line as each request ends. `report.json`, `timeline.json` and `timeline.png` are
written at the end, and after Ctrl-C of the requests so far. During the run `report.json` is rewritten every few seconds
with `interrupted` true, because a killed process cannot write one. `job.resume=true` continues an earlier
`completions.jsonl`; the report is then of the prompts of this run. `failure.txt` holds the trace of what ended the
engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from actors.protocol.messages import SamplingParams
from cluster.baseline import PlainEngine, describe, needs_own_engine
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine, EngineError
from cluster.io.console import ABSENT, Terminal, figure, percent
from cluster.io.prompts import Prompt, read_prompts
from cluster.io.resume import check_same_settings, drop_unfinished
from cluster.observability import timeline
from cluster.observability.choices import describe_choices
from cluster.observability.report import (
    Circumstances,
    RunFigures,
    circumstances,
    figures,
    mean_draft_length,
    memory_bound_speedup,
    request_metrics,
    write_json,
)
from cluster.observability.results import Run, Served
from cluster.placement.ranks import RankPlacement
from cluster.pocket import is_bundled
from cluster.run_prompts import serve_prompts, warming
from parallel.whole_files import append_text, write_text

REPORT_EVERY_S = 5.0
_WARM_UP = "warm-up"
"""Phase of the requests that warm up, and where the salts of their caches begin: none finds KV rows of another, nor do
the measured ones."""
COMPLETIONS_SHOWN = 8


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read, EngineError if a request failed, KeyboardInterrupt."""
    job: GenerateConfig = config.job
    completions, report_file, terminal = run_dir / "completions.jsonl", run_dir / "report.json", Terminal()
    prompts = _read_prompts(config, terminal)
    finished = _finished(config, prompts, completions, terminal) if job.resume else set()
    indices = [index for index in range(len(prompts)) if index not in finished]
    if not indices:
        _report_nothing(config, report_file, len(finished))
        return
    prompts = [prompts[index] for index in indices]
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    with engine:
        sampling = config.sampling_params(engine.tokenizer)
        first_token_s = _warm_up(engine, prompts, sampling)
        num_spec_tokens = getattr(config.drafter, "num_draft_tokens", 0)
        make_report = partial(_report, engine, len(finished), first_token_s)
        so_far, started, written_at = Run(interrupted=True), time.monotonic(), 0.0
        if not finished:
            write_text(completions, "")
        write_json(report_file, make_report(so_far))  # beside no pass: the first report takes as long as one

        def record(served: Served) -> None:
            nonlocal written_at
            line = completion_record(replace(served, index=indices[served.index]), num_spec_tokens)
            append_text(completions, json.dumps(line, ensure_ascii=False) + "\n")  # before the next request ends
            so_far.requests.append(served)
            so_far.wall_s = time.monotonic() - started
            if so_far.wall_s > written_at + REPORT_EVERY_S:
                written_at = so_far.wall_s
                write_json(report_file, make_report(so_far))

        speculative = _timed(engine, prompts, sampling, terminal, speculate=True, on_finished=record)
        compared = job.baseline and not speculative.interrupted
        alone, plain = compared and needs_own_engine(config, engine.places), None
        if compared and not alone:
            write_json(report_file, {**make_report(speculative), "interrupted": True})
            plain = _timed(engine, prompts, sampling, terminal, speculate=False, on_finished=lambda _: None)
        # Before the engine closes: a batch system may stop all processes of the job at once.
        report = make_report(speculative, plain)
        write_json(report_file, {**report, "interrupted": report["interrupted"] or alone})
        if engine.trace:
            write_text(run_dir / "failure.txt", engine.trace)
        if job.trace and speculative.spans:
            _trace(engine, speculative, report, run_dir)
    if alone:
        plain, places = _plain_alone(config, prompts, sampling, terminal)
        report = make_report(speculative, plain, places)
        write_json(report_file, report)
    _show(terminal, speculative)
    _summarise(terminal, report, run_dir)
    _check_completed(report, speculative, indices)


def _read_prompts(config: LaunchConfig, terminal: Terminal) -> list[Prompt]:
    """Those of the run; of a user's file it is said what is not used."""
    job, drafters, notes = config.job, config.drafter.names_in(config.pipeline.name), list[str]()
    prompts = read_prompts(Path(job.prompts), job.limit, drafters=drafters, note=notes.append)
    for note in [] if is_bundled(job.prompts) else notes:
        terminal.line(f"note: {note}")
    return prompts


def _finished(config: LaunchConfig, prompts: Sequence[Prompt], completions: Path, terminal: Terminal) -> set[int]:
    """Indices of the prompts that an earlier run in the directory finished with the same settings."""
    if finished := drop_unfinished(completions, prompts):
        check_same_settings(completions.with_name("report.json"), config.target.path, asdict(config.sampling))
        terminal.line(f"{len(finished)} of {len(prompts)} prompts are already in {completions}")
    return finished


def _report_nothing(config: LaunchConfig, file: Path, num_resumed: int) -> None:
    """Unless the run that finished all prompts wrote a report before it was killed."""
    if not file.exists():
        nothing = {"num_resumed": num_resumed, **figures(Run()), "mbsu": None, **circumstances(config, [], {})}
        write_json(file, {"job": config.job.name, **nothing, "interrupted": False})


def _check_completed(report: GenerateReport, run: Run, indices: Sequence[int]) -> None:
    """Raise KeyboardInterrupt, or EngineError if a request failed; `indices`: places of the prompts in their file."""
    if report["interrupted"]:
        raise KeyboardInterrupt
    if run.failed:
        first, count = run.failed[0], len(run.failed)
        raise EngineError(
            f"{count} of {len(indices)} requests failed; prompt {indices[first.index] + 1}: {first.error}"
        )


class GenerateReport(RunFigures, Circumstances):
    """`report.json` of `job=generate`."""

    job: str
    concurrency: int
    num_resumed: int
    startup_s: dict[str, float]
    mbsu: float | None
    """Memory-bound speed-up."""
    plain: RunFigures | None
    baseline: str | None
    """What plain decoding ran on."""
    chosen: str | None
    """What was chosen without being asked for, and why."""
    incidents: list[dict[str, Any]]
    interrupted: bool


def _report(
    engine: Engine,
    num_resumed: int,
    first_token_s: float | None,
    speculative: Run,
    plain: Run | None = None,
    plain_places: Sequence[RankPlacement] = (),
) -> GenerateReport:
    """`plain_places` are the ranks of an engine of its own; none: plain decoding ran in this one."""
    job: GenerateConfig = engine.config.job
    # Plain decoding that was cut short waited for the end of the engine too: its speed is none to compare with.
    measured = figures(speculative, None if plain is not None and plain.interrupted else plain)
    return {
        "job": job.name,
        "concurrency": job.concurrency,
        "num_resumed": num_resumed,
        "startup_s": engine.startup.seconds(first_token_s),
        **measured,
        "mbsu": memory_bound_speedup(speculative.counters, engine.ready),
        "plain": figures(plain) if plain else None,
        "baseline": describe(plain_places or engine.places, own_engine=bool(plain_places)) if plain else None,
        "chosen": describe_choices(engine.config, measured),
        "incidents": [asdict(incident) for incident in engine.supervisor.incidents],
        **circumstances(engine.config, engine.places, engine.ready),
        "interrupted": speculative.interrupted or (plain is not None and plain.interrupted),
    }


def _warm_up(engine: Engine, prompts: list[Prompt], sampling: SamplingParams) -> float | None:
    """Run a short request without and with speculation. Returns the seconds until the first token."""
    first_token_s: list[float | None] = []
    for speculate in (False, True):
        how: dict[str, Any] = {"speculate": speculate, "concurrency": 1, "phase": _WARM_UP}
        salt = f"{_WARM_UP}, {speculate=}"
        run = serve_prompts(engine, prompts[:1], warming(sampling), cache_salt=salt, **how)
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
    """Serve all prompts once, under a progress bar."""
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
            cache_salt="" if speculate else "plain",  # else the prompts' KV rows would be found in the cache
            on_finished=finished,
        )


def _plain_alone(
    config: LaunchConfig, prompts: list[Prompt], sampling: SamplingParams, terminal: Terminal
) -> tuple[Run, list[RankPlacement]]:
    """Decode the prompts plainly, in an engine that has the whole machine, after the other one has ended."""
    try:
        with terminal.starting() as progress, PlainEngine(config) as engine:
            progress("starting plain decoding by itself, to compare")
            places = engine.places
            engine.serve(prompts[:1], warming(sampling), 1, _WARM_UP)
            progress("plain decoding by itself, to compare")
            return engine.serve(prompts, sampling, config.job.concurrency), places
    except KeyboardInterrupt:
        return Run(interrupted=True), []


def _trace(engine: Engine, run: Run, report: GenerateReport, run_dir: Path) -> None:
    trace, picture = run_dir / "timeline.json", run_dir / "timeline.png"
    timeline.write_trace(trace, run.spans)
    timeline.draw(picture, run.spans, {"target": report["target_busy"], "draft": report["draft_busy"]})
    for file in (trace, picture):
        engine.publish(file)


def completion_record(served: Served, num_spec_tokens: int) -> dict[str, object]:
    """One line of `completions.jsonl`; `index` is the prompt's place among all that were read."""
    return {
        "index": served.index,
        "prompt": served.prompt.text,
        **served.prompt.labels(),
        "text": served.text,
        "token_ids": list(served.token_ids),
        "finish_reason": served.finish_reason,
        "error": served.error,
        "metrics": {
            "speculative_decoding": request_metrics(served.stats, num_spec_tokens),
            "ttft_s": served.ttft_s,
            "latency_s": served.latency_s,
            "num_preemptions": served.stats.num_preemptions,
        },
    }


def _show(terminal: Terminal, run: Run) -> None:
    """Print some completions. Printing them during the run would slow what is measured."""
    for served in sorted(run.requests, key=lambda served: served.index)[:COMPLETIONS_SHOWN]:
        ending = served.error or f"{len(served.token_ids)} tokens, {served.finish_reason}"
        terminal.completion(served.prompt.text, served.text, ending)
    if len(run.requests) > COMPLETIONS_SHOWN:
        terminal.line(f"and {len(run.requests) - COMPLETIONS_SHOWN} more in completions.jsonl\n")


def _summarise(terminal: Terminal, report: GenerateReport, run_dir: Path) -> None:
    plain, ttft_s = report["plain"], report["ttft_s"]
    round_ms, overhead_ms = report["round_ms"], report["round_overhead_ms"]
    rows = [
        ("requests", f"{report['num_requests']}, {report['num_failed']} failed"),
        ("tokens", f"{report['tokens']:,} in {figure(report['wall_s'], 1)} s"),
        ("speed", f"{figure(report['tokens_per_s'], 1)} tokens/s"),
        ("speed, plain decoding", _plain_speed(report)),
        ("speed-up over plain decoding", figure(report["speedup_vs_ar"], 2, "x")),
        ("tokens equal to plain decoding", _equality(report)),
        ("time to first token", figure(1e3 * ttft_s["median"] if ttft_s else None, 1, " ms, median")),
        ("time per later token", f"{figure(report['decode_ms_per_token'])} ms"),
        ("the same, plain decoding", f"{figure(plain['decode_ms_per_token'] if plain else None)} ms"),
        ("mean acceptance length", f"{figure(report['mean_acceptance_length'])} tokens per target pass with a draft"),
        ("draft tokens accepted", percent(report["draft_acceptance_rate"])),
        ("mean draft length ordered", f"{figure(mean_draft_length(report['draft_lengths']), 1)} tokens"),
        ("drafts ready before their verdict", percent(report["branch_hit_rate"])),
        ("plain decoding as a fallback", f"{figure(report['fallback_s'], 1)} s"),
        ("trials of speculation", _trials(report)),
        ("round with a draft", f"{figure(round_ms)} ms, most of it: {report['bound_by'] or ABSENT}"),
        ("round overhead", f"{figure(overhead_ms)} ms in which neither target nor drafter worked"),
        ("busy", f"target {percent(report['target_busy'])}, drafter {percent(report['draft_busy'])} of the time"),
        ("target waited", _waiting(report)),
    ]
    if guessed := report["num_guessed_states"]:
        share = percent((report["num_accepted_states"] or 0) / guessed)
        rows.append(("guessed states accepted", f"{share} of {guessed:,}; plain decoding computes one state a pass"))
    terminal.table("Summary", ("", ""), rows)
    if report["chosen"]:
        terminal.line(f"chosen: {report['chosen']}")
    for note in report["notes"]:
        terminal.line(f"note: {note}")
    files = [name for name in ("report.json", "completions.jsonl", "timeline.png", "logs") if (run_dir / name).exists()]
    terminal.line(f"{finding(report)}; see {', '.join(files)} in {run_dir}")


def finding(report: GenerateReport) -> str:
    """The most important result of a run, in one phrase."""
    return next(_findings(report))


def _findings(report: GenerateReport) -> Iterator[str]:
    """Findings in order of importance; the last one always applies."""
    losses, speedup = report["role_losses"] or {}, report["speedup_vs_ar"]
    if report["num_failed"]:
        yield f"{report['num_failed']} requests failed"
    if report["num_unequal_requests"] and not any("not its tokens" in note for note in report["notes"]):
        yield f"tokens of {report['num_unequal_requests']} requests differ from plain decoding"
    if report["interrupted"]:
        yield "interrupted: the figures are of what was generated before, unfinished requests included"
    if losses:
        yield "processes were lost: " + ", ".join(f"{role} {count} times" for role, count in sorted(losses.items()))
    if speedup is not None and not (report["num_spec_steps"] or report["num_guessed_states"]):
        yield f"no draft was verified: plain decoding, at {speedup:.2f}x of what it reached when timed for itself"
    if speedup is not None and round(speedup, 2) < 1:
        bound_by = report["bound_by"] or "target"
        yield f"slower than plain decoding ({speedup:.2f}x); most of a round with a draft went to: {bound_by}"
    if speedup is not None:
        yield f"{speedup:.2f}x the speed of plain decoding"
    yield f"{figure(report['tokens_per_s'], 1)} tokens/s, not compared with plain decoding"


def _plain_speed(report: GenerateReport) -> str:
    where = f"; {report['baseline']}" if report["baseline"] else ""
    return f"{figure(report['plain_tokens_per_s'], 1)} tokens/s{where}"


def _equality(report: GenerateReport) -> str:
    num_unequal = report["num_unequal_requests"]
    if num_unequal is None:
        return ABSENT
    return f"{num_unequal} requests differ" if num_unequal else "all equal"


def _trials(report: GenerateReport) -> str:
    """How often the never-slower guard measured whether speculation pays, and what it found last."""
    gain = (report["guard"] or {}).get("gain")
    measured = f"; last found: {gain:.2f}x of plain decoding" if gain else ""
    return f"{report['num_probes']} probes, {report['num_trials']} trials{measured}"


def _waiting(report: GenerateReport) -> str:
    waits = report["waits"]
    if waits is None:
        return ABSENT
    drafter_s, messages_s = waits["target_for_drafter_s"], waits["target_for_messages_s"]
    return f"{drafter_s:.1f} s for the drafter, {messages_s:.1f} s for messages"
