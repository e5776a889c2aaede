"""llama.cpp as a peer, through the bindings of `xllamacpp`: greedy, plain and with the same draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.options import TargetConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
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
        self._ids: dict[tuple[object, str], tuple[str, tuple[int, ...]]] = {}

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
        texts: list[str] = []

        def complete(prompt: Prompt) -> Timed:
            answer = self._ask(key, prompt, task)
            texts.append(answer["choices"][0]["text"])
            return (), answer["timings"]["prompt_ms"] / 1e3

        run = complete_in_turn(task, complete)
        run.requests = [
            replace(served, token_ids=self._token_ids(key, served.prompt, task, text))
            for served, text in zip(run.requests, texts, strict=True)
        ]
        return run

    def _token_ids(self, key: object, prompt: Prompt, task: BenchTask, text: str) -> tuple[int, ...]:
        """The tokens of an answer. Only answers with probabilities have them, which take time, so it is asked again."""
        known = self._ids.get((key, prompt.text))
        if known is None or known[0] != text:
            choice = self._ask(key, prompt, task, n_probs=1)["choices"][0]
            known = choice["text"], tuple(token["id"] for token in choice["logprobs"]["content"])
            self._ids[key, prompt.text] = known
        return known[1]

    def _ask(self, key: object, prompt: Prompt, task: BenchTask, **more: object) -> dict[str, Any]:
        assert prompt.token_ids is not None, "a task's prompts are tokenized"
        sampling = task.sampling
        request = {"temperature": 0, "n_predict": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        return self._servers[key].handle_completions(
            {"prompt": list(prompt.token_ids), "cache_prompt": False, **request, **more}
        )

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
