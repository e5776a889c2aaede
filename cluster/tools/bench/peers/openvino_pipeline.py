"""OpenVINO GenAI as a peer: greedy, plain and with the same draft model, in float32 throughout."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from actors.options import TargetConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.io.text import read_eos_token_ids
from cluster.observability.results import Run
from cluster.tools.bench.peers.interface import Timed, check_float32_on_cpu, complete_in_turn, greedy_sides
from cluster.tools.bench.peers.openvino_model import write_openvino
from cluster.tools.bench.tasks import BenchTask

OPENVINO = "openvino"
OPENVINO_DRAFT = "openvino draft model"


class OpenVino:
    """A pipeline for every number of threads and every draft model."""

    def __init__(self, target: TargetConfig) -> None:
        self._target = target
        self._folder = TemporaryDirectory(prefix="specdec-openvino-")
        self._eos_token_ids = read_eos_token_ids(Path(target.path))
        self._models: dict[str, str] = {}
        self._pipelines: dict[object, Any] = {}

    def describe(self) -> dict[str, object]:
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        threads, version = "as the target role has", openvino_genai.__version__
        return {"dtype": "float32", "device": "cpu", "batch": 1, "num_threads": threads, "version": version}

    def sides(self, task: BenchTask) -> dict[str, object]:
        return greedy_sides(task, OPENVINO, OPENVINO_DRAFT)

    def complete(self, side: str, task: BenchTask) -> Run:
        import openvino  # pyright: ignore[reportMissingImports] (the user's to install)
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        key = self.sides(task)[side]
        if key not in self._pipelines:
            self._pipelines[key] = self._open(task, speculates=side == OPENVINO_DRAFT)
        sampling = task.sampling
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens, config.ignore_eos = sampling.max_tokens, sampling.ignore_eos
        config.stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        if side == OPENVINO_DRAFT:
            config.num_assistant_tokens = task.setting.num_draft_tokens

        def complete(prompt: Prompt) -> Timed:
            ids = np.array([prompt.token_ids], dtype=np.int64)
            tokens = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
            answer = self._pipelines[key].generate(tokens, config)
            return tuple(answer.tokens[0]), answer.perf_metrics.get_ttft().mean / 1e3

        return complete_in_turn(task, complete)

    def _open(self, task: BenchTask, *, speculates: bool) -> Any:
        import openvino_genai  # pyright: ignore[reportMissingImports] (the user's to install)

        exact = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "INFERENCE_NUM_THREADS": task.num_threads,
        }
        more = {}
        if speculates:
            drafter: Any = task.setting.drafter
            more["draft_model"] = openvino_genai.draft_model(self._model(drafter.path), "CPU", **exact)
        return openvino_genai.LLMPipeline(self._model(self._target.path, self._target.stretch), "CPU", **exact, **more)

    def _model(self, path: str, stretch: int = 0) -> str:
        if path not in self._models:
            folder = Path(self._folder.name, str(len(self._models)))
            write_openvino(path, folder, stretch)
            self._models[path] = str(folder)
        return self._models[path]


def of_engine(engine: Engine) -> OpenVino:
    check_float32_on_cpu("openvino-genai", engine.ready["target-0"].facts)
    return OpenVino(engine.config.target)
