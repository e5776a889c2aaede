"""The peers by name: how one is opened, which packages it needs, and which sampling parameters it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from actors.protocol.messages import SamplingParams
from cluster.engine import Engine
from cluster.tools.bench.peers import hf_transformers, llama_cpp, openvino_pipeline
from cluster.tools.bench.peers.interface import Peer
from cluster.tools.bench.tasks import ASSISTED, TRANSFORMERS

_GREEDY = ("temperature", "max_tokens", "seed", "ignore_eos")
_SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids")


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A value of `job.peers`. Of the sampling parameters it has those that it `carries`, with equal meaning."""

    open: Callable[[Engine], Peer]
    modules: tuple[str, ...]
    install: str
    carries: tuple[str, ...]
    sides: dict[str, str]
    """What each of its sides is, for the report."""


PEERS: dict[str, PeerKind] = {
    "transformers": PeerKind(
        hf_transformers.of_engine,
        ("transformers",),
        "transformers",
        (*_GREEDY, *_SAMPLED),
        {
            TRANSFORMERS: "transformers generate on the same checkpoint and prompts, one request at a time",
            ASSISTED: "the same with the same draft model, or prompt lookup, at the same length",
        },
    ),
    "openvino-genai": PeerKind(
        openvino_pipeline.of_engine,
        ("openvino", "openvino_genai"),
        "openvino-genai",
        (*_GREEDY, "stop_token_ids"),
        {
            openvino_pipeline.OPENVINO: "OpenVINO GenAI on the same weights and prompts, one greedy request at a time",
            openvino_pipeline.OPENVINO_DRAFT: "the same with the same draft model at the same length",
        },
    ),
    "llama-cpp": PeerKind(
        llama_cpp.of_engine,
        ("xllamacpp", "gguf"),
        "xllamacpp gguf",
        _GREEDY,
        {
            llama_cpp.LLAMA_CPP: "llama.cpp on the same weights and prompts, one greedy request at a time",
            llama_cpp.LLAMA_CPP_DRAFT: "the same with the same draft model at the same length",
        },
    ),
}
"""Values of `job.peers`."""


def check_peers(peers: Sequence[str], sampling: SamplingParams) -> None:
    """Raise ValueError, one line, for a peer that is unknown, not installed or without a sampling parameter."""
    defaults = SamplingParams()
    changed = [
        name for name in SamplingParams.__dataclass_fields__ if getattr(sampling, name) != getattr(defaults, name)
    ]
    for name in peers:
        if name not in PEERS:
            raise ValueError(f"job.peers={name}: is unknown; choose from {', '.join(PEERS)}")
        kind = PEERS[name]
        missing = [module for module in kind.modules if find_spec(module) is None]
        if missing:
            raise ValueError(f"job.peers={name}: {missing[0]} is not installed; pip install {kind.install}")
        for field in changed:
            if field not in kind.carries:
                raise ValueError(f"sampling.{field}: {name} has no counterpart; drop it or job.peers")


def baselines(peers: Sequence[str]) -> dict[str, str]:
    """What the ratios over the sides of these peers compare with."""
    sides = {side: text for name in peers for side, text in PEERS[name].sides.items()}
    return {f"speculative / {side}": text for side, text in sides.items()}
