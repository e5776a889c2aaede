"""The configuration record of `drafter=model`, its choices and its checks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from actors.drafters.config import DrafterConfig, DraftSetup, PathResolver, PlacedDrafterConfig, Placement
from actors.drafters.model.confidence_growth import WIDEST
from actors.options import (
    ATTENTION,
    CHECKPOINT,
    DEVICES,
    DTYPES,
    INDEPENDENT_ONLY,
    KV_DTYPES,
    MAX_RANKS,
    WEIGHTS,
    Parallel,
    PipelineName,
    VerifyRule,
    check_kv_dtype,
    check_pace,
    check_weights,
)
from actors.protocol.messages import SamplingKind
from actors.topology import TOP
from parallel.ranges import OneOf, Range, errors_of, require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter
    from actors.options import SchedulerConfig, TargetConfig
    from parallel.kv.row_limits import ChunkLimits, RowLimits


class MlpParallel(StrEnum):
    """How layer-parallel ranks run the MLPs."""

    auto = "auto"
    replicated = "replicated"
    tensor = "tensor"


class Calibration(StrEnum):
    """Which rank computes the exact KV rows that replace fuzzy ones."""

    recompute = "recompute"
    owner = "owner"
    broadcast = "broadcast"


class CalibrationPolicy(StrEnum):
    """When fuzzy KV rows are replaced."""

    every = "every"
    mismatch = "mismatch"
    never = "never"


class Strategy(StrEnum):
    """The shape of the proposal."""

    chain = "chain"
    tree = "tree"
    beam = "beam"
    best_first = "best_first"
    dynamic = "dynamic"
    cape = "cape"


class Translation(StrEnum):
    """How a draft model with a tokenizer of its own proposes the target's tokens."""

    auto = "auto"
    intersection = "intersection"
    strings = "strings"


class Draws(StrEnum):
    """How the children of a node are drawn for a ratio rule."""

    auto = "auto"
    independent = "independent"
    without_replacement = "without_replacement"


class DraftRows(StrEnum):
    """Which KV rows of a long text a draft model keeps, or sees."""

    full = "full"
    streaming = "streaming"
    chunks = "chunks"


DRAWN = (Strategy.chain, Strategy.tree, Strategy.beam)
"""Shapes whose tokens are drawn at random where a ratio rule verifies; of the others the likeliest tokens are taken."""

BRANCHING = (Strategy.tree, Strategy.beam, Strategy.best_first, Strategy.dynamic)
"""Shapes in which the root has several children."""


class LengthRule(StrEnum):
    """When a chain ends before it has the ordered tokens."""

    ordered = "ordered"
    threshold = "threshold"
    thompson = "thompson"
    probability = "probability"
    gap = "gap"
    priced = "priced"


@dataclass(frozen=True, slots=True)
class PassDrafterConfig(PlacedDrafterConfig):
    """What all drafters have in common that draft by passes of a model: the shape of a draft, how its tokens are drawn,
    and how long it is."""

    strategy: Strategy = Strategy.chain
    """chain: one guess per position; tree: a fixed shape, `branching`; beam: the `width` best paths of every level
    (RSD-S); best_first: a tree grown where it is likely; dynamic: likewise, with one budget for the whole batch, and
    only while another pass pays; cape: a chain with more siblings where the model is less sure (asynchronous pipelines
    grow every tree as best_first)."""
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 5
    """Draft tokens a round, at most."""
    depth: Annotated[int, Range(1, cap=128)] = 5
    """strategy=tree, beam, best_first, dynamic or cape: longest path, in tokens; one draft pass for each."""
    width: Annotated[int, Range(1, cap=64)] = 2
    """strategy=tree, beam, best_first or dynamic: children per node of a tree that grows, at most; children of the root
    of a fixed one; paths of a beam."""
    branching: Annotated[list[int], Range(1, cap=64)] = field(default_factory=list)
    """strategy=tree: children of every node by its depth, as [4,2,1,1]; empty = `width` at the root and 1 below it,
    `depth` levels."""
    tree: str = ""
    """strategy=tree: a file of shapes, in place of `branching`: the best for measured acceptance (Sequoia), as written
    by `job=tree`."""
    draws: Draws = Draws.auto
    """A ratio rule, strategy=chain, tree or beam: whether the children of a node are drawn independently (SpecInfer,
    MCSD, SpecTr) or without_replacement (RSD); auto: without replacement, for verify=kseq and
    transport independently."""
    min_gain: Annotated[float, Range(0, zero="off")] = 0.0
    """strategy=best_first: accepted tokens that a level must be expected to add for another to be grown (OPT-Tree)."""
    merge_ngram: Annotated[int, Range(0, zero="off")] = 0
    """strategy=tree, best_first or dynamic, pipeline=sync or pingpong: paths of one length whose last so many tokens
    agree are fed once, and share their next distributions (GSD)."""
    batch_nodes: Annotated[int, Range(0, zero="each request its own")] = 0
    """strategy=dynamic, pipeline=sync or pingpong: draft tokens of a round, over all requests; 0 = `num_draft_tokens`
    for each."""
    length_rule: LengthRule = LengthRule.ordered
    """strategy=chain, pipeline=sync or pingpong: how long a draft is. ordered: as the coordinator orders, which with
    pipeline.adaptive=true follows from measured acceptance and cost; threshold: at most `num_draft_tokens`, and to the
    token after which the chance that one is rejected exceeds `rejection_threshold` (SpecDec++); thompson: each further
    token with a probability drawn from the posterior of the request's acceptance (EESD); probability: to the first
    token that the drafter itself gives less than `least_probability` (Kangaroo, Draft & Verify); gap: to the first
    token where the two likeliest are as close as where it is wrong with more than `rejection_threshold` (FREE); priced:
    as ordered, less the tokens that are not likely enough to be worth a row of the target's pass, with verify=coupled
    and pipeline.adaptive=true."""
    rejection_threshold: Annotated[float, Range(above=0, below=1, zero="as published")] = 0.0
    """length_rule=threshold or gap: chance of a rejected token from which on a draft ends; 0 = as published, 0.3 for
    threshold and 0.6 for gap."""
    least_probability: Annotated[float, Range(above=0, below=1, zero="follows acceptance")] = 0.0
    """length_rule=probability: a draft ends with the first token that the drafter gives less than this (Kangaroo: 0.6);
    0 = a threshold that is steered to where nine of ten tokens are accepted (Draft & Verify)."""
    fan_out: Annotated[int, Range(1, cap=1024)] = 6
    """pipeline=pearl, branches or tree: likely next tokens kept for every node, of which a verdict picks one."""
    ahead_width: Annotated[int, Range(1)] = 8
    """pipeline=pearl, branches or tree: nodes fed in one pass of draft-ahead. pipeline.adaptive=true: of each request,
    at most; how many is chosen from the measured cost of passes. false: always so many, over all requests."""
    calibration_policy: CalibrationPolicy = CalibrationPolicy.every
    """When KV rows of accepted draft tokens that were computed from nearly right inputs (parallel=layer, or a
    speculator's own features) are replaced by exact ones: every (`calibrate_every` rounds), mismatch (when a draft
    token was rejected), or never."""
    calibrate_every: Annotated[int, Range(1, remedy="see drafter.calibration_policy=never")] = 1
    """Rounds from one calibration to the next."""
    kv_slots: Annotated[int, Range(0, zero="sized automatically")] = 0
    """Token slots in the KV pool of each rank, as `target.kv_slots`; 0 = sized from the memory that is free."""
    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    """float32, bfloat16, float16, or auto, as `target.dtype`."""
    weights: Annotated[str, OneOf(WEIGHTS)] = "auto"
    """How matrices are stored, as `target.weights`; auto is int8 on a CPU if the checkpoint is bfloat16 and does not
    learn, since only acceptance depends on it."""
    attention: Annotated[str, OneOf(ATTENTION)] = "auto"
    """How attention is computed, as `target.attention`."""
    rows: DraftRows = DraftRows.full
    """Which KV rows of the text drafts attend to. full: all; streaming: the first `sinks` and the newest `window` ones,
    so that a draft model takes the same memory and time behind any text; its positions are counted from the first kept
    row, so a text may be longer than the model can read (StreamingLLM, TriForce); chunks: all are kept, and drafts
    attend to those `num_chunks` chunks of the text that the newest token attends to most, or that stand around these
    (TriForce, SpecExtend).
    drafter=self: drafts attend to so many of the target's rows, and no layer need be left out (MagicDec)."""
    sinks: Annotated[int, Range(1)] = 4
    """rows=streaming: first rows of the text."""
    window: Annotated[int, Range(8)] = 508
    """rows=streaming: newest rows of the text; an eighth more before the oldest of them leave."""
    chunk_size: Annotated[int, Range(1)] = 8
    """rows=chunks: rows of a chunk."""
    num_chunks: Annotated[int, Range(2)] = 128
    """rows=chunks: chunks that drafts attend to, the first one and the newest eighth of them included."""
    choose_every: Annotated[int, Range(1)] = 64
    """rows=chunks: tokens after which chunks are chosen again, by a pass that reads all rows; until then drafts attend
    to the newer tokens too. drafter=self: sooner after drafts of which no token was accepted."""
    pace_ms: Any = 0.0
    """Milliseconds that every pass of this drafter's model takes at least, as `target.pace_ms`; 0 = off."""
    runs_passes = True

    def check_fields(self, where: str) -> None:
        check_pace(where, self.pace_ms)
        is_tree = self.strategy is Strategy.tree
        remedy = f"is the shape of a fixed tree; add {where}.strategy=tree or drop it"
        require(is_tree or not self.branching, f"{where}.branching", self.branching, remedy)
        require(is_tree or not self.tree, f"{where}.tree", self.tree, remedy)
        remedy = f"contradicts {where}.branching={self.branching}; drop one of them"
        require(not (self.tree and self.branching), f"{where}.tree", self.tree, remedy)
        remedy = f"ends the growth of a best-first tree; add {where}.strategy=best_first or drop it"
        require(self.strategy is Strategy.best_first or not self.min_gain, f"{where}.min_gain", self.min_gain, remedy)
        merges = self.strategy in (Strategy.tree, Strategy.best_first, Strategy.dynamic)
        remedy = f"{where}.strategy={self.strategy} has no paths to merge; use tree, best_first or dynamic, or drop it"
        require(merges or not self.merge_ngram, f"{where}.merge_ngram", self.merge_ngram, remedy)
        remedy = f"{where}.strategy={self.strategy} takes the likeliest tokens and draws none; drop it"
        require(self.strategy in DRAWN or self.draws is Draws.auto, f"{where}.draws", self.draws, remedy)
        ends_early = self.length_rule is not LengthRule.ordered
        remedy = f"ends chains; leave {where}.strategy at chain or drop it"
        require(self.strategy is Strategy.chain or not ends_early, f"{where}.length_rule", self.length_rule, remedy)
        least, is_read = self.least_probability, self.length_rule is LengthRule.probability
        remedy = f"is the threshold of {where}.length_rule=probability; add that or drop it"
        require(is_read or not least, f"{where}.least_probability", least, remedy)
        remedy = f"the paths of {where}.strategy=beam are drawn without replacement; drop it or use strategy=tree"
        is_independent = self.draws is Draws.independent
        require(not (is_independent and self.strategy is Strategy.beam), f"{where}.draws", self.draws, remedy)
        nodes = self.batch_nodes
        remedy = f"is for trees that share a budget; add {where}.strategy=dynamic or drop it"
        require(self.strategy is Strategy.dynamic or not nodes, f"{where}.batch_nodes", nodes, remedy)
        counted = self.calibrate_every == 1 or self.calibration_policy is CalibrationPolicy.every
        remedy = "counts rounds; add drafter.calibration_policy=every or drop it"
        require(counted, f"{where}.calibrate_every", self.calibrate_every, remedy)

    @property
    def keeps_all_rows(self) -> bool:
        return self.rows is DraftRows.full

    @property
    def row_limits(self) -> RowLimits | ChunkLimits:
        """Those of `rows`, which is not `full`."""
        from parallel.kv.row_limits import ChunkLimits, RowLimits

        if self.rows is DraftRows.streaming:
            return RowLimits(self.sinks, self.window)
        return ChunkLimits(self.chunk_size, self.num_chunks, self.choose_every)

    @property
    def chooses_lengths(self) -> bool:
        return self.length_rule not in (LengthRule.ordered, LengthRule.priced)

    @property
    def paces_ms(self) -> list[Any]:
        return [self.pace_ms] if self.pace_ms else []

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        super(PassDrafterConfig, self).check_with(rule, pipeline, where)
        remedy = f"cannot end what pipeline={pipeline} prepares ahead of time; use sync or pingpong, or drop it"
        ends_early = self.length_rule is not LengthRule.ordered
        require(not (ends_early and pipeline.works_ahead), f"{where}.length_rule", self.length_rule, remedy)
        is_exact = self.length_rule is not LengthRule.priced or rule is VerifyRule.coupled
        remedy = "drops tokens by their probability, which is exact with verify=coupled only; use that or drop it"
        require(is_exact, f"{where}.length_rule", self.length_rule, remedy)
        nodes = self.batch_nodes
        remedy = f"drafts of pipeline={pipeline} are made one by one, ahead of time; use sync or pingpong, or drop it"
        require(not (nodes and pipeline.works_ahead), f"{where}.batch_nodes", nodes, remedy)
        merged = self.merge_ngram
        require(not (merged and pipeline.works_ahead), f"{where}.merge_ngram", merged, remedy)
        is_given = self.draws is not Draws.auto
        remedy = "verify=coupled draws with the noise that the target draws with; drop it or choose a ratio rule"
        require(not (is_given and rule is VerifyRule.coupled), f"{where}.draws", self.draws, remedy)
        remedy = f"pipeline={pipeline} takes the likeliest tokens and draws none; use sync or pingpong, or drop it"
        require(not (is_given and pipeline.works_ahead), f"{where}.draws", self.draws, remedy)

    def _tree_file(self, resolve: PathResolver, key: str) -> str:
        from actors.drafters.model.fixed_trees import read_trees  # loads numpy

        path = resolve.file(key, self.tree, "one made by job=tree")
        with errors_of(f"{key}={self.tree}"):
            read_trees(Path(path))
        return path

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        if self.strategy not in DRAWN or pipeline.works_ahead:
            return {SamplingKind.DETERMINISTIC}
        return {self.draw_kind(rule)}

    def draw_kind(self, rule: str) -> SamplingKind:
        """How children are drawn at random for a ratio rule."""
        by_rule = self.draws is Draws.auto and self.strategy is not Strategy.beam and rule in INDEPENDENT_ONLY
        is_independent = by_rule or self.draws is Draws.independent
        return SamplingKind.IID if is_independent else SamplingKind.WITHOUT_REPLACEMENT

    @property
    def widest(self) -> int:
        """Children of one node, at most."""
        fixed = {Strategy.chain: 1, Strategy.cape: WIDEST}
        return fixed.get(self.strategy, 0) or max(self.branching, default=self.width)

    @property
    def is_chain(self) -> bool:
        return self.strategy is Strategy.chain


LEARNS_ALONE = "learns as a drafter of its own, or with drafter=routed, only; drop it"


@dataclass(frozen=True, slots=True)
class LearningDrafterConfig(PassDrafterConfig):
    """A drafter whose weights can be learned while it serves."""

    online: bool = False
    """Learn from what the target said at verified rows, while the rank waits for records; see docs/online.md."""
    online_rate: Annotated[float, Range(above=0, high=1)] = 3e-4
    """online=true: learning rate of the adapters."""
    online_strength: Annotated[float, Range(0, 1)] = 1.0
    """online=true: how much of what was learned is served; 0: the shipped model, whatever is learned."""
    online_budget: Annotated[float, Range(above=0, high=1)] = 1.0
    """online=true: share of the time in which the draft rank waits for records that may be spent learning."""
    online_memory: Annotated[int, Range(32)] = 16384
    """online=true: positions that wait to be learned, at most; 110 bytes each, and a speculator's features."""
    online_state: str = ""
    """online=true: a file from which learning continues, and to which it is saved every 64 steps and at the end; empty
    = it starts anew and is lost."""

    def check_fields(self, where: str) -> None:
        self._check_learning(where)
        super(LearningDrafterConfig, self).check_fields(where)

    def _check_learning(self, where: str) -> None:
        remedy = "is for a drafter that learns; add drafter.online=true or drop it"
        require(self.online or not self.online_state, f"{where}.online_state", self.online_state, remedy)
        if not self.online:
            return
        field = f"{where}.online"
        remedy = "needs a rank that idles while the target works; use drafter.placement=separate"
        require(self.placement is not Placement.attached, field, True, remedy)
        require(self.weights != "packed", field, True, f"changes the weights; drop {where}.weights=packed")

    @property
    def needs_own_ranks(self) -> bool:
        return self.online

    @property
    def target_top_k(self) -> int:
        return 8 if self.online else 0

    @property
    def learns_later(self) -> bool:
        return self.online

    def with_state(self, where: str) -> Self:
        """The record with the absolute path of what was learned."""
        if not self.online_state:
            return self
        state = Path(self.online_state).absolute()
        remedy = "its folder does not exist; make it or name another file"
        require(state.parent.is_dir(), f"{where}.online_state", self.online_state, remedy)
        return replace(self, online_state=str(state))


@dataclass(frozen=True, slots=True)
class ModelDrafterConfig(LearningDrafterConfig):
    """A separate, smaller model."""

    name: str = "model"
    path: str = "pocket"
    """A checkpoint directory in Hugging Face format, a hub id, or a bundled one: `pocket` or `pocket-deep`."""
    ranks: Annotated[int, Range(1, cap=MAX_RANKS, remedy="for none write drafter=none")] = 1
    """Ranks that share the draft model."""
    kv_dtype: Annotated[str, OneOf(KV_DTYPES)] = "auto"
    """Type of stored keys and values, with the choices of `target.kv_dtype`."""
    mask_steps: Annotated[int, Range(0, cap=64, zero="the checkpoint's")] = 0
    """Passes in which a draft model that fills masks fills those of a draft (`job.recipe=specdiff`, pard); 0 = as its
    config.json says, which is 1 without `pard_steps`."""
    mask_drafts: Annotated[int, Range(1, cap=64)] = 1
    """Drafts that such a model makes side by side, each behind another of its likeliest first tokens, in each pass but
    the first: for strategy=tree, beam, best_first or dynamic, whose branches at the root then have a draft each."""
    num_threads: Annotated[int, Range(0, zero="one for every core of a rank")] = 0
    """CPU: threads of a rank, at most; 0 = one for every core that it has."""
    parallel: Parallel = Parallel.single
    """How they share it: single (one rank), tensor (every layer is split), or layer (the attention of several layers
    runs side by side on nearly right inputs: EasySpec)."""
    layer_group: Annotated[int, Range(0, zero="as many as ranks")] = 0
    """parallel=layer: layers side by side; 0 = as many as ranks, at most 4; 1 = one after the other. More than one on
    a single rank computes the same drafts without the speed."""
    layer_partition: list[Any] = field(default_factory=list)
    """parallel=layer: which layers, as sizes [1,3,3,1] or as layers [[0],[1,2],[3]]; empty = by `layer_group`, the
    first and the last layer alone."""
    mlp_parallel: MlpParallel = MlpParallel.auto
    """parallel=layer: replicated (every rank computes all MLPs), tensor (each is split over the ranks), or auto: what
    is faster, measured at the start."""
    calibration: Calibration = Calibration.recompute
    """parallel=layer: which rank computes exact KV rows: recompute (every rank by itself), owner (a rank holds the
    attention and KV of its own layers only), broadcast (rank 0, which sends them to the others)."""
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    """cpu, cuda, or auto, as `target.device`."""
    prefixes: Annotated[list[int], Range(1)] = field(default_factory=list)
    """Numbers of the model's first layers that may draft in its place (S2D), for a model that was trained so
    (`job.recipe=sorted`). One: they always do. Several: the prompt is read by the whole model, and every draft takes
    the fewest layers that were as sure as `prefix_confidence` at the latest ones. Empty = the whole model."""
    prefix_confidence: Annotated[float, Range(0, 1)] = 0.6
    """prefixes: least probability of the likeliest token, by so many layers, to draft with them; the mean over the
    latest drafts."""
    vocabulary: str = ""
    """A token list made by `job=vocabulary`: the model drafts these tokens only and computes no other logits; empty =
    all tokens."""
    vocabulary_size: Annotated[int, Range(0, zero="all of them")] = 0
    """Tokens of the list to draft, the most frequent first; 0 = all of them."""
    translate: Translation = Translation.auto
    """A draft model with another tokenizer than the target's: intersection (it drafts the tokens that both have),
    strings (it drafts a chain of its own tokens, whose text is encoded in the target's), or auto: intersection if the
    tokenizers differ, else nothing is translated."""
    tokenizer: str = ""
    """Checkpoint directory whose tokens a translated drafter proposes; empty = the target's."""

    @property
    def needs_own_ranks(self) -> bool:
        alone = self.ranks > 1 or self.num_threads > 0 or self.device != "auto"
        return self.online or alone or self.parallel is not Parallel.single

    def check_fields(self, where: str) -> None:
        remedy = "shares the target's ranks; drop it, the draft model is split as the target is"
        attached = self.placement is Placement.attached
        require(not attached or self.parallel is Parallel.single, f"{where}.parallel", self.parallel, remedy)
        path, shared = self.path, self.parallel is not Parallel.single
        require(bool(path), f"{where}.path", path, CHECKPOINT)
        check_weights(where, self.weights, self.dtype, self.device)
        check_kv_dtype(where, self.kv_dtype, self.attention)
        remedy = "needs a way to share the model; add drafter.parallel=tensor or layer"
        require(shared or self.ranks == 1, f"{where}.ranks", self.ranks, remedy)
        spells = self.translate is Translation.strings
        remedy = f"writes chains; use {where}.strategy=chain or {where}.translate=intersection"
        require(not spells or self.strategy is Strategy.chain, f"{where}.translate", self.translate, remedy)
        remedy = f"lists tokens that the model does not have; drop it or use {where}.translate=intersection"
        require(not (spells and self.vocabulary), f"{where}.vocabulary", self.vocabulary, remedy)
        size, remedy = self.vocabulary_size, f"counts tokens of a list; add {where}.vocabulary=FILE or drop it"
        require(bool(self.vocabulary) or not size, f"{where}.vocabulary_size", size, remedy)
        drafts, remedy = self.mask_drafts, f"differ from the second pass on; use {where}.mask_steps=2 or more"
        require(drafts == 1 or self.mask_steps != 1, f"{where}.mask_drafts", drafts, remedy)
        remedy = f"are branches of a tree; use {where}.strategy=tree, beam, best_first or dynamic, or drop it"
        require(drafts == 1 or self.strategy in BRANCHING, f"{where}.mask_drafts", drafts, remedy)
        self._check_layers(where)
        remedy = "runs a prefix of the layers one by one; drop it or use drafter.parallel=single or tensor"
        require(self.parallel is not Parallel.layer or not self.prefixes, f"{where}.prefixes", self.prefixes, remedy)
        partial = not self.keeps_all_rows
        remedy = f"has layers side by side, which keep all rows; drop it or use {where}.parallel=single or tensor"
        require(not partial or self.parallel is not Parallel.layer, f"{where}.rows", self.rows, remedy)
        remedy = f"contradicts {where}.prefixes, whose rows are read again by more layers; drop one of them"
        require(not (partial and self.prefixes), f"{where}.rows", self.rows, remedy)
        super(ModelDrafterConfig, self).check_fields(where)

    def _check_learning(self, where: str) -> None:
        super(ModelDrafterConfig, self)._check_learning(where)
        if not self.online:
            return
        field = f"{where}.online"
        require(not self.prefixes, field, True, f"learns with all layers; drop it or {where}.prefixes")
        remedy = "learns on one rank, which holds the whole model; use drafter.ranks=1 drafter.parallel=single"
        require(self.parallel is Parallel.single and self.ranks == 1, field, True, remedy)
        remedy = f"learns the target's own tokens; drop {where}.vocabulary and {where}.translate"
        require(not self.vocabulary and self.translate is Translation.auto, field, True, remedy)

    def _check_layers(self, where: str) -> None:
        by_layer = self.parallel is Parallel.layer
        group, partition = self.layer_group, self.layer_partition
        remedy = "is for layers that run side by side; add drafter.parallel=layer or leave it at"
        require(by_layer or group < 2, f"{where}.layer_group", group, f"{remedy} 0")
        require(by_layer or not partition, f"{where}.layer_partition", partition, f"{remedy} []")
        split = self.mlp_parallel is MlpParallel.tensor and self.calibration is Calibration.broadcast
        remedy = "the one rank that runs exact passes needs whole MLPs; use drafter.mlp_parallel=replicated"
        require(not split, f"{where}.calibration", self.calibration, remedy)

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        config = replace(self, path=resolve.checkpoint(f"{where}.path", self.path))
        if self.tree:
            config = replace(config, tree=self._tree_file(resolve, f"{where}.tree"))
        config = config._with_tokenizer(resolve, where)
        config = config.with_state(where)
        if not self.vocabulary:
            return config
        from actors.drafters.vocabulary.token_list import read_token_list
        from parallel.model.families.registry import read_config

        vocabulary = resolve.file(f"{where}.vocabulary", self.vocabulary, "one made by job=vocabulary")
        tokens = read_token_list(Path(vocabulary), Path(resolve.target), f"{where}.vocabulary")
        size = read_config(Path(resolve.target)).vocab_size
        remedy = f"names token {max(tokens)}, beyond the target's {size}; make one with job=vocabulary"
        require(max(tokens) < size, f"{where}.vocabulary", vocabulary, remedy)
        return replace(config, vocabulary=vocabulary)

    def _with_tokenizer(self, resolve: PathResolver, where: str) -> ModelDrafterConfig:
        """The record with the tokenizer to translate to, if the draft model is to be translated."""
        from actors.drafters.vocabulary.token_pieces import has_same_tokens

        tokenizer = resolve.checkpoint(f"{where}.tokenizer", self.tokenizer or resolve.target)
        same = has_same_tokens(Path(tokenizer), Path(self.path))
        remedy = "needs a tokenizer.json beside both models; save it there or drop it"
        require(self.translate is Translation.auto or same is not None, f"{where}.translate", self.translate, remedy)
        translates = same is False or self.translate is not Translation.auto
        return replace(self, tokenizer=tokenizer if translates else "")

    def check_checkpoints(self, where: str = "drafter") -> None:
        if self.tokenizer or self.vocabulary:
            from actors.drafters.model.loading import head_rows

            with errors_of(f"{where}.path", "use another drafter or token list"):
                head_rows(self)
        from parallel.model.families.registry import read_config

        num_layers, deepest = read_config(self.path).num_layers, max(self.prefixes, default=0)
        remedy = f"{self.path} has {num_layers} layers; name none above"
        require(deepest <= num_layers, f"{where}.prefixes", self.prefixes, remedy)
        if not self.keeps_all_rows:
            from parallel.kv.row_limits import RowLimits, check_partial

            with errors_of(f"{where}.rows={self.rows}"):
                limits = self.row_limits
                check_partial(read_config(self.path), limits if isinstance(limits, RowLimits) else None)
        if self.online:
            remedy = f"learns tokens of the target's own tokenizer, and {self.path} has another; drop it"
            require(not self.tokenizer, f"{where}.online", True, remedy)
            with errors_of(f"{where}.online=True"):
                read_config(self.path).check_adaptable()
        if self.parallel is Parallel.tensor:
            read_config(self.path).check_ranks(self.ranks, f"{where}.ranks")
        if self.parallel is Parallel.layer:
            from actors.drafters.model.layer_partition import layer_partition

            try:
                layer_partition(self, read_config(self.path))
            except ValueError as error:
                raise ValueError(str(error).replace("drafter.", f"{where}.")) from None

    def models(self) -> list[str]:
        return [self.path]

    def models_of(self, role: str, pipeline: str) -> Sequence[DrafterConfig]:
        own = "target" if self.is_attached(pipeline) else TOP
        return [self] if role == own else []

    def memory(self, ranks: int, device: str) -> tuple[int, int]:
        """Bytes of the weights on one of the ranks that share the model's tensors, and of a KV slot there."""
        from parallel.model.families.registry import read_config
        from parallel.runtime.model_bytes import model_memory

        shapes, types = read_config(self.path), (self.dtype, self.weights, self.kv_dtype)
        return model_memory(shapes, self.path, ranks, device, types, rounds=not self.online)

    def memory_beside(
        self, target: TargetConfig, ranks: int, device: str, scheduler: SchedulerConfig
    ) -> tuple[int, int]:
        weights, per_slot = self.memory(ranks, device)
        streams = self.rows is DraftRows.streaming
        slots = self.kv_slots or (scheduler.max_num_seqs * self.most_rows(scheduler) if streams else 0)
        return (weights + slots * per_slot, 0) if slots else (weights, per_slot)

    def most_rows(self, scheduler: SchedulerConfig, longest: int = 0) -> int:
        """KV rows of one request, at most: `longest` positions of the model, or what streaming keeps."""
        if self.rows is not DraftRows.streaming:
            return longest
        from parallel.kv.row_limits import RowLimits

        drafted = max(self.num_draft_tokens, self.ahead_width * self.depth)
        most = RowLimits(self.sinks, self.window).most_with(scheduler.prefill_chunk, drafted)
        return min(most, longest) if longest else most

    def translated_models(self) -> list[str]:
        return [self.path] if self.tokenizer else []

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        if self.translate is Translation.strings:
            return {SamplingKind.DETERMINISTIC}
        return super(ModelDrafterConfig, self).sampling_kinds(rule, pipeline)

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.model.loading import build_model_drafter

        return build_model_drafter(self, setup)
