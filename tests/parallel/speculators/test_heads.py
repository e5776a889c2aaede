"""Heads: passes equal the training forward; states follow from the text before the newest token and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.config import Strategy
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.drafters.speculator.drafter import AheadSpeculatorDrafter, SpeculatorDrafter
from actors.protocol.messages import SamplingParams
from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.speculators.config import FINAL
from parallel.speculators.heads.cells import CELLS
from parallel.speculators.heads.runner import KEPT_FEATURES, HeadsRunner
from parallel.speculators.heads.training import HeadsNet, HeadsOptions, build
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from tests.matrices import in_turn
from tests.parallel.conftest import Checkpoint
from tests.parallel.speculators.nets import make_net, random_text, read_text

DEPTHS, LENGTH, HIDDEN = 4, 20, 32
METHODS: dict[str, dict[str, Any]] = {
    "medusa": {"blocks": 2},
    "medusa own": {"method": "medusa", "head": "own"},
    "blockwise": {"inner": 8},
    "hydra": {"blocks": 2},
    "hydra skip": {"method": "hydra", "linear_skip": True, "head": "shared"},
    "rnn": {"blocks": 2},
    "rnn wide": {"method": "rnn", "inner": 2 * HIDDEN, "head": "shared"},
    "mlp": {},
    "mlp own": {"method": "mlp", "own_embedding": True, "inner": 24, "head": "own"},
    "mlp tied": {"method": "mlp", "tied": True, "own_embedding": True, "head": "shared"},
    "lstm": {},
    "lstm own": {"method": "lstm", "own_embedding": True, "inner": 24, "head": "shared"},
}


def every_second(first):
    """The others are slow: they run the same cells in other tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] * ((i + first) % 2)) for i, name in enumerate(METHODS)]


assert {options.get("method", name) for name, options in METHODS.items()} == CELLS.keys(), "a row for every cell"
READING_TOKENS = [name for name in METHODS if not name.startswith(("medusa", "blockwise"))]


class TrainedHeads:
    """Heads with strong random weights beside a tiny target, their checkpoint, and a text that the target has read."""

    def __init__(self, target: Checkpoint, folder: Path, name: str) -> None:
        self.target, self.path = target, folder
        options = HeadsOptions(**({"method": name, "heads": DEPTHS} | METHODS[name]))
        self.net: HeadsNet = make_net(build, options, target, folder)
        self.tokens = random_text(target, LENGTH)
        self.batch = read_text(target, self.tokens)
        self.features = self.batch.taps[FINAL][0]

    @torch.no_grad()
    def expected(self, anchor: int) -> list[Tensor]:
        """Logits [V] of the training forward after the token at `anchor` and after those that follow."""
        places = torch.tensor([0]), torch.tensor([anchor])
        return [logits[0] for logits in self.net.unroll(self.batch, *places)]

    def open(self, group: Group = SINGLE) -> HeadsRunner:
        place = SpeculatorPlace(open_tables(self.target.path, group), group, "cpu", torch.float32, 256)
        runner = open_speculator(self.path, place)
        assert isinstance(runner, HeadsRunner)
        return runner


@pytest.fixture
def trained(llama: Checkpoint, tmp_path: Path) -> Callable[[str], TrainedHeads]:
    return lambda name: TrainedHeads(llama, tmp_path / "speculator", name)


def begin(runner: HeadsRunner, one: TrainedHeads, anchor: int, seq_id: str = "a") -> Tensor:
    """Logits [V] after the token at `anchor`."""
    runner.open(seq_id)
    runner.read_features(seq_id, 0, one.features[:anchor])
    return runner.forward([Span(seq_id, anchor + 1)], one.tokens[0, : anchor + 1]).logits[0]


def drafted(runner: HeadsRunner, one: TrainedHeads, anchor: int) -> list[Tensor]:
    """Logits after text up to `anchor`, then after every drafted token, which are those of the text."""
    logits = [begin(runner, one, anchor)]
    for depth in range(1, DEPTHS):
        logits.append(runner.forward([Span("a", 1)], one.tokens[0, anchor + depth, None], fuzzy=True).logits[0])
    runner.close("a")
    return logits


def equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_passes_equal_the_training_forward(trained: Callable[[str], TrainedHeads], name: str) -> None:
    """T5."""
    one = trained(name)
    runner = one.open()
    for anchor in (1, 6, 13):
        for logits, expected in zip(drafted(runner, one, anchor), one.expected(anchor), strict=True):
            equal(logits, expected)


@pytest.mark.parametrize("name", ["medusa", "medusa own", "blockwise"])
def test_training_begins_with_what_the_target_would_say(llama: Checkpoint, tmp_path: Path, name: str) -> None:
    """`MatrixShape.begins`: what is added to the target's state is nothing yet, and output layers are its own."""
    options = HeadsOptions(**({"method": name, "heads": DEPTHS} | METHODS[name]))
    net: HeadsNet = make_net(build, options, llama, tmp_path / "speculator", noise=0.0)
    batch = read_text(llama, random_text(llama, LENGTH))
    anchors = torch.arange(1, LENGTH - DEPTHS)
    for logits in net.unroll(batch, torch.zeros_like(anchors), anchors):
        torch.testing.assert_close(logits, batch.head(batch.taps[FINAL][0, anchors - 1]), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["hydra", "rnn", "mlp"])
def test_the_state_of_the_target_comes_first_in_what_matrices_read(
    llama: Checkpoint, tmp_path: Path, name: str
) -> None:
    """path: training begins with nothing of it, beside small parts of the tokens behind it; state: with all of it."""
    options = HeadsOptions(**({"method": name, "heads": DEPTHS} | METHODS[name]))
    net: HeadsNet = make_net(build, options, llama, tmp_path / "speculator", noise=0.0)
    shapes = net.cell.shapes.matrices
    weights = {one: net.parameter(f"{one}.weight") for one, size in shapes.items() if size.begins in ("path", "state")}
    expected = torch.zeros(HIDDEN, HIDDEN) if name == "hydra" else torch.eye(HIDDEN)
    assert len(weights) == (DEPTHS if name == "hydra" else 1)
    for weight in weights.values():
        assert torch.equal(weight[:, :HIDDEN], expected)
        assert weight.shape[1] == HIDDEN or 0 < float(weight[:, HIDDEN:].detach().std()) < 100


@pytest.mark.parametrize("name", every_second(0))
def test_two_ranks_compute_what_one_does(
    trained: Callable[[str], TrainedHeads], on_ranks: Callable[..., list[Any]], name: str
) -> None:
    one = trained(name)
    alone = torch.stack(drafted(one.open(), one, 6))
    for logits in on_ranks(2, lambda group: torch.stack(drafted(one.open(group), one, 6))):
        torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", every_second(1))
def test_a_tree_in_company_has_the_logits_of_its_paths_alone(trained: Callable[[str], TrainedHeads], name: str) -> None:
    """Nodes of unequal depths in one pass, and text and nodes in one pass."""
    one = trained(name)
    runner, other = one.open(), one.open()
    begin(runner, one, 6, "a")
    begin(other, one, 6, "a")
    begin(runner, one, 9, "b")
    runner.forward([Span("a", 2, [6, 6], 2), Span("b", 1)], [11, 12, 50], fuzzy=True)
    rows = runner.forward([Span("a", 3, [7, 9, 8], 3), Span("b", 1)], [13, 14, 15, 51], fuzzy=True).logits
    for path, row in (([11, 13], 0), ([11, 13, 14], 1), ([12, 15], 2)):
        other.truncate("a", 0)
        alone = other.forward([Span("a", 7 + len(path))], [*one.tokens[0, :7].tolist(), *path]).logits
        equal(rows[row], alone[0])
    runner.truncate("a", 0)
    fed = [*one.tokens[0, :7].tolist(), 11, 12, 13]
    parents = [*range(-1, 6), 6, 6, 7]
    together = runner.forward([Span("a", 10, parents, 4)], fed).logits
    equal(together[3], rows[0])


@pytest.mark.parametrize("name", READING_TOKENS)
def test_a_sibling_changes_its_own_descendants_only(trained: Callable[[str], TrainedHeads], name: str) -> None:
    one = trained(name)

    def leaves(siblings: list[int]) -> Tensor:
        runner = one.open()
        begin(runner, one, 6)
        runner.forward([Span("a", 2, [6, 6], 2)], siblings, fuzzy=True)
        return runner.forward([Span("a", 2, [7, 8], 2)], [20, 21], fuzzy=True).logits

    before, after, swapped = leaves([11, 12]), leaves([11, 13]), leaves([12, 11])
    equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1], atol=1e-2)
    assert not torch.allclose(before[0], swapped[0], atol=1e-2)


@pytest.mark.extended
@pytest.mark.parametrize("name", METHODS)
def test_a_state_is_that_of_the_newest_features_and_tokens(trained: Callable[[str], TrainedHeads], name: str) -> None:
    """T7: whatever was drafted, accepted, dropped and forgotten before."""
    one, choose = trained(name), random.Random(0)
    runner, tokens = one.open(), one.tokens[0].tolist()
    begin(runner, one, 3)
    runner.commit("a", range(4))
    end = 4  # tokens of the text
    while end < LENGTH - DEPTHS - 1:
        wrong = [choose.randrange(97) for _ in range(3)]
        num_accepted = choose.randrange(3)
        chain = [*tokens[end : end + num_accepted], *wrong][:3]
        for token in chain:
            runner.forward([Span("a", 1)], [token], fuzzy=True)
        runner.commit("a", range(num_accepted))
        assert runner.drop_fuzzy("a") == (num_accepted > 0)
        assert runner.cached_len("a") == end
        runner.read_features("a", end - 1, one.features[end - 1 : end + num_accepted])
        end += num_accepted + 1
        logits = runner.forward([Span("a", end - runner.cached_len("a"))], tokens[runner.cached_len("a") : end]).logits
        equal(logits[0], one.expected(end - 1)[0])
        runner.commit("a", range(num_accepted + 1))


def test_what_was_read_and_what_was_not(trained: Callable[[str], TrainedHeads]) -> None:
    """A row without features, or below its last head, has no logits; features of long ago are forgotten."""
    one = trained("hydra")
    runner = one.open()
    assert runner.longest_draft == DEPTHS
    runner.open("a")
    assert runner.forward([Span("a", 1)], [5]).logits.isneginf().all(), "nothing is known before the first token"
    runner.truncate("a", 0)
    runner.read_features("a", 0, one.features.repeat(9, 1))
    assert runner.num_known("a") == 9 * LENGTH
    assert runner._features["a"].start == 9 * LENGTH - KEPT_FEATURES
    runner.forward([Span("a", 9 * LENGTH, num_logits=0)], [3] * 9 * LENGTH)
    runner.commit("a", range(9 * LENGTH))
    for depth in range(DEPTHS + 2):
        is_silent = runner.forward([Span("a", 1)], [7], fuzzy=depth > 0).logits.isneginf().all()
        assert is_silent == (depth >= DEPTHS)


def test_hydra_reads_the_state_and_then_the_path(trained: Callable[[str], TrainedHeads]) -> None:
    """The order of the released code, [h, e(root), e(first), ...], which no shape tells."""
    one = trained("hydra skip")
    net, embed = one.net, one.batch.embed
    path = torch.cat([one.features[5], *embed(one.tokens[0, 6:8])]).detach()
    parts = {part: net.parameter(f"hydra_mlp.1.0.{part}.weight") @ path for part in ("linear", "res_connection")}
    parts = {part: value + net.parameter(f"hydra_mlp.1.0.{part}.bias") for part, value in parts.items()}
    read = parts["res_connection"] + torch.nn.functional.silu(parts["linear"])
    equal(one.expected(6)[1], (net.parameter("hydra_lm_head.0.weight") @ read).detach())


def test_blocks_of_a_head_are_not_one_block(trained: Callable[[str], TrainedHeads]) -> None:
    """The released code repeats one module."""
    one = trained("medusa")
    one.net.train()
    one.net.loss(one.batch, torch.Generator())[0].backward()
    first, second = (one.net.parameter(f"0.{block}.linear.weight").grad for block in (0, 1))
    assert first is not None and second is not None and not torch.equal(first, second)
    assert not torch.equal(one.net.parameter("0.0.linear.weight"), one.net.parameter("0.1.linear.weight"))


def context_of(tokens: list[int], temperature: float = 0.0) -> Context:
    return Context(1, 0, tokens, len(tokens), SamplingParams(seed=1, temperature=temperature))


@pytest.mark.parametrize(
    ("strategy", "name", "rule"),
    list(
        in_turn(
            [Strategy.chain, Strategy.tree, Strategy.best_first, Strategy.cape],
            ["medusa", "rnn"],
            ["coupled", "rejection"],
            times={Strategy.chain: 2},
        )
    ),
)
def test_heads_that_all_say_what_the_target_says_of_a_constant_text(
    make_checkpoint: Callable[..., Checkpoint], tmp_path: Path, name: str, rule: str, strategy: Strategy
) -> None:
    """T4: Medusa heads whose blocks are zero are the target's head, so a text of one token is drafted as deep as there
    are heads. No draft is deeper, whatever was ordered."""
    target = make_checkpoint("Llama")
    one = TrainedHeads(target, tmp_path / "speculator", name)
    for parameter in one.net.parameters():
        parameter.data.zero_()
    one.net.save(one.path)
    config = SpeculatorDrafterConfig(path=str(one.path), num_draft_tokens=9, depth=9, strategy=strategy)
    drafter = SpeculatorDrafter(one.open(), config, ModelOptions(rule, 8, (), 512))
    context = context_of([5, 5, 5])
    drafter.open(context)
    drafter.runner.read_features(1, 0, one.features[:1].repeat(2, 1))
    (draft,) = drafter.propose([context], [9])
    best = int(one.batch.head(one.features[0]).argmax())
    assert max(draft.tree.depths()) <= DEPTHS
    if name == "medusa" and strategy is Strategy.chain:
        assert draft.tree.token_ids == (5, *[best] * DEPTHS)


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_draft_ahead_ends_where_the_heads_do(trained: Callable[[str], TrainedHeads], name: str) -> None:
    one = trained(name)
    config = replace(SpeculatorDrafterConfig(path=str(one.path), num_draft_tokens=3), ahead_width=40)
    drafter = AheadSpeculatorDrafter(one.open(), config, ModelOptions("coupled", 8, (), 512), "tree")
    context = context_of(one.tokens[0, :7].tolist())
    drafter.open(context)
    drafter.runner.read_features(1, 0, one.features[:6])
    drafter.propose([context], [3])
    for _ in range(9):
        if drafter.wants_work:
            drafter.work(30)
    tree = drafter._states[1].tree
    assert max(node.depth for node in tree.nodes) == DEPTHS
    assert all(node.value > -torch.inf for node in tree.nodes)
