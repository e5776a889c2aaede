"""Milliseconds a token behind long texts: `python -m docs.measurements.long_contexts OUT.jsonl --pair DIR [options]`.

`--make` copies the bundled pair to DIR with room for 65,536 positions; the pair was trained on 8,192, so behind longer
texts its tokens are poor, and the same in every setting. A text is modules of the standard library one after the other,
each once, so that lookups find no copy of it. Each setting of `SETTINGS`, or of `--settings`, starts an engine and, for
each of `--lengths`, reads so many tokens and writes `--tokens` more, of which the first 16 are not timed. One line for
each: milliseconds a token, tokens a target pass, bytes of the drafter's KV rows, and a digest of the tokens, which has
to be the same in all settings. `--longspec DIR` is a layer that `job=train job.recipe=longspec` made for the target in
the folder of the pair. `--table` prints Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.text import load_tokenizer
from cluster.observability.report import drafter_bytes
from docs.measurements import lines

SETTINGS = {
    "plain": ["pipeline=plain", "drafter=none"],
    "model": ["drafter=model"],
    "model, streaming": ["drafter=model", "drafter.rows=streaming"],
    "model, chunks": ["drafter=model", "drafter.rows=chunks"],
    "self, streaming": ["drafter=self", "drafter.rows=streaming"],
    "self, chunks": ["drafter=self", "drafter.rows=chunks"],
    "TriForce": [
        "drafter=cascade",
        "drafter.levels=[{name: model, rows: streaming, num_draft_tokens: 2},"
        "{name: self, rows: chunks, num_draft_tokens: 5}]",
    ],
    "LongSpec": ["drafter=speculator"],
}
COMMON = ("cluster=inprocess", "cluster.dashboard=false", "pipeline.adaptive=false", "scheduler.max_num_seqs=1")
NOT_TIMED = 16
POLL_S = 2e-4


def copy_with_room(checkpoint: Path, folder: Path, positions: int) -> None:
    """A copy of the checkpoint whose config.json has so many positions."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | {"max_position_embeddings": positions}
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def make_pair(folder: Path, positions: int = 65_536) -> None:
    for name, source in (("target", pocket.TARGET), ("drafter", pocket.DRAFTER)):
        copy_with_room(source, folder / name, positions)


def modules(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each module of the standard library that is one file, by their names."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield tokenizer.encode(file.read_text(encoding="utf-8")).ids


def text_of(checkpoint: Path, length: int) -> list[int]:
    """So many tokens of modules, one after the other."""
    tokens = list(islice(chain.from_iterable(modules(load_tokenizer(checkpoint))), length))
    if len(tokens) < length:
        raise ValueError(f"the standard library has {len(tokens)} tokens, not {length}; lower --lengths")
    return tokens


def overrides(pair: Path, longspec: Path | None, longest: int, setting: Sequence[str]) -> list[str]:
    """Those of an engine for one text at a time, with the paths of what drafts."""
    words = [f"target.path={pair / 'target'}", f"target.kv_slots={longest + 2048}", *COMMON]
    words += [word.replace("{name: model,", f"{{name: model, path: {pair / 'drafter'},") for word in setting]
    paths = {"drafter=model": pair / "drafter", "drafter=speculator": longspec}
    return words + [f"drafter.path={path}" for word, path in paths.items() if word in setting]


def measure(options: argparse.Namespace, name: str) -> None:
    """One setting at all lengths."""
    words = overrides(options.pair, options.longspec, max(options.lengths), SETTINGS[name])
    words.append(f"target.stretch={options.stretch}")
    with Engine(load_config(words)) as engine:
        kv_bytes = drafter_bytes(engine.ready)["kv"]
        for length in options.lengths:
            line = {"setting": name, "length": length} | figures(
                engine, text_of(options.pair / "target", length), options.tokens
            )
            lines.append(options.file, line | {"kv_bytes": kv_bytes})


def figures(engine: Engine, text: Sequence[int], num_tokens: int) -> dict[str, Any]:
    completion = engine.submit(list(text), SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    seen = [(time.monotonic(), 0)]  # tokens of one verdict come together
    while not completion.finished:
        if (count := len(completion.token_ids)) > seen[-1][1]:
            seen.append((time.monotonic(), count))
        time.sleep(POLL_S)
    tokens = completion.result().token_ids
    timed = [one for one in seen if one[1] >= NOT_TIMED]
    (began, before), (ended, after) = timed[0], timed[-1]
    return {
        "ms_per_token": 1e3 * (ended - began) / (after - before),
        "tokens_per_pass": (after - before) / (len(timed) - 1),
        "digest": hashlib.sha256(repr(tokens).encode()).hexdigest()[:8],
    }


def table(found: Sequence[lines.Line]) -> str:
    """A row for each setting: milliseconds a token (tokens a pass) by length, and MiB of the drafter's KV rows."""
    lengths = sorted({line["length"] for line in found})
    rows = [lines.head("", *(f"{length:,}" for length in lengths), "draft rows, MiB")]
    for (name,), measured in lines.grouped(found, "setting").items():
        own = {line["length"]: line for line in measured}
        cells = [
            f"{own[at]['ms_per_token']:.1f} ({own[at]['tokens_per_pass']:.1f})" if at in own else "" for at in lengths
        ]
        rows.append(lines.row(name, *cells, f"{measured[0]['kv_bytes'] / 2**20:.1f}"))
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--pair", type=Path, default=Path("long-pair"))
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--longspec", type=Path)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--stretch", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.make:
        make_pair(options.pair)
    if options.table:
        print(table(lines.read(options.file)))
        return
    for name in options.settings:
        if name != "LongSpec" or options.longspec is not None:
            measure(options, name)


if __name__ == "__main__":
    main()
