"""A session on a GPU as one program: what the machine reaches, and what the engine reaches of it.

    python docs/gpu/session.py --out gpu-session            # all steps, under an hour on one GPU
    python docs/gpu/session.py --out gpu-session --steps exact,same-bits,attention --seconds 560
    python docs/gpu/session.py --out /tmp/tiny --device cpu --tiny

Every step is a process of its own with a budget of seconds, so that one that hangs or breaks its CUDA context costs
only itself. A step's rows go to OUT/STEP.json as they are measured; OUT/session.md is a table of each. Steps whose file
is complete are not run again, so that a session may be cut into several calls; already the first ones decide something.
Needs PyTorch, numpy, safetensors and this repository: no Ray, no network, no checkpoint but the bundled pair, and no
weights but random ones. What further packages single steps need (`NEEDS`) is said before the first begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from docs.gpu import session_bits, session_kernels, session_rounds  # noqa: E402
from parallel.kernels.packing import Packing  # noqa: E402

Row = dict[str, Any]

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
ROPE = {"max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA
    | ROPE
    | dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    | dict(intermediate_size=14336, vocab_size=128256),
    "1b": LLAMA
    | ROPE
    | dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    | dict(intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True),
    "0.6b": LLAMA
    | ROPE
    | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", rope_theta=1e6, rms_norm_eps=1e-6)
    | dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    | dict(intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True),
    # a quarter of the layers of a mixture with 30B parameters, of which a token uses 3B
    "mixture": LLAMA
    | ROPE
    | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", rope_theta=1e6, rms_norm_eps=1e-6)
    | dict(hidden_size=2048, num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
    | dict(intermediate_size=6144, vocab_size=151936, decoder_sparse_step=1, mlp_only_layers=[]),
    # what one of eight tensor-parallel ranks computes, without its collectives
    "70b-of-8": LLAMA
    | ROPE
    | dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=8, num_key_value_heads=1, head_dim=128)
    | dict(intermediate_size=3584, vocab_size=16032),
}
TINY = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16) | dict(
    intermediate_size=96, vocab_size=512
)
GRID = [(1, 1024, 1), (1, 1024, 8), (1, 2048, 32), (1, 32768, 8), (16, 2048, 1), (16, 2048, 6), (64, 1024, 6)]
"""Sequences, committed rows of each, rows of each in the pass."""
TINY_GRID = [(1, 40, 1), (2, 40, 3)]
NEEDS = {
    "engine": ("msgspec", "zmq", "hydra", "omegaconf"),
    "certify": ("msgspec", "zmq", "hydra", "omegaconf"),
    "round": ("msgspec",),
    "sampling": ("msgspec",),
    "tests-parallel": ("pytest", "hypothesis"),
    "tests-actors": ("pytest", "hypothesis", "msgspec", "zmq", "hydra"),
}
"""Packages beside PyTorch, NumPy and safetensors without which a step cannot run."""
CHAIN = 8
"""Steps of a chain, measured where a pass has one row of each sequence."""
GEMM_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512]


class Machine:
    """The device under measurement. `tiny` makes everything small: to test this program without a GPU."""

    def __init__(self, device: str, *, tiny: bool) -> None:
        from parallel.runtime.device import use_device

        self.device, self.tiny = torch.device(device), tiny
        self.on_cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.repeats = 3 if tiny else 30
        use_device(self.device)

    @staticmethod
    def tiny_of(shape: dict[str, Any]) -> dict[str, Any]:
        few = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        return TINY | (few if "num_experts" in shape else {})

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], inner: int = 1) -> float:
        """Of one call: the median over the repeats, of `inner` calls at a time, queued without a wait in between."""
        for _ in range(2):
            work()
        self.wait()
        times = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            for _ in range(inner):
                work()
            self.wait()
            times.append((time.perf_counter() - started) / inner)
        return statistics.median(times)

    def graph(self, work: Callable[[], object], calls: int) -> Callable[[], object]:
        """So many calls as one CUDA graph."""
        work()
        self.wait()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(calls):
                work()
        return captured.replay

    def copy_rate(self) -> float:
        """Bytes a second that a copy on the device reads and writes together."""
        size = 1 << (20 if self.tiny else 31)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: into.copy_(source), 1 if self.tiny else 5)

    def memory(self) -> int:
        """Bytes of the device in use."""
        if not self.on_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def runner(
        self,
        shape: dict[str, Any],
        num_slots: int,
        dtype: torch.dtype | None = None,
        pool: dict[str, Any] | None = None,
        packing: Packing | None = None,
        **options: Any,
    ) -> Any:
        """A model of this shape with random weights and KV rows, made on the device; `pool` are options of the pool,
        `packing` is how the matrices of its layers are kept."""
        from parallel.model.decoder import Decoder
        from parallel.model.families.registry import read_config
        from parallel.model.layers.weight import Weight
        from parallel.runtime.profiling import fill_at_random
        from parallel.runtime.runner import ModelRunner

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape | (self.tiny_of(shape) if self.tiny else {})))
            config = read_config(Path(folder))
        with torch.inference_mode():
            decoder = Decoder(config, device=self.device, dtype=dtype or self.dtype)
            if packing is not None:
                for part in (part for layer in decoder.layers for part in layer.walk()):
                    if isinstance(part, Weight):
                        part.store_as("packed")
                        part.settle(packing, torch.float32 if packing.scale_bytes == 4 else torch.float16)
            fill_at_random(decoder)
            kept = decoder.make_pool(num_slots, **(pool or {}))
            for rows in (kept.keys, kept.values):
                for layer in rows:
                    layer.copy_(torch.randn(layer.shape, device=self.device))
            return ModelRunner(decoder, kept, **options)


# --- the steps --------------------------------------------------------------------------------------------------------


def environment(machine: Machine) -> Iterator[Row]:
    """Versions, the copy rate, and what a launch and a node of a graph cost."""
    facts: Row = {"python": platform.python_version(), "torch": torch.__version__, "cpu cores": os.cpu_count()}
    if machine.on_cuda:
        found = torch.cuda.get_device_properties(machine.device)
        facts |= {"gpu": found.name, "GiB": round(found.total_memory / 2**30, 1), "SMs": found.multi_processor_count}
        facts |= {"capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda}
        facts |= {"cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    for package in ("triton", "numpy", "transformers", "ray", "hydra-core", "pyzmq", "msgspec", "vllm"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    yield from ({"what": name, "value": value} for name, value in facts.items())
    yield {"what": "copy GB/s", "value": round(machine.copy_rate() / 1e9, 1)}
    x = torch.ones(64, device=machine.device)
    yield {"what": "launch us", "value": round(1e6 * machine.seconds(lambda: x.add_(1), 1000), 2)}
    yield {"what": "host waits us", "value": round(1e6 * machine.seconds(x[0].item), 2)}
    if machine.on_cuda:
        replay = machine.graph(lambda: x.add_(1), 1000)
        yield {"what": "graph node us", "value": round(1e3 * machine.seconds(replay), 3)}


def gemm(machine: Machine) -> Iterator[Row]:
    """The products of an 8B layer, by rows, by PyTorch and by our kernel for the codes of quantised checkpoints; the
    share is of the copy rate, reading the matrix as it is kept once."""
    from parallel.kernels.packed_products import PackedMatrix, PackedRows

    rate = machine.copy_rate()
    sizes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    kept = packings(machine)
    for name, (outputs, inputs) in sizes.items():
        if machine.tiny:
            outputs, inputs = outputs // 64, inputs // 64  # noqa: PLW2901
        for kind in (str(machine.dtype).removeprefix("torch."), *kept):
            products, num_bytes = list[Callable[[torch.Tensor], torch.Tensor]](), 0
            # several matrices in turn, since one of them would stay in the cache
            for _ in range(1 if machine.tiny else 8):
                if kind in kept:
                    scale_type = torch.float32 if kept[kind].scale_bytes == 4 else torch.float16
                    matrix = PackedMatrix(outputs, inputs, kept[kind], scale_type, machine.device)
                    PackedRows(matrix, slice(None)).normal_(std=0.02)
                    products.append(matrix.multiply)
                    num_bytes = kept[kind].num_bytes(outputs, inputs)
                else:
                    weight = torch.randn(outputs, inputs, dtype=machine.dtype, device=machine.device)
                    products.append(partial(F.linear, weight=weight))
                    num_bytes = weight.nbytes
            for rows in GEMM_ROWS[:1] if machine.tiny else GEMM_ROWS:
                x = torch.randn(rows, inputs, dtype=machine.dtype, device=machine.device)

                def multiply(x: torch.Tensor = x, products: list[Any] = products) -> None:
                    for product in products:
                        product(x)

                work = machine.graph(multiply, 1) if machine.on_cuda else multiply
                seconds = machine.seconds(work) / len(products)
                row = {"matrix": name, "kind": kind, "rows": rows, "us": round(1e6 * seconds, 1)}
                yield row | {"share of copy": round(num_bytes / seconds / rate, 3)}


def packings(machine: Machine) -> dict[str, Packing]:
    """The codes of published checkpoints that this machine multiplies by."""
    from parallel.kernels.packed_products import can_pack

    known = {"fp8": Packing("fp8", 128), "int4": Packing("int4", 128, has_zeros=True, scale_bytes=2)}
    return {name: packing for name, packing in known.items() if can_pack(packing, machine.device)}


def packed(machine: Machine) -> Iterator[Row]:
    """Passes of the 8B shape whose matrices are codes, as in a quantised checkpoint, all but the embedding and the
    head; plain ones where no kernel takes codes."""
    grid = TINY_GRID[:1] if machine.tiny else [(1, 1024, 1), (1, 1024, 8), (16, 2048, 6)]
    num_slots = max(count * (context + max(rows, CHAIN)) for count, context, rows in grid)
    rate = machine.copy_rate()
    for name, packing in (packings(machine) or {"plain": None}).items():
        for row in _measured(machine, machine.runner(SHAPES["8b"], num_slots, packing=packing), grid, rate):
            yield {"weights": name} | row


def first_shapes(machine: Machine) -> Iterator[Row]:
    """The first call of attention for an exact shape, with cuDNN's kernels and without."""
    for uses_cudnn in (False, True) if machine.on_cuda else (False,):
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
        for length in (1000, 1001, 1002, 1003):
            num_keys = length // 50 if machine.tiny else length
            q, k = (
                torch.randn(1, heads, rows, 128, dtype=machine.dtype, device=machine.device)
                for heads, rows in ((32, 8), (32, num_keys))
            )
            machine.wait()
            times = []
            for _ in range(2):
                started = time.perf_counter()
                F.scaled_dot_product_attention(q, k, k)
                machine.wait()
                times.append(1e3 * (time.perf_counter() - started))
            row = {"cudnn": uses_cudnn, "keys": num_keys}
            yield row | {"first ms": round(times[0], 3), "second ms": round(times[1], 3)}


def passes(machine: Machine, name: str) -> Iterator[Row]:
    """One decoding pass, and a drafted chain of passes with the host's read of its tokens, eagerly and as a graph.
    `share of copy` is of the copy rate of this session, over the bytes of the weights and of the committed rows; `plan
    ms` is the host's part before a pass, `MiB` what the graph took."""
    grid = TINY_GRID if machine.tiny else [size for size in GRID if name in ("8b", "1b") or size[1] < 8192]
    rate = machine.copy_rate()
    runner = machine.runner(SHAPES[name], max(count * (context + max(rows, CHAIN)) for count, context, rows in grid))
    yield from _measured(machine, runner, grid, rate)


def fp8_rows(machine: Machine) -> Iterator[Row]:
    """Passes of the 8B shape over keys and values in FP8."""
    from parallel.kv.pool import FP8

    grid = TINY_GRID if machine.tiny else [(1, 32768, 8), (16, 2048, 6)]
    num_slots = max(count * (context + max(rows, CHAIN)) for count, context, rows in grid)
    options = {"stored": FP8, "scales": None} if machine.on_cuda else {}
    yield from _measured(machine, machine.runner(SHAPES["8b"], num_slots, pool=options), grid, machine.copy_rate())


def invariant(machine: Machine) -> Iterator[Row]:
    """Passes of the 8B shape with `target.numerics` fast and invariant: what the same bits in any company cost."""
    grid = TINY_GRID[:1] if machine.tiny else [(1, 2048, 1), (1, 2048, 8), (1, 32768, 8), (16, 2048, 6)]
    num_slots = max(count * (context + max(rows, CHAIN)) for count, context, rows in grid)
    rate = machine.copy_rate()
    for numerics in ("fast", "invariant"):
        runner = machine.runner(SHAPES["8b"], num_slots, invariant=numerics == "invariant")
        for row in _measured(machine, runner, grid, rate):
            yield {"numerics": numerics} | row


def ragged(machine: Machine) -> Iterator[Row]:
    """One long request beside 63 short ones, which padding to the longest would make as expensive."""
    count, short, long = (4, 20, 100) if machine.tiny else (64, 1024, 32768)
    rate = machine.copy_rate()
    runner = machine.runner(SHAPES["8b"], count * (short + 8) + long)
    yield from _measured(machine, runner, [(count, short, 1)], rate, longest=long)


def _measured(
    machine: Machine, runner: Any, grid: list[tuple[int, int, int]], rate: float, longest: int = 0
) -> Iterator[Row]:
    from actors.protocol.messages import SamplingParams
    from actors.sampling.logits import ChoicesAhead
    from parallel.kv.pass_plan import Span
    from parallel.runtime.graph_list import GraphList, bucket

    def choices(count: int, steps: int) -> ChoicesAhead:
        return ChoicesAhead.of([SamplingParams(temperature=0.8)] * count, [0] * count, steps, machine.device)

    item = machine.dtype.itemsize
    config = runner.config
    weights = runner.decoder.nbytes() - (0 if config.tied else config.vocab_size * config.hidden_size * item)
    for count, context, rows in grid:
        for index in range(count):
            runner.open(index)
            runner.pool.reserve(index, length := longest if longest and not index else context)
            runner.pool.commit(index, range(length))
        committed = (count - 1) * context + (longest or context)
        bytes_read = weights + committed * 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
        spans = [Span(index, rows, num_logits=rows) for index in range(count)]
        # different ones, which a mixture sends to different experts
        tokens = torch.randint(0, config.vocab_size, (count * rows,), device=machine.device)

        def one(spans: list[Any] = spans, tokens: torch.Tensor = tokens, count: int = count) -> tuple[float, float]:
            started = time.perf_counter()
            plan = runner.plan(spans)
            planned = time.perf_counter()
            runner.run(plan, tokens)
            machine.wait()
            ended = time.perf_counter()
            for index in range(count):
                runner.drop_pending(index)
            return planned - started, ended - started

        def chain(tokens: torch.Tensor = tokens, count: int = count) -> tuple[float, float]:
            started = time.perf_counter()
            runner.extend([Span(index, 1) for index in range(count)], tokens, choices(count, CHAIN)).tolist()
            ended = time.perf_counter()
            for index in range(count):
                runner.drop_pending(index)
            return 0.0, ended - started

        works = [(rows, 1, one), (f"chain of {CHAIN}", CHAIN, chain)][: 2 if rows == 1 and not longest else 1]
        for (label, steps, work), kind in itertools.product(works, ("eager", "graph")):
            if kind == "graph" and not runner.captures:
                continue
            before = machine.memory()
            with runner.eagerly() if kind == "eager" else nullcontext():
                started = time.perf_counter()
                if kind == "graph" and work is chain:
                    runner.capture(GraphList(chains=[(bucket(count), CHAIN)]), choices=choices)
                work()
                first, times = time.perf_counter() - started, [work() for _ in range(machine.repeats)]
            plan_s, wall_s = (statistics.median(part) for part in zip(*times, strict=True))
            yield {
                "sequences": count,
                "context": context if not longest else f"{context}, one {longest}",
                "rows": label,
                "attention": runner.attention,
                "kind": kind,
                "first ms": round(1e3 * first, 2),
                "plan ms": round(1e3 * plan_s, 3) if work is one else "",
                "wall ms": round(1e3 * wall_s, 3),
                "ideal ms": round(1e3 * steps * bytes_read / rate, 3),
                "share of copy": round(steps * bytes_read / wall_s / rate, 3),
                "MiB": round((machine.memory() - before) / 2**20, 1),
            }
        for index in range(count):
            runner.close(index)


def kernels(machine: Machine) -> Iterator[Row]:
    """Kernels of a pass by name, those that take longest first: of a replayed graph, or of an eager pass on a CPU."""
    from parallel.kv.pass_plan import Span

    activities = [torch.profiler.ProfilerActivity.CUDA if machine.on_cuda else torch.profiler.ProfilerActivity.CPU]
    wanted = torch.autograd.DeviceType.CUDA if machine.on_cuda else torch.autograd.DeviceType.CPU
    for name, rows in (("8b", 1), ("8b", 32), ("mixture", 1), ("mixture", 8)):
        context = 32 if machine.tiny else 2048
        runner = machine.runner(SHAPES[name], context + rows + 8)
        runner.open(0)
        runner.pool.reserve(0, context)
        runner.pool.commit(0, range(context))
        tokens = torch.randint(0, runner.config.vocab_size, (rows,), device=machine.device)

        def one(runner: Any = runner, rows: int = rows, tokens: torch.Tensor = tokens) -> None:
            runner.run(runner.plan([Span(0, rows, num_logits=rows)]), tokens)
            machine.wait()
            runner.drop_pending(0)

        one()
        with torch.profiler.profile(activities=activities) as profile:
            one()
        label = {"pass": f"{name}, {rows} rows"}
        events = [event for event in profile.key_averages() if event.device_type == wanted]
        total = sum(event.self_device_time_total if machine.on_cuda else event.self_cpu_time_total for event in events)
        yield label | {"kernel": "all", "calls": sum(event.count for event in events), "us": round(total, 1)}
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:12]:
            yield label | {"kernel": event.key[:60], "calls": event.count, "us": round(event.self_device_time_total, 1)}


def sampling(machine: Machine) -> Iterator[Row]:
    """Choosing a token for each row of logits over 128k tokens."""
    from actors.protocol.messages import SamplingParams, TokenTree
    from actors.sampling.logits import LogitRows, choose_batch

    kinds = {
        "greedy": SamplingParams(),
        "temperature": SamplingParams(temperature=0.8),
        "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    }
    vocabulary = 512 if machine.tiny else 128256
    for count in (1, 2) if machine.tiny else (1, 8, 64):
        logits = torch.randn(count, vocabulary, device=machine.device)
        for name, params in kinds.items():
            batch = [LogitRows(params, 1, [1, 2, 3], TokenTree.chain(3, [])) for _ in range(count)]

            def choose(logits: torch.Tensor = logits, batch: list[Any] = batch) -> list[int]:
                return choose_batch(logits, batch, ()).tolist()

            yield {"rows": count, "sampling": name, "ms": round(1e3 * machine.seconds(choose), 3)}


def loader(machine: Machine) -> Iterator[Row]:
    """Loading a checkpoint of the 1B shape from a local disk, whose pages are in memory."""
    from safetensors.torch import save_file

    from parallel.model.checkpoint import tensor_shapes
    from parallel.runtime.runner import open_model

    config = machine.runner(SHAPES["1b"], 8).config
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES["1b"] | (TINY if machine.tiny else {})
        (Path(folder) / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
        tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in tensor_shapes(config).items()}
        save_file(tensors, str(Path(folder) / "model.safetensors"))
        size = sum(tensor.nbytes for tensor in tensors.values())
        started = time.perf_counter()
        open_model(folder, device=machine.device, dtype=machine.dtype, num_slots=8)
        machine.wait()
        seconds = time.perf_counter() - started
    yield {"GB": round(size / 1e9, 3), "seconds": round(seconds, 2), "GB/s": round(size / 1e9 / seconds, 2)}


def tokens(machine: Machine) -> Iterator[Row]:
    """Greedy tokens of the bundled target in float32, on the device and on a CPU."""
    from cluster import pocket
    from parallel.kv.pass_plan import Span
    from parallel.runtime.runner import open_model

    torch.backends.cuda.matmul.allow_tf32 = False
    count = 8 if machine.tiny else 64

    def decode(device: torch.device, **options: Any) -> list[int]:
        runner = open_model(pocket.TARGET, device=device, dtype=torch.float32, num_slots=256, **options)
        runner.open(0)
        fed, text = list(range(5, 25)), []
        for _ in range(count):
            text.append(int(runner.forward([Span(0, len(fed))], fed).logits[-1].argmax()))
            runner.commit(0, range(len(fed)))
            fed = text[-1:]
        return text

    expected = decode(torch.device("cpu"))
    kinds = {"graphs": {}, "eager": {"graphs": False}} if machine.on_cuda else {"padded": {"backend": "padded"}}
    for name, options in kinds.items():
        found = decode(machine.device, **options)
        same = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), count)
        yield {"passes": name, "tokens": count, "the same": same, "equal": found == expected}


def engine(machine: Machine) -> Iterator[Row]:
    """The engine in one process, without Ray: tokens of three pipelines and of plain decoding."""
    from cluster.config.compose import load_config
    from cluster.engine import Engine

    device = "cuda" if machine.on_cuda else "cpu"
    shared = ["cluster=inprocess", f"target.device={device}", "target.dtype=float32", "placement=colocated"]
    expected: list[Any] | None = None
    for pipeline in ("plain", "sync") if machine.tiny else ("plain", "sync", "branches", "tree"):
        keys = [*shared, f"pipeline={pipeline}", f"sampling.max_tokens={8 if machine.tiny else 64}"]
        keys += ["drafter=model", f"drafter.device={device}", "drafter.dtype=float32"] if pipeline != "plain" else []
        started = time.perf_counter()
        with Engine(load_config(keys)) as client:
            ready = time.perf_counter()
            texts = [one.token_ids for one in client.generate(["class Stack:", "def main():", "import"])]
            ended = time.perf_counter()
        expected = texts if expected is None else expected
        yield {
            "pipeline": pipeline,
            "start s": round(ready - started, 1),
            "tokens/s": round(sum(map(len, texts)) / (ended - ready), 1),
            "tokens are plain's": texts == expected,
        }


def certify(machine: Machine) -> Iterator[Row]:
    """`job=certify` of the bundled pair with `target.numerics=invariant`, which allows logits no movement: the engine's
    tokens in bfloat16 with trees of drafts are those of plain decoding."""
    device, (prompts, count) = "cuda" if machine.on_cuda else "cpu", (1, 8) if machine.tiny else (4, 96)
    keys = ["job=certify", "cluster=inprocess", f"target.device={device}", f"drafter.device={device}"]
    keys += ["target.numerics=invariant", "target.dtype=bfloat16", "drafter=model", "drafter.strategy=tree"]
    keys += [f"job.limit={prompts}", f"sampling.max_tokens={count}", "job.draws=200", "job.contexts=1", "job.seeds=[0]"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cluster.launch", *keys, f"hydra.run.dir={folder}"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        file = Path(folder) / "certificate.json"
        checks = json.loads(file.read_text())["checks"] if file.exists() else []
    for check in checks:
        name, passed = check.pop("name"), check.pop("passed")
        figures = [f"{figure} {value}" for figure, value in check.items() if isinstance(value, int | float)]
        yield {"check": name, "passed": passed, "figures": ", ".join(figures)}
    if found.returncode or not checks:
        raise RuntimeError(f"job=certify ended with {found.returncode}: {(found.stderr.strip() or '?')[-200:]}")


_PASSED, _NO_TESTS = 0, 5


def tests(machine: Machine, folder: str) -> Iterator[Row]:
    """The tests that need a GPU, and those of Triton's kernels, which run on it where there is one."""
    files, marks = [f"tests/{folder}"], "gpu or multi_gpu"
    if folder == "parallel/kernels":
        marks += " or not slow"
        files += [f"tests/parallel/model/test_{name}.py" for name in ("experts", "flash", "invariant", "split_kv")]
    if machine.tiny:
        files = ["tests/parallel/runtime/test_cuda.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", marks, *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = found.stdout.strip().splitlines()
    yield from ({"line": line} for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED")))
    yield {"line": lines[-1] if lines else found.stderr.strip()[-200:]}
    if found.returncode not in (_PASSED, _NO_TESTS):
        raise RuntimeError(f"pytest ended with {found.returncode}: {lines[-1] if lines else found.stderr[-200:]}")


STEPS: dict[str, tuple[int, Callable[[Machine], Iterator[Row]]]] = {
    "environment": (60, environment),
    "exact": (120, session_kernels.exact),
    "same-bits": (90, lambda machine: session_bits.same_bits(machine, SHAPES["8b"])),
    "attention": (180, session_kernels.attention),
    "invariant": (150, invariant),
    "fp8-rows": (90, fp8_rows),
    "gemm": (120, gemm),
    "packed": (120, packed),
    "certify": (180, certify),
    "tokens": (90, tokens),
    "passes-8b": (240, lambda machine: passes(machine, "8b")),
    "passes-1b": (120, lambda machine: passes(machine, "1b")),
    "round": (120, lambda machine: session_rounds.round_of_two(machine, SHAPES)),
    "prompts": (120, lambda machine: session_rounds.prompts(machine, SHAPES["8b"])),
    "mixture": (120, lambda machine: passes(machine, "mixture")),
    "kernels": (90, kernels),
    "passes-0.6b": (90, lambda machine: passes(machine, "0.6b")),
    "passes-70b-of-8": (120, lambda machine: passes(machine, "70b-of-8")),
    "ragged": (90, ragged),
    "first-shapes": (60, first_shapes),
    "sampling": (60, sampling),
    "loader": (60, loader),
    "engine": (180, engine),
    "tests-kernels": (300, lambda machine: tests(machine, "parallel/kernels")),
    "tests-parallel": (300, lambda machine: tests(machine, "parallel")),
    "tests-actors": (300, lambda machine: tests(machine, "actors")),
}
"""Name -> its budget in seconds, and the step; first whether kernels are right, then what was measured nowhere."""


# --- the session ------------------------------------------------------------------------------------------------------


def missing(steps: list[str]) -> dict[str, list[str]]:
    """By step, the packages that it needs and this machine lacks."""
    lacking = {name: [one for one in NEEDS.get(name, ()) if find_spec(one) is None] for name in steps}
    return {name: packages for name, packages in lacking.items() if packages}


def run_step(name: str, out: Path, machine: Machine) -> None:
    """In this process; rows are written as they come."""
    record: dict[str, Any] = {"step": name, "about": STEPS[name][1].__doc__, "status": "cut off", "rows": []}
    started = time.perf_counter()
    file = out / f"{name}.json"
    try:
        for row in STEPS[name][1](machine):
            record["rows"].append(row)
            record["seconds"] = round(time.perf_counter() - started, 1)
            file.write_text(json.dumps(record, indent=1))
        record["status"] = "done"
    except ImportError as error:
        record["status"] = f"not possible here: {error}"
    except Exception as error:  # the next step is another process
        record["status"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        traceback.print_exc()
    record["seconds"] = round(time.perf_counter() - started, 1)
    file.write_text(json.dumps(record, indent=1))


def write_report(out: Path) -> None:
    """A table for each step that has a file, in the order of the steps."""
    parts = ["# GPU session\n"]
    for name in STEPS:
        file = out / f"{name}.json"
        if not file.exists():
            continue
        record = json.loads(file.read_text())
        parts.append(f"## {name}\n\n{record['status']}, {record.get('seconds', '?')} s\n")
        if record["rows"]:
            heads = list(dict.fromkeys(key for row in record["rows"] for key in row))
            lines = [heads, ["---"] * len(heads), *([str(row.get(key, "")) for key in heads] for row in record["rows"])]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    (out / "session.md").write_text("\n".join(parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--steps", default="", help=f"of {', '.join(STEPS)}; all by default")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the program")
    parser.add_argument("--seconds", type=float, default=1680.0, help="for the whole call")
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.step:
        run_step(options.step, options.out, Machine(options.device, tiny=options.tiny))
        return 0
    wanted = options.steps.split(",") if options.steps else list(STEPS)
    if unknown := [name for name in wanted if name not in STEPS]:
        parser.error(f"--steps: {', '.join(unknown)} unknown; there are {', '.join(STEPS)}")
    for name, packages in missing(wanted).items():
        print(
            f"{name}: cannot run here without {', '.join(packages)}; install them from their wheels",
            flush=True,
        )
    deadline = time.monotonic() + options.seconds
    for name in wanted:
        file = options.out / f"{name}.json"
        budget = STEPS[name][0] * (3 if options.tiny else 1)  # small shapes are for slow machines
        if file.exists() and json.loads(file.read_text())["status"] == "done":
            continue
        left = deadline - time.monotonic()
        if left < min(budget, 30):
            print(f"{name}: no time left", flush=True)
            continue
        command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device, "--step", name]
        try:
            subprocess.run([*command, *["--tiny"] * options.tiny], timeout=min(budget, left), check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: over its {min(budget, left):.0f} s", flush=True)
        if file.exists():
            print(f"{name}: {json.loads(file.read_text())['status']}", flush=True)
        write_report(options.out)
    write_report(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
