"""A decoder and its KV pool, and the passes over them: what the rest of the engine calls a model.

A sequence is an identifier here. Knows neither the tokens of a sequence nor why rows form trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span, SpanRows, TableRead, logit_rows, source_reads
from parallel.kv.pool import FP8, KVPool, SeqId
from parallel.kv.sequences import PooledSequences
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.config import HeadRows
from parallel.model.decoder import Decoder, run_pass
from parallel.model.families.registry import read_config
from parallel.model.layers.attention import ChainBackend, PassPlan, ReadPlan
from parallel.model.layers.backends import CAPTURED, check_invariant, default_backend, make_backend
from parallel.model.layers.embedding import VocabTable
from parallel.model.layers.ragged import RaggedBackend
from parallel.model.layers.weight import Stored
from parallel.model.partition import LayerLayout
from parallel.model.weights import load_weights, read_kv_scales
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.device import use_device
from parallel.runtime.graph_list import ChainShape, GraphList, GraphShape, bucket, example_rows
from parallel.runtime.interface import PassOutput, StepChoice
from parallel.runtime.recorded_passes import WORTH_RECORDING, RecordedDecoder
from parallel.transfers import upload

if TYPE_CHECKING:
    from parallel.runtime.cuda_graphs import CapturedPasses


_WARM_ROWS, _WARM_STEPS = 64, WORTH_RECORDING
"""Rows of the first pass of a warm-up, and passes of a row behind it: so many that both kinds are recorded."""


class ModelRunner(DecoderRunner):
    """Passes of one model over one pool.

    `backend` is "ragged", on CPU in float32 and bfloat16 where its kernel can be had, "triton", on CUDA where Triton
    can be had, "padded", on CUDA elsewhere, or "sdpa"; None or "auto" is the first that can be had. With `graphs`
    passes of "triton" and "padded" on CUDA are captured, but for those of encoder-decoders and of mixtures of experts
    in which the host reads which experts the rows use.

    `invariant`: a row's logits have the same bits alone, beside other sequences, in a chain, in a tree and in a prompt;
    ValueError where "ragged" and "triton" cannot be had, the backends that compute a row alone.
    """

    _passes: CapturedPasses | None = None
    _recorded: RecordedDecoder | None = None
    _is_invariant = False
    _chain_lengths: Sequence[int] = ()
    """Steps of the chains that are captured, the longest first."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        *,
        backend: str | None = None,
        graphs: bool = True,
        invariant: bool = False,
    ) -> None:
        super().__init__(decoder, PooledSequences(pool))
        backend = default_backend(pool, decoder.attention_shape()) if backend in (None, "auto") else backend
        if invariant:
            check_invariant(backend)
            decoder.compute_rows_apart()
            self._is_invariant = True
        graphs &= decoder.device.type == "cuda" and backend in CAPTURED
        graphs &= decoder.waits_for_nothing and decoder.config.encoder is None
        self.attention = backend
        self._backend = make_backend(
            backend, pool, decoder.attention_shape(), decoder, bucketed=graphs, invariant=invariant
        )
        if graphs:
            from parallel.runtime.cuda_graphs import CapturedPasses

            self._passes = CapturedPasses(decoder)
        if isinstance(self._backend, RaggedBackend) and decoder.group.size == 1 and decoder.layout is None:
            self._recorded = RecordedDecoder(decoder, self._backend)

    @property
    def split_head(self) -> VocabTable | None:
        head = self.decoder.lm_head
        return head if head.group.size > 1 and self.config.head is None else None

    # --- captured passes ---------------------------------------------------------------------------------------------

    def capture(
        self, graphs: GraphList, taps: Sequence[int] = (), choices: Callable[[int, int], StepChoice] | None = None
    ) -> GraphList:
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

        def feed_chain(start: Tensor, choice: StepChoice, seq_ids: Sequence[SeqId]) -> None:
            self.extend([Span(seq_id, 1) for seq_id in seq_ids], start, choice)

        passes, chains = list[GraphShape](), list[ChainShape]()
        kinds = [kind for kind, is_wanted in ((True, graphs.of_every_row), (False, graphs.of_last_rows)) if is_wanted]
        self._passes.expect(len(graphs.passes) * len(kinds) + len(graphs.chains))
        for shape in graphs.passes:
            numbers = example_rows(shape)
            gave = [gives_graph(numbers, partial(feed_pass, numbers, kind)) for kind in kinds]
            passes += [shape] * any(gave)
        if choices is not None and not self._is_invariant:
            self._chain_lengths = sorted({steps for _, steps in graphs.chains}, reverse=True)
            for batch, steps in graphs.chains:
                start = torch.zeros(batch, dtype=torch.int64, device=self.decoder.device)
                feed = partial(feed_chain, start, choices(batch, steps))
                if gives_graph([steps] * batch, feed):
                    chains.append((batch, steps))
        return replace(graphs, passes=passes, chains=chains)

    @property
    def captures(self) -> bool:
        return self._passes is not None

    def run_eagerly(self) -> None:
        if self._passes is not None:
            self._passes.drop()
        self._passes = self._recorded = None

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """The same inside a block; captured and recorded passes stay."""
        kept, self._passes, self._recorded = (self._passes, self._recorded), None, None
        try:
            yield
        finally:
            self._passes, self._recorded = kept

    # --- passes ------------------------------------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span]) -> PassPlan:
        if self._policy is not None:
            for span in spans:
                if span.num_logits and not self.pool.pending_len(span.seq_id):
                    self._policy.began(span.seq_id, self.pool.cached_len(span.seq_id))
        return super().plan(spans)

    def plan_rows(self, rows: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        plan = self._backend.plan(rows, wanted)
        if self.decoder.encoder is not None:
            plan.source = self._backend.plan_reads(source_reads(self.pool, rows))
        return plan

    def plan_reads(self, reads: Sequence[TableRead]) -> ReadPlan:
        return self._backend.plan_reads(reads)

    def _plan_chain(self, spans: Sequence[Span], num_steps: int) -> list[PassPlan]:
        """Plans of passes of one row of each sequence, one after the other, all of one shape."""
        if isinstance(self._backend, ChainBackend):
            rows = [replace(span, num_tokens=num_steps) for span in spans]
            return self._backend.plan_chain(self.sequences.lay_out(rows), num_steps)
        return [self._plan_step(spans, num_steps - 1 - step) for step in range(num_steps)]

    def _plan_step(self, spans: Sequence[Span], room: int) -> PassPlan:
        """`room`: rows that later steps of the chain append to each sequence."""
        laid_out = self.sequences.lay_out(spans)
        for rows in laid_out:
            rows.room = room
        return self._backend.plan(laid_out, logit_rows(spans))

    def run(self, plan: PassPlan, token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> PassOutput:
        assert len(token_ids) == plan.num_rows, f"{plan.num_rows} rows planned, {len(token_ids)} tokens given"
        if self._recorded is not None and (made := self._recorded.forward(token_ids, plan, taps)) is not None:
            hidden, features, logits = made
            return PassOutput(logits if logits.dtype == torch.float32 else logits.float(), hidden, features)
        return self._run_layers(plan, upload(token_ids, self.decoder.device), taps)

    @torch.inference_mode()
    def _run_layers(self, plan: PassPlan, token_ids: Tensor, taps: Sequence[int]) -> PassOutput:
        """A pass that is captured, or whose layers are called one by one."""
        num_rows, padding = plan.num_rows, len(plan.positions) - plan.num_rows
        token_ids = F.pad(token_ids, (0, padding)) if padding else token_ids
        forward = partial(run_pass, self.decoder) if self._passes is None else self._passes.forward
        hidden, features, logits = forward(token_ids, plan, taps)
        if padding:
            hidden, features = hidden[:num_rows], tuple(feature[:num_rows] for feature in features)
        logits = logits if plan.num_logits is None else logits[: plan.num_logits]
        return PassOutput(logits.float(), hidden, features)

    def extend(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice, *, fuzzy: bool = False
    ) -> Tensor:
        """Passes in one call where they are recorded, and where chains are captured one graph for those behind the
        text."""
        if self._recorded is not None and self._policy is None and self.decoder.encoder is None:
            chosen = self._extend_recorded(self._recorded, spans, token_ids, choice)
            if chosen is not None:
                return chosen
        if self._passes is None or not self._chain_lengths or self._is_invariant:  # steps of a chain share their ranges
            return super().extend(spans, token_ids, choice, fuzzy=fuzzy)
        return self._extend_captured(self._passes, spans, token_ids, choice, fuzzy=fuzzy)

    @torch.inference_mode()
    def _extend_captured(
        self,
        passes: CapturedPasses,
        spans: Sequence[Span],
        token_ids: Tensor | Sequence[int],
        choice: StepChoice,
        *,
        fuzzy: bool,
    ) -> Tensor:
        chosen = list[Tensor]()
        if any(span.num_tokens > 1 for span in spans):
            chosen.append(choice.choose(self.forward(spans, token_ids, fuzzy=fuzzy).logits, 0)[None])
            token_ids = chosen[0][0]
        last = upload(token_ids, self.decoder.device)
        spans = [Span(span.seq_id, 1) for span in spans]
        last = F.pad(last, (0, bucket(len(spans)) - len(spans)))
        while (done := sum(map(len, chosen))) < len(choice):
            # what is left in few graphs; the host lays out the next one while this one runs
            num_steps = next(length for length in self._chain_lengths if length <= len(choice) - done)
            plans = self._plan_chain(spans, num_steps)
            chosen.append(passes.chain(last, plans, choice.part(done, done + num_steps)))
            last = chosen[-1][-1]
        return torch.cat([one[:, : len(spans)] for one in chosen])

    def _extend_recorded(
        self, recorded: RecordedDecoder, spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice
    ) -> Tensor | None:
        """None where the passes of such a chain are not recorded."""
        num_steps = len(choice)
        run = recorded.chain(len(token_ids), num_steps)
        if run is None:
            return None
        longer = [Span(span.seq_id, span.num_tokens + num_steps - 1, span.parents) for span in spans]
        rows = cast(RaggedBackend, self._backend).chain_rows(self.lay_out(longer), num_steps)
        return run(token_ids, rows, choice.race())


def captured_facts(
    runner: DecoderRunner,
    graphs: GraphList,
    taps: Sequence[int] = (),
    choices: Callable[[int, int], StepChoice] | None = None,
) -> dict[str, object]:
    """Capture these passes and chains, and what a rank reports of it; where passes are not captured, run a few."""
    if not runner.captures:
        _warm_up(runner, taps, choices if graphs.chains else None)
        return {}
    started = time.monotonic()
    captured = runner.capture(graphs, taps, choices)
    return {"graphs": str(captured), "capture_s": time.monotonic() - started}


@torch.inference_mode()
def _warm_up(runner: DecoderRunner, taps: Sequence[int], choices: Callable[[int, int], StepChoice] | None) -> None:
    """Passes over a made-up text, and a chain if there are `choices`. The first passes of a process find memory and
    choose kernels, and some later ones are recorded: those of a small draft model took several times as long as the
    others, which the policy would take for the price of a draft. Not of a group: a rank that is replaced would wait for
    the others, which keep their model."""
    if runner.decoder.group.size > 1 or runner.config.encoder is not None:
        return
    if not runner.can_reserve(_WARM_ROWS + 2 * _WARM_STEPS):
        return
    seq_id = ("warm-up",)
    runner.open(seq_id)
    for num_rows in (_WARM_ROWS, *[1] * _WARM_STEPS):
        runner.forward([Span(seq_id, num_rows)], [0] * num_rows, taps)
        runner.commit(seq_id, range(num_rows))
    if choices is not None:
        runner.extend([Span(seq_id, 1)], [0], choices(1, _WARM_STEPS))
    runner.close(seq_id)


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
