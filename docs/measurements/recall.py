"""Tokens a target pass by the distance of what is needed: `python -m docs.measurements.recall OUT.jsonl --pair DIR`.

DIR is what `recall_pair.py` made. A text of `recall_texts.py` has a span and records at each of `--distances` that it
has room for, counted from their end to the question (records: 48 tokens further); each is asked once behind the same
text, and the answer has 46 tokens. Each setting of `SETTINGS`, or of `--settings`, starts an engine and is asked
everything at all of `--lengths`, in `--texts` texts of each. One line for each question: passes and accepted draft
tokens, bytes of the drafter's KV rows, whether the answer was right, and a digest of the tokens, which has to be the
same in all settings. `--longspec DIR` is a layer for the target. `--table` prints Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from actors.protocol.messages import SamplingParams
from cluster.config import load_config
from cluster.engine import Engine
from cluster.observability.report import drafter_bytes
from docs.measurements import lines, long_contexts
from docs.measurements.recall_texts import Block, Words

SETTINGS = long_contexts.SETTINGS | {"suffix": ["drafter=suffix", "drafter.shared_tokens=0"]}
KINDS = ("span", "records")
ASKED = 48
"""Tokens of a question with its answer."""
ROOM = ASKED + 3 * (ASKED - 1)
"""Tokens of a span and of records."""
GIVEN = 2
"""Tokens of it that are in the prompt."""


def recall_text(seed: int, length: int, distances: Sequence[int]) -> tuple[list[int], list[tuple[int, Block]]]:
    """So many tokens, and what stands in them at which distance; a distance without room is left out."""
    choose = random.Random(f"{seed} {length}")
    words, placed, end = Words(choose), list[tuple[int, Block]](), list[int]()
    for distance in sorted(distances):
        if not len(end) <= distance <= length - ROOM:
            continue
        end = [*words.noise(distance - len(end)), *end]
        for kind in KINDS:
            block = words.block(kind, ASKED)
            end = [*block.tokens, *end]
            placed.append((distance, block))
    return [*words.noise(length - len(end)), *end], placed


def measure(options: argparse.Namespace, name: str) -> None:
    """One setting, all questions."""
    words = long_contexts.overrides(options.pair, options.longspec, max(options.lengths), SETTINGS[name])
    words += ["placement=colocated", *options.override]
    sampling = SamplingParams(max_tokens=ASKED - GIVEN, ignore_eos=True)
    with Engine(load_config(words)) as engine:
        kv_bytes = drafter_bytes(engine.ready)["kv"]
        for length in options.lengths:
            for seed in range(options.texts):
                text, placed = recall_text(seed, length, options.distances)
                for distance, block in placed:
                    completion = engine.submit([*text, *block.question[:GIVEN]], sampling)
                    tokens, stats = completion.result().token_ids, completion.stats
                    line = {
                        "setting": name + options.label,
                        "length": length,
                        "text": seed,
                        "kind": block.kind,
                        "distance": distance,
                        "passes": stats.num_spec_steps,
                        "accepted": stats.num_accepted_tokens,
                        "right": tokens == block.question[GIVEN:],
                        "digest": hashlib.sha256(repr(tokens).encode()).hexdigest()[:8],
                        "kv_bytes": kv_bytes,
                    }
                    lines.append(options.file, line)


def tokens_a_pass(found: Sequence[lines.Line]) -> float:
    passes = sum(line["passes"] for line in found)
    return 1 + sum(line["accepted"] for line in found) / passes if passes else 1.0


def differing(found: Sequence[lines.Line]) -> int:
    """Questions to which not all settings gave one answer."""
    questions = lines.grouped(found, "length", "text", "kind", "distance")
    return sum(len({line["digest"] for line in answers}) > 1 for answers in questions.values())


def table(found: Sequence[lines.Line]) -> str:
    """For each kind and setting tokens a pass by length and distance, and MiB of the drafter's KV rows."""
    columns, rows = sorted({(line["length"], line["distance"]) for line in found}), list[str]()
    for (kind,), of_kind in lines.grouped(found, "kind").items():
        places = [f"{length:,}: {distance:,}" for length, distance in columns]
        rows.append(lines.head(kind, *places, "draft rows, MiB"))
        for (name,), own in lines.grouped(of_kind, "setting").items():
            cells = lines.grouped(own, "length", "distance")
            shown = [f"{tokens_a_pass(cells[at]):.1f}" if at in cells else "" for at in columns]
            rows.append(lines.row(name, *shown, f"{own[0]['kv_bytes'] / 2**20:.1f}"))
        rows.append("")
    right = sum(line["right"] for line in found)
    rows.append(f"{right} of {len(found)} answers right; {differing(found)} questions answered differently\n")
    return "\n".join(rows)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--pair", type=Path)
    parser.add_argument("--longspec", type=Path)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--distances", nargs="+", type=int, default=[64, 512, 2048, 8192, 30_000])
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--override", nargs="+", default=[], help="further settings of the engine")
    parser.add_argument("--label", default="", help="what the setting's name ends with in the table")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(lines.read(options.file)))
        return
    for name in options.settings:
        if name != "LongSpec" or options.longspec is not None:
            measure(options, name)


if __name__ == "__main__":
    main()
