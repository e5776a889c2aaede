"""`report.json`: what a run came to, in the words and conventions of vLLM, from counters and requests.

Pure functions; what was not measured is null and never estimated. Acceptance length counts the bonus token; fractions
of time are of the time in which there was work.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from actors.options import VerifyRule
from actors.protocol.membership import Ready
from actors.protocol.messages import RequestStats
from cluster.config.schema import LaunchConfig
from cluster.observability.results import Run, Served
from cluster.placement.ranks import RankPlacement

PACKAGE = "specdec"
"""Name of this distribution."""

FIGURES = (
    "num_requests",
    "num_failed",
    "tokens",
    "wall_s",
    "tokens_per_s",
    "plain_tokens_per_s",
    "speedup_vs_ar",
    "tokens_equal_plain",
    "num_unequal_requests",
    "ttft_s",
    "latency_s",
    "decode_ms_per_token",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "per_position_acceptance",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "branch_hit_rate",
    "foreseen_rate",
    "levels",
    "draft_busy",
    "target_busy",
    "round_ms",
    "round_overhead_ms",
    "num_rounds",
    "waits",
    "bound_by",
    "preemptions",
    "stale",
    "lost_records",
    "role_losses",
    "resume_s",
    "draft_lengths",
    "fallback_s",
    "num_probes",
    "num_trials",
    "guard",
)
"""Measured, per run."""

CIRCUMSTANCES = ("layout", "bytes_per_role", "stretch", "notes", "versions", "config")
"""What it was measured on."""

REPORT_FIELDS = FIGURES + CIRCUMSTANCES
"""The fields of every report; tools read them by these names."""


def figures(run: Run, plain: Run | None = None) -> dict[str, object]:
    """`FIGURES` of one run; `plain` is plain decoding of the same prompts by the same engine."""
    tokens_per_s = _ratio(run.num_tokens, run.wall_s)
    plain_tokens_per_s = _ratio(plain.num_tokens, plain.wall_s) if plain else None
    num_unequal = num_unequal_requests(run, plain) if plain else None
    return {
        "num_requests": len(run.requests),
        "num_failed": len(run.failed),
        "tokens": run.num_tokens,
        "wall_s": run.wall_s,
        "tokens_per_s": tokens_per_s,
        "plain_tokens_per_s": plain_tokens_per_s,
        "speedup_vs_ar": _ratio(tokens_per_s, plain_tokens_per_s),
        "tokens_equal_plain": None if num_unequal is None else num_unequal == 0,
        "num_unequal_requests": num_unequal,
        "ttft_s": _middle(one.ttft_s for one in run.completed),
        "latency_s": _middle(one.latency_s for one in run.completed),
        "decode_ms_per_token": decode_ms_per_token(run.completed),
        **speculation(run.counters),
        **rounds(run.counters),
        **control(run.counters),
    }


def speculation(counters: Mapping[str, object]) -> dict[str, object]:
    """Acceptance, from the counters of a window or of a request."""
    steps, drafted = counters.get("num_spec_steps"), counters.get("num_draft_tokens")
    accepted = counters.get("num_accepted_tokens")
    histogram = counters.get("acceptance_histogram")
    per_position = zip(counters.get("num_accepted_per_pos", ()), counters.get("num_drafted_per_pos", ()), strict=True)
    hits, lookups = counters.get("num_branch_hits"), counters.get("num_branch_lookups")  # only where one drafts ahead
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": None if histogram is None else list(histogram),
        "per_position_acceptance": [kept / offered for kept, offered in per_position] if steps else None,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "branch_hit_rate": _ratio(hits, lookups),
        "foreseen_rate": _ratio(counters.get("num_prefetched"), lookups),
        "levels": levels(counters.get("levels") or {}),
    }


def levels(counted: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]] | None:
    """Every level of a cascade: its passes, what a draft of it cost, and how the level above judged it."""
    return {
        name: {
            "num_passes": work["num_passes"],
            "ms_per_pass": _ratio(1e3 * work["busy_s"], work["num_passes"]),
            "num_drafts": work["num_drafts"],
            "ms_per_draft": _ratio(1e3 * work["busy_s"], work["num_drafts"]),
            "num_draft_tokens": work["num_draft_tokens"],
            "num_accepted_tokens": work["num_accepted_tokens"],
            "draft_acceptance_rate": _ratio(work["num_accepted_tokens"], work["num_draft_tokens"]),
        }
        for name, work in sorted(counted.items())
    } or None


def rounds(counters: Mapping[str, object]) -> dict[str, object]:
    """How busy the roles were, and what a round costs beyond their work."""
    active_s, spec_rounds = counters.get("active_s"), counters.get("num_spec_rounds")
    round_s = _ratio(counters.get("spec_round_s"), spec_rounds)
    overhead_s = _ratio(counters.get("spec_round_overhead_s"), spec_rounds)
    return {
        "draft_busy": _ratio(counters.get("draft_busy_s"), active_s),
        "target_busy": _ratio(counters.get("target_busy_s"), active_s),
        "round_ms": None if round_s is None else round_s * 1e3,
        "round_overhead_ms": None if overhead_s is None else overhead_s * 1e3,
        "num_rounds": counters.get("num_rounds"),
        **waits(counters),
        "preemptions": counters.get("num_preemptions"),
        "stale": counters.get("num_stale"),
        "lost_records": counters.get("num_lost_records"),
        "role_losses": counters.get("num_role_losses"),
        "resume_s": counters.get("resume_s"),
    }


def waits(counters: Mapping[str, object]) -> dict[str, object]:
    """Who waited for whom in rounds with speculation, in seconds, and whose time most of it was.

    `bound_by` names what to make faster first: target, drafter, or messages (links and coordinator).
    """
    round_s = counters.get("spec_round_s")
    if not round_s:
        return {"waits": None, "bound_by": None}
    drafter_s, messages_s = counters["wait_for_draft_s"], counters["wait_for_messages_s"]
    shares = {"target": round_s - drafter_s - messages_s, "drafter": drafter_s, "messages": messages_s}
    seconds = {
        "target_for_drafter_s": drafter_s,
        "target_for_messages_s": messages_s,
        "drafter_for_target_s": max(0.0, counters["active_s"] - counters["draft_busy_s"]),
    }
    return {"waits": seconds, "bound_by": max(shares, key=lambda name: shares[name])}


def control(counters: Mapping[str, object]) -> dict[str, object]:
    """What adaptive control did: how often each draft length was ordered, from 0 on, and how often it looked around.

    `fallback_s` is the time in which requests were decoded plainly although they might have been speculated for;
    `guard` is what it measured last under the load there was: its mode, plain tokens per second, speculation's gain.
    """
    seconds, entered = counters.get("seconds_by_mode", {}), counters.get("num_by_mode", {})
    rested_s = seconds.get("rest", 0.0) + seconds.get("catch_up", 0.0)
    return {
        "draft_lengths": list(counters.get("orders_by_length", ())),
        "fallback_s": rested_s + counters.get("fallback_s", 0.0),
        "num_probes": entered.get("probe", 0),
        "num_trials": entered.get("trial", 0),
        "guard": counters.get("guard"),
    }


def mean_draft_length(lengths: Sequence[int]) -> float | None:
    """Over orders that asked for a draft at all."""
    return _ratio(sum(length * count for length, count in enumerate(lengths)), sum(lengths[1:]))


def request_metrics(served: Served, num_spec_tokens: int) -> dict[str, object]:
    """One request's metrics, in the vocabulary of vLLM's; `num_spec_tokens` is what the drafter may propose a round."""
    stats: RequestStats = served.stats
    steps, drafted, accepted = stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }


def decode_ms_per_token(requests: Sequence[Served]) -> float | None:
    """Time per token behind the first, over all requests: what is left when the prompt has been read."""
    timed = [one for one in requests if one.ttft_s is not None and len(one.token_ids) > 1]
    seconds = sum(one.latency_s - one.ttft_s for one in timed)
    return _ratio(1e3 * seconds, sum(len(one.token_ids) - 1 for one in timed))


def num_unequal_requests(run: Run, other: Run) -> int:
    """Requests that ended in both runs with different tokens."""
    ended = {one.index: one.token_ids for one in other.completed if one.finish_reason != "abort"}
    mine = (one for one in run.completed if one.finish_reason != "abort" and one.index in ended)
    return sum(one.token_ids != ended[one.index] for one in mine)


def bytes_per_role(ready: Mapping[str, Ready]) -> dict[str, dict[str, int]]:
    """Bytes of weights and KV over the ranks of each role; a role that holds neither has zeros."""
    total: dict[str, dict[str, int]] = {}
    for rank in ready.values():
        role = total.setdefault(rank.role, {"weights": 0, "kv": 0})
        role["weights"] += int(rank.facts.get("weight_bytes", 0))
        role["kv"] += int(rank.facts.get("kv_bytes", 0))
    return total


def versions() -> dict[str, str | None]:
    """Of everything that can change a figure; null where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (PACKAGE, "torch", "ray", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def circumstances(
    config: LaunchConfig, places: Sequence[RankPlacement], ready: Mapping[str, Ready]
) -> dict[str, object]:
    """`CIRCUMSTANCES` of an engine."""
    return {
        **layout(places, ready),
        "stretch": config.target.stretch,
        "notes": notes(config),
        "versions": versions(),
        "config": asdict(config),
    }


def layout(places: Sequence[RankPlacement], ready: Mapping[str, Ready]) -> dict[str, object]:
    """Where every rank is, and what its role holds in memory."""
    return {
        "layout": [{"identity": place.identity, **asdict(place), "cores": place.bound_to} for place in places],
        "bytes_per_role": bytes_per_role(ready),
    }


def notes(config: LaunchConfig) -> list[str]:
    """What a reader must know before comparing the figures with others."""
    said = []
    if config.target.stretch:
        said.append(
            f"target.stretch={config.target.stretch}: the target has that many extra layers, which cost time and "
            "change no token"
        )
    if config.verify.rule != VerifyRule.coupled and config.sampling.temperature > 0:
        said.append(
            f"verify.rule={config.verify.rule} keeps the law of the output, not its tokens: sampled requests differ "
            "from plain decoding"
        )
    if config.cluster.oversubscribe:
        said.append("cluster.oversubscribe=true: ranks may share cores, timings mean little")
    return said


def write_json(path: Path, content: object) -> None:
    """All of it or nothing: whoever reads meanwhile, or after a death, finds a whole file."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _middle(values) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": median(known), "max": max(known)} if known else None
