"""What every side of a setting is given: the same prompts as token ids, sampling, and threads. Knows no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from actors.protocol.messages import SamplingParams
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.tools.bench.plan import Setting


@dataclass(frozen=True, slots=True)
class Task:
    """A setting's work. `num_threads` is what the target role computes with; a peer gets as many."""

    setting: Setting
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    num_threads: int

    def warm_up(self) -> Task:
        """As many prompts as are in flight."""
        return replace(self, prompts=self.prompts[: self.setting.batch])


def make_task(setting: Setting, config: LaunchConfig, prompts: Sequence[Prompt], engine: Engine) -> Task:
    """ValueError, one line, if no prompt leaves room for the answer."""
    sampling = setting.configure(config).sampling_params(engine.tokenizer)
    room = int(engine.ready["target-0"].facts["max_model_len"])
    if setting.context:
        made = of_length(prompts, setting.context, engine.tokenizer, sampling.max_tokens, room)
    else:
        made = fitting(tokenized(prompts, engine.tokenizer), sampling.max_tokens, room)
    num_threads = sum(place.num_threads for place in engine.places if place.role == "target")
    return Task(setting, tuple(made), sampling, num_threads)


def tokenized(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Prompt]:
    return [replace(prompt, token_ids=tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]


def fitting(prompts: Sequence[Prompt], max_tokens: int, max_model_len: int) -> list[Prompt]:
    """Those that leave room for `max_tokens`: cut short, a request would not measure what the others do."""
    kept = [prompt for prompt in prompts if len(prompt.token_ids) + max_tokens <= max_model_len]
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ValueError(
            f"job.prompts: the shortest has {shortest} tokens and leaves no room for sampling.max_tokens={max_tokens} "
            f"in the context of {max_model_len}; lower sampling.max_tokens or give shorter prompts"
        )
    return kept


def of_length(
    prompts: Sequence[Prompt], length: int, tokenizer: Tokenizer, max_tokens: int, max_model_len: int
) -> list[Prompt]:
    """One prompt of exactly `length` tokens per prompt: its own text, then the texts that follow it in the file."""
    if length + max_tokens > max_model_len:
        raise ValueError(
            f"job.contexts={length}: with sampling.max_tokens={max_tokens} it exceeds the context of {max_model_len}; "
            "lower one of them"
        )
    made = []
    for index, prompt in enumerate(prompts):
        texts = [other.text for other in (*prompts[index:], *prompts[:index])]
        whole = "\n\n".join(texts)
        ids = tokenizer.encode(whole).ids
        while len(ids) < length:
            whole += "\n\n" + whole
            ids = tokenizer.encode(whole).ids
        made.append(replace(prompt, text=tokenizer.decode(ids[:length]), token_ids=tuple(ids[:length])))
    return made
