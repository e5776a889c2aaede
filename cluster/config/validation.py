"""What makes no sense or may not be combined, refused before anything is started.

No check here needs a device or a file; drafters check themselves; placement, weights and the jobs refuse what only they
can see. A refusal is one line: the field, what is wrong, the remedy. It must not know how the configuration was
composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.drafters.model.config import Parallel
from actors.options import DEVICES, DTYPES, PipelineName, VerifyRule
from actors.ranges import require

if TYPE_CHECKING:
    from cluster.config.schema import CertifyConfig, LaunchConfig

WORKLOADS = ("completion", "editing", "agent")

_Rule = tuple[str, object, bool, str]
"""Field, its value, whether that is good, and what is wrong otherwise together with the remedy."""


def validate(config: LaunchConfig) -> None:
    """Raise ValueError for the first rule that is broken."""
    _require(_target(config))
    config.drafter.check()
    config.drafter.check_with(config.verify.rule, config.pipeline.name)
    for rules in (_verify, _pipeline, _scheduler, _cluster, _job):
        _require(rules(config))
    config.sampling.params().check()


def _require(rules: Iterator[_Rule]) -> None:
    for name, value, good, otherwise in rules:
        require(good, name, value, otherwise)


def _target(config: LaunchConfig) -> Iterator[_Rule]:
    target = config.target
    yield "target.name", target.name, target.name in ("pocket", "hf"), "is set by target=pocket or target=hf; drop it"
    yield "target.path", target.path, bool(target.path), "give a directory with a Hugging Face checkpoint, or a hub id"
    yield "target.tp", target.tp, target.tp >= 1, "must be at least 1"
    yield "target.dtype", target.dtype, target.dtype in DTYPES, f"is unknown; choose one of {', '.join(DTYPES)}"
    yield "target.device", target.device, target.device in DEVICES, f"is unknown; choose one of {', '.join(DEVICES)}"
    yield "target.stretch", target.stretch, target.stretch >= 0, "must be 0 (off) or above"
    yield (
        "target.max_model_len",
        target.max_model_len,
        target.max_model_len >= 0,
        "must be 0 (the checkpoint's) or above",
    )
    yield "target.kv_slots", target.kv_slots, target.kv_slots >= 0, "must be 0 (sized automatically) or above"


def _verify(config: LaunchConfig) -> Iterator[_Rule]:
    yield "verify.law_size", config.verify.law_size, config.verify.law_size >= 1, "must be at least 1"
    if config.verify.rule is not VerifyRule.coupled:  # which is exact for any proposal whatever
        from actors.verification.rules import check_scheme  # loads PyTorch

        check_scheme(config.verify.rule, config.drafter.sampling_kinds(config.verify.rule, config.pipeline.name))


def _pipeline(config: LaunchConfig) -> Iterator[_Rule]:
    shortest, longest = config.pipeline.min_draft_tokens, config.drafter.num_draft_tokens
    fits = shortest >= 0 and (not longest or shortest <= longest)
    yield "pipeline.min_draft_tokens", shortest, fits, f"must be from 0 to drafter.num_draft_tokens={longest}"


def _scheduler(config: LaunchConfig) -> Iterator[_Rule]:
    limits, length = config.scheduler, config.drafter.num_draft_tokens
    yield "scheduler.max_num_seqs", limits.max_num_seqs, limits.max_num_seqs >= 1, "must be at least 1"
    yield "scheduler.prefill_chunk", limits.prefill_chunk, limits.prefill_chunk >= 1, "must be at least 1"
    rows = limits.max_num_batched_tokens
    yield (
        "scheduler.max_num_batched_tokens",
        rows,
        rows > length,
        (f"cannot hold one sequence's root and {length} draft tokens; raise it to at least {length + 1}"),
    )


def _cluster(config: LaunchConfig) -> Iterator[_Rule]:
    cluster = config.cluster
    if cluster.name in ("existing", "slurm"):
        remedy = "give HOST:PORT of the Ray cluster" + (
            ", or auto" if cluster.name == "existing" else ", or submit the job with `sbatch launch.sh`"
        )
        yield "cluster.address", cluster.address, bool(cluster.address), remedy
    else:
        yield (
            "cluster.address",
            cluster.address,
            not cluster.address,
            "is only for cluster=existing; add that or drop it",
        )
        one_machine = "is only for clusters of several nodes; drop it"
        yield "cluster.nodes", cluster.nodes, cluster.nodes <= 1, one_machine
        yield "placement.nodes", config.placement.nodes, not config.placement.nodes, one_machine
    yield (
        "cluster.nodes",
        cluster.nodes,
        cluster.nodes >= 0,
        "must be 0 (those that are there) or above",
    )
    yield "cluster.wait_s", cluster.wait_s, cluster.wait_s >= 0, "must be 0 or above"
    cpus = cluster.num_cpus
    yield "cluster.num_cpus", cpus, cpus is None or cpus >= 1, "must be at least 1, or null for all"
    delay, here = cluster.link_delay_ms, cluster.name in ("local", "inprocess")
    yield "cluster.link_delay_ms", delay, delay >= 0, "must be 0 (none) or above"
    otherwise = "is for one machine, where there is no network; use cluster=local or cluster=inprocess, or drop it"
    yield "cluster.link_delay_ms", delay, here or not delay, otherwise
    timeout = cluster.startup_timeout_s
    yield "cluster.startup_timeout_s", timeout, timeout > 0, "must be above 0"
    yield "cluster.max_restarts", cluster.max_restarts, cluster.max_restarts >= 0, "must be 0 (none) or above"
    silence = cluster.silence_s
    yield "cluster.silence_s", silence, silence == 0 or silence >= 1, "must be 0 (never) or at least 1 second"


def _drill(config: LaunchConfig) -> Iterator[_Rule]:
    job, name = config.job, config.cluster.name
    yield "cluster", name, name == "local", "has no processes of this machine to kill; use cluster=local for job=drill"
    yield "cluster.silence_s", config.cluster.silence_s, config.cluster.silence_s > 0, "must be above 0 for job=drill"
    yield "job.concurrency", job.concurrency, job.concurrency >= 1, "must be at least 1"
    yield "job.faults", job.faults, job.faults >= 1, "must be at least 1"
    yield "job.pairs", job.pairs, 0 <= job.pairs <= 1, "must be from 0 to 1"
    known = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM", "SIGABRT")
    right = bool(job.signals) and set(job.signals) <= set(known)
    yield "job.signals", job.signals, right, f"must be some of {', '.join(known)}"
    yield "job.spacing_s", job.spacing_s, job.spacing_s >= 0, "must be 0 or above"


def _certify(job: CertifyConfig) -> Iterator[_Rule]:
    yield "job.limit", job.limit, job.limit >= 0, "must be 0 (all prompts) or above"
    yield "job.concurrency", job.concurrency, job.concurrency >= 0, "must be 0 (all at once) or above"
    temperatures = job.temperatures
    yield "job.temperatures", temperatures, bool(temperatures), "must name at least one; 0 is greedy"
    yield "job.temperatures", temperatures, all(t >= 0 for t in temperatures), "must all be 0 or above"
    yield "job.seeds", job.seeds, bool(job.seeds), "must name at least one"
    yield "job.contexts", job.contexts, job.contexts >= 1, "must be at least 1"
    yield "job.draws", job.draws, job.draws >= 100, "must be at least 100; fewer show nothing"
    yield "job.significance", job.significance, 0 < job.significance < 1, "must be between 0 and 1"
    yield "job.power", job.power, 0 < job.power < 1, "must be between 0 and 1"


def _job(config: LaunchConfig) -> Iterator[_Rule]:
    job = config.job
    right = type(job)().name
    yield "job.name", job.name, job.name == right, f"is set by job={right}; write job={job.name}"
    if right in ("generate", "bench", "certify", "drill"):
        workload = job.workload
        unknown = f"is unknown; choose one of {', '.join(WORKLOADS)}"
        yield "job.workload", workload, workload in WORKLOADS, unknown
        for one in getattr(job, "workloads", ()):
            yield "job.workloads", one, one in WORKLOADS, unknown
    if right in ("generate", "bench", "plan"):
        yield "job.limit", job.limit, job.limit >= 0, "must be 0 (all prompts) or above"
    if right == "generate":
        yield "job.concurrency", job.concurrency, job.concurrency >= 0, "must be 0 (all at once) or above"
    if right == "certify":
        yield from _certify(job)
    if right == "drill":
        yield from _drill(config)
    if right == "bench":
        yield "job.repeats", job.repeats, job.repeats >= 1, "must be at least 1"
        yield "job.warmup", job.warmup, job.warmup >= 0, "must be 0 or above"
        yield "job.batches", job.batches, all(batch >= 1 for batch in job.batches), "must all be at least 1"
        lengths = job.draft_lengths
        yield "job.draft_lengths", lengths, all(length >= 1 for length in lengths), "must all be at least 1"
        yield "job.temperatures", job.temperatures, all(t >= 0 for t in job.temperatures), "must all be 0 or above"
        yield "job.contexts", job.contexts, all(context >= 1 for context in job.contexts), "must all be at least 1"
    if right == "plan":
        yield from _plan(config)
    if right == "passes":
        yield "job.ranks", job.ranks, job.ranks >= 1, "must be at least 1"
        yield "job.context", job.context, job.context >= 1, "must be at least 1"
        yield "job.repeats", job.repeats, job.repeats >= 1, "must be at least 1"
        groups = job.layer_groups
        good = all(1 <= group <= job.ranks for group in groups)
        yield "job.layer_groups", groups, good, f"must all be between 1 and job.ranks={job.ranks}"
        yield "job.rows", job.rows, bool(job.rows) and min(job.rows) >= 1, "must all be at least 1"


def _plan(config: LaunchConfig) -> Iterator[_Rule]:
    job = config.job
    drafter = config.drafter.name
    yield "drafter.name", drafter, drafter == "model", "has no ranks to lay out; a plan needs drafter=model"
    yield "job.batch", job.batch, job.batch >= 1, "must be at least 1"
    for axis in ("draft_lengths", "target_ranks", "draft_ranks", "layer_groups"):
        numbers = getattr(job, axis)
        yield f"job.{axis}", numbers, all(number >= 1 for number in numbers), "must all be at least 1"
    yield "job.draft_lengths", job.draft_lengths, bool(job.draft_lengths), "must name at least one length"
    for axis, known in (("parallels", tuple(Parallel)), ("pipelines", tuple(PipelineName))):
        names = getattr(job, axis)
        good = all(name in known for name in names)
        yield f"job.{axis}", names, good, f"must all be among {', '.join(known)}"
    yield "job.seconds", job.seconds, job.seconds > 0, "must be above 0"
    yield "job.trials", job.trials, job.trials >= 0, "must be 0 (none) or above"
    yield "job.repeats", job.repeats, job.repeats >= 1, "must be at least 1"
