from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.cpp_mutants import chosen_places, places, planted

KERNELS = Path(__file__).parents[1] / "parallel" / "kernels"
SOURCE = """\
#include <cmath>
#define TWO 2
// a < b + 1
constexpr int64_t SIZE = 1 << 15;  /* x = 1; */
template <class Body>
void f(const float *x, int64_t n) {
    const char *name = "a < 3";
    for (int64_t i = 0; i < n; i++) sum += g<2>(x[i]) * 0.5f;
    if (n == 1) done(n,
                     sum);
    return h(sum);
}
"""


def test_each_kind_of_mistake_is_found_at_its_places_and_nowhere_else():
    found = {(kind, SOURCE[start:end], text) for kind, start, end, text in places(SOURCE)}
    numbers = ("1", "15", "0", "2", "0.5f")
    assert found == {
        *(("number", number, f"({number} {sign} 1)") for number in numbers for sign in "+-"),
        *(("operator", *pair) for pair in [("<<", ">>"), ("<", "<="), ("+=", "-="), ("*", "/"), ("==", "!=")]),
        ("dropped statement", "sum += g<2>(x[i]) * 0.5f", ""),
        ("dropped statement", "done(n,\n                     sum)", ""),
    }


@pytest.mark.parametrize("file", sorted(KERNELS.glob("*.cpp")), ids=lambda file: file.stem)
def test_the_kernels_have_mistakes_of_every_kind_and_each_changes_code_only(file):
    source = file.read_text()
    chosen = chosen_places(source, random.Random(1))
    assert {kind for kind, *_ in chosen} == {"operator", "number", "dropped statement"} and len(chosen) > 15
    for _, start, end, text in chosen:
        line = source[source.rfind("\n", 0, start) + 1 : end]
        assert "//" not in line.split("\n")[0] and not re.match(r"\s*#", line)
        assert planted(source, start, end, text) != source
