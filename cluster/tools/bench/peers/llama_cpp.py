"""llama.cpp as a peer, through the bindings of `xllamacpp`: greedy, plain, with the same draft model and by lookup."""

from __future__ import annotations

import re
from typing import Any

from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers.gguf_file import write_gguf
from cluster.tools.bench.peers.interface import FilePeer, Means, Speculation, Timed


class LlamaCpp(FilePeer):
    """A server of llama.cpp in this process, without a socket."""

    name, package, write = "llama.cpp", "xllamacpp", staticmethod(write_gguf)

    @property
    def arithmetic(self) -> str:
        return "float32 weights, " + ("float32 KV" if self.exact else "float16 KV and flash attention, its defaults")

    def open(self, num_threads: int, target: str, drafter: str, speculation: Speculation) -> Any:
        import xllamacpp  # pyright: ignore[reportMissingImports] (the user's to install)

        params = xllamacpp.CommonParams()
        params.model.path = target
        params.n_ctx, params.n_parallel, params.verbosity = self.setup.max_model_len, 1, -1
        draft, kinds = params.speculative.draft, xllamacpp.common_speculative_type
        threads, caches = [params.cpuparams, params.cpuparams_batch], [params]
        if speculation.means is Means.model:
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.mparams.path = drafter
            draft.n_max, draft.n_min, draft.p_min = speculation.num_draft_tokens, 0, 0.0
            threads += [draft.cpuparams, draft.cpuparams_batch]
            caches.append(draft)
        if speculation.means is Means.lookup:
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            lookup = params.speculative.ngram_simple
            lookup.size_n, lookup.size_m = speculation.max_ngram, speculation.num_draft_tokens
        for each in threads:
            each.n_threads = num_threads
        if self.exact:
            for each in caches:
                each.cache_type_k = each.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        return xllamacpp.Server(params)

    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, speculation: Speculation) -> Timed:  # noqa: ARG002  asked for when it was opened
        assert prompt.token_ids is not None, "a task's prompts are tokenized"
        request = {"temperature": 0, "n_predict": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        answer = opened.handle_completions({"prompt": list(prompt.token_ids), "cache_prompt": False, **request})
        choice = answer["choices"][0]
        tokens = tuple(int(number) for number in re.findall(r"\d+", choice["text"]))
        ended = self.eos_token_ids[:1] if choice["finish_reason"] == "stop" else ()
        return tokens + ended, answer["timings"]["prompt_ms"] / 1e3
