"""The target's hidden states at committed tokens, for a drafter that reads them.

A reader stands between a `Verifier` and its runner: it asks each pass for the taps and, once the verdicts are known,
picks the rows of the tokens that the pass committed. It keeps the hidden states beside the KV rows, by slot, so that
they are there too where a text begins with rows of another. Knows rows and positions, not the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from actors.drafters.interface import FeatureRows
from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool
from parallel.runtime.interface import PassOutput, Runner
from parallel.speculators.config import FINAL, STREAMS, kv_tap
from parallel.transfers import upload

if TYPE_CHECKING:
    from actors.verification.verifier import VerifyInput
    from parallel.runtime.decoder_runner import DecoderRunner


def kept_bytes(taps: Sequence[int], hidden_size: int) -> int:
    """Bytes for each KV slot, at most, of the hidden states that are kept beside it."""
    return 4 * hidden_size * len({tap for tap in taps if tap >= FINAL})


class FeatureReader:
    """`taps` as `parallel.speculators.config` numbers them; several stand side by side in a row. For keys and values
    it must read on every rank of the target, each of which has heads of its own in its pool. `pool` is the target's
    where the features of its rows are kept."""

    def __init__(self, taps: Sequence[int], pool: KVPool | None = None) -> None:
        self._taps = tuple(taps)
        self._pool = pool
        self.streams = tuple(sorted({tap for tap in taps if tap > FINAL}))
        self._kv_taps = tuple(tap for tap in taps if tap < FINAL)
        self._kv: dict[int, Tensor] = {}
        self._output: PassOutput | None = None
        self._kept: dict[int, Tensor] = {}  # by tap, [slots, size], memory that is taken as rows are written

    def forward(self, runner: Runner, spans: Sequence[Span], token_ids: Sequence[int]) -> PassOutput:
        """The pass, of which it keeps until `rows` what it reads."""
        self._output = runner.forward(spans, token_ids, self.streams)
        if self._kv_taps or self._pool is not None:
            pooled = cast("DecoderRunner", runner)
            slots = upload(_written_slots(pooled, spans), self._output.hidden.device)
            self._kv = {tap: _keys_and_values(pooled, slots, kv_tap(tap)) for tap in self._kv_taps}
            if self._pool is not None:
                self._keep(self._pool.num_slots, slots, self._output)
        return self._output

    @property
    def has_streams(self) -> bool:
        """Whether passes compute more for requests that are drafted for."""
        return STREAMS in self._taps

    @property
    def keeps(self) -> bool:
        """Whether the features of all rows in the pool are there."""
        return self._pool is not None

    def known(self, runner: DecoderRunner, request_id: int, num_rows: int) -> FeatureRows:
        """Features of the first rows that a request has, which may be of passes for others."""
        slots = upload(runner.pool.slots(request_id)[:num_rows].copy(), runner.pool.keys.device)
        parts = [
            _keys_and_values(runner, slots, kv_tap(tap)) if tap < FINAL else self._kept[tap].index_select(0, slots)
            for tap in self._taps
        ]
        return FeatureRows(request_id, 0, torch.cat(parts, -1))

    def _keep(self, num_slots: int, slots: Tensor, output: PassOutput) -> None:
        for tap, rows in self._hidden_states(output).items():
            if tap in self._taps:
                if tap not in self._kept:
                    self._kept[tap] = rows.new_empty(num_slots, rows.shape[-1])
                self._kept[tap].index_copy_(0, slots, rows)

    def _hidden_states(self, output: PassOutput) -> dict[int, Tensor]:
        return dict(zip(self.streams, output.features, strict=True)) | {FINAL: output.hidden}

    @property
    def pruned(self) -> frozenset[int]:
        """Rows of the last pass's logits that it gave up."""
        return self._output.pruned if self._output is not None else frozenset()

    def rows(
        self, inputs: Sequence[VerifyInput], first_positions: Sequence[int], paths: Mapping[int, Sequence[int]]
    ) -> list[FeatureRows]:
        """Features of the tokens that the last pass committed: of each input's fed text, which begins at its entry of
        `first_positions`, and of the accepted path of its proposal, if `paths` has one."""
        output, self._output = self._output, None
        assert output is not None, "one pass, one reading"
        found, wanted, start = [], [], 0
        for one, position in zip(inputs, first_positions, strict=True):
            root = start + one.num_fed - 1
            rows = [*range(start, start + one.num_fed), *(root + node for node in paths.get(one.seq_id, ()))]
            start += one.num_fed + (one.tree.num_draft_tokens if one.proposal is not None else 0)
            found.append((one.seq_id, position, len(rows)))
            wanted += rows
        features = self._features(output, wanted, start)
        parts = features.split([count for *_, count in found])
        return [FeatureRows(seq_id, position, rows) for (seq_id, position, _), rows in zip(found, parts, strict=True)]

    def _features(self, output: PassOutput, wanted: list[int], num_rows: int) -> Tensor:
        streams = self._hidden_states(output) | self._kv
        index = None
        if len(wanted) < num_rows:
            index = upload(wanted, output.hidden.device)
        picked = [streams[tap] if index is None else streams[tap].index_select(0, index) for tap in self._taps]
        return picked[0].clone() if len(picked) == 1 and index is None else torch.cat(picked, -1)


def _written_slots(runner: DecoderRunner, spans: Sequence[Span]) -> np.ndarray:
    """Where the last pass wrote its rows, in their order."""
    return np.concatenate([runner.pool.slots(span.seq_id)[-span.num_tokens :] for span in spans])


def _keys_and_values(runner: DecoderRunner, slots: Tensor, layer: int) -> Tensor:
    """Keys and values of a layer in these slots, of all ranks' heads, [n, 2 * KV heads * head size]."""
    pool, group = runner.pool, runner.decoder.group
    pair = torch.stack(pool.read(layer, slots), 1)
    if group.size > 1:
        pair = group.all_gather(pair.contiguous(), 2)
        pair = pair[:, :, :: pair.shape[2] // runner.config.num_kv_heads]  # ranks may hold the same head
    return pair.flatten(1)
