"""The program of `docs/measurements/chunk_choices.py`: what a choice sums up, and that drafts see no more than it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, LlamaForCausalLM

from docs.measurements.chunk_choices import GROUPINGS, SIZE, Agreement, PartialAttention, ReadText, agreed, chosen, main
from docs.measurements.recall_pair import constructed, save

TEXT = [(7 * i * i + 3 * i) % 97 for i in range(60)]


def test_each_group_chooses_by_its_own_weights() -> None:
    weights = torch.full((2, 2, 80), 1e-3)
    for layer in range(2):
        for head in range(2):
            weights[layer, head, SIZE * (2 + 2 * layer + head)] = 1.0 + layer + 3 * head
    rows = {name: chosen(weights, axes, 3) for name, axes in GROUPINGS.items()}
    middle = {name: (one[..., SIZE] // SIZE).tolist() for name, one in rows.items()}
    assert middle == {
        "all": [[5, 5], [5, 5]],
        "layer": [[3, 3], [5, 5]],
        "KV head": [[4, 5], [4, 5]],
        "KV head of a layer": [[2, 3], [4, 5]],
    }
    assert {tuple(one.shape) for one in rows.values()} == {(2, 2, 3 * SIZE)}


@pytest.fixture
def opened(tiny_checkpoint: Callable[[str], Path]) -> Iterator[tuple[ReadText, LlamaForCausalLM]]:
    attention = PartialAttention()
    AttentionInterface.register("in_part", attention)
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint("Llama"), dtype=torch.float32)
    model.set_attn_implementation("in_part")
    with torch.inference_mode():
        yield ReadText(model.eval(), attention, TEXT), model


def test_drafts_are_the_models_own_where_all_rows_are_seen(opened: tuple[ReadText, LlamaForCausalLM]) -> None:
    rows, model = opened
    weights = rows.read(5)
    assert weights.shape[2] == len(TEXT)
    assert torch.allclose(weights.sum(-1), torch.full(weights.shape[:2], weights.sum() / weights[..., 0].numel()))
    everything = torch.arange(len(TEXT)).expand(*weights.shape[:2], -1)
    found = rows.draft(6, None, len(TEXT))
    assert rows.draft(6, everything, len(TEXT)) == found and rows.num_rows == len(TEXT) + 1
    expected = [*TEXT, 5, 6]
    model.set_attn_implementation("eager")
    for _ in found:
        expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert found == expected[-len(found) :]


def test_drafts_see_the_chosen_rows_alone(opened: tuple[ReadText, LlamaForCausalLM]) -> None:
    """Other rows may hold anything."""
    rows, _ = opened
    weights = rows.read(5)
    seen = chosen(weights, (), 3)
    found = rows.draft(6, seen, len(TEXT))
    for layer, cached in enumerate(rows._cache.layers):
        for head, chosen_rows in enumerate(seen[layer]):
            others = sorted({*range(len(TEXT))} - {*chosen_rows.tolist()})
            cached.keys[0, head, others] = torch.nan  # pyright: ignore[reportOptionalSubscript]
    assert rows.draft(6, seen, len(TEXT)) == found
    assert rows.draft(6, None, len(TEXT)) != found


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    assert [agreed([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [0, 2, 3])] == [3, 1, 0]


def test_a_choice_is_compared_with_another_one_draft_by_draft() -> None:
    first, second = Agreement([1, 2, 3, 2], [0.5]), Agreement([2, 2, 3, 1], [0.25])
    assert first.over(first) == "3.00 (50%)"
    assert second.over(first) == "3.00, +0.00 ± 0.35 (25%)"


@pytest.mark.extended
def test_the_table_of_a_pair_that_looks_things_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(constructed(48, 0), tmp_path / "target")
    main([str(tmp_path), "--recall", "--lengths", "1024", "--chunks", "32", "128", "--starts", "8", "--texts", "1"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.endswith("| " + " | ".join(GROUPINGS) + " |")
    assert row.startswith("| 1,024 | 32 | ")
    assert all(float(cell[:4]) > 2 for cell in row.strip("| ").split(" | ")[2:])
