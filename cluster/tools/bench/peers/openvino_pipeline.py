"""OpenVINO GenAI as a peer: greedy, plain and with the same draft model, in float32 throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from actors.protocol.messages import SamplingParams
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers.interface import FilePeer, Timed, check_float32_on_cpu
from cluster.tools.bench.peers.openvino_model import write_openvino

OPENVINO = "openvino"
OPENVINO_DRAFT = "openvino draft model"
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


class OpenVino(FilePeer):
    """An LLM pipeline of OpenVINO GenAI."""

    plain, speculative, package = OPENVINO, OPENVINO_DRAFT, "openvino_genai"

    def write(self, checkpoint: str, place: Path, stretch: int) -> None:
        write_openvino(checkpoint, place, stretch)

    def open(self, num_threads: int, target: str, drafter: str, num_draft_tokens: int) -> Any:  # noqa: ARG002  asked for in each request
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        options: dict[str, Any] = {**_EXACT, "INFERENCE_NUM_THREADS": num_threads}
        draft = {"draft_model": openvino_genai.draft_model(drafter, "CPU", **options)} if drafter else {}
        return openvino_genai.LLMPipeline(target, "CPU", **options, **draft)

    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, num_draft_tokens: int) -> Timed:
        import openvino  # pyright: ignore[reportMissingImports] (the user's to install)
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens, config.ignore_eos = sampling.max_tokens, sampling.ignore_eos
        config.stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        if num_draft_tokens:
            config.num_assistant_tokens = num_draft_tokens
        ids = np.array([prompt.token_ids], dtype=np.int64)
        tokens = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        answer = opened.generate(tokens, config)
        return tuple(answer.tokens[0]), answer.perf_metrics.get_ttft().mean / 1e3


def of_engine(engine: Engine) -> OpenVino:
    check_float32_on_cpu("openvino-genai", engine.ready["target-0"].facts)
    return OpenVino(engine.config.target)
