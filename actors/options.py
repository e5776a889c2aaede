"""What a user may choose about the roles: target, drafter, verification rule, pipeline, sampling, batching.

One frozen record per choice, a docstring under each field; the defaults here are the defaults of the command line.
Standard library only. It must not know Hydra, devices, files or how a choice is carried out; what may be combined
with what is checked in `cluster/config/schema.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from actors.protocol.messages import SamplingParams


class Parallel(StrEnum):
    """How the ranks of a draft model share its work."""

    single = "single"
    tensor = "tensor"
    layer = "layer"


class MlpParallel(StrEnum):
    """How layer-parallel ranks run the MLPs."""

    auto = "auto"
    replicated = "replicated"
    tensor = "tensor"


class Calibration(StrEnum):
    """Which rank makes the exact KV rows that replace fuzzy ones."""

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
    best_first = "best_first"
    dynamic = "dynamic"


class VerifyRule(StrEnum):
    """Which draft tokens are accepted; every rule keeps the target's output law."""

    coupled = "coupled"
    rejection = "rejection"
    traversal = "traversal"
    kseq = "kseq"


class PipelineName(StrEnum):
    """In which order the roles work."""

    plain = "plain"
    sync = "sync"
    pearl = "pearl"
    branches = "branches"
    tree = "tree"
    pingpong = "pingpong"


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model whose output is preserved."""

    name: str = "pocket"
    """Set by the choice `target=`."""
    path: str = "pocket"
    """A checkpoint directory in Hugging Face format, a hub id, or `pocket` for the bundled target."""
    tp: int = 1
    """Tensor-parallel ranks."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: the checkpoint's on a GPU, float32 on a CPU."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    stretch: int = 0
    """Extra layers that change no token: a larger model on a small machine. Reports say when it is on."""
    max_model_len: int = 0
    """Longest sequence in tokens, prompt included; 0 = the checkpoint's limit."""
    kv_slots: int = 0
    """Token slots in the KV pool; 0 = sized from the memory that is free."""


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What every family of drafters has."""

    name: str = ""
    """Set by the choice `drafter=`."""


@dataclass(frozen=True, slots=True)
class NoDrafterConfig(DrafterConfig):
    """Nobody drafts: every proposal is empty."""

    name: str = "none"
    """Set by the choice `drafter=`."""


@dataclass(frozen=True, slots=True)
class NgramDrafterConfig(DrafterConfig):
    """Prompt lookup: what followed the last occurrence of the current n-gram."""

    name: str = "ngram"
    """Set by the choice `drafter=`."""
    num_draft_tokens: int = 5
    """Draft tokens a round, at most."""
    max_ngram: int = 4
    """Longest n-gram looked up; the longest match wins."""
    min_ngram: int = 2
    """Shortest n-gram worth following."""


@dataclass(frozen=True, slots=True)
class SuffixDrafterConfig(DrafterConfig):
    """Suffix lookup: what followed the longest match in this request's text, in others' answers and in a corpus."""

    name: str = "suffix"
    """Set by the choice `drafter=`."""
    num_draft_tokens: int = 8
    """Draft tokens a round, at most."""
    min_match: int = 2
    """Shortest match worth following, in tokens."""
    tokens_per_match: float = 2.0
    """Draft tokens for every matched token: the longer the match, the longer the draft."""
    min_probability: float = 0.1
    """A draft ends where its path followed in fewer of the matches than this."""
    width: int = 1
    """Followers tried behind every node, the likeliest first; 1 = a chain."""
    shared_tokens: int = 250_000
    """Tokens of finished requests' answers to draft from, the oldest dropped first; 0 = requests share nothing."""
    corpus: str = ""
    """Text to draft from, read at start: a text file, or JSONL with a `text` or `prompt` field; empty = none."""
    tokenizer: str = ""
    """Checkpoint directory whose tokenizer reads the corpus; empty = the target's."""


@dataclass(frozen=True, slots=True)
class MaxgramDrafterConfig(DrafterConfig):
    """What followed the longest match of the text's end, then bigrams: always says something. Base of cascades."""

    name: str = "maxgram"
    """Set by the choice `drafter=`."""
    num_draft_tokens: int = 5
    """Draft tokens a round, at most."""
    max_places: int = 64
    """Earlier places of the last token that are compared, the latest ones."""
    shared_bigrams: bool = True
    """Bigrams of finished requests help where a request's own end; false = requests share nothing."""


@dataclass(frozen=True, slots=True)
class ModelDrafterConfig(DrafterConfig):
    """A separate, smaller model with the target's vocabulary."""

    name: str = "model"
    """Set by the choice `drafter=`."""
    path: str = "pocket"
    """A checkpoint directory in Hugging Face format, a hub id, or a bundled one: `pocket` or `pocket-deep`."""
    ranks: int = 1
    """Ranks that share the draft model."""
    num_threads: int = 0
    """CPU: threads of a rank, at most; 0 = one for every core that it has."""
    parallel: Parallel = Parallel.single
    """How they share it: single (one rank), tensor (every layer is split), or layer (the attention of several layers
    runs side by side on nearly right inputs: EasySpec)."""
    layer_group: int = 0
    """parallel=layer: layers side by side; 0 = as many as ranks, at most 4; 1 = one after the other. More than one on
    a single rank computes the same drafts without the speed."""
    layer_partition: list[Any] = field(default_factory=list)
    """parallel=layer: which layers, as sizes [1,3,3,1] or as layers [[0],[1,2],[3]]; empty = by `layer_group`, the
    first and the last layer alone."""
    mlp_parallel: MlpParallel = MlpParallel.auto
    """parallel=layer: replicated (every rank computes all MLPs), tensor (each is split over the ranks), or auto: what
    is faster, measured at the start."""
    calibration: Calibration = Calibration.recompute
    """parallel=layer: who makes exact KV rows: recompute (every rank by itself), owner (a rank holds the attention
    and KV of its own layers only), broadcast (rank 0, which sends them out)."""
    calibration_policy: CalibrationPolicy = CalibrationPolicy.every
    """parallel=layer: every (`calibrate_every` rounds), mismatch (when a draft token was rejected), or never."""
    calibrate_every: int = 1
    """parallel=layer: rounds from one calibration to the next."""
    strategy: Strategy = Strategy.chain
    """chain: one guess per position; tree: `width` children per node; best_first: a tree grown where it is likely;
    dynamic: likewise, with one budget for the whole batch, and only while another pass pays (asynchronous pipelines:
    as best_first)."""
    num_draft_tokens: int = 5
    """Draft tokens a round, at most."""
    depth: int = 5
    """Longest path of a tree."""
    width: int = 2
    """Children per node of a tree; of a dynamic one, at most."""
    batch_nodes: int = 0
    """strategy=dynamic, pipeline=sync or pingpong: draft tokens of a round, over all requests; 0 = `num_draft_tokens`
    for each."""
    fan_out: int = 6
    """Asynchronous pipelines: likely next tokens remembered behind every node."""
    ahead_width: int = 8
    """Asynchronous pipelines: nodes fed in one pass of draft-ahead. pipeline.adaptive=true: of each request, at most;
    how many is chosen by what passes cost. false: always so many, over all requests."""
    kv_slots: int = 0
    """As `target.kv_slots`."""
    dtype: str = "auto"
    """As `target.dtype`."""
    device: str = "auto"
    """As `target.device`."""


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """How proposals are verified."""

    rule: VerifyRule = VerifyRule.coupled
    """coupled needs no draft probabilities and makes sampled text independent of the drafter."""
    law_size: int = 64
    """Entries of a draft law that a ratio rule is sent; the drafter really samples from the law cut to this size."""


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How drafting and verification interleave."""

    name: PipelineName = PipelineName.sync
    """plain: no speculation; sync: draft, then verify, in turn; the others draft while the target verifies: pearl runs
    ahead on one chain, branches prepares every likely outcome, tree grows one tree that each verdict re-roots,
    pingpong alternates between two halves of the batch."""
    adaptive: bool = True
    """Choose draft lengths from measured costs and acceptance, at most `drafter.num_draft_tokens`, and how many
    outcomes are prepared for, at most `drafter.ahead_width` of each request; wait for a late draft only while it pays,
    and decode plainly while that measures faster. false: every draft is as long as the drafter's setting and waited
    for, up to ten seconds, after which the drafter must hang."""
    min_draft_tokens: int = 0
    """Shortest draft that `adaptive` may choose; above 0 it waits for drafts and never falls back to plain
    decoding."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds on one target pass."""

    max_num_seqs: int = 16
    """Sequences that run at a time."""
    max_num_batched_tokens: int = 2048
    """Rows of one pass in all: prompt chunks, roots and draft tokens."""
    prefill_chunk: int = 512
    """Rows of one prompt in one pass."""


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How requests of this run want their tokens; names and meaning are vLLM's."""

    temperature: float = 0.0
    """0 = greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens seen in prompt or output; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, as `{42: -5.0}`."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that must not be generated."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the output; they are not part of it."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end the output."""
    min_tokens: int = 0
    """No end of text before so many tokens."""
    max_tokens: int = 128
    """Tokens per request, at most."""
    ignore_eos: bool = False
    """Go on behind the end of text, for measuring."""
    seed: int = 0
    """With prompt and settings it decides every sampled token."""

    def params(self, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
        """The same wish in the engine's words; `bad_words` are already tokenised."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=bad_words,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )
