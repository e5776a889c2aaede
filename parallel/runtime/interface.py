"""What a runner is: passes of one model over rows of sequences, and how its rows follow the text.

Drafters and the verifier (`actors`) call a `Runner` and know no more of a model. `DecoderRunner`, in a file of its own,
is one whose rows stand in a KV pool as they were fed; other runners take part in its passes. A runner that holds
another one, to fill masks or to translate tokens, wraps it. Knows no pool and no rule of drafting.

A sequence has committed rows, in the order of the text, and after them pending ones, which form trees (`Span`). A
drafter opens a sequence, feeds the text and draft tokens, commits the rows of what was accepted, and closes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text

if TYPE_CHECKING:
    from parallel.kernels.choice import Race
    from parallel.model.decoder import Decoder
    from parallel.model.layers.embedding import VocabTable


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


class StepChoice(Protocol):
    """How the tokens of a chain's steps are chosen: from tensors of the device that are there before the first step."""

    def __len__(self) -> int:
        """The number of steps."""
        ...

    def part(self, start: int, stop: int) -> Self:
        """The choice of these steps alone."""
        ...

    def tensors(self) -> list[Tensor]: ...
    def key(self) -> tuple[object, ...]: ...
    def like(self) -> Self: ...

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """logits [n, V] of any type -> tokens int64 [n]."""
        ...

    def race(self) -> Race:
        """The same for a kernel on a CPU."""
        ...


class RunnerSizes(Protocol):
    """What callers ask of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_logits(self) -> int:
        """Columns of its logits."""
        ...

    @property
    def max_positions(self) -> int:
        """Rows of a sequence, at most."""
        ...


class Runner(Protocol):
    """Passes of one model. The methods with a body are those of a model whose rows are all exact and whose passes are
    run one by one."""

    decoder: Decoder
    """Whose embedding and head it uses, on whose device it runs, and whose ranks all make the same passes."""

    @property
    @abstractmethod
    def config(self) -> RunnerSizes: ...

    @property
    def longest_draft(self) -> int:
        """Tokens of one path after the text, at most, that it has logits for."""
        return self.config.max_positions

    @property
    def reads_drafts(self) -> bool:
        """Whether its logits behind a draft token depend on which token it is, rather than on its place alone."""
        return True

    @property
    def longest_text(self) -> int:
        """Tokens of a text and the draft behind it, at most."""
        return self.config.max_positions

    @property
    def drops_rows(self) -> bool:
        """Whether it takes back rows of what it has read, so that a text needs room for a part of it at a time."""
        return False

    @property
    def split_head(self) -> VocabTable | None:
        """The head of which each rank has some tokens, all of them and in their order, if passes without the exchange
        of logits (`ungathered`) are sound: the runner reads none itself. The verifier asks; None where not."""
        return None

    # --- sequences ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        """A sequence without rows, or, where rows of ended sequences are kept, with those of the longest beginning of
        `text` that has any, short of its last token (`cached_len`). A runner whose rows do not follow from the text
        before them alone leaves `text` unread, and says so."""

    @abstractmethod
    def close(self, seq_id: SeqId) -> None:
        """Give its rows back."""

    def set_source(self, seq_id: SeqId, token_ids: Sequence[int]) -> None:
        """What the encoder of an encoder-decoder reads for a sequence that was just opened; without an encoder,
        nothing."""

    def forget_texts(self) -> None:
        """Keep no rows of ended sequences; none is open."""

    @abstractmethod
    def cached_len(self, seq_id: SeqId) -> int:
        """Leading tokens of the text that need not be fed again: its committed rows."""
        ...

    @abstractmethod
    def can_reserve(self, num_rows: int) -> bool:
        """Whether a pass may feed so many rows; `forward` relies on it."""
        ...

    @abstractmethod
    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Commit the pending rows `keep`, a path that starts after the committed rows; rows `retain` stay pending, all
        others are dropped."""

    @abstractmethod
    def truncate(self, seq_id: SeqId, length: int) -> None:
        """Drop the pending rows and those of tokens from `length` on."""

    def drop_pending(self, seq_id: SeqId) -> None:
        self.truncate(seq_id, self.cached_len(seq_id))

    def drop_fuzzy(self, seq_id: SeqId) -> bool:  # noqa: ARG002  here all rows are exact
        """Drop committed rows from the first fuzzy one on, whose tokens are then fed again; returns whether there were
        any. Drafters call it when a verdict arrives."""
        return False

    # --- passes ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        """One pass over the tokens of all spans, [T]. `taps` are residual streams to return as features, numbered as
        `Decoder.forward` does.

        `fuzzy` allows an approximate pass, whose rows are later computed again exactly: drafters set it for all passes
        of a draft but the first, which feeds text.
        """
        ...

    @torch.inference_mode()
    def extend(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice, *, fuzzy: bool = False
    ) -> Tensor:
        """Feed the tokens of all spans, choose each sequence's next one from the logits of its last row, feed that, for
        all steps of `choice`: the chosen tokens, [steps, sequences]. The host waits for none of them. All passes but
        the first one are fuzzy where there are such, and that one with `fuzzy`.
        """
        chosen: list[Tensor] = []
        for step in range(len(choice)):
            token_ids = choice.choose(self.forward(spans, token_ids, fuzzy=fuzzy or step > 0).logits, step)
            chosen.append(token_ids[None])
            spans = [Span(span.seq_id, 1) for span in spans]
        return torch.cat(chosen)

    def run_eagerly(self) -> None:
        """Stop using captured passes, because only the parts of an eager pass can be timed."""


class RunnerAround(Runner):
    """A runner that holds another one, in whose passes its own rows are."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.decoder = runner.decoder

    @property
    def config(self) -> RunnerSizes:
        return self.runner.config

    @property
    def longest_draft(self) -> int:
        return self.runner.longest_draft

    @property
    def longest_text(self) -> int:
        return self.runner.longest_text

    @property
    def drops_rows(self) -> bool:
        return self.runner.drops_rows

    def run_eagerly(self) -> None:
        self.runner.run_eagerly()


def run_by_kind(
    spans: Sequence[Span],
    token_ids: Tensor | Sequence[int],
    kinds: Sequence[int],
    run: Callable[[int, Sequence[Span], Tensor | Sequence[int]], PassOutput],
) -> PassOutput:
    """One pass for the spans of each kind, by ascending kinds; results in the order of `spans`."""
    if len(set(kinds)) == 1:
        return run(kinds[0], spans, token_ids)
    tokens = torch.as_tensor(token_ids).split([span.num_tokens for span in spans])
    rows: list[tuple[Tensor, ...]] = [()] * len(spans)
    for kind in sorted(set(kinds)):
        chosen = [i for i, one in enumerate(kinds) if one == kind]
        part = [spans[i] for i in chosen]
        output = run(kind, part, torch.cat([tokens[i] for i in chosen]))
        wanted = output.logits.split([span.num_logits for span in part])
        streams = [one.split([span.num_tokens for span in part]) for one in (output.hidden, *output.features)]
        for i, *tensors in zip(chosen, wanted, *streams, strict=True):
            rows[i] = tuple(tensors)
    logits, hidden, *features = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return PassOutput(logits, hidden, tuple(features))
