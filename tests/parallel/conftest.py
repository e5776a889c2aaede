"""Tiny checkpoints with strong random weights, and ranks as threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.group import Group
from parallel.comm.rendezvous import connect_store, host_store, join
from tests.families import tiny_model

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "sliding_window": None,
}


class Checkpoint:
    """A saved checkpoint and the transformers model it was saved from."""

    def __init__(self, path: Path, model: torch.nn.Module) -> None:
        self.path = path
        self.model = model

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, vocab] of a plain causal pass."""
        return self.model(torch.tensor([token_ids])).logits[0]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def make(family: str = "Llama", *, shard_size: str = "5GB", **overrides: Any) -> Checkpoint:
        key = json.dumps([family, shard_size, overrides], sort_keys=True)
        if key not in made:
            model = tiny_model(family, 0, **SHAPE | overrides)
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms start at one and biases at zero, which would hide a missing one
                    offset = 0.0 if name.endswith("bias") else 1.0
                    parameter.data = offset + 0.3 * torch.randn_like(parameter)
            path = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(path, max_shard_size=shard_size)
            made[key] = Checkpoint(path, model)
        return made[key]

    return make


@pytest.fixture
def llama(make_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    return make_checkpoint("Llama")


def in_threads(size: int, work: Callable[[int], Any], wait_s: float | None = None) -> list[Any]:
    """What `work` returns for each rank, in a thread of its own; raises what it raises, and where a rank takes longer
    than `wait_s`."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(wait_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[Group], Any]], list[Any]]:
    """Run a function once per rank of a group, each in a thread of its own; the results in rank order."""

    def run(size: int, work: Callable[[Group], Any]) -> list[Any]:
        store = host_store()

        def rank_main(rank: int) -> Any:
            group = join(connect_store("127.0.0.1", store.port), "ranks", 0, rank, size, timeout_s=60)
            result = work(group)
            group.close()
            return result

        return in_threads(size, rank_main)

    return run
