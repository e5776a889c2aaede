"""Layer-parallel drafting loses nothing at width 1, more the wider it is, and more still without calibration."""

from __future__ import annotations

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import SamplingParams
from cluster.tools.planning.fidelity import (
    INTERVALS,
    calibrated,
    compare,
    describe_interval,
    engine_sizes,
    full_sizes,
    input_similarity,
    nearness,
    open_partition,
    widths_of,
)
from cluster.tools.planning.rounds import KnownText
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model

SAMPLING = SamplingParams(max_tokens=44, ignore_eos=True)


@pytest.fixture(scope="module")
def deep(tiny_checkpoint) -> ModelDrafterConfig:
    return ModelDrafterConfig(path=str(tiny_checkpoint("Llama", num_hidden_layers=6)), num_draft_tokens=4)


@pytest.fixture(scope="module")
def texts(deep) -> list[KnownText]:
    """What the deep model itself would write, so that exact drafts are always right."""
    runner = open_model(deep.path, num_slots=128)
    written = []
    for seed in range(2):
        tokens = [seed + 1, 40, 7 * seed + 11]
        runner.open(seed)
        fed = 0
        while len(tokens) < SAMPLING.max_tokens:
            logits = runner.forward([Span(seed, len(tokens) - fed)], tokens[fed:]).logits
            runner.commit(seed, range(len(tokens) - fed))
            fed = len(tokens)
            tokens.append(int(logits.argmax()))
        runner.close(seed)
        written.append(KnownText(tuple(tokens), 3))
    return written


@pytest.mark.slow
def test_the_table_of_an_ablation(deep, texts):
    found = compare(deep, texts, SAMPLING, INTERVALS[::3], planned=[(1, 4, 1), (3, 3)])
    exact, *fuzzy = found
    assert (exact.layer_group, exact.calibration) == (1, "exact")
    assert exact.acceptance == (1.0,) * 4 and exact.acceptance_length == 5 and exact.accepted_kept == 1
    assert exact.top1_agreement == 1 and exact.cosine == pytest.approx(1, abs=1e-5) and exact.divergence < 1e-6
    partitions = [(1, 2, 2, 1), (1, 4, 1), (3, 3), (1, 3, 1, 1)]
    assert [one.partition for one in fuzzy[::2]] == [one.partition for one in fuzzy[1::2]] == partitions, "each once"
    assert [one.layer_group for one in fuzzy[::2]] == [2, 4, 3, 3]
    at = {(one.layer_group, one.calibration): one for one in fuzzy}
    for width in (2, 4):
        assert at[width, "every round"].acceptance[0] == 1, "the first token comes from an exact pass"
        assert at[width, "never"].acceptance[0] < 1
        assert at[width, "never"].cosine < at[width, "every round"].cosine < 1
    assert at[4, "every round"].cosine < at[2, "every round"].cosine
    assert at[4, "every round"].acceptance_length < 5
    kept = at[2, "never"].acceptance_length
    assert at[2, "never"].length_kept == pytest.approx(kept / 5)
    assert at[2, "never"].accepted_kept == pytest.approx((kept - 1) / 4)


def test_runs_of_rows_behind_exact_ones_are_compared_row_by_row(deep, texts):
    """The first row of a run has an exact past, so only its own layers are inexact."""
    runner = open_partition(deep, [1, 4, 1], texts)
    short, long = nearness(runner, texts, 1), nearness(runner, texts, 0)
    assert 0 < long[1] < short[1] < 1 and 0 < short[2] < long[2]
    assert 0 < short[3] < long[3]


def test_inputs_differ_more_the_further_apart_their_layers_are(deep, texts):
    similarity = input_similarity(deep, texts)
    assert len(similarity) == 3 and 1 > similarity[0] > similarity[2] > 0


def test_a_shallow_model_has_at_least_its_layers_side_by_side(tiny_checkpoint):
    shallow = ModelDrafterConfig(path=str(tiny_checkpoint("Llama", num_hidden_layers=2)))
    assert widths_of(shallow) == [1, 2] and engine_sizes(2, 2) == [2] and engine_sizes(2, 1) == [1, 1]
    assert engine_sizes(3, 2) == full_sizes(3, 2) == [2, 1] and engine_sizes(8, 4) == [1, 3, 3, 1]
    assert full_sizes(8, 4) == [1, 4, 2, 1] and full_sizes(8, 3) == [1, 3, 3, 1] and full_sizes(32, 4)[1] == 3
    single = ModelDrafterConfig(path=str(tiny_checkpoint("Llama", num_hidden_layers=1)))
    assert widths_of(single) == [1]


def test_policies_name_themselves():
    assert list(map(describe_interval, INTERVALS)) == ["every round", "every 2 rounds", "every 4 rounds", "never"]
    assert calibrated(ModelDrafterConfig(), 0).calibration_policy == "never"
    assert calibrated(ModelDrafterConfig(), 4).calibrate_every == 4
