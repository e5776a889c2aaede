"""Checks that span several records, refused before anything is started.

Every record checks itself first. No check here needs a device or a file; placement, weights and the jobs refuse what
only they can see. A refusal is one line: the field, what is wrong, the remedy. It must not know how the configuration
was composed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.drafters.registry import DRAFTERS
from actors.options import VerifyRule
from actors.verification.compatibility import check_scheme
from parallel.ranges import require

if TYPE_CHECKING:
    from actors.drafters.config import DrafterConfig
    from cluster.config.schema import LaunchConfig


def validate(config: LaunchConfig) -> None:
    """Raise ValueError, one line, for the first value that makes no sense, alone or with the others."""
    rule, pipeline = config.verify.rule, config.pipeline.name
    config.target.check("target")
    config.drafter.check("drafter")
    config.drafter.check_with(rule, pipeline)
    for where in ("verify", "pipeline", "placement", "scheduler", "cluster", "job", "sampling", "server"):
        getattr(config, where).check(where)
    drafters = _drafters(config)
    if rule is not VerifyRule.auto:
        for drafter in drafters:
            check_scheme(rule, drafter.sampling_kinds(rule, pipeline), drafter.draft_traits)
    _check_lengths(config)
    _check_machines(config)
    if config.job.name == "plan":
        remedy = "has no ranks to lay out; a plan needs drafter=model"
        require(config.drafter.name == "model", "drafter.name", config.drafter.name, remedy)
    if config.job.name == "tree":
        remedy = "has no tree of a fixed shape; job=tree needs drafter=model or speculator"
        require(config.drafter.name in ("model", "speculator"), "drafter.name", config.drafter.name, remedy)
        remedy = "is for chains; measure with coupled, rejection, traversal, kseq or transport"
        require(rule != "block", "verify.rule", rule, remedy)
    if config.job.name == "search":
        remedy = "is not drafted by the target's own layers; job=search needs drafter=self"
        require(config.drafter.name == "self", "drafter.name", config.drafter.name, remedy)


def _drafters(config: LaunchConfig) -> list[DrafterConfig]:
    """Those whose proposals are verified, one at a time: which of them depends on the committed text and on what has
    arrived, never on a token that was drawn, so that a rule has to be exact for each of them alone."""
    pipeline, local = config.pipeline.name, config.pipeline.local_drafter
    if local == "none":
        return [config.drafter]
    remedy = "is for a drafter that works ahead; use pipeline=pearl, branches or tree, or drop it"
    require(pipeline.works_ahead, "pipeline.local_drafter", local, remedy)
    remedy = "is for a draft model far away; use drafter=model, or drafter=pool for one at a time, or drop it"
    is_far = config.drafter.name in ("model", "pool") and config.drafter.num_seats <= 1
    require(is_far, "pipeline.local_drafter", local, remedy)
    return [config.drafter, DRAFTERS[local]()]


def _check_lengths(config: LaunchConfig) -> None:
    longest, shortest = config.drafter.num_draft_tokens, config.pipeline.min_draft_tokens
    remedy = f"must be from 0 to drafter.num_draft_tokens={longest}"
    require(not longest or shortest <= longest, "pipeline.min_draft_tokens", shortest, remedy)
    rows = config.scheduler.max_num_batched_tokens
    remedy = f"cannot hold one sequence's root and {longest} draft tokens; raise it to at least {longest + 1}"
    require(rows > longest, "scheduler.max_num_batched_tokens", rows, remedy)


def _check_machines(config: LaunchConfig) -> None:
    name, nodes, silence = config.cluster.name, config.placement.nodes, config.cluster.silence_s
    remedy = "is only for clusters of several nodes; drop it"
    require(name in ("existing", "slurm") or not nodes, "placement.nodes", nodes, remedy)
    if config.job.name == "drill":
        remedy = "has no processes of this machine to kill; use cluster=local for job=drill"
        require(name == "local", "cluster", name, remedy)
        require(silence > 0, "cluster.silence_s", silence, "must be above 0 for job=drill")
