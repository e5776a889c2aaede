"""Prompts, sampling and threads of a setting, and the names of the sides that complete them. Knows no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from actors.protocol.messages import SamplingParams
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.observability.results import Run
from cluster.placement.ranks import RankPlacement
from cluster.tools.bench.plan import Setting
from cluster.tools.training.corpus import library_sources, load_corpus

SPECULATIVE = "speculative"
PLAIN = "plain"
"""This engine, with and without speculation; every trial has these two sides."""

Trial = dict[str, Run]
"""One repeat of one setting: a run per side."""


def peer_sides(sides: Iterable[str]) -> list[str]:
    """The sides that are not the engine's own, each once, in order."""
    return [side for side in dict.fromkeys(sides) if side not in (SPECULATIVE, PLAIN)]


@dataclass(frozen=True, slots=True)
class BenchTask:
    """The work of a setting. `num_threads` is the number that plain decoding computes with; a peer gets as many."""

    setting: Setting
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    num_threads: int

    def warm_up(self) -> BenchTask:
        """Runs as many prompts as are in flight."""
        return replace(self, prompts=self.prompts[: self.setting.batch])


def make_task(
    setting: Setting,
    config: LaunchConfig,
    prompts: Sequence[Prompt],
    engine: Engine,
    plain_places: Sequence[RankPlacement],
) -> BenchTask:
    """Raise ValueError, one line, if no prompt leaves room for the answer."""
    sampling = setting.configure(config).sampling_params(engine.tokenizer)
    facts = engine.ready["target-0"].facts
    # what an encoder reads leaves the room of the answer as it is
    max_tokens, room = (0, source) if (source := facts.get("max_source_len")) else (sampling.max_tokens, None)
    room = int(room or facts["max_model_len"])
    if setting.context:
        made = of_length(prompts, setting.context, engine.tokenizer, max_tokens, room)
    else:
        made = fitting(prompts, engine.tokenizer, max_tokens, room)
    return BenchTask(setting, tuple(made), sampling, num_target_threads(plain_places))


def num_target_threads(places: Iterable[RankPlacement]) -> int:
    """Threads of all ranks of the target together."""
    return sum(place.num_threads for place in places if place.role == "target")


def fitting(prompts: Sequence[Prompt], tokenizer: Tokenizer, max_tokens: int, max_model_len: int) -> list[Prompt]:
    """The prompts, tokenized, that leave room for `max_tokens`; a request that is cut short measures less work."""
    ids = [tuple(tokenizer.encode(prompt.text).ids) for prompt in prompts]
    kept = [
        replace(prompt, token_ids=token_ids)
        for prompt, token_ids in zip(prompts, ids, strict=True)
        if len(token_ids) + max_tokens <= max_model_len
    ]
    if not kept:
        raise ValueError(
            f"job.prompts: the shortest has {min(map(len, ids))} tokens and leaves no room for "
            f"sampling.max_tokens={max_tokens} in the context of {max_model_len}; lower sampling.max_tokens or give "
            "shorter prompts"
        )
    return kept


def of_length(
    prompts: Sequence[Prompt], length: int, tokenizer: Tokenizer, max_tokens: int, max_model_len: int
) -> list[Prompt]:
    """One prompt of exactly `length` tokens per prompt: its own text, the texts that follow it in the file, then
    modules of the standard library that no other prompt has. No text comes twice: lookups would draft the second."""
    if length + max_tokens > max_model_len:
        raise ValueError(
            f"job.contexts={length}: with sampling.max_tokens={max_tokens} it exceeds the context of {max_model_len}; "
            "lower one of them"
        )
    made, modules = list[Prompt](), list[str]()
    for index, prompt in enumerate(prompts):
        texts = [*dict.fromkeys(other.text for other in (*prompts[index:], *prompts[:index]))]
        ids = tokenizer.encode("\n\n".join(texts)).ids
        if len(ids) < length and not modules:
            modules = [source.text for source in library_sources(load_corpus(0))]
        further = iter(modules[index :: len(prompts)])
        while len(ids) < length:
            if (text := next(further, None)) is None:
                raise ValueError(
                    f"job.contexts={length}: a prompt with all texts that follow it has {len(ids)} tokens, and none is "
                    "repeated; lower it or give longer prompts"
                )
            texts.append(text)
            ids = tokenizer.encode("\n\n".join(texts)).ids
        made.append(replace(prompt, text=tokenizer.decode(ids[:length]), token_ids=tuple(ids[:length])))
    return made
