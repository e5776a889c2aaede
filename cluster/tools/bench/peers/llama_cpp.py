"""llama.cpp as a peer, through the bindings of `xllamacpp`: greedy, plain and with the same draft model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers.gguf_file import write_gguf
from cluster.tools.bench.peers.interface import FilePeer, Timed, check_float32_on_cpu

LLAMA_CPP = "llama.cpp"
LLAMA_CPP_DRAFT = "llama.cpp draft model"


class LlamaCpp(FilePeer):
    """A server of llama.cpp in this process, without a socket."""

    plain, speculative, package = LLAMA_CPP, LLAMA_CPP_DRAFT, "xllamacpp"

    def __init__(self, target: TargetConfig, max_model_len: int) -> None:
        super().__init__(target)
        self._max_model_len = max_model_len

    def write(self, checkpoint: str, place: Path, stretch: int) -> None:
        write_gguf(checkpoint, place, stretch)

    def open(self, num_threads: int, target: str, drafter: str, num_draft_tokens: int) -> Any:
        import xllamacpp  # pyright: ignore[reportMissingImports] (the user's to install)

        params = xllamacpp.CommonParams()
        params.model.path = target
        params.n_ctx, params.n_parallel, params.verbosity = self._max_model_len, 1, -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        threads = [params.cpuparams, params.cpuparams_batch]
        if drafter:
            draft = params.speculative.draft
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.mparams.path = drafter
            draft.n_max, draft.n_min, draft.p_min = num_draft_tokens, 0, 0.0
            draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            threads += [draft.cpuparams, draft.cpuparams_batch]
        for each in threads:
            each.n_threads = num_threads
        return xllamacpp.Server(params)

    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, num_draft_tokens: int) -> Timed:  # noqa: ARG002  asked for when it was opened
        assert prompt.token_ids is not None, "a task's prompts are tokenized"
        request = {"temperature": 0, "n_predict": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        answer = opened.handle_completions({"prompt": list(prompt.token_ids), "cache_prompt": False, **request})
        choice = answer["choices"][0]
        tokens = tuple(int(number) for number in re.findall(r"\d+", choice["text"]))
        ended = self.eos_token_ids[:1] if choice["finish_reason"] == "stop" else ()
        return tokens + ended, answer["timings"]["prompt_ms"] / 1e3


def of_engine(engine: Engine) -> LlamaCpp:
    facts = engine.ready["target-0"].facts
    check_float32_on_cpu("llama-cpp", facts)
    return LlamaCpp(engine.config.target, int(facts["max_model_len"]))
