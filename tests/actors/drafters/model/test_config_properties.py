"""Random options of a draft model: what is refused, under which name, and with which value."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from actors.drafters.model.config import (
    Calibration,
    CalibrationPolicy,
    Draws,
    MlpParallel,
    ModelDrafterConfig,
    Strategy,
)
from actors.options import INDEPENDENT_ONLY, Parallel, PipelineName, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.verification.compatibility import check_scheme

SYNC, AHEAD = (PipelineName.sync, PipelineName.pingpong), (PipelineName.pearl, PipelineName.branches, PipelineName.tree)


def refused(check, *arguments):
    """The key and the value that the error line names; None if there is no error."""
    try:
        check(*arguments)
    except ValueError as error:
        key, _, rest = str(error).partition("=")
        assert "\n" not in rest
        return key, rest.partition(": ")[0]
    return None


def random_options(draw):
    rarely = lambda value, default: value if draw.random() < 0.25 else default  # noqa: E731
    return dict(
        path=rarely("", "x"),
        ranks=rarely(2, 1),
        parallel=draw.choice(list(Parallel)),
        layer_group=rarely(2, draw.randrange(2)),
        layer_partition=rarely([1, 2, 1], []),
        mlp_parallel=draw.choice(list(MlpParallel)),
        calibration=draw.choice(list(Calibration)),
        calibration_policy=draw.choice(list(CalibrationPolicy)),
        calibrate_every=rarely(2, 1),
        strategy=draw.choice(list(Strategy)),
        branching=rarely([3, 1], []),
        tree=rarely("file", ""),
        min_gain=rarely(0.5, 0.0),
        merge_ngram=rarely(2, 0),
        draws=rarely(draw.choice(list(Draws)), Draws.auto),
        batch_nodes=rarely(4, 0),
    )


def test_what_makes_no_sense_is_refused_by_its_name_and_value():
    draw, found = random.Random(0), Counter()
    for _ in range(600):
        options = random_options(draw)
        config = ModelDrafterConfig(**options)
        by_layer = config.parallel == "layer"
        rules = {
            "path": not config.path,
            "ranks": config.ranks > 1 and config.parallel == "single",
            "layer_group": config.layer_group > 1 and not by_layer,
            "layer_partition": config.layer_partition and not by_layer,
            "calibration": config.mlp_parallel == "tensor" and config.calibration == "broadcast",
            "branching": config.branching and config.strategy != "tree",
            "tree": config.tree and (config.strategy != "tree" or config.branching),
            "min_gain": config.min_gain and config.strategy != "best_first",
            "merge_ngram": config.merge_ngram and config.strategy in ("chain", "beam", "cape"),
            "draws": (config.draws != "auto" and config.strategy in ("best_first", "dynamic", "cape"))
            or (config.draws == "independent" and config.strategy == "beam"),
            "batch_nodes": config.batch_nodes and config.strategy != "dynamic",
            "calibrate_every": config.calibrate_every > 1 and config.calibration_policy != "every",
        }
        key = next((name for name, is_broken in rules.items() if is_broken), None)
        expected = None if key is None else (f"draft.{key}", str(options[key]) or "''")
        assert refused(config.check, "draft") == expected
        found[key] += 1
    assert set(found) == {None, *rules}, "every rule was broken at least once"


def test_a_budget_for_the_batch_is_for_drafts_made_on_demand():
    config = ModelDrafterConfig(path="x", strategy=Strategy.dynamic, batch_nodes=3)
    for pipeline in (*SYNC, *AHEAD):
        expected = ("draft.batch_nodes", "3") if pipeline in AHEAD else None
        assert refused(config.check_with, VerifyRule.coupled, pipeline, "draft") == expected


def test_paths_are_merged_in_drafts_made_on_demand():
    config = ModelDrafterConfig(path="x", strategy=Strategy.tree, merge_ngram=1)
    for pipeline in (*SYNC, *AHEAD):
        expected = ("draft.merge_ngram", "1") if pipeline in AHEAD else None
        assert refused(config.check_with, VerifyRule.coupled, pipeline, "draft") == expected


def test_how_children_are_drawn_is_for_rules_and_pipelines_that_draw():
    config = ModelDrafterConfig(path="x", strategy=Strategy.tree, draws=Draws.independent)
    for rule in VerifyRule:
        for pipeline in (*SYNC, *AHEAD):
            wrong = rule == "coupled" or pipeline in AHEAD
            found = refused(config.check_with, rule, pipeline, "draft")
            assert found == (("draft.draws", "independent") if wrong else None)


def test_draws_are_as_asked_for_and_a_rule_that_is_not_exact_for_them_refuses():
    of = lambda rule, **options: ModelDrafterConfig(path="x", **options).draw_kind(rule)  # noqa: E731
    for rule in ("rejection", "traversal", "kseq", "transport"):
        for strategy in (Strategy.chain, Strategy.tree):
            assert of(rule, strategy=strategy, draws=Draws.independent) is SamplingKind.IID
            assert of(rule, strategy=strategy, draws=Draws.without_replacement) is SamplingKind.WITHOUT_REPLACEMENT
        assert of(rule, strategy=Strategy.beam) is SamplingKind.WITHOUT_REPLACEMENT
    with pytest.raises(ValueError, match="kseq would bias the output of a drafter that draws siblings without rep"):
        check_scheme("kseq", {of("kseq", strategy=Strategy.beam)})


def test_chains_and_plain_trees_are_drawn_at_random_on_demand():
    for strategy in Strategy:
        for rule in VerifyRule:
            for pipeline in (*SYNC, *AHEAD):
                (kind,) = ModelDrafterConfig(strategy=strategy).sampling_kinds(rule, pipeline)
                drawn = (
                    SamplingKind.IID
                    if rule in INDEPENDENT_ONLY and strategy != "beam"
                    else SamplingKind.WITHOUT_REPLACEMENT
                )
                at_random = strategy in ("chain", "tree", "beam") and pipeline in SYNC
                assert kind is (drawn if at_random else SamplingKind.DETERMINISTIC)
