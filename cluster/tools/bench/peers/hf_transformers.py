"""`transformers` as a peer: `generate`, plain and with its own speculation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.io.text import read_eos_token_ids
from cluster.observability.results import Run
from cluster.tools.bench.peers.interface import Timed, complete_in_turn
from cluster.tools.bench.tasks import ASSISTED, TRANSFORMERS, BenchTask

if TYPE_CHECKING:
    from transformers import GenerationConfig


class Transformers:
    """`generate` of the transformers library; assisted by the same draft model, or by prompt lookup for `ngram`."""

    def __init__(self, target: TargetConfig, dtype: str, device: str) -> None:
        self._dtype, self._device = dtype, device
        self._eos_token_ids = read_eos_token_ids(Path(target.path))
        self._model = load_model(target.path, dtype, device, target.stretch)
        self._assistants: dict[str, Any] = {}

    def describe(self) -> dict[str, object]:
        """Its dtype, device and batch, for the report."""
        return {"dtype": self._dtype, "device": self._device, "batch": 1, "num_threads": "as the target role has"}

    def sides(self, task: BenchTask) -> dict[str, object]:
        """The sides that it can complete this task as, each with a key; sides with equal keys need only one run."""
        setting = task.setting
        if setting.batch != 1:
            return {}
        common = (setting.temperature, setting.context, task.num_threads)
        sides: dict[str, object] = {TRANSFORMERS: (TRANSFORMERS, *common)}
        match setting.drafter:
            case ModelDrafterConfig(path=path, num_draft_tokens=length):
                sides[ASSISTED] = (ASSISTED, *common, path, length)
            case NgramDrafterConfig(num_draft_tokens=length, max_ngram=longest):
                sides[ASSISTED] = (ASSISTED, *common, longest, length)
        return sides

    def complete(self, side: str, task: BenchTask) -> Run:
        """One timed run."""
        torch.set_num_threads(task.num_threads)
        self._model.generation_config = self._generation_config(task.sampling)
        speculation = self._speculation(task) if side == ASSISTED else {}
        return complete_in_turn(task, lambda prompt: self._complete(prompt, task.sampling, speculation))

    def _complete(self, prompt: Prompt, sampling: SamplingParams, speculation: dict[str, Any]) -> Timed:
        clock = _FirstToken()
        ids = torch.tensor([prompt.token_ids], device=self._device)
        torch.manual_seed(sampling.seed)
        started = time.monotonic()
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **speculation)
        return tuple(output[0, ids.shape[1] :].tolist()), clock.at - started

    def _generation_config(self, sampling: SamplingParams, **more: object) -> GenerationConfig:
        from transformers import GenerationConfig

        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)]
        sampled = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        return GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=ends or None,
            pad_token_id=(*self._eos_token_ids, 0)[0],
            **(sampled if sampling.temperature > 0 else {}),
            **more,
        )

    def _speculation(self, task: BenchTask) -> dict[str, Any]:
        """Options of its counterpart of our drafter, which drafts a constant number of tokens."""
        match task.setting.drafter:
            case NgramDrafterConfig(num_draft_tokens=length, max_ngram=longest):
                return {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": longest}
            case ModelDrafterConfig(num_draft_tokens=length, path=path):
                if path not in self._assistants:
                    self._assistants[path] = load_model(path, self._dtype, self._device)
                assistant = self._assistants[path]
                assistant.generation_config = self._generation_config(
                    SamplingParams(temperature=task.setting.temperature),
                    num_assistant_tokens=length,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )
                return {"assistant_model": assistant}
        return {}


def load_model(path: str, dtype: str, device: str = "cpu", stretch: int = 0) -> Any:
    """The checkpoint as transformers loads it, with `target.stretch` more layers that change nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    num_real = config.num_hidden_layers
    if stretch:
        config.num_hidden_layers += stretch
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types, *config.layer_types[-1:] * stretch]
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=getattr(torch, dtype)).eval()
    silence_layers(model, num_real)
    return torch.nn.Module.to(model, device)


def silence_layers(model: Any, first: int) -> None:
    """Zero the output of the layers from `first` on, as `target.stretch` does in the engine."""
    with torch.no_grad():
        for layer in model.model.layers[first:]:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                for parameter in projection.parameters():
                    parameter.zero_()


def of_engine(engine: Engine) -> Transformers:
    facts = engine.ready["target-0"].facts
    return Transformers(engine.config.target, str(facts["dtype"]), str(facts["device"]))


class _FirstToken:
    """A streamer that keeps the time of the first token: the second call of `put`, after the prompt."""

    def __init__(self) -> None:
        self.at = 0.0
        self._num_puts = 0

    def put(self, _tokens: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.at = time.monotonic()

    def end(self) -> None:
        """Nothing to release."""
