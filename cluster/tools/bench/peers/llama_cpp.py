"""llama.cpp as a peer, through the bindings of `xllamacpp`: greedy, plain and with the same draft model."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.io.text import read_eos_token_ids
from cluster.observability.results import Run
from cluster.tools.bench.peers.gguf_file import write_gguf
from cluster.tools.bench.peers.interface import Timed, check_float32_on_cpu, complete_in_turn, greedy_sides
from cluster.tools.bench.tasks import BenchTask

LLAMA_CPP = "llama.cpp"
LLAMA_CPP_DRAFT = "llama.cpp draft model"


class LlamaCpp:
    """A server of llama.cpp in this process for every number of threads and every draft model; none has a socket."""

    def __init__(self, target: TargetConfig, max_model_len: int) -> None:
        self._target = target
        self._max_model_len = max_model_len
        self._folder = TemporaryDirectory(prefix="specdec-gguf-")
        self._files: dict[str, str] = {}
        self._servers: dict[object, Any] = {}
        self._eos_token_ids = read_eos_token_ids(Path(target.path))

    def describe(self) -> dict[str, object]:
        import xllamacpp  # pyright: ignore[reportMissingImports] (the user's to install)

        threads = "as the target role has"
        return {
            "dtype": "float32",
            "device": "cpu",
            "batch": 1,
            "num_threads": threads,
            "version": xllamacpp.__version__,
        }

    def sides(self, task: BenchTask) -> dict[str, object]:
        return greedy_sides(task, LLAMA_CPP, LLAMA_CPP_DRAFT)

    def complete(self, side: str, task: BenchTask) -> Run:
        key = self.sides(task)[side]
        if key not in self._servers:
            self._servers[key] = self._open(task, speculates=side == LLAMA_CPP_DRAFT)
        return complete_in_turn(task, lambda prompt: self._complete(self._servers[key], prompt, task.sampling))

    def _complete(self, server: Any, prompt: Prompt, sampling: SamplingParams) -> Timed:
        assert prompt.token_ids is not None, "a task's prompts are tokenized"
        request = {"temperature": 0, "n_predict": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        answer = server.handle_completions({"prompt": list(prompt.token_ids), "cache_prompt": False, **request})
        choice = answer["choices"][0]
        tokens = tuple(int(number) for number in re.findall(r"\d+", choice["text"]))
        ended = self._eos_token_ids[:1] if choice["finish_reason"] == "stop" else ()
        return tokens + ended, answer["timings"]["prompt_ms"] / 1e3

    def _open(self, task: BenchTask, *, speculates: bool) -> Any:
        import xllamacpp  # pyright: ignore[reportMissingImports] (the user's to install)

        params = xllamacpp.CommonParams()
        params.model.path = self._file(self._target.path, self._target.stretch)
        params.n_ctx, params.n_parallel, params.verbosity = self._max_model_len, 1, -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        threads = [params.cpuparams, params.cpuparams_batch]
        if speculates:
            drafter: Any = task.setting.drafter
            draft = params.speculative.draft
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.mparams.path = self._file(drafter.path)
            draft.n_max, draft.n_min, draft.p_min = drafter.num_draft_tokens, 0, 0.0
            draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            threads += [draft.cpuparams, draft.cpuparams_batch]
        for each in threads:
            each.n_threads = task.num_threads
        return xllamacpp.Server(params)

    def _file(self, path: str, stretch: int = 0) -> str:
        if path not in self._files:
            file = Path(self._folder.name, f"{len(self._files)}.gguf")
            write_gguf(path, file, stretch)
            self._files[path] = str(file)
        return self._files[path]


def of_engine(engine: Engine) -> LlamaCpp:
    facts = engine.ready["target-0"].facts
    check_float32_on_cpu("llama-cpp", facts)
    return LlamaCpp(engine.config.target, int(facts["max_model_len"]))
