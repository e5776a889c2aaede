"""The comparison of ADED's constructions: it counts the target's own text, and the table that it fills decides."""

from __future__ import annotations

import pytest

from actors.drafters.adjacency.config import AdedDrafterConfig
from cluster import pocket
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from docs.measurements import constructions
from parallel.runtime.runner import open_model


@pytest.mark.extended
def test_the_targets_distributions_bring_tokens():
    """Verdicts teach the table: without their rows it knows only what the texts have."""
    target, eos = open_model(str(pocket.TARGET), num_slots=1024), tuple(read_eos_token_ids(pocket.TARGET))
    tokenizer = load_tokenizer(pocket.TARGET)
    prompts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in read_prompts(pocket.PROMPTS, 4)]
    found = {}
    for learns in (True, False):
        config = AdedDrafterConfig(num_draft_tokens=8, learns=learns)
        found[learns] = constructions.rounds_of(target, config, eos, prompts, 32)
        assert {one.prompt for one in found[learns]} == {0, 1, 2, 3}
        assert 4 * 32 <= sum(one.num_tokens for one in found[learns]) < 4 * (32 + 9)
    assert len(found[True]) < 0.9 * len(found[False])


@pytest.mark.slow
def test_a_small_run(capsys):
    constructions.main(["--prompts", "1", "--tokens", "4"])
    printed = capsys.readouterr().out
    assert "completion" in printed and "editing" in printed and "best_first" in printed and "search" in printed
