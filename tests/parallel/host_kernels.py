"""Stand-ins for devices compute with operations of PyTorch alone, as a GPU does: they would not see kernels that a CPU
calls by address."""

from __future__ import annotations

import pytest


def use_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("model.layers.weight.has_products", "model.layers.norm.has_norms", "kernels.norms.has_norms"):
        monkeypatch.setattr(f"parallel.{where}", lambda: False)
    monkeypatch.setattr("parallel.model.layers.activation.maps_rows", lambda _: False)
    monkeypatch.setattr("parallel.kernels.noise.has_noise", lambda: False)
    monkeypatch.setattr("actors.sampling.logits.has_choice", lambda: False)
