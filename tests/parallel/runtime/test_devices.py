"""Passes of every family on a device of the test's own (`fake_accelerator.py`): nothing is left on the host."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model
from tests.families import FAMILIES, LIKE_OTHERS
from tests.matrices import in_turn
from tests.parallel import host_kernels
from tests.parallel.fake_accelerator import FakeAccelerator, MixedDevices

TOKENS = list(range(30))


def walk(model, accelerator=None):
    """Logits of a prefill, a tree and the step behind it, and how often the host waited for the passes."""
    for seq_id in "ab":
        model.open(seq_id)
    before = accelerator.num_syncs if accelerator is not None else 0
    outputs = [model.forward([Span("a", 30), Span("b", 11)], TOKENS + TOKENS[:11], taps=(1,))]
    for seq_id, size in (("a", 30), ("b", 11)):
        model.commit(seq_id, range(size))
    outputs.append(model.forward([Span("a", 5, [-1, 0, 0, 1, 2], num_logits=5), Span("b", 1)], [1, 2, 3, 4, 5, 6]))
    model.commit("a", [0, 2, 4])
    model.commit("b", [0])
    outputs.append(model.forward([Span("a", 1), Span("b", 1)], [7, 8]))
    waited = accelerator.num_syncs - before if accelerator is not None else 0
    return torch.cat([output.logits for output in outputs]).to("cpu"), waited


@pytest.mark.extended
@pytest.mark.parametrize(("family", "backend"), list(in_turn(FAMILIES, ["padded", "sdpa"], times=LIKE_OTHERS)))
def test_a_pass_stays_on_its_device(make_checkpoint, monkeypatch, family, backend):
    host_kernels.use_none(monkeypatch)
    path = make_checkpoint(family, **FAMILIES[family]).path
    expected, _ = walk(open_model(path, num_slots=128, backend=backend))
    with FakeAccelerator() as accelerator:
        model = open_model(path, device=accelerator.device, num_slots=128, backend=backend)
        logits, waited = walk(model, accelerator)
    assert torch.equal(logits, expected)
    assert waited == 0 or model.config.num_experts, "the host waits for no part of a pass"


def test_the_accelerator_refuses_what_a_gpu_refuses():
    with FakeAccelerator() as accelerator:
        x = torch.ones(3, device=accelerator.device)
        assert (x * 2).device == accelerator.device and (x + torch.tensor(1.0)).sum().item() == 6
        assert accelerator.num_syncs == 1 and x[1:].add_(1).tolist() == [2, 2] and x.tolist() == [1, 2, 2]
        for mixed in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(1)])):
            with pytest.raises(MixedDevices):
                mixed()
        with pytest.raises(TypeError):
            x.numpy()
        assert accelerator.num_syncs == 3
