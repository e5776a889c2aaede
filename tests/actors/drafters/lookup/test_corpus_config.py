"""Tests of where the text lies that a lookup reads at its start, and whose tokens it is read as."""

from __future__ import annotations

from typing import Any

import pytest

from actors.drafters.lookup.suffix import SuffixDrafterConfig


class Resolver:
    """Puts a mark before every path that it was asked for."""

    target = "the target"

    def checkpoint(self, key, path, *, is_model=True):
        return f"{key}: {path}"

    def file(self, key, path, wanted):
        return f"{key}: {path}"


@pytest.mark.parametrize(("tokenizer", "read_as"), [("", "the target"), ("other", "other")])
def test_text_is_read_by_the_named_tokenizer_or_the_targets(tokenizer, read_as):
    resolve: Any = Resolver()
    found: Any = SuffixDrafterConfig(corpus="text", tokenizer=tokenizer).with_paths(resolve, "drafter")
    assert (found.corpus, found.tokenizer) == ("drafter.corpus: text", f"drafter.tokenizer: {read_as}")


def test_without_a_text_nothing_is_looked_for():
    none: Any = None
    record = SuffixDrafterConfig(tokenizer="other")
    assert record.with_paths(none) is record
