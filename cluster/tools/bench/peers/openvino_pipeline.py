"""OpenVINO GenAI as a peer: greedy, plain, with the same draft model and by its prompt lookup."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers.interface import FilePeer, Means, Speculation, Timed
from cluster.tools.bench.peers.openvino_model import write_openvino

_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
_SHOWN = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


class OpenVino(FilePeer):
    """An LLM pipeline of OpenVINO GenAI; without `exact` its plugin for CPUs chooses: bfloat16 where that is native."""

    name, package, write = "openvino", "openvino_genai", staticmethod(write_openvino)

    @property
    def arithmetic(self) -> str:
        import openvino  # pyright: ignore[reportMissingImports] (the user's to install)

        core = openvino.Core()
        chosen = _FLOAT32 if self.exact else {name: _word(core.get_property("CPU", name)) for name in _SHOWN}
        return ", ".join(f"{name.lower()}={value}" for name, value in chosen.items())

    def open(self, num_threads: int, target: str, drafter: str, speculation: Speculation) -> Any:
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        options: dict[str, Any] = {**(_FLOAT32 if self.exact else {}), "INFERENCE_NUM_THREADS": num_threads}
        means: dict[str, Any] = {}
        if speculation.means is Means.model:
            means["draft_model"] = openvino_genai.draft_model(drafter, "CPU", **options)
        if speculation.means is Means.lookup:
            means["prompt_lookup"] = True
        return openvino_genai.LLMPipeline(target, "CPU", **options, **means)

    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, speculation: Speculation) -> Timed:
        import openvino  # pyright: ignore[reportMissingImports] (the user's to install)
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens, config.ignore_eos = sampling.max_tokens, sampling.ignore_eos
        config.stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        if speculation.num_draft_tokens:
            config.num_assistant_tokens = speculation.num_draft_tokens
        if speculation.max_ngram:
            config.max_ngram_size = speculation.max_ngram
        ids = np.array([prompt.token_ids], dtype=np.int64)
        tokens = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        answer = opened.generate(tokens, config)
        return tuple(answer.tokens[0]), answer.perf_metrics.get_ttft().mean / 1e3


def _word(value: Any) -> str:
    """The name of a number type, as in the options; of a number its digits."""
    return value.get_type_name() if hasattr(value, "get_type_name") else str(value)
