"""Costs of a cluster: read, written, looked up, and refused in one line."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import yaml

from cluster.tools.planning.cost_file import read_costs, write_costs
from cluster.tools.planning.costs import DraftCost, PassCosts, TargetCost
from cluster.tools.planning.layouts import Shape
from cluster.tools.simulation import PassCost, power_law
from tests.damage import damaged_json, tried

PLANS = Path(__file__).parents[4] / "docs" / "plans"
EXAMPLES = sorted(
    [path for path in PLANS.glob("*.yaml") if "regions:" not in path.read_text()]
)  # the others are fleets


@pytest.fixture
def write(tmp_path: Path):
    def write_(text: str) -> Path:
        path = tmp_path / "costs.yaml"
        path.write_text(text)
        return path

    return write_


def test_what_a_text_takes_is_read_and_written(write):
    entry = "{pass_ms: 10, exact_ms: 12, context_ms: 1.5}"
    costs = read_costs(write(f"target: [{{pass_ms: 10, context_ms: 3}}]\ndrafter: [{entry}]"))
    assert costs.target[0].passes(1, 2000) == pytest.approx(0.016)
    (drafter,) = costs.drafter
    assert drafter.exact is not None
    assert drafter.passes(1, 4000) == pytest.approx(0.016) and drafter.exact(1, 4000) == pytest.approx(0.018)
    path = write("")
    write_costs(path, costs)
    assert read_costs(path) == costs


def test_a_short_file_is_enough(write):
    costs = read_costs(write("target: [{ranks: 4, pass_ms: 10}]\ndrafter: [{pass_ms: {1: 1.5, 8: 2}}]"))
    assert costs.num_devices == 4 and costs.runners_up == power_law(1.0)
    assert costs.of_target(4, None, 0, beside=True).passes == PassCost.flat(0.01)
    assert costs.of_drafter(Shape(), 4, 0, beside=False).passes(8) == 0.002
    assert costs.of_target(2, None, 0, beside=False) is None
    assert costs.of_drafter(Shape("tensor", 2), 4, 0, beside=False) is None


def test_what_is_written_is_read_back(tmp_path: Path):
    layer = Shape("layer", 2, 2, "tensor", (1, 2, 1, 2))
    costs = PassCosts(
        2,
        (
            TargetCost(1, PassCost.table({1: 0.005, 6: 0.006}), 1, False),
            TargetCost(1, PassCost.flat(0.007), 1, True),
            TargetCost(1, PassCost.flat(0.004), 2, False, layer),
        ),
        (
            DraftCost(layer, PassCost.flat(0.001), PassCost.flat(0.002), (0.7, 0.5), 1, False, 2),
            DraftCost(Shape(threads=1), PassCost.flat(0.003)),
        ),
        0.0002,
        0.0001,
        (0.8, 0.7),
        (0.5, 0.2),
    )
    write_costs(tmp_path / "costs.yaml", costs)
    assert read_costs(tmp_path / "costs.yaml") == costs


def test_costs_depend_on_cores_and_on_the_other_role():
    alone, beside, wide, paired = (
        TargetCost(1, PassCost.flat(seconds), cores, busy, shape)
        for seconds, cores, busy, shape in (
            (1.0, 1, False, None),
            (2.0, 1, True, None),
            (3.0, 2, False, None),
            (4.0, 1, False, Shape()),
        )
    )
    draft = DraftCost(Shape(), PassCost.flat(1.0), target_ranks=2)
    costs = PassCosts(2, (alone, beside, wide, paired), (draft,))
    assert costs.of_target(1, None, 1, beside=False) is alone and costs.of_target(1, None, 1, beside=True) is beside
    assert costs.of_target(1, None, 2, beside=False) is wide and costs.of_target(1, None, 2, beside=True) is None
    assert costs.of_target(1, Shape(), 1, beside=False) is paired
    assert costs.of_target(1, Shape("tensor", 2), 1, beside=False) is alone, "measured alone, it fits any drafter"
    assert costs.of_drafter(Shape(), 2, 1, beside=False) is draft
    assert costs.of_drafter(Shape(), 1, 1, beside=False) is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_costs(path: Path):
    costs = read_costs(path)
    assert costs.target and costs.drafter and costs.num_devices >= 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("target: [", "is no YAML"),
        ("- 1", "must be object, got array"),
        ("drafter: []", "target: names no pass"),
        ("targets: []", "Object contains unknown field targets"),
        ("target: [{rank: 4}]", r"target\[0\].*: Object contains unknown field rank;"),
        ("target: [{ranks: 4}]", r"target\[0\].*: Object missing required field pass_ms"),
        ("target: [{ranks: 0, pass_ms: 1}]", r"target\[0\].ranks=0: must be int >= 1"),
        ("target: [{pass_ms: {0: 1}}]", r"target\[0\].pass_ms={0: 1}: must be int >= 1 as a key"),
        ("target: [{pass_ms: 0}]", r"target\[0\].pass_ms=0: must be float > 0"),
        ("target: [{pass_ms: {1: 0}}]", r"target\[0\].pass_ms"),
        ("target: [{pass_ms: 1}]\nacceptance: []", r"acceptance=\[\]: must be array of length >= 1"),
        ("target: [{pass_ms: 1}]\nrunners_up: [0.9, 0.9]", r"runners_up: \[0.9, 0.9\] must not sum to more than 1"),
        ("target: [{pass_ms: 1}]\nacceptance: [1.2]", r"acceptance\[0\]=1.2: must be float <= 1.0"),
        (
            "target: [{pass_ms: 1}]\ndrafter: [{parallel: wide, pass_ms: 1}]",
            r"drafter\[0\].parallel='wide': Invalid enum value",
        ),
        ("target: [{pass_ms: 1}]\ndrafter: [{mlp: half, pass_ms: 1}]", r"drafter\[0\].mlp='half': Invalid enum value"),
        ("target: [{pass_ms: 1, beside: 2}]", r"target\[0\].beside=2: must be bool or null"),
        ("target: [{pass_ms: 1}]\ndrafter: [{partition: 4, pass_ms: 1}]", r"drafter\[0\].partition=4: must be array"),
        ("target: 3", "target=3: must be array"),
    ],
)
def test_invalid_costs_are_refused_in_one_line(write, text: str, complaint: str):
    with pytest.raises(ValueError, match=f"^job.costs=.*costs.yaml: {complaint}.*see docs/planning.md$"):
        read_costs(write(text))


def test_damaged_files_are_one_line_or_costs(tmp_path: Path):
    rng, path = random.Random(0), tmp_path / "costs.yaml"
    good = [yaml.safe_load(example.read_text()) for example in EXAMPLES]
    for _ in range(30):
        text = json.dumps({str(key): value for key, value in rng.choice(good).items()}, default=str)
        kind, content = damaged_json(text, rng)
        path.write_bytes(content[:5000])
        costs, refusal = tried(lambda: read_costs(path))
        assert costs or str(path) in refusal, kind
        assert costs is None or all(math.isfinite(cost.passes(3)) for cost in costs.target), kind


@pytest.mark.parametrize("text", ["target: [{ranks: .inf, pass_ms: 1}]", "link_ms: 2001-99-99", "'a\nb': 1", "[" * 500])
def test_what_the_library_does_not_refuse_by_itself(write, text: str):
    _, refusal = tried(lambda: read_costs(write(text)))
    assert refusal.startswith("job.costs=")
