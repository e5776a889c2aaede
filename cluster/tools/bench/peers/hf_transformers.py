"""`transformers` as a peer: `generate`, plain and with its own speculation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.observability.results import Run
from cluster.tools.bench.peers.interface import (
    Means,
    PeerSetup,
    SpeculatingPeer,
    Speculation,
    Timed,
    checkpoint_dtype,
    complete_in_turn,
)
from cluster.tools.bench.tasks import BenchTask

if TYPE_CHECKING:
    from transformers import GenerationConfig


class Transformers(SpeculatingPeer):
    """`generate` of the transformers library, in the checkpoint's own number type or, if `exact`, the engine's."""

    name, package, only_greedy = "transformers", "transformers", False

    def __init__(self, setup: PeerSetup, *, exact: bool) -> None:
        super().__init__(setup, exact=exact)
        self._dtype = setup.dtype if exact else checkpoint_dtype(setup.target.path)
        self._model = load_model(setup.target.path, self._dtype, setup.device, setup.target.stretch)
        self._assistants: dict[str, Any] = {}

    @property
    def arithmetic(self) -> str:
        return self._dtype

    def complete(self, side: str, task: BenchTask) -> Run:
        torch.set_num_threads(task.num_threads)
        self._model.generation_config = self._generation_config(task.sampling)
        means = self._means(self.speculation(side, task), task.sampling)
        return complete_in_turn(task, lambda prompt: self._complete(prompt, task.sampling, means))

    def _complete(self, prompt: Prompt, sampling: SamplingParams, speculation: dict[str, Any]) -> Timed:
        clock = _FirstToken()
        ids = torch.tensor([prompt.token_ids], device=self.setup.device)
        torch.manual_seed(sampling.seed)
        started = time.monotonic()
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **speculation)
        return tuple(output[0, ids.shape[1] :].tolist()), clock.at - started

    def _generation_config(self, sampling: SamplingParams, **more: object) -> GenerationConfig:
        from transformers import GenerationConfig

        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)]
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
            pad_token_id=(*self.eos_token_ids, 0)[0],
            **(sampled if sampling.temperature > 0 else {}),
            **more,
        )

    def _means(self, how: Speculation, sampling: SamplingParams) -> dict[str, Any]:
        """Options of `generate`; it drafts a constant number of tokens."""
        if how.means is Means.lookup:
            return {"prompt_lookup_num_tokens": how.num_draft_tokens, "max_matching_ngram_size": how.max_ngram}
        if how.means is Means.plain:
            return {}
        if how.path not in self._assistants:
            self._assistants[how.path] = load_model(how.path, self._dtype, self.setup.device)
        assistant = self._assistants[how.path]
        assistant.generation_config = self._generation_config(
            SamplingParams(temperature=sampling.temperature),
            num_assistant_tokens=how.num_draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        return {"assistant_model": assistant}


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
