"""Acceptance by how far back the context stands that a draft needs: `python docs/measurements/needed_context.py`.

A text is a piece of a held-out module, then so many tokens of other modules (`--distances`), then the beginning of the
piece again; the bundled target, greedy, goes on with the piece as far as it copies it. Only a draft that sees the piece
can follow. Each of `--settings` starts an engine; all drafts have `ROWS` rows to see, but for `model`, which sees all.
Texts stay within the 512 tokens that the pair was trained on, and windows are as much smaller. One row for each
setting: tokens a round by distance; before them the tokens that the target copies, at most `--tokens`. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import Corpus, library_sources, load_corpus

ROWS = 64
_STREAMING = f"sinks: 4, window: {ROWS - 4}"
_CHUNKS = f"chunk_size: 8, num_chunks: {ROWS // 8}, choose_every: 16"
SETTINGS = {
    "model": "{name: model}",
    "model, streaming": f"{{name: model, rows: streaming, {_STREAMING}}}",
    "model, chunks": f"{{name: model, rows: chunks, {_CHUNKS}}}",
    "self, streaming": f"{{name: self, rows: streaming, {_STREAMING}}}",
    "self, chunks": f"{{name: self, rows: chunks, {_CHUNKS}}}",
    "TriForce": f"{{name: cascade, levels: [{{name: model, rows: streaming, {_STREAMING}, num_draft_tokens: 2}},"
    f"{{name: self, rows: chunks, {_CHUNKS}, num_draft_tokens: 5}}]}}",
    "ngram": "{name: ngram}",
}
COMMON = ("cluster=inprocess", "cluster.dashboard=false", "pipeline.adaptive=false", "scheduler.max_num_seqs=1")
PIECE, BEGUN = 64, 16
"""Tokens of a piece, and those of them that stand again at the end."""
Texts = list[tuple[list[int], list[int]]]
"""Prompts, each with what the piece goes on with."""


def texts_at(distance: int, count: int, corpus: Corpus) -> Texts:
    """So many texts, each of a piece of its own; what stands between is of modules that come once."""
    tokenizer = load_tokenizer(pocket.TARGET)
    held_out = [tokenizer.encode(source.text).ids for source in corpus.held_out]
    others = iter(library_sources(corpus))
    found: Texts = []
    for i in range(count):
        own = held_out[i % len(held_out)]
        first = (1 + i // len(held_out)) * 5 * PIECE
        piece = own[first : first + PIECE]
        if len(piece) < PIECE:
            continue
        between = tokenizer.encode(next(others).text).ids
        while len(between) < distance:
            between += tokenizer.encode(next(others).text).ids
        found.append(([*piece, *between[:distance], *piece[:BEGUN]], piece[BEGUN:]))
    return found


def copied(texts: Sequence[Sequence[int]], pieces: Sequence[Sequence[int]]) -> float:
    """Tokens before the first that is not the piece's, on average."""
    lengths = [
        next((i for i, (own, right) in enumerate(zip(text, piece, strict=False)) if own != right), min(len(text), PIECE))
        for text, piece in zip(texts, pieces, strict=True)
    ]
    return sum(lengths) / len(lengths)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--distances", nargs="+", type=int, default=[0, 64, 128, 256, 384])
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    corpus = load_corpus(0)
    texts = {distance: texts_at(distance, options.texts, corpus) for distance in options.distances}
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    print("| | " + " | ".join(f"{distance}" for distance in texts) + " |")
    print("|---" * (len(texts) + 1) + "|")
    first: dict[int, list[list[int]]] = {}
    for name in options.settings:
        written, cells = dict[int, list[list[int]]](), list[str]()
        with Engine(load_config([*COMMON, f"drafter={SETTINGS[name]}"])) as engine:
            for distance, own in texts.items():
                before = engine.report().counters
                written[distance] = [engine.submit(prompt, params).result().token_ids for prompt, _ in own]
                now = engine.report().counters
                steps, accepted = (now[key] - before[key] for key in ("num_spec_steps", "num_accepted_tokens"))
                cells.append(f"{1 + accepted / steps:.2f}")
        if not first:
            first = written
            tokens = [copied(first[distance], [piece for _, piece in own]) for distance, own in texts.items()]
            print("| copied by the target | " + " | ".join(f"{count:.1f}" for count in tokens) + " |")
        assert written == first, "a draft changed a token"
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
