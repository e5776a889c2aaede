"""Rows of a bench for the terminal, `bench.csv` and `bench.md`. Reads the entries of `report.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.io.console import ABSENT, Table, figure, percent
from cluster.tools.bench.figures import BenchEntry, DraftingFigures, Spread
from cluster.tools.bench.tasks import peer_sides
from parallel.whole_files import write_text

Cells = Sequence[tuple[str, Callable[[BenchEntry], str]]]
"""Columns, and the cell of an entry in each."""

_PLAIN_COLUMNS = (
    "tokens",
    "wall_s",
    "tokens_per_s",
    "plain_tokens_per_s",
    "speedup_vs_ar",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "decode_ms_per_token",
    "draft_busy",
    "target_busy",
    "round_ms",
    "round_overhead_ms",
    "preemptions",
    "stale",
    "num_unequal_requests",
    "repeats",
    *DraftingFigures.__annotations__,
    "mbsu",
)

_SPEED: Cells = (
    ("setting", lambda entry: entry["name"]),
    ("tokens/s", lambda entry: figure(entry["tokens_per_s"], 1)),
    ("plain", lambda entry: figure(entry["plain_tokens_per_s"], 1)),
    ("speed-up", lambda entry: figure(entry["ratios"]["speculative / plain"]["median"], 2, "x")),
    ("range", lambda entry: "{min:.2f}-{max:.2f}".format(**entry["ratios"]["speculative / plain"])),
    ("accepted + 1", lambda entry: figure(entry["mean_acceptance_length"])),
    ("ms/token", lambda entry: figure(entry["decode_ms_per_token"])),
    ("plain", lambda entry: figure(_median(entry["sides"]["plain"]["decode_ms_per_token"]))),
    ("first ms", lambda entry: figure(_median(entry["sides"]["speculative"]["ttft_s"], 1e3), 1)),
    ("tokens", lambda entry: _equality(entry["sides"]["plain"]["num_unequal_requests"], entry)),
)

_ROUNDS: Cells = (
    ("setting", lambda entry: entry["name"]),
    ("round ms", lambda entry: figure(entry["round_ms"])),
    ("of it overhead", lambda entry: figure(entry["round_overhead_ms"])),
    ("", lambda entry: percent(_share(entry["round_overhead_ms"], entry["round_ms"]))),
    ("target busy", lambda entry: percent(entry["target_busy"])),
    ("drafter busy", lambda entry: percent(entry["draft_busy"])),
    ("target threads", lambda entry: str(entry["num_threads"]["target"])),
    ("plain", lambda entry: str(entry["num_threads"]["plain"])),
    ("memory", lambda entry: figure(sum(entry["resident_bytes"].values()) / 2**20, 0, " MiB")),
)

_DRAFTERS: Cells = (
    ("setting", lambda entry: entry["name"]),
    ("accepted + 1", lambda entry: figure(entry["mean_acceptance_length"])),
    ("ms/draft", lambda entry: figure(entry["ms_per_draft"])),
    ("of a round", lambda entry: percent(entry["draft_share"])),
    ("ms/verify", lambda entry: figure(entry["verify_ms"], 1)),
    ("tokens/s decoding", lambda entry: figure(entry["decode_tokens_per_s"], 1)),
    ("predicted", lambda entry: figure(entry["predicted_tokens_per_s"], 1)),
    ("error", lambda entry: ABSENT if (error := entry["prediction_error"]) is None else f"{100 * error:+.0f} %"),
    ("speed-up", lambda entry: figure(entry["speedup_vs_ar"], 2, "x")),
    ("weights MiB", lambda entry: _mebibytes(entry["drafter_bytes"]["weights"])),
    ("KV MiB", lambda entry: _mebibytes(entry["drafter_bytes"]["kv"])),
)


def _mebibytes(size: int) -> str:
    return figure(size / 2**20, 1)


def _table(entries: Sequence[BenchEntry], cells: Cells) -> Table:
    return [column for column, _ in cells], [[cell(entry) for _, cell in cells] for entry in entries]


def speed_table(entries: Sequence[BenchEntry]) -> Table:
    """Speed against plain decoding; the range is from least to most over the repeats."""
    return _table(entries, _SPEED)


def round_table(entries: Sequence[BenchEntry]) -> Table:
    """Parts of the time of a round, and the memory that the ranks hold."""
    return _table(entries, _ROUNDS)


def drafter_table(entries: Sequence[BenchEntry]) -> Table:
    """Costs of drafting. Tokens/s are those after each request's first token; the speed-up is of whole requests."""
    return _table(entries, _DRAFTERS)


def peer_table(entries: Sequence[BenchEntry]) -> Table | None:
    """Other engines on the same prompts: their speed, this engine's relative to it, and the share of the prompts with
    equal tokens; None without peers."""
    rows = [
        [
            entry["name"],
            peer,
            figure(_median(side["tokens_per_s"]), 1),
            figure(_median(side["decode_ms_per_token"])),
            figure(entry["ratios"][f"speculative / {peer}"]["median"], 2, "x"),
            figure(entry["ratios"][f"plain / {peer}"]["median"], 2, "x"),
            percent(side["equal_share"]),
            _equality(side["num_unequal_requests"], entry, side["num_different_tokens"]),
        ]
        for entry in entries
        for peer in peer_sides(entry["sides"])
        if (side := entry["sides"][peer])
    ]
    columns = ["setting", "peer", "tokens/s", "ms/token", "speculation over it", "plain over it", "equal", "tokens"]
    return (columns, rows) if rows else None


def category_table(entries: Sequence[BenchEntry]) -> Table | None:
    """Categories down, settings across: speed-up over plain decoding and acceptance length; None without categories.

    Settings with other prompts may lack a category, or have none.
    """
    entries = [entry for entry in entries if entry["categories"]]
    categories = dict.fromkeys(name for entry in entries for name in entry["categories"])
    rows = [[name, *(_category_cell(entry["categories"].get(name)) for entry in entries)] for name in categories]
    return (["category", *(entry["name"] for entry in entries)], rows) if rows else None


def _category_cell(figures: dict[str, float | None] | None) -> str:
    if figures is None:
        return ""
    return f"{figure(figures['speculative / plain'], 2, 'x')}  {figure(figures['mean_acceptance_length'])}"


def csv_row(entry: BenchEntry) -> dict[str, object]:
    """One flat row; columns of peers and categories have their names."""
    row: dict[str, object] = {"name": entry["name"], **entry["setting"]}
    row |= {name: entry[name] for name in _PLAIN_COLUMNS}
    row["resident_bytes"] = sum(entry["resident_bytes"].values())
    row |= {f"drafter_{name}_bytes": size for name, size in entry["drafter_bytes"].items()}
    for side, figures in entry["sides"].items():
        row[f"{side} ttft_s"] = _median(figures["ttft_s"])
        row[f"{side} decode_ms_per_token"] = _median(figures["decode_ms_per_token"])
        row[f"{side} tokens_per_s"] = _median(figures["tokens_per_s"])
        row[f"{side} equal_share"] = figures["equal_share"]
    for name, ratio in entry["ratios"].items():
        row |= {name: ratio["median"], f"{name} min": ratio["min"], f"{name} max": ratio["max"]}
    for category, figures in entry["categories"].items():
        row |= {f"{category}: {name}": value for name, value in figures.items()}
    return row


def write_markdown(path: Path, entries: Sequence[BenchEntry]) -> None:
    """The table of drafters; the fastest of each comparison in bold."""
    fastest = [_fastest(group)["name"] for group in comparisons(entries)]
    columns, rows = drafter_table(entries)
    lines = [columns, ["---"] * len(columns)]
    lines += [[f"**{cell}**" for cell in row] if row[0] in fastest else row for row in rows]
    write_text(path, "".join(f"| {' | '.join(line)} |\n" for line in lines))


def choices(entries: Sequence[BenchEntry]) -> list[str]:
    """The drafter that the formula chooses after one repeat, and its distance from the fastest, in each comparison."""
    lines = []
    for group in comparisons(entries):
        predicted = [(prediction, entry) for entry in group if (prediction := entry["first_prediction"]) is not None]
        if len(predicted) < 2:
            continue
        _, chosen = max(predicted, key=lambda pair: pair[0])
        fastest = _fastest(group)
        lead = (fastest["decode_tokens_per_s"] or 0.0) / (chosen["decode_tokens_per_s"] or 1.0) - 1
        lines.append(
            f"by measured costs of one repeat the walltime formula chooses {chosen['name']}; "
            + (f"{fastest['name']} is {100 * lead:.0f} % faster" if lead else "nothing is faster")
        )
    return lines


def comparisons(entries: Sequence[BenchEntry]) -> list[list[BenchEntry]]:
    """Settings that differ in nothing but the drafter."""
    groups: dict[tuple[object, ...], list[BenchEntry]] = {}
    for entry in entries:
        if entry["decode_tokens_per_s"] is not None:
            key = tuple(entry["setting"][name] for name in ("pipeline", "temperature", "batch", "context", "workload"))
            groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _fastest(entries: Sequence[BenchEntry]) -> BenchEntry:
    return max(entries, key=lambda entry: entry["decode_tokens_per_s"] or 0.0)


def _equality(num_unequal: int | None, entry: BenchEntry, num_tokens: int | None = None) -> str:
    if num_unequal is None:
        return ABSENT
    counted = f", in {num_tokens} tokens" if num_tokens else ""
    return f"{num_unequal} of {entry['num_requests']} differ{counted}" if num_unequal else "all equal"


def _median(values: Spread | None, factor: float = 1.0) -> float | None:
    return None if values is None else values["median"] * factor


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
