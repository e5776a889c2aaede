"""Stand-ins for the Triton kernels of sampling on the accelerator of `fake_accelerator.py`.

They compute by the definitions, on the CPU, and count the launches of the kernels.
"""

from __future__ import annotations

import math

import pytest
import torch

from actors.protocol.messages import SamplingParams
from actors.sampling import logits as sampling
from actors.sampling import noise
from tests.parallel.fake_accelerator import DeviceTensor, FakeAccelerator


def install(monkeypatch, accelerator: FakeAccelerator) -> None:
    """Drafters and targets of this process then choose as on a GPU. Skips the test where Triton is not there."""
    kernels = pytest.importorskip("actors.sampling.noise_kernels", reason="needs triton")

    def gumbel(keys, token_ids):
        accelerator.launches["noise"] += 1
        return DeviceTensor(noise.gumbel(keys.on_cpu, token_ids.on_cpu))

    def race(scores, keys, sampled, first, of_none):
        accelerator.launches["race"] += 2
        raced = _raced(scores.on_cpu, keys.on_cpu[: len(scores)], sampled.on_cpu[: len(scores)], first)
        return tuple(map(DeviceTensor, sampling._winners(raced, of_none, first)))

    def truncate(scores, *limits):
        accelerator.launches["truncate"] += 1
        params = [
            _params(*one, scores.shape[1]) for one in zip(*(limit.on_cpu.tolist() for limit in limits), strict=True)
        ]
        return DeviceTensor(sampling._truncate(scores.on_cpu, params))

    monkeypatch.setattr(sampling, "gumbel", gumbel)
    monkeypatch.setattr(kernels, "race", race)
    monkeypatch.setattr("actors.sampling.truncation_kernels.truncate", truncate)
    monkeypatch.setattr(sampling, "_has_kernels", lambda scores: isinstance(scores, DeviceTensor))


def _raced(scores, keys, sampled, first):
    tokens = torch.arange(first, first + scores.shape[1])
    return scores + noise.gumbel(keys, tokens).where(sampled[:, None], scores.new_zeros(()))


def _params(top_k: int, top_p: float, share: float, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        top_k=top_k if top_k < vocab_size else 0,
        top_p=min(top_p, 1.0),
        min_p=math.exp(share),
    )
