"""The machine of a measurement, and the memory its ranks hold."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil

from actors.protocol.membership import Ready


def machine() -> dict[str, object]:
    """Processor, cores this process may use, memory, GPUs, system."""
    import torch  # late: a process that will hold ranks settles how its threads wait before PyTorch loads

    return {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def resident_bytes(ready: Mapping[str, Ready]) -> dict[str, int]:
    """Resident memory of the ranks' processes on this host, now; ranks of one process share an entry.

    Ranks that report no process id run in this process; they are given its memory and that of its children.
    """
    by_process: dict[int | None, list[str]] = {}
    for identity, rank in ready.items():
        by_process.setdefault(rank.facts.get("pid"), []).append(identity)
    return {"+".join(sorted(identities)): _resident(pid) for pid, identities in by_process.items()}


def _resident(pid: int | None) -> int:
    if pid is not None and psutil.pid_exists(pid):
        return psutil.Process(pid).memory_info().rss
    own = psutil.Process()
    return sum(process.memory_info().rss for process in (own, *own.children(recursive=True)))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
