"""`drafter=self`: drafts with some layers of the target itself, over the target's KV rows.

The drafting is that of `drafter=model`, with a runner whose sequences follow the target's. The text needs no reading:
when a draft is wanted, the target has rows of all of it but the last token. Where the pool is full there is no draft.
Knows no rows and no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.drafters.interface import Capabilities, Context, Draft
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.self_speculation.layer_search import LayerSearch
from actors.drafters.self_speculation.searches import open_search
from parallel.kv.row_limits import RowLimits
from parallel.runtime.pacing import pace
from parallel.runtime.row_policies import ChunkRows, PartialRows, RecentRows
from parallel.self_speculation.runner import SelfDraftRunner

if TYPE_CHECKING:
    from actors.drafters.config import DraftSetup, ModelOptions
    from actors.drafters.self_speculation.config import SelfDrafterConfig
    from parallel.runtime.decoder_runner import DecoderRunner


class SelfDrafter(ModelDrafter):
    """Drafts in turn with the target, on its ranks; a `search` chooses the layers before each draft."""

    runner: SelfDraftRunner

    def __init__(
        self,
        runner: SelfDraftRunner,
        config: SelfDrafterConfig,
        options: ModelOptions,
        search: LayerSearch | None = None,
    ) -> None:
        super().__init__(runner, config, options)
        self.search = search
        self.capabilities = Capabilities(
            runner.config.vocab_size, prefills=None if search is None else self, shares_rows=runner
        )

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        if self.search is not None:
            self.runner.layers = self.search.before_draft(contexts)
        return super().propose(contexts, budgets)

    def prefill(self, contexts: Sequence[Context]) -> None:
        """The target reads the text. A search looks at it, so that the rounds of a trial cost what later ones will."""
        read = [one for one in contexts if self.runner.cached_len(one.request_id) == len(one.token_ids) - 1]
        if self.search is not None and read:
            self.runner.layers = self.search.before_trial(read)

    def release(self, request_id: int) -> None:
        if self.search is not None:
            self.search.release(request_id)
        super().release(request_id)

    def _prefill(self, context: Context, leave: int) -> None:
        """The target reads the text."""


def open_self_draft(config: SelfDrafterConfig, setup: DraftSetup, *, resumes: bool) -> SelfDraftRunner:
    """The layers that the record names of the target that `setup` names."""
    target = setup.target_runner
    if target is None:
        raise ValueError("drafter=self: drafts with the target's own layers, and has to be on its ranks")
    num_layers = target.config.num_layers
    config.check_layers(num_layers)

    def open_one() -> tuple[SelfDraftRunner]:
        # what attended to a part of the rows is not exact, in any layer but the first
        runner = SelfDraftRunner(target, config.layer_plan(num_layers), resumes=resumes and config.keeps_all_rows)
        if not config.keeps_all_rows:
            runner.keep_rows_by(_policy_of(config, target))
        pace(runner, config.pace_ms)
        return (runner,)

    return setup.opened.next(open_one)[0]


def _policy_of(config: SelfDrafterConfig, target: DecoderRunner) -> PartialRows:
    """What of the target's rows drafts see."""
    limits = config.row_limits
    return RecentRows(limits) if isinstance(limits, RowLimits) else ChunkRows(target.decoder, target.pool, limits)


def build_self_drafter(config: SelfDrafterConfig, setup: DraftSetup) -> tuple[SelfDrafter, dict[str, object]]:
    """The drafter on the target that `setup` names."""
    runner = open_self_draft(config, setup, resumes=config.resume)
    search = open_search(config, setup)
    if search is not None:
        runner.layers = search.layers
    share = runner.layers.num_sublayers / (2 * runner.config.num_layers)
    return SelfDrafter(runner, config, setup.model_options, search), {"draft_share": share}
