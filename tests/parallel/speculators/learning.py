"""A few steps of training, as the tests of speculators' nets take them."""

from __future__ import annotations

from typing import Any

import torch


def check_it_learns(net: Any, batch: Any, num_steps: int = 10) -> None:
    """The loss falls by a fifth, and every parameter has a gradient."""
    generator, losses = torch.Generator(), []
    stepper = torch.optim.Adam(net.train().parameters(), lr=3e-3)
    for _ in range(num_steps):
        loss, _ = net.loss(batch, generator)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is not None for parameter in net.parameters())


def held_out_metrics(net: Any, batch: Any) -> set[str]:
    """The names of what an evaluation reports."""
    _, metrics = net.eval().loss(batch, torch.Generator())
    return set(metrics)
