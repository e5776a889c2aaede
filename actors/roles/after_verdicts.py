"""What the target's ranks do for the drafter around a pass: nothing, for one that reads committed text alone.

Two kinds replace this: a drafter on these ranks (`attached.py`) drafts behind the verdicts, and the sender of hidden
states (`bridge.py`) serves one elsewhere. None of them may know how a pass is computed or verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from actors.drafters.interface import FeatureRows
from actors.protocol.messages import Verdict, VerdictBatch, VerifyBatch, VerifyItem

if TYPE_CHECKING:
    from actors.roles.target import TargetContext
    from parallel.runtime.decoder_runner import DecoderRunner


class AfterVerdicts:
    """No drafter, or one that needs nothing of these ranks."""

    keeps_at_once = False
    """The rows of the verdicts' paths are kept before `follow`, not with the next batch's commits."""

    def verifying(self, target: DecoderRunner) -> DecoderRunner:
        """The runner for the target's passes."""
        return target

    def begin(self, batch: VerifyBatch) -> None:
        """Called before the target's rows change."""

    def ended(self, request_id: int, token_ids: list[int]) -> None:
        """A request leaves the target, with this text."""

    def wants_features(self, batch: VerifyBatch) -> bool:
        """Whether `follow` reads the hidden states of this batch's pass."""
        return False

    def agree(self, verdicts: Sequence[Verdict], items: Sequence[VerifyItem], *, is_lead: bool) -> tuple[Verdict, ...]:
        """The verdicts on which `follow` works on this rank; only the lead has those of the pass."""
        return tuple(verdicts)

    def reads_much(
        self, batch: VerifyBatch, verdicts: Sequence[Verdict], contexts: Mapping[int, TargetContext]
    ) -> bool:
        """Whether `follow` takes so long that the verdicts leave before it."""
        return False

    def follow(
        self,
        batch: VerifyBatch,
        answer: VerdictBatch,
        features: Sequence[FeatureRows],
        contexts: Mapping[int, TargetContext],
    ) -> VerdictBatch:
        """The answer with what else it brings; `features` are those of the tokens that the pass committed, `contexts`
        the requests of the target, whose texts do not have these tokens yet."""
        return answer

    def answered(self) -> None:
        """The verdicts have left."""

    def forget(self) -> None:
        """Drop every request, before the target does."""

    def rejoin(self) -> None:
        """Another epoch begins, beside ranks that may be new."""
