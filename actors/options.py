"""The options of the roles: target, verification rule, pipeline, scheduler, sampling.

One frozen record per section of the command line, with its defaults; the type of a field declares its range and the
docstring under it is its documentation (docs/options.md, `--help KEY`). The records of the drafters stand beside the
drafters (`actors/drafters/registry.py`). Standard library only. It must not know Hydra, devices, files or how an option
is carried out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from actors.protocol.sampling_params import ADDED_PENALTY, NGRAM, REPETITION_PENALTY, SEED, TEMPERATURE, SamplingParams
from parallel.ranges import OneOf, Range, Section, require

CHECKPOINT = "give a directory with a Hugging Face checkpoint, or a hub id"
MAX_RANKS = 1024
"""Ranks of a role: more are refused before a layout of them is computed."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "packed", "bfloat16", "int8", "w8a8")
DEVICES = ("auto", "cpu", "cuda")
KV_DTYPES = ("auto", "fp8")
NUMERICS = ("fast", "invariant")
DECODERS = ("auto", "static", "prefix", "dual")
LOCAL_DRAFTERS = ("none", "ngram", "suffix", "maxgram", "copy")
ATTENTION = ("auto", "triton", "padded", "sdpa", "ragged")


class VerifyRule(StrEnum):
    """Which draft tokens are accepted; every rule keeps the target's output distribution."""

    coupled = "coupled"
    rejection = "rejection"
    block = "block"
    traversal = "traversal"
    kseq = "kseq"
    transport = "transport"
    auto = "auto"


INDEPENDENT_ONLY = (VerifyRule.kseq, VerifyRule.transport)
"""Rules for siblings that are drawn independently, and for no other drafts."""


class Parallel(StrEnum):
    """How the ranks of a draft model share its work."""

    single = "single"
    tensor = "tensor"
    layer = "layer"


class PipelineName(StrEnum):
    """The order in which the roles work."""

    plain = "plain"  # every pass verifies empty proposals: the baseline and the fallback
    sync = "sync"  # the whole batch is drafted for, then the whole batch is verified
    pearl = "pearl"
    branches = "branches"
    tree = "tree"
    pingpong = "pingpong"

    @property
    def drafts(self) -> bool:
        return self is not PipelineName.plain

    @property
    def works_ahead(self) -> bool:
        """The drafter prepares for the outcomes of a verdict while the target computes it: the three differ in what."""
        return self in (PipelineName.pearl, PipelineName.branches, PipelineName.tree)

    @property
    def alternates(self) -> bool:
        """Two halves of the batch take turns: while the target verifies one, the drafter drafts for the other. No
        outcome has to be guessed; it takes at least two requests (MineDraft, arXiv 2603.18016)."""
        return self is PipelineName.pingpong


@dataclass(frozen=True, slots=True)
class TargetConfig(Section):
    """The model whose output is preserved."""

    name: str = "pocket"
    """Set by the choice `target=`."""
    path: str = "pocket"
    """A checkpoint directory in Hugging Face format, a hub id, or `pocket` for the bundled target."""
    tp: Annotated[int, Range(1, cap=MAX_RANKS)] = 1
    """Tensor-parallel ranks, each on a device of its own."""
    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    """float32, bfloat16, float16, or auto: the checkpoint's on a GPU, float32 on a CPU. bfloat16 on a CPU reads half of
    the bytes and multiplies by the processor's own dot products where it has them."""
    weights: Annotated[str, OneOf(WEIGHTS)] = "auto"
    """How matrices are stored: fewer bytes are read faster. CPU: bfloat16 or int8 (a factor for every output) beside
    float32 activations; w8a8: int8 for rows that are rounded to int8 too, each by its largest number, beside float32 or
    bfloat16; the output is that of the rounded model. CUDA: packed, the codes of a quantised checkpoint, which a kernel
    of ours multiplies by, or bfloat16, to dequantise them at the start. auto: packed if the checkpoint is quantised, on
    CUDA; bfloat16 if its matrices are, on a CPU, which rounds nothing; else `dtype`; never w8a8."""
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    attention: Annotated[str, OneOf(ATTENTION)] = "auto"
    """How attention and what surrounds it are computed: triton (kernels of ours on CUDA), padded (PyTorch, a batch as
    one rectangle), sdpa (PyTorch, sequence by sequence), ragged (a kernel of ours on a CPU), or auto: the fastest that
    can be had."""
    all_reduce: Annotated[str, OneOf(("nccl", "symmetric"))] = "nccl"
    """How GPUs add up a layer's small tensors with tp: nccl, whose ranks survive the death of one with their weights;
    or symmetric: in one step over memory that the GPUs of a node map, else nccl and a warning. Its waits cannot be
    aborted: when a rank dies, all ranks of the target end and are started anew, cluster.max_restarts times."""
    stretch: Annotated[int, Range(0, cap=10_000, zero="off")] = 0
    """Extra layers that change no token: a larger model on a small machine. Reports show when it is on."""
    max_model_len: Annotated[int, Range(0, zero="the checkpoint's")] = 0
    """Longest sequence in tokens, prompt included, at most the checkpoint's limit; 0 = that."""
    kv_slots: Annotated[int, Range(0, zero="sized automatically")] = 0
    """Token slots in the KV pool of each rank; 0 = sized from the memory that is free."""
    kv_dtype: Annotated[str, OneOf(KV_DTYPES)] = "auto"
    """Type of stored keys and values: fp8 (e4m3, with the checkpoint's scales or 1), or auto, the model's type. With
    fp8 two or four times the tokens fit, and the output is that of the target with rounded keys and values."""
    numerics: Annotated[str, OneOf(NUMERICS)] = "fast"
    """invariant: a token's logits have the same bits alone, beside other requests, in a prompt, a draft and a tree, so
    that greedy and seeded tokens depend on neither the company nor the drafter, in bfloat16 too. On a GPU it is slower,
    needs Triton and was never run; on a CPU it needs a C++ compiler, whose kernels do so anyway. fast: the fastest
    order of sums."""
    decoder: Annotated[str, OneOf(DECODERS)] = "auto"
    """static: fill the masks of a masked-diffusion target (SDAR, TraDo, LLaDA, Dream) block by block, the surest first.
    Of LLaDA and Dream, whose rows see the whole text, prefix and dual keep rows from the start of a block to its end,
    those before it, or also those behind it: a pass is cheaper, and the text another. auto: static, or token by token,
    as the checkpoint is. What it writes is that decoder's, whatever `num_states` is."""
    num_states: Annotated[int, Range(1, cap=1024)] = 4
    """States of a block that a masked-diffusion target computes in one pass, the present one's successor and guesses
    of those after it (FreeDave); 1 = one after the other."""
    unmask_threshold: Annotated[float, Range(0, 1)] = 0.0
    """A masked-diffusion target fills all masks of which it is this sure, and at least one; 0 = one at a time. Another
    value writes another text."""
    pace_ms: Any = 0.0
    """Milliseconds that every pass takes at least, with the host idle for the rest, as beside a GPU: what overlap is
    worth at a GPU's pass times, with a small model's tokens. A number, or a table by rows as job=plan writes it:
    {1: 15.0, 16: 16.2}; 0 = off. Reports say that it was on."""

    @property
    def is_invariant(self) -> bool:
        return self.numerics == "invariant"

    def check_fields(self, where: str) -> None:
        known = self.name in ("pocket", "hf")
        require(known, f"{where}.name", self.name, "is set by target=pocket or target=hf; drop it")
        require(bool(self.path), f"{where}.path", self.path, CHECKPOINT)
        check_weights(where, self.weights, self.dtype, self.device)
        has_gpus = self.all_reduce == "nccl" or self.device != "cpu"
        require(has_gpus, f"{where}.all_reduce", self.all_reduce, f"needs GPUs; set {where}.device=cuda or drop it")
        check_kv_dtype(where, self.kv_dtype, self.attention)
        check_numerics(where, self)
        check_pace(where, self.pace_ms)


def check_weights(where: str, weights: str, dtype: str, device: str) -> None:
    """ValueError if weights are to be stored in a type that cannot be multiplied by there."""
    is_possible = weights in ("auto", "packed", dtype) or (device != "cuda" and dtype in ("auto", "float32"))
    is_possible |= weights == "bfloat16" and device == "cuda" and dtype == "auto"
    types = "float32 or bfloat16" if weights == "w8a8" else "float32"
    if weights == "w8a8":
        is_possible = device != "cuda" and dtype != "float16"
    remedy = f"needs {where}.device=cpu and {where}.dtype={types}; set them or drop it"
    require(is_possible, f"{where}.weights", weights, remedy)


def check_kv_dtype(where: str, kv_dtype: str, attention: str) -> None:
    """ValueError if an attention is asked for that does not read such rows."""
    remedy = f"is not read by {where}.attention=ragged; use sdpa or padded there, or drop one of them"
    require(kv_dtype == "auto" or attention != "ragged", f"{where}.kv_dtype", kv_dtype, remedy)


def check_numerics(where: str, target: TargetConfig) -> None:
    """ValueError if invariant results are asked of what computes rows together."""
    if not target.is_invariant:
        return
    remedy = f"has no {where}.attention={target.attention}, which computes rows together; drop one of them"
    require(target.attention not in ("sdpa", "padded"), f"{where}.numerics", target.numerics, remedy)
    remedy = f"adds in rank order, and {where}.all_reduce=symmetric by sizes; drop one of them"
    require(target.all_reduce == "nccl", f"{where}.numerics", target.numerics, remedy)
    on_cpu = f"{where}.kv_dtype=fp8 is read on a CPU by kernels that compute rows together; drop one of them"
    require(target.kv_dtype == "auto" or target.device != "cpu", f"{where}.numerics", target.numerics, on_cpu)


LONGEST_PACE_MS = 1000
"""A drafter whose draft takes ten seconds counts as hanging."""


def check_pace(where: str, pace_ms: Any) -> None:
    """ValueError unless it is milliseconds, or milliseconds by ascending rows from 1 on."""
    table = pace_ms if isinstance(pace_ms, dict) else {1: pace_ms}
    rows, times = list(table), list(table.values())
    is_table = bool(rows) and all(type(at) is int and at >= 1 for at in rows) and rows == sorted(rows)
    is_time = all(type(ms) in (int, float) and 0 <= ms <= LONGEST_PACE_MS for ms in times)
    remedy = f"must be milliseconds from 0 (off) to {LONGEST_PACE_MS}, or a table by rows, as {{1: 15.0, 16: 16.2}}"
    require(is_table and is_time, f"{where}.pace_ms", pace_ms, remedy)


@dataclass(frozen=True, slots=True)
class VerifyConfig(Section):
    """The rule that decides which draft tokens stand."""

    rule: VerifyRule = VerifyRule.coupled
    """coupled: target and drafter share their noise, so that sampled text does not depend on the drafter; rejection:
    recursive rejection sampling; block: block verification, for chains; traversal: traversal verification, the same for
    trees; kseq: K-SEQ, for drafts that are drawn independently; transport: optimal transport, which accepts the most of
    those at every node. These five need draft probabilities. auto: block for chains that a model draws at a temperature
    above 0, else coupled: the one of them that accepts the most tokens."""
    law_size: Annotated[int, Range(1)] = 64
    """Entries of a draft distribution that are sent to the target for every rule but coupled. The drafter
    samples from the distribution cut to this size, so the output stays exact."""


@dataclass(frozen=True, slots=True)
class PipelineConfig(Section):
    """The order of drafting and verification."""

    name: PipelineName = PipelineName.sync
    """plain: no speculation; sync: draft, then verify, in turn; the others draft while the target verifies: pearl runs
    ahead on one chain, branches prepares every likely outcome, tree grows one tree that each verdict re-roots,
    pingpong alternates between two halves of the batch."""
    adaptive: bool = True
    """true: choose draft lengths from measured costs and acceptance, at most `drafter.num_draft_tokens`, and the number
    of prepared outcomes, at most `drafter.ahead_width` of each request; wait for a late draft only while it pays, draft
    ahead only while that measures faster than in turn, and decode plainly while that does. false: every draft has the
    configured length and is waited for, at most ten seconds, after which the drafter counts as hanging."""
    min_draft_tokens: Annotated[int, Range(0)] = 0
    """Shortest draft that `adaptive` may choose, in tokens; above 0 it waits for drafts and never falls back to plain
    decoding."""
    local_drafter: Annotated[str, OneOf(LOCAL_DRAFTERS)] = "none"
    """pearl, branches or tree with drafter=model or pool far away: drafts are never waited for. The drafter sends what
    it has prepared all the time, which is used where it fits the text by then; elsewhere this lookup drafts, on the
    coordinator's machine. none = drafts that were not prepared are waited for."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Section):
    """Bounds on one target pass."""

    max_num_seqs: Annotated[int, Range(1)] = 64
    """Sequences that run at a time."""
    max_num_batched_tokens: Annotated[int, Range(1)] = 2048
    """Rows of one pass in all: prompt chunks, roots and draft tokens; of a masked-diffusion target prompt chunks and
    states of blocks, of which guesses are dropped first, and what is left over is computed in further passes."""
    prefill_chunk: Annotated[int, Range(1)] = 512
    """Rows of one prompt in one pass; longer prompts take several passes, between which other sequences go on."""
    prefix_cache: bool = True
    """Keep the KV rows of ended requests until their slots are needed, for requests that begin with the same tokens."""
    text_pass_ms: Annotated[float, Range(0, zero="no bound")] = 150.0
    """While requests decode, a pass reads as many rows of prompts as take about so many milliseconds by what passes
    took, or eight passes without prompts where those take longer: for so long no stream gains a token. 0 = as many as
    the limits above allow. Masked-diffusion targets have no such bound."""


@dataclass(frozen=True, slots=True)
class SamplingConfig(Section):
    """How the requests of this run are sampled; names and meaning are vLLM's."""

    temperature: Annotated[float, TEMPERATURE] = 0.0
    """Divides the logits; 0 = greedy decoding."""
    top_k: Annotated[int, Range(0, zero="all")] = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """Keep the likeliest tokens up to this probability mass; 1 = all."""
    min_p: Annotated[float, Range(0, 1)] = 0.0
    """Keep tokens whose probability is at least this share of the likeliest one's; 0 = all."""
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    """Divides the positive logits of tokens in prompt or output, multiplies the negative ones; 1 = off."""
    presence_penalty: Annotated[float, ADDED_PENALTY] = 0.0
    """Subtracted once from the logits of tokens in the output; 0 = off."""
    frequency_penalty: Annotated[float, ADDED_PENALTY] = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence; 0 = off."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, as `{42: -5.0}`: at most 300, each between -100 and 100."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that must not be generated: at most 300 words of tokens, 8192 tokens in all."""
    allowed_token_ids: Annotated[list[int], Range(0)] = field(default_factory=list)
    """Token ids of which the output consists, at most 1024; [] = all. It ends early only if its end token is one."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the output; they are not part of it. At most 64, of 8192 characters in all."""
    stop_token_ids: Annotated[list[int], Range(0)] = field(default_factory=list)
    """Token ids that end the output, at most 128."""
    min_tokens: Annotated[int, Range(0)] = 0
    """Tokens before which the output does not end; at most `sampling.max_tokens`."""
    max_tokens: Annotated[int, Range(1)] = 128
    """Tokens per request, at most."""
    ignore_eos: bool = False
    """Continue after the end-of-text token, for measurements of a fixed length."""
    seed: Annotated[int, SEED] = 0
    """Seed of the noise; with prompt and settings it decides every sampled token."""
    no_repeat_ngram_size: Annotated[int, NGRAM] = 0
    """So many tokens stand in a text only once in one order; 0 = off, or as an encoder-decoder's checkpoint says."""

    def check_fields(self, where: str) -> None:
        self.params().check()
        is_filled = all(map(str.strip, self.bad_words))
        require(is_filled, f"{where}.bad_words", self.bad_words, "must not hold an empty text")

    def params(self, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
        """The record that travels with a request; `bad_words` are already tokenised."""
        lists = {name: tuple(getattr(self, name)) for name in ("stop", "stop_token_ids", "allowed_token_ids")}
        pairs = {"bad_words": bad_words, "logit_bias": tuple(self.logit_bias.items())}
        return SamplingParams(**{**asdict(self), **lists, **pairs})
