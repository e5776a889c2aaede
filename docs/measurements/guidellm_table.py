"""What guidellm measured of the server, as a table and a picture:

    python docs/measurements/guidellm_table.py FOLDER PICTURE.png

FOLDER has guidellm's JSON, one file for each server that was started, named MODE-STREAMS-START.json. `served.md` has
the commands that made them. Prints medians over starts, and how many prompts had several texts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = ("tokens/s", "tokens/s of a stream", "TTFT p50", "p99", "ITL p50", "p99", "acceptance")


def figures(benchmark: dict[str, Any]) -> list[float]:
    """Those of `COLUMNS`; times in milliseconds."""
    metrics, done = benchmark["metrics"], benchmark["requests"]["successful"]

    def of(name: str, part: str) -> float:
        found = metrics[name]["successful"]
        return found[part] if part in found else found["percentiles"][part]

    speculation = [(one.get("response_metrics") or {}).get("speculative_decoding") or {} for one in done]
    steps = sum([one.get("num_spec_steps", 0) for one in speculation])
    accepted = sum([one.get("num_accepted_draft_tokens", 0) for one in speculation])
    return [
        of("output_tokens_per_second", "mean"),
        1e3 / of("inter_token_latency_ms", "median"),
        *(of("time_to_first_token_ms", part) for part in ("median", "p99")),
        *(of("inter_token_latency_ms", part) for part in ("median", "p99")),
        1 + accepted / steps if steps else 1.0,
    ]


def main(folder: Path, picture: Path) -> None:
    groups: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    texts: dict[str, set[str]] = defaultdict(set)
    count = 0
    for file in sorted(folder.glob("*-*-*.json")):
        mode, streams, _ = file.stem.split("-")
        (benchmark,) = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        groups[mode, int(streams)].append(figures(benchmark))
        for one in benchmark["requests"]["successful"]:
            asked = one["request_args"]
            body = (json.loads(asked) if isinstance(asked, str) else asked)["body"]
            texts[body["prompt"]].add(one["output"])
            count += 1
    medians = {key: [median(column) for column in zip(*rows, strict=True)] for key, rows in groups.items()}
    lines = [f"| streams | speculation | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for (mode, streams), row in sorted(medians.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in row]
        lines.append(f"| {streams} | {mode} | {' | '.join(cells)} |")
    differing = sum(len(found) > 1 for found in texts.values())
    sys.stdout.write(
        "\n".join(lines) + f"\n\n{count} completions of {len(texts)} prompts, {differing} with several texts\n"
    )
    _draw(medians, picture)


def _draw(medians: dict[tuple[str, int], list[float]], picture: Path) -> None:
    """Throughput against what one stream gets, by number of streams."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for mode in sorted({mode for mode, _ in medians}):
        points = sorted((streams, row) for (name, streams), row in medians.items() if name == mode)
        axes.plot([row[1] for _, row in points], [row[0] for _, row in points], marker="o", label=f"speculation {mode}")
        for streams, row in points:
            axes.annotate(str(streams), (row[1], row[0]), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(
        xlabel="tokens/s of a stream, 1 / median inter-token latency", ylabel="tokens/s of all streams", xscale="log"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
