"""Trainings of early exits: which layers are dropped, which exits count, and what ranks of different depth average."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.parts import parts_of
from cluster.tools.training.speculators import layerskip
from cluster.tools.training.speculators.distill import DistilledDrafter, DistillOptions, read_exits
from cluster.tools.training.speculators.layerskip import (
    LayerSkipNet,
    LayerSkipOptions,
    drop_rates,
    dropped,
    exit_weights,
    exits_at,
    repeated,
)
from cluster.tools.training.trainer import average_over_participants
from parallel.comm.group import Group
from parallel.speculators.config import FINAL
from parallel.training.interface import TargetBatch
from parallel.training.losses import forward_kl
from tests.parallel.conftest import on_ranks  # noqa: F401  a fixture

TOKENS = torch.randint(1, 97, (3, 10), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    config = drafter_config(97, 4)
    config.hidden_size, config.intermediate_size, config.initializer_range = 32, 48, 0.3
    return initialised(config, 0, "cpu").eval()


def batch_of(model: Any) -> TargetBatch:
    """A batch of a target with the model's head, whose states are random; every token is a label."""
    states = torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    return TargetBatch(TOKENS, {FINAL: states}, mask, model.lm_head, model.get_input_embeddings())


def test_later_layers_are_dropped_more_often():
    rates = drop_rates(6, 0.2)
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.2)
    assert all(1.14 < (after + 0.2) / (before + 0.2) < 1.16 for before, after in pairwise(rates))


def test_curricula():
    turns = [exits_at(step, 6, "rotational", 3) for step in range(4)]
    assert turns == [[1, 4, 6], [2, 5, 6], [3, 6], [1, 4, 6]]
    assert [exits_at(step, 4, "gradual", 2) for step in (0, 1, 2, 4, 99)] == [
        [3, 4],
        [3, 4],
        [2, 3, 4],
        [1, 2, 3, 4],
        [1, 2, 3, 4],
    ]


@pytest.mark.parametrize(
    ("curriculum", "expected"), [("rotational", [[1, 3], [2], [1, 3]]), ("gradual", [[3], [2, 3]])]
)
def test_the_curriculum_moves_on_with_every_step_of_training(
    model: Any, monkeypatch: pytest.MonkeyPatch, curriculum: str, expected: list[list[int]]
):
    """Which exits a step reads besides the last; an evaluation is none, and a resumed run goes on from its step."""
    interval = 2 if curriculum == "rotational" else 1
    net = LayerSkipNet(copy.deepcopy(model), LayerSkipOptions(curriculum=curriculum, interval=interval, dropout=0.0))
    seen: list[list[int]] = []
    read = layerskip.read_exits
    monkeypatch.setattr(layerskip, "read_exits", lambda *a: (seen.append(sorted(a[2])[:-1]), read(*a))[1])
    batch = batch_of(model)
    for _ in expected:
        net.train().loss(batch, torch.Generator())
        net.eval().loss(batch, torch.Generator())
    assert seen[::2] == expected
    assert all(exits == [1, 2, 3] for exits in seen[1::2])
    again = LayerSkipNet(copy.deepcopy(model), net.options)
    again.load_state_dict(net.state_dict())
    assert int(again.num_steps) == len(expected)


def test_exits_learn_at_the_labels_by_their_weights(model: Any):
    net = LayerSkipNet(copy.deepcopy(model), LayerSkipOptions(interval=1, dropout=0.0)).train()
    batch = replace(batch_of(model), loss_mask=torch.arange(10).expand(3, -1) >= 4)
    with torch.no_grad():
        loss, _ = net.loss(batch, torch.Generator())
        read = read_exits(parts_of(model), TOKENS, [2, 3, 4])
        goals = batch.target_logits()[:, 3:-1].flatten(0, 1)
        means = {
            one: forward_kl(goals, model.lm_head(hidden[:, 3:-1].flatten(0, 1))).mean() for one, hidden in read.items()
        }
    assert float(loss) == pytest.approx(
        sum(w * float(means[one]) for one, w in {2: 0.1, 3: 0.3, 4: 0.6}.items()), rel=1e-4
    )


def test_every_prefix_learns_by_its_own_divergence(model: Any):
    net = DistilledDrafter(copy.deepcopy(model), DistillOptions(prefixes=(1, 2))).train()
    batch = replace(batch_of(model), loss_mask=torch.arange(10).expand(3, -1) >= 4)
    with torch.no_grad():
        loss, _ = net.loss(batch, torch.Generator())
        goals = batch.target_logits()[:, 3:-1].flatten(0, 1)
        read = read_exits(parts_of(model), TOKENS, [1, 2, 4])
        each = [forward_kl(goals, model.lm_head(hidden[:, 3:-1].flatten(0, 1))).mean() for hidden in read.values()]
    assert float(loss) == pytest.approx(float(sum(each)), rel=1e-4)


def test_weights_of_exits_grow_with_depth():
    weights = exit_weights([1, 2, 3, 4], 4, 1.0)
    assert weights == pytest.approx({2: 1 / 10, 3: 3 / 10, 4: 6 / 10})  # of one layer: 0
    assert exit_weights([4], 4, 1.0) == {4: 1.0}
    assert exit_weights([1, 2], 2, 1.0) == {2: 1.0}
    assert exit_weights([1, 2, 3, 4], 4, 0.0) == {4: 1.0}


def test_a_repeated_layer_adds_its_share_and_its_copies_are_layers_of_their_own(model: Any):
    """Next to nothing added in small parts is the same added at once; a cache tells the copies apart."""
    small = copy.deepcopy(model).double()
    with torch.no_grad():
        for layer in small.model.layers:
            layer.self_attn.o_proj.weight *= 1e-6
            layer.mlp.down_proj.weight *= 1e-6
    deeper = repeated(small, 3)
    assert deeper.config.num_hidden_layers == len(deeper.model.layers) == 12 and small.config.num_hidden_layers == 4
    assert len({each.data_ptr() for each in deeper.parameters()}) == len(list(deeper.parameters()))
    with torch.no_grad():
        streams = [one(TOKENS, output_hidden_states=True).hidden_states for one in (small, deeper)]
        whole = deeper(TOKENS).logits
        first = deeper(TOKENS[:, :4], use_cache=True)
        rest = deeper(TOKENS[:, 4:], past_key_values=first.past_key_values).logits
    for i in range(1, 4):
        added = streams[0][i] - streams[0][i - 1]
        torch.testing.assert_close(streams[1][3 * i] - streams[1][3 * i - 3], added, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(rest, whole[:, 4:])


def test_a_dropped_layer_passes_its_input_on(model: Any):
    """Row 1 without layers 1 and 2 is the model without them; the other rows are as they were."""
    kept = [torch.ones(3, dtype=torch.bool) for _ in range(4)]
    kept[1][1] = kept[2][1] = False
    with torch.no_grad(), dropped(parts_of(model), kept):
        found = model(TOKENS).logits
    with torch.no_grad():
        whole = model(TOKENS).logits
        shorter = torch.nn.ModuleList([model.model.layers[0], model.model.layers[3]])
        layers, model.model.layers = model.model.layers, shorter
        without = model(TOKENS).logits
        model.model.layers = layers
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]])
    torch.testing.assert_close(found[1], without[1])


def test_exits_are_the_models_of_their_layers(model: Any):
    with torch.no_grad():
        read = read_exits(parts_of(model), TOKENS, [1, 3])
        states = model(TOKENS, output_hidden_states=True).hidden_states
    assert set(read) == {1, 3} and len(model.model.layers) == 4
    for depth, hidden in read.items():
        torch.testing.assert_close(hidden, model.model.norm(states[depth]))


@pytest.mark.extended
def test_each_layer_is_averaged_over_the_ranks_that_trained_it(
    model: Any,
    on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]],  # noqa: F811
):
    """The mean is compared with the gradients of each rank's own loss, of prefixes of 4 layers, 2 and 1."""
    depths, batch = (4, 2, 1), batch_of(model)

    def gradients(rank: int) -> DistilledDrafter:
        net = DistilledDrafter(copy.deepcopy(model), DistillOptions(prefixes=(1, 2))).train()
        net.take_part(rank)
        loss, _ = net.loss(batch, torch.Generator())
        loss.backward()
        return net

    alone = [gradients(rank) for rank in range(3)]
    for rank, net in enumerate(alone):
        weights = [net.model.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(4)]
        trained = [weight.grad is not None for weight in weights]
        assert trained == [layer < depths[rank] for layer in range(4)]

    def average(group: Group) -> DistilledDrafter:
        net = gradients(group.rank)
        net.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
        average_over_participants(list(net.parameters()), group.all_reduce)
        return net

    for net in on_ranks(3, average):
        assert net.unused.grad is None
        for name, parameter in net.model.named_parameters():
            theirs = [one.model.get_parameter(name).grad for one in alone]
            present = [gradient for gradient in theirs if gradient is not None]
            torch.testing.assert_close(parameter.grad, sum(present) / len(present), msg=name)
