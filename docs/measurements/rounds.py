"""What a round costs beside its passes: `python -m docs.measurements.rounds OUT.jsonl [options] SETTING ...`.

A setting is overrides of the launch joined by commas, such as `drafter=model,drafter.placement=attached`. Every start
makes a new engine for each setting in turn, generates once to warm up, and appends one line for each window that
follows: the mean round, its part in which neither role worked (*overhead*), and the share of that. `--table` prints
medians and ranges of what the file has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.prompts import read_prompts
from docs.measurements import lines

COMMON = ("cluster.dashboard=false", "sampling.max_tokens=96", "sampling.ignore_eos=true")


def measure(options: argparse.Namespace) -> None:
    """Every start in turn, so that what else the machine does meets all settings alike."""
    for start in range(options.starts):
        for setting in options.settings:
            for line in windows(options, setting):
                lines.append(options.file, {"setting": setting, "start": start} | line)


def windows(options: argparse.Namespace, setting: str) -> list[dict[str, float]]:
    """Figures of each window of one engine; its first prompt is generated before them."""
    config = load_config([*COMMON, *options.overrides, *setting.split(",")])
    prompts = [one.text for one in read_prompts(Path(options.prompts), options.limit)]
    found = []
    with Engine(config) as engine:
        engine.generate(prompts[:1])
        for _ in range(options.windows):
            engine.report(reset=True)
            for prompt in prompts:
                engine.generate([prompt])
            found.append(_figures(engine.report().counters))
    return found


def _figures(counters: dict[str, float]) -> dict[str, float]:
    rounds = max(1, counters["num_spec_rounds"])
    round_s, overhead_s = counters["spec_round_s"], counters["spec_round_overhead_s"]
    return {
        "tokens_per_s": counters["num_tokens"] / counters["active_s"],
        "rounds": rounds,
        "round_ms": 1e3 * round_s / rounds,
        "overhead_ms": 1e3 * overhead_s / rounds,
        "share": overhead_s / max(1e-9, round_s),
    }


def table(found: Sequence[lines.Line]) -> str:
    """Medians over all windows, and the range of the share."""
    rows = [lines.head("setting", "tokens/s", "round, ms", "overhead, ms", "of a round")]
    for (setting,), own in lines.grouped(found, "setting").items():
        medians = [median([line[key] for line in own]) for key in ("tokens_per_s", "round_ms", "overhead_ms")]
        cells = [f"{one:.{digits}f}" for one, digits in zip(medians, (0, 2, 2), strict=True)]
        rows.append(lines.row(f"`{setting}`", *cells, lines.spread([line["share"] for line in own], ".1%")))
    return "\n".join(rows)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", default=str(pocket.PROMPTS))
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--overrides", action="append", default=[], help="of every setting")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args()
    if options.table:
        print(table(lines.read(options.file)))
    else:
        measure(options)


if __name__ == "__main__":
    main()
