"""The contract of every drafter: whatever it proposes, the tokens are those of plain decoding, and so are their
log-probabilities, to the bit.

A new drafter or shape joins by one row in `DRAFTERS`, a recipe by its name in `SPECULATORS`; pipelines join by
themselves.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import textwrap
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig
from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.draft_ahead.tree import AHEAD
from actors.drafters.interface import Draft
from actors.drafters.jacobi.config import JacobiDrafterConfig, LookaheadDrafterConfig
from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import DraftRows, LengthRule, ModelDrafterConfig, Strategy, Translation
from actors.drafters.registry import DRAFTERS as REGISTERED
from actors.drafters.retrieval.config import RestDrafterConfig
from actors.drafters.routed.config import RoutedDrafterConfig
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import LOCAL_DRAFTERS, Parallel, PipelineName, SchedulerConfig, VerifyRule
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.messages import PLAIN_DECODING, MeasuredCosts, SamplingParams, TokenTree
from actors.verification.compatibility import EXACT_FOR, is_exact
from actors.verification.logprobs import LogprobReader
from cluster.tools.training.speculators.recipes import RECIPES
from parallel.kernels.attention import has_attention
from parallel.kv.pool import FP8
from parallel.speculators.streams.target_pass import StreamingRunner
from tests import matrices
from tests.actors.drafters.model.small_trees import small_trees
from tests.actors.drafters.retrieval.small_store import small_store
from tests.actors.drafters.vocabulary.small_list import every_other
from tests.actors.scripted_policy import MoodyPolicy
from tests.actors.small_speculators import TRAINED
from tests.matrices import in_turn

MAX_ROWS = 256
VOCAB_SIZE = 97
MAX_TOKENS = 24 if matrices.is_whole else 16
FEW_TOKENS = 24 if matrices.is_whole else 12
NUM_REQUESTS = 5 if matrices.is_whole else 4
"""A few rounds each; whole matrices have rows whose drafter is seldom right."""
PREEMPTED, FEW_SLOTS = (30, 130) if matrices.is_whole else (24, 115)
"""Tokens of each of five requests, and rows that are too few for three of them."""
DRAFTERS = {
    "ngram": NgramDrafterConfig(min_ngram=1),
    "suffix": SuffixDrafterConfig(min_match=1, width=2),
    "copy": CopyDrafterConfig(trigger_len=1),
    "recycling": RecyclingDrafterConfig(num_draft_tokens=12, width=4),
    "aded": AdedDrafterConfig(num_draft_tokens=9),
    "rest": RestDrafterConfig(num_draft_tokens=9, datastore=small_store(), shortest_match=1),
    "jacobi": JacobiDrafterConfig(num_draft_tokens=5),
    "lookahead": LookaheadDrafterConfig(num_draft_tokens=14, window=3, ngram=3, guesses=4),
    "chain": ModelDrafterConfig(num_draft_tokens=5),
    "threshold": ModelDrafterConfig(num_draft_tokens=5, length_rule=LengthRule.threshold, rejection_threshold=0.9),
    "thompson": ModelDrafterConfig(num_draft_tokens=5, length_rule=LengthRule.thompson),
    "probability": ModelDrafterConfig(num_draft_tokens=5, length_rule=LengthRule.probability),
    "gap": ModelDrafterConfig(num_draft_tokens=5, length_rule=LengthRule.gap),
    "priced": ModelDrafterConfig(num_draft_tokens=5, length_rule=LengthRule.priced),
    "tree": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=12, depth=4, width=3),
    "branching": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=12, branching=[3, 2, 1]),
    "fixed": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=9, tree=small_trees()),
    "beam": ModelDrafterConfig(strategy=Strategy.beam, num_draft_tokens=12, depth=4, width=3),
    "merged": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=14, branching=[3, 2, 1], merge_ngram=1),
    "cape": ModelDrafterConfig(strategy=Strategy.cape, num_draft_tokens=9, depth=4),
    "best_first": ModelDrafterConfig(strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3),
    "newest-rows": ModelDrafterConfig(num_draft_tokens=5, rows=DraftRows.streaming, sinks=2, window=9),
    "newest-rows-tree": ModelDrafterConfig(
        strategy=Strategy.tree, num_draft_tokens=12, depth=4, width=3, rows=DraftRows.streaming, sinks=1, window=16
    ),
    "chosen-rows": ModelDrafterConfig(
        num_draft_tokens=5, rows=DraftRows.chunks, chunk_size=2, num_chunks=4, choose_every=6
    ),
    "pard": ModelDrafterConfig(path="pard", num_draft_tokens=5),
    "pard-tree": ModelDrafterConfig(path="pard", strategy=Strategy.tree, num_draft_tokens=12, depth=4, width=3),
    "specdiff": ModelDrafterConfig(path="specdiff", num_draft_tokens=5),
    "specdiff-steps": ModelDrafterConfig(path="specdiff", num_draft_tokens=5, mask_steps=4),
    "specdiff-drafts": ModelDrafterConfig(
        path="specdiff", strategy=Strategy.tree, num_draft_tokens=12, depth=4, width=3, mask_drafts=3
    ),
    "auto": AutoDrafterConfig(
        drafters=[
            NgramDrafterConfig(min_ngram=1),
            RecyclingDrafterConfig(num_draft_tokens=9, width=3),
            ModelDrafterConfig(num_draft_tokens=5, kv_slots=4096),
        ],
        num_draft_tokens=9,
    ),
    "routed": RoutedDrafterConfig(
        drafters=[
            ModelDrafterConfig(num_draft_tokens=5, kv_slots=4096),
            ModelDrafterConfig(num_draft_tokens=4, kv_slots=4096),
        ],
        num_draft_tokens=5,
    ),
    "online": ModelDrafterConfig(num_draft_tokens=5, online=True),
    "layer": ModelDrafterConfig(num_draft_tokens=5, parallel=Parallel.layer, layer_group=2),
    "prefix": ModelDrafterConfig(num_draft_tokens=5, prefixes=[1]),
    "prefixes": ModelDrafterConfig(num_draft_tokens=5, prefixes=[1, 2], prefix_confidence=0.3),
    "trimmed": ModelDrafterConfig(
        strategy=Strategy.tree, num_draft_tokens=9, depth=4, width=3, vocabulary=every_other()
    ),
    "foreign": ModelDrafterConfig(path="foreign", tokenizer="target", num_draft_tokens=5),
    "strings": ModelDrafterConfig(
        path="foreign", tokenizer="target", translate=Translation.strings, num_draft_tokens=5
    ),
    "maxgram": MaxgramDrafterConfig(),
}
_HEADS = "medusa", "blockwise", "hydra", "rnn", "mlp", "lstm"
_STREAMS = "streaming", "mask_lora", "s3d"
_EXITS = "kangaroo", "eesd"
_LAYERS = "eagle", "eagle3", "eagle3.1", "mtp", "p_eagle", "chimera", "glide", "longspec", "gloeckle"
_BLOCKS = "dflash", "dspark", "dflash2", "domino"
SPECULATORS = {
    recipe: SpeculatorDrafterConfig(path=recipe, num_draft_tokens=5)
    for recipe in (*_LAYERS, *_STREAMS, *_EXITS, *_HEADS, *_BLOCKS)
} | {
    "eagle3-tree": SpeculatorDrafterConfig(
        path="eagle3", strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3
    ),
    "gloeckle-tree": SpeculatorDrafterConfig(
        path="gloeckle", strategy=Strategy.best_first, num_draft_tokens=9, depth=3, width=3
    ),
    "dflash-tree": SpeculatorDrafterConfig(
        path="dflash", strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3
    ),
    "domino-tree": SpeculatorDrafterConfig(
        path="domino", strategy=Strategy.best_first, num_draft_tokens=9, depth=9, width=3
    ),
    "streaming-tree": SpeculatorDrafterConfig(
        path="streaming", strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3
    ),
    "s3d-tree": SpeculatorDrafterConfig(path="s3d", strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3),
    "dspark-threshold": SpeculatorDrafterConfig(
        path="dspark", num_draft_tokens=5, length_rule=LengthRule.threshold, rejection_threshold=0.6
    ),
    "kangaroo-threshold": SpeculatorDrafterConfig(
        path="kangaroo", num_draft_tokens=5, length_rule=LengthRule.threshold, rejection_threshold=0.6
    ),
    "eesd-tree": SpeculatorDrafterConfig(
        path="eesd", strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3
    ),
}
"""Methods of `drafter=speculator` by the name of their recipe, attached."""
ON_ITS_LAYERS = "s3d", "s3d-tree", "kangaroo", "eesd", "kangaroo-threshold", "eesd-tree"
"""Those of them that draft with the target's own layers, and so on its ranks."""
SELVES = {
    "exit": SelfDrafterConfig(exit=1, num_draft_tokens=5),
    "exit-tree": SelfDrafterConfig(exit=1, strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3),
    "skip": SelfDrafterConfig(skip=["1m"], num_draft_tokens=5),
    "swift": SelfDrafterConfig(search=Search.swift, search_every=1, num_draft_tokens=5, skip_share=0.3),
    "clasp": SelfDrafterConfig(search=Search.clasp, search_every=2, num_draft_tokens=5),
    "fly": SelfDrafterConfig(search=Search.fly, least_cosine=0.1, num_draft_tokens=5),
    "del": SelfDrafterConfig(search=Search.exit, search_every=1, search_window=8, num_draft_tokens=5),
    "own-newest": SelfDrafterConfig(num_draft_tokens=5, rows=DraftRows.streaming, sinks=2, window=9),
    "own-chosen": SelfDrafterConfig(
        num_draft_tokens=5, rows=DraftRows.chunks, chunk_size=2, num_chunks=4, choose_every=6
    ),
    "skip-tree": SelfDrafterConfig(skip=["0m"], strategy=Strategy.tree, num_draft_tokens=12, depth=4, width=3),
}
"""Ways in which the target drafts for itself."""
EVERY_KIND = AutoDrafterConfig(
    drafters=[
        SuffixDrafterConfig(min_match=1, width=2),
        ModelDrafterConfig(num_draft_tokens=5, kv_slots=4096),
        SpeculatorDrafterConfig(path="eagle3", num_draft_tokens=5, kv_slots=4096),
        SelfDrafterConfig(exit=1, num_draft_tokens=5),
        JacobiDrafterConfig(num_draft_tokens=5),
    ],
    num_draft_tokens=8,
)
"""A lookup, a draft model, a speculator, the target's own layers, and its own answers, at once on its ranks."""
SENT_STATES = AutoDrafterConfig(
    drafters=[
        SuffixDrafterConfig(min_match=1, width=2),
        SpeculatorDrafterConfig(path="eagle3", num_draft_tokens=5, kv_slots=4096),
    ],
    num_draft_tokens=8,
)
"""Drafters on ranks of their own, to which hidden states are sent for one of them."""
MIXED = {
    "every-kind": EVERY_KIND,
    "two-speculators": AutoDrafterConfig(
        drafters=[
            SpeculatorDrafterConfig(path="glide", num_draft_tokens=5, kv_slots=4096),
            SpeculatorDrafterConfig(path="medusa", num_draft_tokens=4, kv_slots=4096),
        ],
        num_draft_tokens=5,
    ),
    "own-layers": AutoDrafterConfig(
        drafters=[
            SpeculatorDrafterConfig(path="kangaroo", num_draft_tokens=5, kv_slots=4096),
            SelfDrafterConfig(skip=["1m"], num_draft_tokens=5),
            SpeculatorDrafterConfig(path="eesd", num_draft_tokens=4, kv_slots=4096),
        ],
        num_draft_tokens=5,
    ),
}
ON_TARGET = SPECULATORS | SELVES | MIXED
OTHER_SHAPES = {name for name in ON_TARGET if name.endswith(("-tree", "-threshold"))}
"""Rows whose method another row has, with drafts of another shape; the rows of draft models have each shape."""
VARIANTS = {name for name, config in DRAFTERS.items() if config.name == "model"} - {
    "chain",
    "tree",
    "best_first",
    "layer",
}
"""Rows of the draft model that differ in what they draft alone."""
_FIRST = {RECIPES[config.path].module: name for name, config in reversed(SPECULATORS.items())}.values()
AGAIN = (SPECULATORS.keys() - _FIRST) | {"exit-tree", "skip-tree", "swift", "clasp", "fly"}
"""Rows on the target's ranks whose rows and features another row keeps in the same way: of the same module."""
PASSED_ON = dict.fromkeys(VARIANTS | AGAIN, 0)
"""For matrices about something else than drafts, by default: one row for each way of keeping rows."""
OTHERS = dict.fromkeys(DRAFTERS, 0)
"""For matrices of which a few drafters are enough by default; they name them."""
_BY_PASSES = "newest-rows", "newest-rows-tree", "chosen-rows"
BY_ORDER = "recycling", "aded", "maxgram", "jacobi", "lookahead", "auto", "thompson", *_BY_PASSES
"""Those whose drafts depend on the order in which requests are served, on the step, or on how many rows of text a pass
feeds."""
LOOKUPS = [name for name, config in DRAFTERS.items() if not config.runs_passes]
EVERY_PROCESSOR = dict(
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((5, 2.0), (7, -3.0)),
    bad_words=((11,), (12, 13)),
    min_tokens=6,
)
SAMPLINGS = {
    "greedy": {},
    "greedy-processed": EVERY_PROCESSOR,
    "T=0.6": dict(temperature=0.6),
    "T=1": dict(temperature=1.0),
    "T=0.6-processed": dict(temperature=0.6, **EVERY_PROCESSOR),
    "T=1-processed": dict(temperature=1.0, **EVERY_PROCESSOR),
}
USUAL = ("greedy", "T=1", "T=1-processed")
DRAFTED = [pipeline for pipeline in PipelineName if pipeline != "plain"]


def several_drafters():
    """Drafters on ranks of their own in every pipeline, by default in three, some with hidden states, and all kinds on
    the target's."""
    yield from in_turn(DRAFTED, USUAL, [DRAFTERS["auto"]], times={"pearl": 0, "pingpong": 0})
    for sampling, pipeline in zip(USUAL, ("pearl", "branches", "tree"), strict=True):
        marks = [] if pipeline == "branches" else [pytest.mark.slow]
        yield pytest.param("sync", sampling, EVERY_KIND, marks=marks)
        yield pytest.param(pipeline, sampling, SENT_STATES, marks=marks)


@pytest.mark.extended
@pytest.mark.parametrize(("pipeline", "sampling", "auto"), list(several_drafters()))
def test_requests_of_one_batch_may_each_name_a_drafter(open_room, make_requests, auto, sampling, pipeline):
    """One of those that the engine has, plain decoding, or none: then the engine chooses."""
    names = *auto.member_names, PLAIN_DECODING, None
    requests = make_requests(2 * len(names), max_tokens=FEW_TOKENS, **SAMPLINGS[sampling])
    requests = [replace(one, drafter=names[i % len(names)]) for i, one in enumerate(requests)]
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(auto, pipeline=pipeline, attached=auto.is_attached(pipeline)).serve(requests)
    assert room.said == plain.said
    assert room.stats.levels.keys() == {*auto.member_names}, "each of them drafted"


def test_every_drafter_has_a_row():
    """A method without one would be compared with plain decoding nowhere; cascades and pools, which have no drafter
    of their own, have tests of their own."""
    rows = {config.name for config in (*DRAFTERS.values(), *ON_TARGET.values())}
    missing = REGISTERED.keys() - rows - {"none", "cascade", "pool"}
    assert not missing, "add a row of DRAFTERS in this file for each"
    missing = set(TRAINED) - {config.path for config in SPECULATORS.values()}
    assert not missing, "name each of these recipes in SPECULATORS of this file"


def test_the_example_of_the_contributing_guide_is_a_drafter(open_room, make_requests, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "contributed_echo.py").write_text(textwrap.dedent("   " + code.lstrip()))
    monkeypatch.syspath_prepend(tmp_path)
    config = import_module("contributed_echo").EchoDrafterConfig()
    requests = make_requests(3, max_tokens=12)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(config, rule="block").serve(requests)
    assert room.tokens == plain.tokens and room.stats.num_draft_tokens > 0
    kinds = config.sampling_kinds(VerifyRule.block, PipelineName.sync)
    assert is_exact(VerifyRule.block, kinds, config.draft_traits)


@pytest.fixture
def make_requests(make_requests):
    """One of three requests asks for nothing beside its tokens, and one for the log-probabilities of its prompt too."""

    def make(count, **options):
        asked = itertools.cycle([{}, {"logprobs": 3, "prompt_logprobs": 2}, {"logprobs": 0}])
        return [replace(one, **next(asked)) for one in make_requests(count, **options)]

    return make


@pytest.fixture(scope="module")
def plain_tokens():
    """What plain decoding said, per test function and sampling, computed once."""
    return {}


@pytest.mark.parametrize(
    ("drafter", "pipeline", "sampling"),
    list(in_turn(DRAFTERS, DRAFTED, SAMPLINGS, times={"chain": 5, "tree": 3}))
    + list(in_turn(["chain"], ["plain"], SAMPLINGS)),
)
def test_tokens_are_those_of_plain_decoding(open_room, make_requests, plain_tokens, drafter, sampling, pipeline):
    requests = make_requests(NUM_REQUESTS, max_tokens=FEW_TOKENS, **SAMPLINGS[sampling])
    if ("few", sampling) not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens["few", sampling] = plain.said
    room = open_room(DRAFTERS[drafter], pipeline=pipeline).serve(requests)
    assert room.said == plain_tokens["few", sampling]
    if pipeline != "plain" and "processed" not in sampling and drafter not in LOOKUPS:
        assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"
        if pipeline in AHEAD and drafter == "chain":
            assert room.stats.num_prefetched > 0, "no preview was ever of use"


PRICED = {
    "model": (DRAFTERS["priced"], False),
    "attached": (DRAFTERS["priced"], True),
    "eagle": (SpeculatorDrafterConfig(path="eagle", num_draft_tokens=5, length_rule=LengthRule.priced), False),
    "kangaroo": (SpeculatorDrafterConfig(path="kangaroo", num_draft_tokens=5, length_rule=LengthRule.priced), True),
    "medusa": (SpeculatorDrafterConfig(path="medusa", num_draft_tokens=5, length_rule=LengthRule.priced), True),
}


@pytest.mark.parametrize(
    ("drafter", "pipeline", "sampling"),
    list(
        in_turn(
            PRICED,
            ["sync", "pingpong"],
            USUAL,
            exists=lambda one, way, _: not PRICED[one][1] or way == "sync",
            extended=[*PRICED][2:],
        )
    ),
)
def test_tokens_that_are_not_worth_a_row_are_dropped_and_no_token_changes(
    open_room, make_requests, plain_tokens, monkeypatch, drafter, sampling, pipeline
):
    """A token has to be accepted in six cases of ten."""
    requests = make_requests(NUM_REQUESTS, max_tokens=FEW_TOKENS, **SAMPLINGS[sampling])
    if ("few", sampling) not in plain_tokens:
        plain_tokens["few", sampling] = open_room(pipeline="plain").serve(requests).said
    (config, attached), rooms = PRICED[drafter], []
    for costs in (MeasuredCosts(), MeasuredCosts(least_chance=0.6)):
        fixed = property(lambda _, costs=costs: costs, lambda _, value: None)
        monkeypatch.setattr(Policy, "costs", fixed, raising=False)
        rooms.append(open_room(config, pipeline=pipeline, attached=attached).serve(requests))
        assert rooms[-1].said == plain_tokens["few", sampling]
    assert rooms[1].stats.num_draft_tokens < rooms[0].stats.num_draft_tokens


FAR = "chain", "best_first", "cape", "layer", "newest-rows", "prefixes", "trimmed"
"""Draft models that may be far away."""
LOCAL = [name for name in LOCAL_DRAFTERS if name != "none"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline", "lookup", "sampling"),
    list(in_turn(FAR, AHEAD, LOCAL, USUAL, times={"chain": 3, "best_first": 3})),
)
def test_tokens_with_a_far_drafter_and_a_lookup(
    request, open_room, make_requests, models, plain_tokens, drafter, pipeline, lookup, sampling
):
    """Records to and from the drafter are several passes of the target late."""
    requests = make_requests(5, max_tokens=24, **SAMPLINGS[sampling])
    if ("far", sampling) not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens["far", sampling] = plain.said
    path = {} if drafter in ("layer", "prefixes") else {"path": models["target"]}
    room = open_room(DRAFTERS[drafter], pipeline=pipeline, local_drafter=lookup, **path).serve(requests)
    assert room.said == plain_tokens["far", sampling]
    if request.node.get_closest_marker("slow"):
        return  # in so short texts one row in ten is of no use
    assert room.stats.num_prefetched > 0, "no draft of the far drafter was of use"
    if sampling == "greedy" and lookup != "copy":
        assert room.proposers[lookup] > 0, "no draft of the lookup was of use"


SAME_PLACEMENT = dict.fromkeys(("suffix", "copy", "aded", "rest", "lookahead", "maxgram", "best_first"), 0)
"""Rows of other methods that are placed as one which runs by default: a lookup, guesses, or a draft model."""


@pytest.mark.extended
@pytest.mark.parametrize(("drafter", "sampling"), list(in_turn(DRAFTERS, USUAL, times=PASSED_ON | SAME_PLACEMENT)))
def test_tokens_with_an_attached_drafter_are_those_of_plain_decoding(
    open_room, make_requests, plain_tokens, drafter, sampling
):
    """Attached, any drafter drafts as often as in a role of its own, and as well. Variants of the draft model differ in
    what they draft, which `test_tokens_are_those_of_plain_decoding` runs; the placement is the same for all."""
    requests = make_requests(NUM_REQUESTS, max_tokens=MAX_TOKENS, **SAMPLINGS[sampling])
    if sampling not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens[sampling] = plain.said
    room = open_room(DRAFTERS[drafter], attached=True).serve(requests)
    assert room.said == plain_tokens[sampling]
    if drafter not in BY_ORDER:
        own_role = open_room(DRAFTERS[drafter]).serve(requests)
        counts = [(one.stats.num_accepted_tokens, one.stats.num_draft_tokens) for one in (room, own_role)]
        assert counts[0] == counts[1], "the placement changed what was drafted"


def _next_row(read, reader, result, seq_id):
    return read(reader, result, seq_id).roll(1, 0)


def _row_of_the_root(read, reader, result, seq_id):
    return read(reader, replace(result, path=(0,) * len(result.path)), seq_id)


def _a_millionth_off(read, reader, result, seq_id):
    return read(reader, result, seq_id) * (1 + 1e-6)


@pytest.mark.skipif(not has_attention(), reason="PyTorch's products depend on the rows beside")
@pytest.mark.parametrize("plant", [_next_row, _row_of_the_root, _a_millionth_off])
def test_a_mistake_in_the_rows_of_log_probabilities_is_noticed(
    open_room, make_requests, models, plain_tokens, monkeypatch, plant
):
    """A negative control of the comparison with plain decoding, whose paths are empty."""
    requests = make_requests(5, max_tokens=24)
    if "mistake" not in plain_tokens:
        plain_tokens["mistake"] = open_room(pipeline="plain").serve(requests)
        right = open_room(DRAFTERS["chain"], path=models["target"]).serve(requests)
        assert right.said == plain_tokens["mistake"].said
    plain = plain_tokens["mistake"]
    read = LogprobReader._rows
    monkeypatch.setattr(LogprobReader, "_rows", lambda reader, *of: plant(read, reader, *of))
    room = open_room(DRAFTERS["chain"], path=models["target"]).serve(requests)
    assert room.tokens == plain.tokens and room.logprobs != plain.logprobs


@pytest.mark.parametrize(
    ("drafter", "rule", "sampling"),
    list(in_turn(ON_TARGET, ["coupled", "rejection"], SAMPLINGS, extended=OTHER_SHAPES)),
)
def test_tokens_with_a_drafter_on_the_target(open_room, make_requests, plain_tokens, drafter, sampling, rule):
    """Greedy tokens are the same under `rejection` too."""
    requests = make_requests(NUM_REQUESTS, max_tokens=FEW_TOKENS, **SAMPLINGS[sampling])
    if ("few", sampling) not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens["few", sampling] = plain.said
    room = open_room(ON_TARGET[drafter], attached=True, rule=rule).serve(requests)
    if rule == "coupled" or sampling.startswith("greedy"):
        assert room.said == plain_tokens["few", sampling]
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


@pytest.mark.extended
@pytest.mark.parametrize("sampling", [pytest.param("greedy", marks=pytest.mark.slow), "T=1-processed"])
def test_nodes_that_the_target_gives_up_change_no_token(open_room, make_requests, plain_tokens, sampling, monkeypatch):
    requests = make_requests(NUM_REQUESTS, max_tokens=MAX_TOKENS, **SAMPLINGS[sampling])
    if sampling not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens[sampling] = plain.said
    find, num_pruned = StreamingRunner._pruned, []

    def counted(self, *of):
        pruned = find(self, *of)
        num_pruned.append(len(pruned))
        return pruned

    monkeypatch.setattr(StreamingRunner, "_pruned", counted)
    room = open_room(replace(SPECULATORS["streaming-tree"], prune_below=0.015), attached=True).serve(requests)
    assert room.said == plain_tokens[sampling]
    assert sum(num_pruned) > 0, "nothing was pruned: the test shows nothing"
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


def test_a_speculator_begins_with_one_token(open_room, make_requests):
    """Which has no features before it, so that draft layers have no row to draft from."""
    requests = make_requests(4, max_tokens=24, longest=2)
    assert all(len(request.prompt) == 1 for request in requests)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(SPECULATORS["eagle3"], attached=True).serve(requests)
    assert room.tokens == plain.tokens
    assert room.stats.num_accepted_tokens > 0


def test_the_confidence_of_a_block_decides_how_long_drafts_are(open_room, make_requests, plain_tokens):
    requests, lengths = make_requests(NUM_REQUESTS, max_tokens=MAX_TOKENS), []
    if "greedy" not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens["greedy"] = plain.said
    for bias in (-20.0, 20.0):

        def biased(drafter, bias=bias):
            drafter.runner.layers.confidence.bias.fill_(bias)
            return drafter

        room = open_room(SPECULATORS["dspark-threshold"], attached=True, wrap=biased).serve(requests)
        assert room.said == plain_tokens["greedy"]
        lengths.append(room.stats.num_draft_tokens / (room.stats.num_tokens - room.stats.num_accepted_tokens))
    assert 2 * lengths[0] < lengths[1], f"mean draft tokens of a verdict: {lengths}"


def can_be_separate(drafter, pipeline):
    """Not on the target's layers, nor, where it works ahead, with a draft that ends by itself."""
    return drafter not in ON_ITS_LAYERS and not (pipeline in AHEAD and SPECULATORS[drafter].chooses_lengths)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline"),
    list(in_turn(SPECULATORS, DRAFTED, times=PASSED_ON | {"eagle3-tree": 1}, exists=can_be_separate)),
)
def test_tokens_with_a_separate_speculator(open_room, make_requests, plain_tokens, drafter, pipeline):
    """The drafter works, behind what the target's features reach, on its own states, in some pipelines ahead of
    time."""
    config = SPECULATORS[drafter]
    requests = make_requests(NUM_REQUESTS, max_tokens=FEW_TOKENS, temperature=1.0)
    if ("few", "T=1") not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        plain_tokens["few", "T=1"] = plain.said
    room = open_room(config, pipeline=pipeline).serve(requests)
    assert room.said == plain_tokens["few", "T=1"]
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


KEPT_APART = "eagle", "glide", "streaming", "kangaroo", "medusa", "dflash", "exit", "own-chosen", "every-kind"
"""Drafters on the target's ranks of each way to keep rows and features."""
FEW_ON_TARGET = dict.fromkeys(ON_TARGET, 0) | dict.fromkeys(KEPT_APART, 1)


@pytest.mark.extended
@pytest.mark.parametrize(("drafter", "temperature"), list(in_turn(ON_TARGET, [0.0, 1.0], times=FEW_ON_TARGET)))
def test_drafters_on_the_target_survive_preemption_and_chunked_prefill(
    open_room, make_requests, plain_tokens, drafter, temperature
):
    """T10: rows and features of chunks and of requests that come back are complete, so the drafts are as good."""
    requests = make_requests(5, max_tokens=PREEMPTED, temperature=temperature)
    if ("preemption", temperature) not in plain_tokens:
        plain_tokens["preemption", temperature] = open_room(pipeline="plain").serve(requests)
    plain = plain_tokens["preemption", temperature]
    config = ON_TARGET[drafter]
    room = open_room(config, limits=SchedulerConfig(3, 40, 16), slots=FEW_SLOTS, attached=True).serve(requests)
    assert room.said == plain.said
    assert room.stats.num_preemptions > 0, "the pool was never short: the test shows nothing"
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


ARITHMETICS = {
    "bfloat16": dict(dtype="bfloat16"),
    "w8a8": dict(weights="w8a8"),
    "bfloat16, w8a8": dict(dtype="bfloat16", weights="w8a8"),
}
"""A CPU's own."""


def rows_in_other_arithmetics():
    """Every drafter in a pipeline or on the target's ranks; by default no lookups, which compute nothing, and of the
    others those whose passes differ most."""
    few, used = dict.fromkeys(("tree", "layer", "chosen-rows"), 2), list(ARITHMETICS)
    attached = dict.fromkeys(("eagle", "glide", "streaming", "exit", "dflash"), 2)
    yield from in_turn(DRAFTERS, DRAFTED, USUAL, used, times=OTHERS | few)
    yield from in_turn(ON_TARGET, [None], USUAL, used, times=dict.fromkeys(ON_TARGET, 0) | attached)


@pytest.mark.extended
@pytest.mark.skipif(not has_attention(), reason="PyTorch's products in bfloat16 depend on the rows beside")
@pytest.mark.parametrize(("drafter", "pipeline", "sampling", "arithmetic"), list(rows_in_other_arithmetics()))
def test_tokens_in_another_arithmetic_are_those_of_its_plain_decoding(
    open_room, make_requests, plain_tokens, drafter, pipeline, sampling, arithmetic
):
    requests, types = make_requests(NUM_REQUESTS, max_tokens=FEW_TOKENS, **SAMPLINGS[sampling]), ARITHMETICS[arithmetic]
    if (arithmetic, sampling) not in plain_tokens:
        alone = [open_room(pipeline="plain", **types).serve([one]) for one in requests]
        plain_tokens[arithmetic, sampling] = [{k: v for one in alone for k, v in part(one).items()} for part in PARTS]
    attached = dict(attached=True) if pipeline is None else dict(pipeline=pipeline)
    room = open_room((DRAFTERS | ON_TARGET)[drafter], **types, **attached).serve(requests)
    assert room.target.runner.pool.dtype == getattr(torch, types.get("dtype", "float32"))
    assert [part(room) for part in PARTS] == plain_tokens[arithmetic, sampling]


PARTS = [attrgetter(name) for name in ("tokens", "ends", "logprobs", "prompt_logprobs")]
ROUNDED = ("chain", "sync"), ("tree", "tree")


@pytest.mark.parametrize(
    ("drafter", "pipeline", "stored"),
    list(in_turn(ROUNDED, [torch.bfloat16, torch.int8, "w8a8"], times={ROUNDED[0]: 2})),
)
def test_tokens_of_a_rounded_target_are_those_of_its_plain_decoding(
    open_room, make_requests, models, plain_tokens, drafter, pipeline, stored
):
    requests, weights = make_requests(4, max_tokens=MAX_TOKENS), str(stored).removeprefix("torch.")
    if stored not in plain_tokens:
        plain = open_room(pipeline="plain", weights=stored).serve(requests)
        plain_tokens[stored] = plain.said
    config = replace(DRAFTERS[drafter], weights=weights)
    room = open_room(config, path=models["target"], pipeline=pipeline, weights=stored).serve(requests)
    assert room.said == plain_tokens[stored]
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline"),
    [
        ("chain", "sync"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("tree", "tree"), ("kangaroo", None))),
        *((name, None) for name in ("exit", "glide", "streaming-tree")),
    ],
)
def test_tokens_with_fp8_rows_are_those_of_their_plain_decoding(
    open_room, make_requests, models, plain_tokens, drafter, pipeline
):
    """Drafts in roles of their own, and with None attached: those that copy, borrow or read rows of the target."""
    requests = make_requests(4, max_tokens=MAX_TOKENS)
    if FP8 not in plain_tokens:
        plain = open_room(pipeline="plain", kv_dtype=FP8).serve(requests)
        plain_tokens[FP8] = plain.said
    path = models["target"] if drafter in DRAFTERS else None
    attached = dict(attached=True) if pipeline is None else dict(pipeline=pipeline)
    room = open_room((DRAFTERS | ON_TARGET)[drafter], path=path, kv_dtype=FP8, **attached).serve(requests)
    assert room.target.runner.pool.is_fp8
    assert room.said == plain_tokens[FP8]
    assert room.stats.num_accepted_tokens > 0, "nothing was ever accepted: the test shows nothing"


@pytest.mark.parametrize(("drafter", "batch"), list(in_turn(DRAFTERS, [1, 3, 8], times=OTHERS | {"chain": 2})))
def test_greedy_equals_transformers(open_room, make_requests, models, drafter, batch):
    requests = make_requests(batch, max_tokens=20)
    room = open_room(DRAFTERS[drafter], path=models["target"]).serve(requests)
    for request in requests:
        prompt = torch.tensor([request.prompt])
        expected = models["reference"].generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert room.tokens[request.request_id] == expected[0, len(request.prompt) :].tolist()


ROWS = "chain", "tree", "layer", *_BY_PASSES, "auto"
"""Drafters each of which keeps rows in another way."""


@pytest.mark.parametrize(
    ("drafter", "temperature", "attached"),
    list(in_turn(DRAFTERS, [0.0, 1.0], [False, True], times=OTHERS | dict.fromkeys(ROWS, 1))),
)
def test_preemption_and_chunked_prefill_change_no_token(
    open_room, make_requests, plain_tokens, drafter, temperature, attached
):
    requests = make_requests(5, max_tokens=PREEMPTED, temperature=temperature)
    if ("preemption", temperature) not in plain_tokens:
        plain_tokens["preemption", temperature] = open_room(pipeline="plain").serve(requests)
    plain = plain_tokens["preemption", temperature]
    limits = SchedulerConfig(3, 40, 16)
    room = open_room(DRAFTERS[drafter], limits=limits, slots=FEW_SLOTS, attached=attached).serve(requests)
    assert room.said == plain.said
    assert room.stats.num_preemptions > 0, "the pool was never short: the test shows nothing"


@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_a_perfect_drafter_is_accepted_whole(open_room, make_requests, models, drafter):
    """T4: with the target as its own drafter every greedy chain is taken, and a tree to its depth."""
    requests = make_requests(1, max_tokens=25)
    room = open_room(DRAFTERS[drafter], path=models["target"]).serve(requests)
    depth = 5 if drafter == "chain" else 4
    histogram = room.stats.acceptance_histogram
    assert histogram[depth] >= 3 and sum(histogram[:depth]) <= 3, "only the last, shortened proposals may fall short"


@pytest.mark.parametrize("sampling", [{}, dict(temperature=1.0)])
def test_max_tokens_and_eos_inside_a_draft(open_room, make_requests, models, sampling):
    for max_tokens in (1, 2, 3, 7):
        requests = make_requests(4, max_tokens=max_tokens, **sampling)
        plain = open_room(pipeline="plain").serve(requests)
        room = open_room(DRAFTERS["tree"], path=models["target"]).serve(requests)
        assert room.said == plain.said
        assert all(len(tokens) <= max_tokens for tokens in room.tokens.values())
    # Any token can play the end: take one that greedy decoding reaches in the middle of a draft.
    requests = make_requests(2, max_tokens=20, **sampling)
    middle = open_room(pipeline="plain").serve(requests).tokens[0][8]
    stopping = [
        type(r)(
            r.request_id,
            r.prompt,
            SamplingParams(max_tokens=20, seed=r.sampling.seed, stop_token_ids=(middle,), **sampling),
        )
        for r in requests
    ]
    plain = open_room(pipeline="plain").serve(stopping)
    room = open_room(DRAFTERS["chain"], path=models["target"]).serve(stopping)
    assert plain.ends[0] == "stop" and room.said == plain.said


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline", "temperature"),
    list(in_turn(("chain", "tree", "ngram"), DRAFTED, [0.0, 1.0], times={"chain": 2})),
)
def test_a_policy_may_change_its_mind_at_any_moment(
    open_room, make_requests, plain_tokens, pipeline, drafter, temperature
):
    """Lengths, rests, and a drafter that has to read what it missed change no token."""
    requests = make_requests(5, max_tokens=70 if matrices.is_whole else 40, temperature=temperature)
    if ("policy", temperature) not in plain_tokens:
        plain_tokens["policy", temperature] = open_room(pipeline="plain").serve(requests)
    plain = plain_tokens["policy", temperature]
    policy = MoodyPolicy(random.Random(3), pipeline)
    room = open_room(DRAFTERS[drafter], pipeline=pipeline).serve(requests, policy=policy)
    assert room.said == plain.said
    assert policy.rounds_in[Mode.rest] and policy.rounds_in[Mode.trial], "it never rested or never returned from it"


class Adversary:
    """Wraps a drafter and replaces what it says."""

    def __init__(self, drafter, say):
        self._drafter, self._say = drafter, say

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, contexts, budgets):
        return [Draft(self._say(context, budget)) for context, budget in zip(contexts, budgets, strict=False)]

    def observe(self, context, commit):
        pass


def _random_tree(context, budget):
    choose = random.Random(len(context.token_ids))
    size = choose.randrange(budget + 1)
    tokens = [context.token_ids[-1], *(choose.randrange(97) for _ in range(size))]
    return TokenTree(tuple(tokens), (-1, *(choose.randrange(i) for i in range(1, size + 1))))


ADVERSARIES = {
    "random": _random_tree,
    "constant": lambda context, budget: TokenTree.chain(context.token_ids[-1], [7] * budget),
    "silent": lambda context, budget: TokenTree.root(context.token_ids[-1]),
    "wrong-root": lambda context, budget: TokenTree.chain(96 - context.token_ids[-1], [1] * budget),
}


@pytest.mark.parametrize(("adversary", "temperature"), list(in_turn(ADVERSARIES, [0.0, 0.8])))
def test_an_adversary_costs_speed_only(open_room, make_requests, adversary, temperature):
    requests = make_requests(3, max_tokens=15, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(NgramDrafterConfig(), wrap=lambda drafter: Adversary(drafter, ADVERSARIES[adversary]))
    room.serve(requests)
    assert room.said == plain.said
    assert (room.stats.num_stale > 0) == (adversary == "wrong-root")


RATIO_RULES = [rule for rule in EXACT_FOR if rule is not VerifyRule.coupled]


def is_exact_for(drafter, rule):
    config = DRAFTERS[drafter]
    return is_exact(rule, config.sampling_kinds(rule, PipelineName.sync), config.draft_traits)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_ratio_rules_or_more_are_exact_for_a_drafter(drafter):
    assert sum(is_exact_for(drafter, rule) for rule in RATIO_RULES) >= 2


GREEDY = {"chain": 4, "tree": 2, "recycling": 1, "rest": 1, "jacobi": 1, "lookahead": 1, "auto": 1, "layer": 1}
"""Drafters of each shape, and the draft model under every rule."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "rule"), list(in_turn(DRAFTERS, RATIO_RULES, times=OTHERS | GREEDY, exists=is_exact_for))
)
def test_ratio_rules_are_greedy_at_zero_temperature(open_room, make_requests, rule, drafter):
    requests = make_requests(3, max_tokens=20)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(DRAFTERS[drafter], rule=rule).serve(requests)
    assert room.tokens == plain.tokens


DEAD = (17, 29, 54, 71, 83)
"""After one of these no token is allowed."""
DEAD_ENDS = dict(bad_words=tuple((token, other) for token in DEAD for other in range(VOCAB_SIZE)))


_GROWTHS = {config.strategy: name for name, config in reversed(DRAFTERS.items()) if config.name == "model"}.values()
DRAWN = dict.fromkeys(_GROWTHS, 1) | {"trimmed": 1, "strings": 1}
"""Drafters of each way in which a draft model's trees grow, and tokens are drawn from other ones."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline", "temperature"),
    list(in_turn(DRAFTERS, DRAFTED, [0.0, 1.0], times=OTHERS | DRAWN | {"chain": 2, "ngram": 1, "layer": 1})),
)
def test_a_request_that_no_token_can_follow_ends_where_plain_decoding_ends_it(
    open_room, make_requests, plain_tokens, drafter, pipeline, temperature
):
    requests = make_requests(6, max_tokens=30, temperature=temperature, **DEAD_ENDS)
    if ("dead", temperature) not in plain_tokens:
        plain = open_room(pipeline="plain").serve(requests)
        assert "error" in plain.ends.values() and len({*plain.ends.values()}) > 1
        plain_tokens["dead", temperature] = plain.said, plain.errors
    room = open_room(DRAFTERS[drafter], pipeline=pipeline).serve(requests)
    assert (room.said, room.errors) == plain_tokens["dead", temperature]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "rule"),
    list(in_turn(DRAFTERS, RATIO_RULES, times=OTHERS | DRAWN | {"chain": 2, "jacobi": 1}, exists=is_exact_for)),
)
def test_under_ratio_rules_nothing_follows_where_no_token_can(open_room, make_requests, rule, drafter):
    requests = make_requests(6, max_tokens=30 if matrices.is_whole else 20, temperature=1.0, **DEAD_ENDS)
    room = open_room(DRAFTERS[drafter], rule=rule).serve(requests)
    assert "error" in room.ends.values()
    for request in requests:
        tokens = room.tokens[request.request_id]
        assert not {*tokens[:-1]} & {*DEAD}, "a banned token came out"
        if room.ends[request.request_id] == "error":
            assert [*request.prompt, *tokens][-1] in DEAD


SHAPES = "chain", "tree", "merged", "jacobi", "lookahead", "exit", "exit-tree", "own-newest", "own-chosen", "kangaroo"
"""Drafts of each shape, and those whose rows are the target's or beside them."""


@pytest.mark.parametrize(
    "drafter", list(in_turn([*DRAFTERS, *SELVES, "kangaroo"], times=PASSED_ON | OTHERS | dict.fromkeys(SHAPES, 1)))
)
def test_kv_after_every_commit_equals_a_fresh_prefill(open_room, make_requests, models, drafter):
    """The rows that the target keeps after any round are those of reading the committed text from scratch."""
    from parallel.runtime.runner import Span, open_model

    checked, fresh = 0, open_model(models["target"], num_slots=MAX_ROWS)

    def compare(room):
        nonlocal checked
        runner = room.target.runner
        for request_id, context in room.target.contexts.items():
            # with an attached drafter the text of a verdict follows with the next batch, its rows are there
            cached_len = min(runner.cached_len(request_id), len(context.token_ids))
            if cached_len < 2 or checked > 15:
                continue
            fresh.open("x")
            fresh.forward([Span("x", cached_len)], context.token_ids[:cached_len])
            ours, theirs = (
                pool.slots(name)[:cached_len] for pool, name in ((runner.pool, request_id), (fresh.pool, "x"))
            )
            for kept, read in ((runner.pool.keys, fresh.pool.keys), (runner.pool.values, fresh.pool.values)):
                torch.testing.assert_close(kept[:, ours], read[:, theirs], atol=2e-5, rtol=1e-4)
            fresh.close("x")
            checked += 1

    config, attached = (DRAFTERS | SELVES | SPECULATORS)[drafter], drafter not in DRAFTERS
    open_room(config, path=models["target"], attached=attached).serve(
        make_requests(3, max_tokens=40 if matrices.is_whole else 24), compare
    )
    assert checked > 10


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", [pytest.param("sync", marks=pytest.mark.slow), "branches"])
def test_a_drafter_may_have_fewer_tokens(open_room, make_requests, models, tmp_path, pipeline):
    """One family pads its vocabularies differently; the target may write, and a client ask for, what lies beyond."""
    narrow = copy.deepcopy(models["reference"])
    narrow.resize_token_embeddings(VOCAB_SIZE - 40)
    narrow.save_pretrained(tmp_path)
    requests = make_requests(4, max_tokens=24, temperature=1.0, repetition_penalty=1.2, bad_words=((90,), (5, 91)))
    plain = open_room(pipeline="plain").serve(requests)
    assert any(token >= VOCAB_SIZE - 40 for tokens in plain.tokens.values() for token in tokens)
    room = open_room(DRAFTERS["chain"], path=tmp_path, pipeline=pipeline).serve(requests)
    assert room.said == plain.said
    assert room.stats.num_accepted_tokens > 0
