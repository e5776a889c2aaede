"""What a user may choose about the roles: target, verification rule, pipeline, sampling, batching.

One frozen record per choice, a docstring under each field; the defaults here are the defaults of the command line.
The records of the drafters stand beside the drafters (`actors/drafters/registry.py`). Standard library only. It must
not know Hydra, devices, files or how a choice is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from actors.protocol.messages import SamplingParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


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
