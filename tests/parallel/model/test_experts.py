"""Mixtures of experts: rows sorted by their experts, multiplied one expert at a time or all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.block import Experts
from parallel.runtime.runner import open_model
from tests.families import FAMILIES
from tests.matrices import in_turn
from tests.parallel.fake_accelerator import FakeAccelerator

MIXTURES = ["Mixtral", "Qwen2Moe", "Qwen3Moe"]
TOKENS = [3 + i * 7 % 90 for i in range(20)]


@pytest.fixture
def grouping(monkeypatch):
    """Groups are multiplied at once here too; PyTorch has the operation on every device."""
    monkeypatch.setattr("parallel.model.layers.weight.groups_on", lambda device, dtype: True)
    monkeypatch.setattr("parallel.model.layers.weight.has_products", lambda: False)


def logits_of(model, tokens=TOKENS):
    model.open(0)
    return model.forward([Span(0, len(tokens), num_logits=len(tokens))], tokens).logits


@pytest.mark.parametrize("family", MIXTURES)
def test_all_experts_at_once_are_those_one_by_one(make_checkpoint, family, request):
    path = make_checkpoint(family, **FAMILIES[family]).path
    one_by_one = open_model(path, num_slots=40, backend="sdpa")
    assert not one_by_one.decoder.waits_for_nothing
    request.getfixturevalue("grouping")
    grouped = open_model(path, num_slots=40, backend="sdpa")
    assert grouped.decoder.waits_for_nothing
    torch.testing.assert_close(logits_of(grouped), logits_of(one_by_one), rtol=1e-3, atol=1e-4)
    assert grouped.decoder.layers[0].nbytes() > 0
    sizes = [sum(layer.nbytes() for layer in model.decoder.layers) for model in (grouped, one_by_one)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2), "no matrix is kept twice"


@pytest.mark.extended
@pytest.mark.parametrize("family", list(in_turn(MIXTURES, times={"Mixtral": 0, "Qwen3Moe": 0})))
def test_the_kernels_of_a_mixture_give_what_one_expert_at_a_time_does(make_checkpoint, family, grouping, device):
    """It reads a prompt, whose rows are sorted, and the single rows behind it, which are not."""
    path = make_checkpoint(family, **FAMILIES[family]).path
    found = []
    for options in (dict(device=device, backend="triton", graphs=False), dict(backend="sdpa")):
        model = open_model(path, num_slots=40, **options)
        logits = [logits_of(model, TOKENS[:10])]
        model.commit(0, range(10))
        for token in TOKENS[:1]:
            logits.append(model.forward([Span(0, 1)], [token]).logits)
            model.commit(0, [0])
        found.append(torch.cat([part.cpu() for part in logits]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=2e-4)


@dataclass(frozen=True)
class Rank:
    """A rank whose sums are taken by the test."""

    rank: int
    size: int = 2

    def all_reduce(self, x):
        return x


@pytest.mark.parametrize("rows", [1, 7])
def test_ranks_add_the_experts_that_they_hold(make_checkpoint, grouping, rows):
    config = open_model(make_checkpoint("Mixtral", **FAMILIES["Mixtral"]).path, num_slots=8, backend="sdpa").config
    options: Any = dict(dtype=torch.float32, device="cpu")
    whole = Experts(config, SINGLE, **options)
    ranks: list[Any] = [Rank(0), Rank(1)]
    parts = [Experts(config, rank, **options) for rank in ranks]
    torch.manual_seed(0)
    for layer in (whole.router, *[part for expert in whole.experts for part in (expert.gate_up, expert.down)]):
        layer.weight.plain.normal_(std=0.3)
    for part in parts:
        part.router.weight.plain.copy_(whole.router.weight.plain)
        for own, expert in zip(part.experts, whole.experts[part.first :], strict=False):
            own.gate_up.weight.plain.copy_(expert.gate_up.weight.plain)
            own.down.weight.plain.copy_(expert.down.weight.plain)
    x = torch.randn(rows, config.hidden_size)
    one_by_one = whole(x)
    for layer in (whole, *parts):
        layer.pack()
        assert layer.is_grouped
    torch.testing.assert_close(whole(x), one_by_one)
    torch.testing.assert_close(sum(part(x) for part in parts), one_by_one)


@pytest.mark.parametrize("groups", [True, False])
def test_the_host_waits_for_nothing_or_once_a_layer(make_checkpoint, request, groups, monkeypatch):
    monkeypatch.setattr("parallel.model.layers.weight.has_products", lambda: False)
    if groups:
        request.getfixturevalue("grouping")
    path = make_checkpoint("Qwen3Moe", **FAMILIES["Qwen3Moe"]).path
    with FakeAccelerator() as accelerator:
        model = open_model(path, device=accelerator.device, num_slots=40, backend="sdpa")
        before = accelerator.num_syncs
        logits_of(model)
        assert accelerator.num_syncs - before == (0 if groups else model.config.num_layers)


def test_launches_grow_neither_with_rows_nor_with_experts(make_checkpoint, grouping):
    found = []
    for num_experts in (4, 8):
        changes = {**FAMILIES["Qwen3Moe"], "num_experts": num_experts}
        path = make_checkpoint("Qwen3Moe", **changes).path
        with FakeAccelerator() as accelerator:
            model = open_model(path, device=accelerator.device, num_slots=40, backend="sdpa")
            for i, num_rows in enumerate((20, 2)):
                accelerator.forget()
                model.open(i)
                model.forward([Span(i, num_rows)], TOKENS[:num_rows])
                found.append(accelerator.launches.total())
    assert len(set(found)) == 1, found
