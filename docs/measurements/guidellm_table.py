"""What guidellm measured of the server, as two tables and a picture:

    python -m docs.measurements.guidellm_table FOLDER PICTURE.png [PROMPTS.jsonl]

FOLDER has guidellm's JSON, one file for each server that was started, named MODE-STREAMS-START.json. `served.md` has
the commands that made them. Prints medians over starts, and how many prompts had several texts. The longest gap of a
stream is known of files that `guidellm_gaps.py` made. PROMPTS.jsonl has the prompts that were sent, each with its
`domain`; the second table has what streams of each domain got, over all starts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cluster.io.pictures import picture
from docs.measurements import lines

COLUMNS = (
    "tokens/s",
    "tokens/s of a stream",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "longest gap p50",
    "p99",
    "acceptance length",
)
LABELS = {mode: f"speculation {mode}" for mode in ("off", "on", "auto")}
Key = tuple[str, int]
"""Mode and number of streams."""
_ITL = "inter_token_latency_ms"
"""Of a request: none with a single token."""


def figures(benchmark: dict[str, Any]) -> list[float | None]:
    """Those of `COLUMNS`; times in milliseconds, None for one that was not measured."""
    metrics, done = benchmark["metrics"], benchmark["requests"]["successful"]

    def of(name: str, part: str) -> float:
        found = metrics[name]["successful"]
        return found[part] if part in found else found["percentiles"][part]

    gaps = [one["info"]["timings"].get("longest_gap_s") for one in done]
    known = [1e3 * gap for gap in gaps if gap is not None]
    return [
        of("output_tokens_per_second", "mean"),
        1e3 / of("inter_token_latency_ms", "median"),
        *(of("time_to_first_token_ms", part) for part in ("median", "p99")),
        *(of("inter_token_latency_ms", part) for part in ("median", "p99")),
        *(percentile(known, share) for share in (0.5, 0.99)),
        acceptance_length(done),
    ]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of all are at most (nearest rank); None without any."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None


def acceptance_length(requests: Iterable[dict[str, Any]]) -> float:
    """Tokens of a round, the target's own among them: 1 without drafts."""
    speculation = [(one.get("response_metrics") or {}).get("speculative_decoding") or {} for one in requests]
    steps = sum([one.get("num_spec_steps", 0) for one in speculation])
    accepted = sum([one.get("num_accepted_draft_tokens", 0) for one in speculation])
    return 1 + accepted / steps if steps else 1.0


def prompt_of(request: dict[str, Any]) -> str:
    """The prompt that a request was sent with."""
    args = request["request_args"]
    return (json.loads(args) if isinstance(args, str) else args)["body"]["prompt"]


def main(folder: Path, drawing: Path, prompts: Path | None) -> None:
    groups: dict[Key, list[list[float | None]]] = defaultdict(list)
    requests: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(folder.glob("*-*-*.json")):
        mode, streams, _ = file.stem.split("-")
        (benchmark,) = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        groups[mode, int(streams)].append(figures(benchmark))
        requests[mode, int(streams)] += benchmark["requests"]["successful"]
    medians = {key: [_median(column) for column in zip(*rows, strict=True)] for key, rows in groups.items()}
    rows = [lines.head("streams", "server", *COLUMNS)]
    for (mode, streams), found in sorted(medians.items(), key=lambda item: (item[0][1], item[0][0])):
        rows.append(lines.row(streams, mode, *map(_cell, found)))
    texts: dict[str, set[str]] = defaultdict(set)
    for one in (one for done in requests.values() for one in done):
        texts[prompt_of(one)].add(one["output"])
    count, differing = sum(map(len, requests.values())), sum(len(found) > 1 for found in texts.values())
    rows += ["", f"{count} completions of {len(texts)} prompts, {differing} with several texts"]
    if prompts is not None:
        rows += ["", *by_domain(requests, prompts)]
    sys.stdout.write("\n".join(rows) + "\n")
    _draw(medians, drawing)


def by_domain(requests: dict[Key, list[dict[str, Any]]], prompts: Path) -> list[str]:
    """The second table: tokens/s of the median stream, and acceptance length, of each domain in each mode."""
    domains = {record["prompt"]: record["domain"] for record in lines.read(prompts)}
    found: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for (mode, streams), done in requests.items():
        for one in done:
            found[streams, domains[prompt_of(one)]][mode].append(one)
    modes = sorted({mode for mode, _ in requests})
    names = [f"{mode}, {figure}" for figure in ("tokens/s of a stream", "acceptance length") for mode in modes]
    rows = [lines.head("streams", "domain", "prompts", *names)]
    for (streams, domain), of in sorted(found.items()):
        speeds = [_median([1e3 / one[_ITL] for one in of[mode] if one[_ITL]]) for mode in modes]
        lengths = [acceptance_length(of[mode]) for mode in modes]
        num = len({prompt_of(one) for done in of.values() for one in done})
        rows.append(lines.row(streams, domain, num, *map(_cell, (*speeds, *lengths))))
    return rows


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _draw(medians: dict[Key, list[float | None]], path: Path) -> None:
    """Throughput against what one stream gets, by number of streams."""
    with picture(path, 6, 4) as ((axes,),):
        for mode in sorted({mode for mode, _ in medians}):
            rows = sorted((streams, row[:2]) for (name, streams), row in medians.items() if name == mode)
            points = [(streams, of_one or 0.0, of_all or 0.0) for streams, (of_all, of_one) in rows]
            axes.plot([x for _, x, _ in points], [y for *_, y in points], marker="o", label=LABELS.get(mode, mode))
            for streams, x, y in points:
                axes.annotate(str(streams), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
        axes.set_xlabel("tokens/s of a stream, 1 / median inter-token latency")
        axes.set(ylabel="tokens/s of all streams", xscale="log")
        axes.legend()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
