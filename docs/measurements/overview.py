"""Runs of `job=bench` side by side: `python -m docs.measurements.overview RUN_DIR ... [--plot FILE.png]`.

Prints one Markdown row per drafter with, for each workload, its acceptance length, the time of a draft, that of the
target's pass over it, and its speed over plain decoding; of several runs of a workload the median, and the range of the
speed. Plain decoding is the same in all engines of a run whose target has as many threads, so the median of its speed
in these is the baseline. The picture has the same figures. Reads `report.json`; starts nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cluster.io.console import figure
from cluster.io.pictures import picture
from docs.measurements import lines

PANELS = {
    "mean_acceptance_length": "acceptance length",
    "ms_per_draft": "ms per draft",
    "verify_ms": "ms per pass of the target",
    "speed": "tokens/s over plain decoding",
}
_MARKS = "osD^vP"
Overview = dict[tuple[str, str], dict[str, list[float]]]
"""(drafter, workload) -> the values of each figure, one for each run, in the order of their first appearance."""


def read_runs(run_dirs: Sequence[Path]) -> Overview:
    """ValueError, one line, for a folder without a report of `job=bench`."""
    found: Overview = {}
    for run_dir in run_dirs:
        path = run_dir / "report.json"
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if report.get("job") != "bench":
            raise ValueError(f"{run_dir}: has no report of job=bench; name the folder of such a run")
        job, plain = report["config"]["job"], _plain_speeds(report["settings"])
        for entry in report["settings"]:
            workload = entry["setting"]["workload"] or Path(job["prompts"]).stem  # its file, where none is named
            name = entry["name"].removesuffix(f" {workload}")
            values = found.setdefault((name, workload), {key: [] for key in PANELS})
            for key, value in {**entry, "speed": entry["tokens_per_s"] / plain[_baseline_of(entry)]}.items():
                if key in values and value is not None:
                    values[key].append(value)
    return found


def _baseline_of(entry: Mapping[str, Any]) -> tuple[str | None, int]:
    """Workload, and threads of the target: a draft model with a core of its own leaves it fewer."""
    return entry["setting"]["workload"], entry["num_threads"]["target"]


def _plain_speeds(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str | None, int], float]:
    """Tokens per second of plain decoding, by baseline."""
    speeds: dict[tuple[str | None, int], list[float]] = {}
    for entry in entries:
        speeds.setdefault(_baseline_of(entry), []).append(entry["plain_tokens_per_s"])
    return {baseline: median(found) for baseline, found in speeds.items()}


def markdown(overview: Overview) -> str:
    """One row per drafter, one column per workload."""
    drafters, workloads = names_in(overview)
    rows = [[drafter, *(_cell(overview.get((drafter, workload))) for workload in workloads)] for drafter in drafters]
    return "\n".join([lines.head("drafter", *workloads), *(lines.row(*cells) for cells in rows)]) + "\n"


def names_in(overview: Overview) -> tuple[list[str], list[str]]:
    """Drafters and workloads."""
    return list(dict.fromkeys(drafter for drafter, _ in overview)), list(dict.fromkeys(name for _, name in overview))


def _cell(values: Mapping[str, Sequence[float]] | None) -> str:
    if values is None:
        return ""
    length, draft_ms, verify_ms = (figure(median(values[key]) if values[key] else None, 2) for key in list(PANELS)[:3])
    speeds = values["speed"]
    speed = figure(median(speeds) if speeds else None, 2, "x")
    spread = f" ({min(speeds):.2f}-{max(speeds):.2f})" if len(speeds) > 1 else ""
    return f"{length}; {draft_ms} + {verify_ms} ms; {speed}{spread}"


def draw(overview: Overview, path: Path) -> None:
    """A panel for each figure, a row for each drafter, a mark for each workload."""
    drafters, workloads = names_in(overview)
    with picture(path, 13, 1.4 + 0.3 * len(drafters), columns=len(PANELS), sharey=True) as (panels,):
        for panel, (key, title) in zip(panels, PANELS.items(), strict=True):
            for workload, mark in zip(workloads, _MARKS, strict=False):
                points = [
                    (median(values[key]), row)
                    for row, drafter in enumerate(drafters)
                    if (values := overview.get((drafter, workload))) and values[key]
                ]
                panel.plot(*zip(*points, strict=True), mark, markersize=5, label=workload) if points else None
            panel.set(xlabel=title, xscale="log" if key == "ms_per_draft" else "linear")
            panel.grid()
        panels[-1].axvline(1.0, color="black")
        panels[0].set_yticks(range(len(drafters)), drafters)
        panels[0].invert_yaxis()
        labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(*labels, loc="outside upper center", ncols=len(workloads))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures as well")
    options = parser.parse_args(arguments)
    try:
        overview = read_runs(options.runs)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(markdown(overview))
    if options.plot:
        draw(overview, options.plot)


if __name__ == "__main__":
    main()
