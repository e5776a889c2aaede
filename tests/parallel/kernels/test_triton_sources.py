"""What a GPU does and the interpreter does not show: reads and writes outside of a tensor, and rounded products.

The interpreter fills what a mask hides with zeros and multiplies in full precision whatever a kernel says; a GPU leaves
what was in the registers, and rounds to TF32 unless the kernel says otherwise. So the text of the kernels is read.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = [
    *(ROOT / "parallel" / "kernels" / f"triton_{name}.py" for name in ("attention", "experts", "products", "rows")),
    *(ROOT / "actors" / "sampling" / f"{name}_kernels.py" for name in ("noise", "truncation")),
]


def calls_of(file, name):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tl.{name}":
            yield ast.unparse(node), {one.arg: ast.unparse(one.value) for one in node.keywords}


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_what_a_mask_hides_has_a_value(file):
    loads = dict(calls_of(file, "load"))
    masked = {text: options for text, options in loads.items() if "mask" in options}
    assert masked and not [text for text, options in masked.items() if "other" not in options]


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_blocks_are_read_and_written_within_their_rows(file):
    """Only single numbers have no mask: fields of a record, a slot, an expert, a sum; and codes, in whole tiles."""
    bare = [text for text, options in calls_of(file, "load") if "mask" not in options]
    single = (
        "tl.load(item",
        "tl.load(rows + row * 3",
        "tl.load(slots + row)",
        "tl.load(lines +",
        "tl.load(codes + line",
        *(f"tl.load({name} + entry)" for name in ("chosen", "places", "weights")),
        "tl.load(winners + row * num_blocks + tl.minimum(index, num_blocks - 1)",
        *(f"tl.load({name} + index)" for name in ("top_ks", "top_ps", "shares")),
        *(f"tl.load({name} + {place}" for name, place in (("sampled", "row)"), ("keys", "2 * row"))),
    )
    assert all(text.startswith(single) for text in bare), bare
    bare = [text for text, options in calls_of(file, "store") if "mask" not in options]
    single = (
        "tl.store(lse + at, tl.where",
        *(f"tl.store({name} + row" for name in ("best", "winners", "values", "tokens")),
    )
    assert all(text.startswith(single) for text in bare), bare


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_products_say_how_they_round(file):
    assert all(options.get("input_precision") == "PRECISION" for _, options in calls_of(file, "dot"))


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_sums_are_in_float32_and_counts_in_int32(file):
    made = [*calls_of(file, "zeros"), *calls_of(file, "full")]
    assert all(text.rstrip(")").endswith(("tl.float32", "tl.int32")) for text, _ in made), made
