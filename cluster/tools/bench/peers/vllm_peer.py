"""vLLM as a peer: greedy, any number of requests at a time, plain, with the same draft model and by its n-gram lookup.

vLLM pins versions of PyTorch and transformers, so it may live in an environment of its own: `SPECDEC_VLLM_PYTHON` names
that one's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from cluster.observability.results import Run, Served
from cluster.tools.bench.peers import vllm_program
from cluster.tools.bench.peers.interface import Means, PeerSetup, SpeculatingPeer, Speculation, checkpoint_dtype
from cluster.tools.bench.tasks import BenchTask

PYTHON = "SPECDEC_VLLM_PYTHON"
_KV_GIB = "1"


class Vllm(SpeculatingPeer):
    """One vLLM for every way to speculate, each started when it is first asked for."""

    name, package, takes_batches = "vllm", "vllm", True

    def __init__(self, setup: PeerSetup, *, exact: bool) -> None:
        super().__init__(setup, exact=exact)
        if setup.target.stretch:
            raise ValueError(
                f"job.peers=vllm: cannot stretch a target; drop target.stretch={setup.target.stretch} or it"
            )
        self._dtype = setup.dtype if exact else checkpoint_dtype(setup.target.path)
        self._programs: dict[object, _Program] = {}

    @property
    def arithmetic(self) -> str:
        return self._dtype

    @property
    def version(self) -> str:
        return next((program.version for program in self._programs.values()), "")

    def complete(self, side: str, task: BenchTask) -> Run:
        how, in_flight = self.speculation(side, task), task.setting.batch
        key = how, in_flight, task.num_threads
        if key not in self._programs:
            self._programs[key] = _Program(self._load(how, in_flight), task.num_threads)
        answer = self._programs[key].ask(
            prompts=[prompt.token_ids for prompt in task.prompts],
            max_tokens=task.sampling.max_tokens,
            ignore_eos=task.sampling.ignore_eos,
            in_flight=in_flight,
        )
        served = [
            Served(
                index,
                prompt,
                tuple(one["tokens"]),
                finish_reason=one["reason"],
                ttft_s=one["ttft_s"],
                latency_s=one["latency_s"],
            )
            for index, (prompt, one) in enumerate(zip(task.prompts, answer["answers"], strict=True))
        ]
        return Run(served, answer["wall_s"])

    def close(self) -> None:
        while self._programs:
            self._programs.popitem()[1].close()

    def _load(self, how: Speculation, in_flight: int) -> dict[str, Any]:
        """Arguments of `vllm.LLM`. Without its prefix cache, which would read no prompt twice; no peer has one here."""
        load = {
            "model": self.setup.target.path,
            "dtype": self._dtype,
            "max_model_len": self.setup.max_model_len,
            "max_num_seqs": in_flight,
            "enable_prefix_caching": False,
        }
        length = how.num_draft_tokens
        if how.means is Means.model:
            drafting = {"method": "draft_model", "model": how.path, "num_speculative_tokens": length}
            return load | {"speculative_config": drafting}
        if how.means is Means.lookup:
            drafting = {"method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": how.max_ngram}
            return load | {"speculative_config": drafting}
        return load


class _Program:
    """A vLLM in a process of its own. Raises RuntimeError when it dies."""

    def __init__(self, load: dict[str, Any], num_threads: int) -> None:
        answers, theirs = os.pipe()
        environment = {
            "OMP_NUM_THREADS": str(num_threads),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by itself it leaves a core to others, of two one
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": _KV_GIB,
            **os.environ,
        }
        environment.pop("PYTHONPATH", None)
        self._errors = TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            [os.environ.get(PYTHON, sys.executable), "-P", str(Path(vllm_program.__file__)), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(theirs,),
            env=environment,
            text=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers)
        self.version = str(self.ask(load=load)["version"])

    def ask(self, **order: object) -> dict[str, Any]:
        """The answer to one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = [text for text in self._errors.read().splitlines() if text.strip()]
            raise RuntimeError(f"job.peers=vllm: it ended with exit code {code}{f': {said[-1]}' if said else ''}")
        return json.loads(line)

    def close(self) -> None:
        """End it; its engine core ends with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._errors.close()
