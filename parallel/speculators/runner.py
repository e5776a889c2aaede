"""What every speculator shows to the drafter that uses it: the passes of a model whose text rows read the target.

The drafter feeds tokens and asks for logits, as of any draft model, so chains, trees, draft-ahead and every rule are
those of `drafter=model`. Rows of committed tokens are computed from the target's features; rows of draft tokens, for
which there are none yet, from the speculator's own state: these are fuzzy, and dropped once the target's features are
there. Knows sequences and rows, not requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool, SeqId
from parallel.model.decoder import Decoder
from parallel.runtime.runner import ModelRunner, PassOutput
from parallel.speculators.config import SpeculatorConfig
from parallel.speculators.features import TextFeatures


class SpeculatorRunner(ModelRunner):
    """`tables` is the target's own decoder, or one of no layers with its embedding and head (`open_tables`).

    A family implements the methods of `ModelRunner` that a drafter calls: `cached_len`, `can_reserve`, `commit`,
    `truncate`, `drop_fuzzy` and `forward`. `forward` may be asked for text only up to the first token whose predecessor
    has no features (`num_known`). The pool may be empty.
    """

    def __init__(self, config: SpeculatorConfig, tables: Decoder, pool: KVPool) -> None:
        self.speculator = config
        self.decoder = tables
        self.pool = pool
        self._features: dict[SeqId, TextFeatures] = {}

    @property
    def config(self) -> SpeculatorConfig:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Its `vocab_size`, `num_logits` and `max_positions` are what a drafter asks of a model."""
        return self.speculator

    def open(self, seq_id: SeqId) -> None:
        self.pool.open(seq_id)
        self._features[seq_id] = TextFeatures()

    def close(self, seq_id: SeqId) -> None:
        self.pool.close(seq_id)
        del self._features[seq_id]

    def read_features(self, seq_id: SeqId, start: int, rows: Tensor) -> None:
        """The target's features [n, `feature_size`] at the committed positions from `start` on, in order."""
        self._features[seq_id].append(start, rows)

    def num_known(self, seq_id: SeqId) -> int:
        """Leading positions of the text whose features were read."""
        return self._features[seq_id].end

    @abstractmethod
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput: ...
