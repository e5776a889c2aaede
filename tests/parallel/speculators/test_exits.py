"""A layer behind an early exit: passes equal the training forward, rounds leave the rows of a fresh cache, the target's
own last layers draft what the target says, ranks share the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.runtime.runner import ModelRunner, open_model
from parallel.speculators.exits.runner import ExitRunner
from parallel.speculators.exits.training import ExitNet, ExitOptions, build
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.training.interface import TargetBatch
from tests.cluster.config.quick_loading import load_quickly
from tests.parallel.backends import BACKENDS
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.learning import check_it_learns, held_out_metrics
from tests.parallel.speculators.nets import make_net, random_text, read_text
from tests.parallel.speculators.rounds import check_rounds, check_tree, draft_chain

STEPS, LENGTH, EXIT = 4, 20, 1


class Beside(ExitRunner):
    """As attached: the target has committed the rows of all text whose features were read."""

    target: ModelRunner
    text: Sequence[int]

    def open(self, seq_id: SeqId, text: object = None) -> None:
        super().open(seq_id)
        self.target.open(seq_id)

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        self.target.close(seq_id)

    def read_features(self, seq_id: SeqId, start: int, rows: Tensor) -> None:
        self.self_draft.close(seq_id)
        super().read_features(seq_id, start, rows)
        self.target.forward([Span(seq_id, len(rows))], self.text[start : start + len(rows)])
        self.target.commit(seq_id, range(len(rows)))


class Trained:
    """A net with strong random weights beside a tiny target, its checkpoint, and a text that the target has read."""

    def __init__(self, method: str, target: Checkpoint, folder: Path) -> None:
        self.target, self.path = target, folder
        self.net: ExitNet = make_net(build, ExitOptions(method, exit=EXIT), target, folder)
        self.batch = read_text(target, random_text(target, LENGTH))
        self.tokens: list[int] = self.batch.tokens[0].tolist()
        self.features: Tensor = self.batch.taps[EXIT][0]

    @torch.no_grad()
    def expected(self, batch: TargetBatch | None = None) -> Tensor:
        """Logits [T, V] of the training forward."""
        return self.batch.head(self.net.read(batch or self.batch)[0])

    def open(self, group: Group = SINGLE, backend: str | None = None) -> Beside:
        target = open_model(self.target.path, group, num_slots=256)
        place = SpeculatorPlace(target.decoder, group, "cpu", torch.float32, 256, target=target)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, ExitRunner) and runner.self_draft is not None
        beside = Beside(runner.layers, place, runner.self_draft, backend=backend)
        beside.target, beside.text = target, self.tokens
        return beside


@pytest.fixture(params=["kangaroo", "eesd"])
def one(request: pytest.FixtureRequest, llama: Checkpoint, tmp_path: Path) -> Trained:
    return Trained(request.param, llama, tmp_path / "speculator")


@pytest.mark.parametrize("backend", BACKENDS)
def test_passes_equal_the_training_forward(one: Trained, backend: str) -> None:
    """Rows of text and of draft tokens, whose streams are computed by the target's first layers."""
    runner, expected = one.open(backend=backend), one.expected()
    for anchor in (0, 1, 6, 13):
        found = draft_chain(runner, one.tokens, one.features, anchor + 1, STEPS)
        torch.testing.assert_close(found, expected[anchor : anchor + STEPS], atol=1e-4, rtol=0)


def test_a_row_sees_no_later_state(one: Trained) -> None:
    place, before = 8, one.expected()
    taps = {tap: stream.clone() for tap, stream in one.batch.taps.items()}
    for stream in taps.values():
        stream[:, place:] += 1
    after = one.expected(replace(one.batch, taps=taps))
    assert torch.equal(before[:place], after[:place])
    assert not torch.isclose(before[place:], after[place:]).all(1).any()


def test_a_tree_is_its_paths(one: Trained) -> None:
    check_tree(one.open(), one.tokens, one.features, 7)


def test_rounds_leave_the_rows_of_a_fresh_cache(one: Trained) -> None:
    """The cache is that of the layer: rows of accepted draft tokens stay, but that of the last of a draft, which was
    never fed."""
    runner = one.open()
    check_rounds(runner, one.tokens, one.features, lambda length, accepted: length + accepted)
    runner.target.pool.check()
    assert runner.target.pool.num_free == runner.target.pool.num_slots


def test_the_last_layers_of_the_target_draft_what_it_says(llama: Checkpoint, tmp_path: Path) -> None:
    """EESD behind all layers but the last, with the last as its layer and the target's norm, is the target."""
    one = Trained("eesd", llama, tmp_path)
    model: Any = llama.model
    last = model.config.num_hidden_layers - 1
    one.net.hf["speculator"]["exit"] = last
    for name, weight in model.model.layers[last].named_parameters():
        one.net.get_parameter(f"layer.{name}").data.copy_(weight)
    one.net.get_parameter("norm.weight").data.copy_(model.model.norm.weight)
    one.net.save(tmp_path)
    with torch.no_grad():
        output = model(torch.tensor([one.tokens]), output_hidden_states=True)
    runner = one.open()
    found = draft_chain(runner, one.tokens, output.hidden_states[last][0], 7, STEPS)
    torch.testing.assert_close(found, output.logits[0, 6 : 6 + STEPS].float(), atol=5e-2, rtol=0)  # saved as bfloat16
    assert torch.equal(found.argmax(-1), output.logits[0, 6 : 6 + STEPS].argmax(-1))


def test_ranks_share_the_layer(one: Trained, on_ranks: Callable[[int, Callable[[Group], Any]], list[Any]]) -> None:
    alone = draft_chain(one.open(), one.tokens, one.features, 7, STEPS)
    for shared in on_ranks(2, lambda group: draft_chain(one.open(group), one.tokens, one.features, 7, STEPS)):
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


def test_without_the_targets_layers_it_says_what_to_do(one: Trained) -> None:
    place = SpeculatorPlace(open_tables(one.target.path), SINGLE, "cpu", torch.float32, 256)
    with pytest.raises(ValueError, match=r"drafts with the target's own layers.*drafter\.placement=attached"):
        open_speculator(one.path, place)


def test_it_learns(one: Trained) -> None:
    check_it_learns(one.net, one.batch)
    assert held_out_metrics(one.net, one.batch) == {f"accept_{depth}" for depth in range(1, 6)} | {"length"}


def test_a_launch_refuses_ranks_of_its_own(one: Trained) -> None:
    words = ["drafter=speculator", f"drafter.path={one.path}", f"target.path={one.target.path}"]
    assert load_quickly([*words, "pipeline=sync"]).drafter.is_attached("sync")
    for other in ("drafter.placement=separate", "pipeline=pearl"):
        with pytest.raises(ValueError, match=r"^drafter\.path=.* drafts with the target's own layers.*pipeline=sync"):
            load_quickly([*words, other])
