"""What a choice costs a GPU: its operations, counted on a CPU, and its waits, for one sequence and for eight."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.protocol.messages import SamplingParams, TokenTree
from actors.sampling import logits as sampling
from actors.sampling.draft_sampling import draw_without_replacement, truncate_distribution
from actors.sampling.logits import LogitRows, choose_batch
from parallel.transfers import to_host
from tests.parallel.fake_accelerator import FakeAccelerator

EOS = (7,)
VOCAB = 3000
VIEWS = {
    "slice",
    "unsqueeze",
    "view",
    "select",
    "expand",
    "unbind",
    "empty",
    "lift_fresh",
    "detach",
    "alias",
    "t",
    "split",
}

CASES = {
    "greedy": (SamplingParams(), 3),
    "temperature": (SamplingParams(temperature=0.7), 5),
    "top-k": (SamplingParams(temperature=0.7, top_k=50), 7),
    "top-p": (SamplingParams(temperature=0.7, top_p=0.9), 7),
    "min-p": (SamplingParams(temperature=0.7, min_p=0.1), 7),
    "penalties": (
        SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2),
        15,
    ),
    "allowed tokens": (SamplingParams(temperature=0.7, allowed_token_ids=(4, 5)), 10),
    "all": (
        SamplingParams(
            temperature=0.7,
            top_k=20,
            top_p=0.9,
            min_p=0.02,
            repetition_penalty=1.2,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            bad_words=((1,), (2, 3)),
            min_tokens=30,
            logit_bias=((4, 2.5),),
        ),
        20,
    ),
}
"""Parameters, and the operations that a choice may take, whatever the number of rows."""


class Launches(TorchDispatchMode):
    """Operations that would be kernels or copies on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS and not (kwargs or {}).get("pin_memory"):  # host memory
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


def choose_counted(params: SamplingParams, num_sequences: int) -> tuple[Counter[str], FakeAccelerator]:
    tree = TokenTree((4, 5, 6, 7), (-1, 0, 1, 1))
    batch = [LogitRows(params, 2, [1, 2, 3, 4], tree) for _ in range(num_sequences)]
    with FakeAccelerator() as accelerator:
        logits = torch.randn(4 * num_sequences, VOCAB).to(accelerator.device)
        accelerator.forget()
        with Launches() as launches:
            choose_batch(logits, batch, EOS)
    return launches.count, accelerator


@pytest.fixture
def on_device(monkeypatch):
    """Triton's kernels, which are counted, in place of the noise, the race and the truncation on a CPU."""
    kernels = pytest.importorskip("actors.sampling.noise_kernels", reason="needs triton")
    launched = []

    def race(scores, keys, sampled, first, of_none):
        launched.append(2)
        return torch.empty(len(scores)), torch.empty(len(scores), dtype=torch.int64)

    def truncate(scores, top_ks, top_ps, shares):
        launched.append(1)
        return scores

    monkeypatch.setattr(kernels, "race", race)
    monkeypatch.setattr("actors.sampling.truncation_kernels.truncate", truncate)
    monkeypatch.setattr(sampling, "_has_kernels", lambda _: True)
    return launched


@pytest.mark.parametrize("case", CASES)
def test_a_choice_takes_few_launches_and_no_wait_for_any_number_of_rows(on_device, case):
    params, budget = CASES[case]
    alone, _ = choose_counted(params, 1)
    on_device.clear()
    together, accelerator = choose_counted(params, 8)
    assert together == alone, "launches must not grow with the batch"
    assert together.total() + sum(on_device) == budget, together
    assert not accelerator.syncs
    assert not accelerator.blocking_uploads


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_host_waits_once_for_all_drawn_children_of_a_level(num_rows):
    logits = torch.randn(num_rows, 100)
    params = [SamplingParams(temperature=0.7)] * num_rows
    asked = params, [0] * num_rows, list(range(num_rows))
    expected = draw_without_replacement(logits, *asked, 3, 8)
    law = truncate_distribution(logits[:1], params[0], 8)
    with FakeAccelerator() as accelerator:
        on_device = logits.to(accelerator.device)
        before = accelerator.num_syncs
        assert draw_without_replacement(on_device, *asked, 3, 8) == expected
        assert accelerator.num_syncs == before + 1
        assert truncate_distribution(on_device[:1], params[0], 8) == law
        ranked = [on_device.topk(3).indices, on_device.topk(3).values]
        before = accelerator.num_syncs
        found = [values.tolist() for values in to_host(ranked)]
        assert accelerator.num_syncs == before + 1
    assert found == [logits.topk(3).indices.tolist(), logits.topk(3).values.tolist()]
