"""A decoder and its KV pool, and the passes over them: what the rest of the engine calls a model.

A sequence is an identifier here. Knows neither the tokens of a sequence nor why rows form trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import PendingRows, Span, lay_out, logit_rows
from parallel.kv.pool import FP8, KVPool, SeqId
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.config import DecoderConfig, HeadRows
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.layers.attention import AttentionShape, PassPlan
from parallel.model.layers.linear import ColumnLinear
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.padded import PaddedBackend
from parallel.model.layers.ragged import RaggedBackend
from parallel.model.layers.sdpa import SdpaBackend
from parallel.model.layers.split_kv import SplitKVBackend
from parallel.model.layers.weight import Layer, Stored
from parallel.model.partition import LayerLayout
from parallel.model.weights import load_weights, read_kv_scales
from parallel.runtime.cuda_graphs import CapturedPasses, StepChoice, run_pass
from parallel.runtime.device import use_device
from parallel.runtime.graph_list import ChainShape, GraphList, GraphShape, bucket, example_rows
from parallel.transfers import upload


@dataclass(frozen=True, slots=True)
class PassOutput:
    """logits [N, `num_logits`] float32 of the rows they were asked for; hidden [T, H]; one [T, H] per tap.

    `acceptance` [N], of a speculator that was trained to predict it: the chance that the target accepts a token drawn
    from these logits. It follows from the rows alone, not from what is drawn. `pruned` are rows of the logits that the
    pass gave up, of tokens to be rejected (`StreamingRunner`).
    """

    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]
    acceptance: Tensor | None = None
    pruned: frozenset[int] = frozenset()


class ModelRunner:
    """Passes of one model over one pool. `forward` is `run(plan(...))`; plans may also be built ahead.

    `backend` is "ragged", in float32 on CPU where its kernel can be had, "triton", on CUDA where Triton can be had,
    "padded", on CUDA elsewhere, or "sdpa"; None or "auto" is the first that can be had. `graphs` captures passes of
    "triton" and "padded" on CUDA, by default except for mixtures of experts, whose passes depend on which experts the
    rows use.
    """

    _passes: CapturedPasses | None = None
    _chain_lengths: Sequence[int] = ()
    """Steps of the chains that are captured, the longest first."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, *, backend: str | None = None, graphs: bool | None = None
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        backend = default_backend(pool) if backend in (None, "auto") else backend
        can_capture = decoder.device.type == "cuda" and backend in CAPTURED
        graphs = can_capture and not decoder.config.num_experts if graphs is None else graphs
        shape = decoder.attention_shape()
        if graphs and decoder.config.num_experts:
            raise ValueError("graphs=True: passes of a mixture of experts cannot be captured")
        if graphs and not can_capture:
            raise ValueError(f"graphs=True needs a CUDA device and one of {CAPTURED}, not {backend!r} here")
        self.attention = backend
        self._backend = make_backend(backend, pool, shape, decoder, bucketed=graphs)
        self._passes = CapturedPasses(decoder) if graphs else None
        self._pending: dict[SeqId, PendingRows] = {}

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def longest_draft(self) -> int:
        """Tokens of one path after the text, at most, that it has logits for."""
        return self.config.max_positions

    # --- sequences ---------------------------------------------------------------------------------------------------

    def open(self, seq_id: SeqId) -> None:
        self.pool.open(seq_id)
        self._pending[seq_id] = PendingRows()

    def close(self, seq_id: SeqId) -> None:
        self.pool.close(seq_id)
        del self._pending[seq_id]

    def cached_len(self, seq_id: SeqId) -> int:
        return self.pool.cached_len(seq_id)

    def can_reserve(self, num_rows: int) -> bool:
        return self.pool.can_reserve(num_rows)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Commit the pending rows `keep`, a path that starts after the committed rows; rows `retain` stay pending."""
        self._pending[seq_id] = self._pending[seq_id].after_commit(keep, retain)
        self.pool.commit(seq_id, keep, retain)

    def drop_pending(self, seq_id: SeqId) -> None:
        self.truncate(seq_id, self.cached_len(seq_id))

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self.pool.truncate(seq_id, length)
        self._pending[seq_id] = PendingRows()

    def drop_fuzzy(self, seq_id: SeqId) -> bool:  # noqa: ARG002  of LayerParallelRunner
        """Drop committed rows from the first fuzzy one on and return whether there were any; here all are exact."""
        return False

    def capture(
        self, graphs: GraphList, taps: Sequence[int] = (), choices: Callable[[int, int], StepChoice] | None = None
    ) -> GraphList:
        """Capture these passes and chains, which no sequence may be open for; those that gave a graph of their own.
        `choices(sequences, steps)` chooses the tokens of a chain.

        With several ranks all do so, in the same order. Empty where passes are not captured; shapes that the pool
        cannot hold are left out.
        """
        if self._passes is None:
            return GraphList()

        def gives_graph(numbers: Sequence[int], feed: Callable[[Sequence[SeqId]], object]) -> bool:
            assert self._passes is not None
            before, seq_ids = len(self._passes), [("capture", i) for i in range(len(numbers))]
            if not self.can_reserve(sum(numbers)):
                return False
            for seq_id in seq_ids:
                self.open(seq_id)
            feed(seq_ids)
            for seq_id in seq_ids:
                self.close(seq_id)
            return len(self._passes) > before

        def feed_pass(numbers: Sequence[int], every_row: bool, seq_ids: Sequence[SeqId]) -> None:
            rows = zip(seq_ids, numbers, strict=True)
            spans = [Span(seq_id, number, num_logits=number if every_row else 1) for seq_id, number in rows]
            self.forward(spans, [0] * sum(numbers), taps)

        passes, chains = list[GraphShape](), list[ChainShape]()
        kinds = [kind for kind, is_wanted in ((True, graphs.of_every_row), (False, graphs.of_last_rows)) if is_wanted]
        for shape in graphs.passes:
            numbers = example_rows(shape)
            gave = [gives_graph(numbers, partial(feed_pass, numbers, kind)) for kind in kinds]
            passes += [shape] * any(gave)
        if choices is not None:
            self._chain_lengths = sorted({steps for _, steps in graphs.chains}, reverse=True)
            for batch, steps in graphs.chains:
                start = torch.zeros(batch, dtype=torch.int64, device=self.decoder.device)
                if gives_graph([steps] * batch, partial(self.extend, token_ids=start, choice=choices(batch, steps))):
                    chains.append((batch, steps))
        return replace(graphs, passes=passes, chains=chains)

    @property
    def captures(self) -> bool:
        """Whether passes are captured."""
        return self._passes is not None

    def run_eagerly(self) -> None:
        """Stop using captured passes, because only the parts of an eager pass can be timed."""
        if self._passes is not None:
            self._passes.drop()
        self._passes = None

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """The same inside a block; the captured passes stay."""
        passes, self._passes = self._passes, None
        try:
            yield
        finally:
            self._passes = passes

    # --- passes ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def plan(self, spans: Sequence[Span]) -> PassPlan:
        """Reserve the rows of a pass and build its plan; call `can_reserve` first."""
        return self._plan(spans)

    def _plan(self, spans: Sequence[Span], room: int = 0) -> PassPlan:
        """`room`: rows that later steps of a chain append to each sequence."""
        assert self.pool.can_reserve(sum(span.num_tokens for span in spans)), "call can_reserve before planning"
        laid_out = lay_out(self.pool, self._pending, spans)
        for rows in laid_out:
            rows.room = room
        return self._backend.plan(laid_out, logit_rows(spans))

    def _plan_chain(self, spans: Sequence[Span], num_steps: int) -> list[PassPlan]:
        """Of passes of one row of each sequence, one after the other, all of one shape."""
        if isinstance(self._backend, SplitKVBackend):
            assert self.pool.can_reserve(num_steps * len(spans)), "call can_reserve before planning"
            rows = [replace(span, num_tokens=num_steps) for span in spans]
            return self._backend.plan_chain(lay_out(self.pool, self._pending, rows), num_steps)
        return [self._plan(spans, room=num_steps - 1 - step) for step in range(num_steps)]

    @torch.inference_mode()
    def run(self, plan: PassPlan, token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> PassOutput:
        """Run a plan on its rows' tokens, [T]; the host does not wait for a tensor that is on the device."""
        token_ids = upload(token_ids, self.decoder.device)
        num_rows, padding = plan.num_rows, len(plan.positions) - plan.num_rows
        assert token_ids.shape == (num_rows,), f"{num_rows} rows planned, tokens {tuple(token_ids.shape)} given"
        token_ids = F.pad(token_ids, (0, padding)) if padding else token_ids
        forward = partial(run_pass, self.decoder) if self._passes is None else self._passes.forward
        hidden, features, logits = forward(token_ids, plan, taps)
        if padding:
            hidden, features = hidden[:num_rows], tuple(feature[:num_rows] for feature in features)
        return PassOutput(logits[: plan.num_logits].float(), hidden, features)

    @torch.inference_mode()
    def extend(self, seq_ids: Sequence[SeqId], token_ids: Tensor, choice: StepChoice) -> Tensor:
        """Feed each sequence its token, choose the next one from the logits, feed that, for all steps of `choice`: the
        chosen tokens, [steps, sequences]. The host waits for none of them. As graphs where chains are captured; passes
        of runners that have fuzzy ones are fuzzy."""
        spans = [Span(seq_id, 1) for seq_id in seq_ids]
        chosen: list[Tensor] = []
        if self._passes is None or not self._chain_lengths:
            for step in range(len(choice)):
                token_ids = choice.choose(self.forward(spans, token_ids, fuzzy=True).logits, step)
                chosen.append(token_ids[None])
            return torch.cat(chosen)
        token_ids = F.pad(token_ids, (0, bucket(len(spans)) - len(spans)))
        while (done := sum(map(len, chosen))) < len(choice):
            # what is left in few graphs; the host lays out the next one while this one runs
            num_steps = next(length for length in self._chain_lengths if length <= len(choice) - done)
            plans = self._plan_chain(spans, num_steps)
            chosen.append(self._passes.chain(token_ids, plans, choice.part(done, done + num_steps)))
            token_ids = chosen[-1][-1]
        return torch.cat(chosen)[:, : len(spans)]

    def forward(
        self,
        spans: Sequence[Span],
        token_ids: Tensor | Sequence[int],
        taps: Sequence[int] = (),
        *,
        fuzzy: bool = False,  # noqa: ARG002  of LayerParallelRunner
    ) -> PassOutput:
        """Plan and run. `fuzzy` allows an approximate pass with layers side by side (EasySpec), whose KV rows are later
        computed again exactly; here every pass is exact."""
        return self.run(self.plan(spans), token_ids, taps)


def captured_facts(
    runner: ModelRunner,
    graphs: GraphList,
    taps: Sequence[int] = (),
    choices: Callable[[int, int], StepChoice] | None = None,
) -> dict[str, object]:
    """Capture these passes and chains, and what a rank reports of it; nothing where passes are not captured."""
    if not runner.captures:
        return {}
    started = time.monotonic()
    captured = runner.capture(graphs, taps, choices)
    return {"graphs": str(captured), "capture_s": time.monotonic() - started}


CAPTURED = ("triton", "padded")
"""Backends whose passes can be captured as CUDA graphs."""


def default_backend(pool: KVPool) -> str:
    """The name of the attention backend that is fastest for this pool."""
    if pool.keys.device.type == "cuda":
        return "triton" if SplitKVBackend.runs(pool) else "padded"
    return "ragged" if RaggedBackend.runs(pool) else "sdpa"


def make_backend(
    name: str, pool: KVPool, shape: AttentionShape, layers: Layer | None = None, *, bucketed: bool = False
) -> PaddedBackend | SdpaBackend | RaggedBackend | SplitKVBackend:
    """The attention backend of this name; ValueError if it is unknown or cannot serve the pool. With "triton" the norms
    and the gates of `layers` use Triton's kernels too."""
    if name == "triton":
        if not SplitKVBackend.runs(pool):
            raise ValueError("backend='triton' needs a CUDA device, Triton and a C compiler; use 'padded' or 'sdpa'")
        for part in () if layers is None else layers.walk():
            if isinstance(part, RMSNorm | ColumnLinear):
                part.uses_triton = True
        return SplitKVBackend(pool, shape, bucketed=bucketed)
    if name == "padded":
        return PaddedBackend(pool, shape, bucketed=bucketed)
    if name == "sdpa":
        return SdpaBackend(pool, shape)
    if name == "ragged":
        if not RaggedBackend.runs(pool):
            raise ValueError("backend='ragged' needs float32, KV rows too, a CPU and a C++ compiler; use 'sdpa'")
        return RaggedBackend(pool, shape)
    raise ValueError(f"attention backend {name!r} is not known; known are 'ragged', 'triton', 'sdpa' and 'padded'")


def open_model(
    path: str | Path,
    group: Group = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_slots: int = 4096,
    stretch: int = 0,
    *,
    layout: LayerLayout | None = None,
    weights: Stored | None = None,
    kv_dtype: torch.dtype | None = None,
    head: HeadRows | None = None,
    **options: Any,
) -> ModelRunner:
    """Load this rank's part of a checkpoint and allocate a pool of `num_slots` rows; `options` are the runner's.

    Matrices are stored as `weights`, "packed" for codes where the checkpoint has them, and KV rows as `kv_dtype`, None
    for `dtype`. The ranks share the model tensor-parallel, or by `layout`; the runner is then a `LayerParallelRunner`.
    With `head`, logits are computed for some tokens only.
    """
    use_device(device)
    directory = resolve_checkpoint(str(path))
    config = replace(read_config(directory).stretched(stretch), head=head)
    if layout is not None:
        from parallel.runtime.layer_parallel_runner import LayerParallelDecoder, LayerParallelRunner

        decoder = LayerParallelDecoder(config, group, device, dtype, layout, weights)
        return LayerParallelRunner(decoder, _load(decoder, directory, num_slots, kv_dtype), **options)
    decoder = Decoder(config, group, device, dtype, weights=weights)
    return ModelRunner(decoder, _load(decoder, directory, num_slots, kv_dtype), **options)


def _load(decoder: Decoder, directory: Path, num_slots: int, kv_dtype: torch.dtype | None) -> KVPool:
    """Fill the weights; returns a pool for them."""
    load_weights(decoder, directory)
    scales = read_kv_scales(decoder, directory) if kv_dtype == FP8 else None
    return decoder.make_pool(num_slots, kv_dtype, scales)
