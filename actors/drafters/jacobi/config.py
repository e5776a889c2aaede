"""The configuration records of `drafter=jacobi` and `drafter=lookahead`. Without PyTorch and numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from actors.drafters.config import DraftSetup, PlacedDrafterConfig
from actors.options import VerifyRule
from parallel.ranges import Range, require

if TYPE_CHECKING:
    from actors.drafters.jacobi.jacobi import JacobiDrafter
    from actors.drafters.jacobi.lookahead import LookaheadDrafter


@dataclass(frozen=True, slots=True)
class JacobiDrafterConfig(PlacedDrafterConfig):
    """Jacobi decoding: what the target said at the rows of the last draft is the next draft."""

    name: str = "jacobi"
    num_draft_tokens: Annotated[int, Range(1, cap=1024, remedy="for none write drafter=none")] = 4
    """Positions that are guessed at a time."""
    width: Annotated[int, Range(1, cap=1024)] = 8
    """Candidates of the target at each row. Greedy decoding uses the first; sampled decoding under `verify=coupled`
    guesses the draw among them."""
    is_chain = True

    @property
    def target_top_k(self) -> int:
        return self.width

    def build(self, setup: DraftSetup) -> tuple[JacobiDrafter, dict[str, object]]:
        from actors.drafters.jacobi.jacobi import JacobiDrafter

        return JacobiDrafter(guesses_draws=setup.verify.rule == VerifyRule.coupled), {}


@dataclass(frozen=True, slots=True)
class LookaheadDrafterConfig(PlacedDrafterConfig):
    """Lookahead decoding: n-grams of a window of Jacobi trajectories, which the target continues beside the drafts."""

    name: str = "lookahead"
    num_draft_tokens: Annotated[int, Range(1, cap=1024, remedy="for none write drafter=none")] = 28
    """Nodes of the tree, at most: the window, and guesses in what it leaves. A round that is ordered fewer verifies
    guesses only."""
    window: Annotated[int, Range(1, cap=256)] = 5
    """Columns of the window: positions ahead whose trajectories are continued each round."""
    ngram: Annotated[int, Range(2, cap=32)] = 4
    """Tokens of an n-gram, the one it is looked up by included; a trajectory is one shorter."""
    guesses: Annotated[int, Range(1, cap=256)] = 5
    """N-grams kept for each first token, the latest, and verified at once."""
    reads_text: bool = True
    """N-grams of the prompt and of the output enter the pool too; false: only those of the window, as published."""
    target_top_k = 1

    @property
    def window_nodes(self) -> int:
        """Rows of a full window: a chain below the root, and a branch at each of its nodes and at the root."""
        return max(self.window - 1 + (self.ngram - 2) * self.window, self.window + self.ngram - 3)

    def check_fields(self, where: str) -> None:
        least = self.window_nodes + self.ngram - 1
        remedy = f"the window takes {self.window_nodes} nodes and a guess {self.ngram - 1}; give at least {least}"
        require(self.num_draft_tokens >= least, f"{where}.num_draft_tokens", self.num_draft_tokens, remedy)

    def build(self, setup: DraftSetup) -> tuple[LookaheadDrafter, dict[str, object]]:
        from actors.drafters.jacobi.lookahead import LookaheadDrafter

        return LookaheadDrafter(self, setup.eos_token_ids), {}
