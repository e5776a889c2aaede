"""The searches of `drafter.search`, by their names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from actors.drafters.self_speculation.clasp import ClaspSearch
from actors.drafters.self_speculation.config import Search
from actors.drafters.self_speculation.exits import ExitSearch
from actors.drafters.self_speculation.fly import FlySearch
from actors.drafters.self_speculation.layer_search import LayerSearch, Scores
from actors.drafters.self_speculation.sublayers import PassShares, Sublayers
from actors.drafters.self_speculation.swift import SwiftSearch
from parallel.self_speculation.replay import Replay

if TYPE_CHECKING:
    from actors.drafters.config import DraftSetup
    from actors.drafters.self_speculation.config import SelfDrafterConfig

_FRUITLESS_SHARE = 3


def open_search(config: SelfDrafterConfig, setup: DraftSetup) -> LayerSearch | None:
    """The configured search on the target that `setup` names; None: the layers are given."""
    target = setup.target_runner
    assert target is not None
    num_layers, every, window = target.config.num_layers, config.search_every, config.search_window
    replay, agree = Replay(target), partial(setup.group.agree, device=target.decoder.device)
    scores = Scores(replay, coupled=setup.verify.rule == "coupled")
    match config.search:
        case Search.none:
            return None
        case Search.swift:
            sublayers, trials = Sublayers.inner(num_layers), config.search_trials
            num_skipped = max(1, round(config.skip_share * 2 * num_layers))
            return SwiftSearch(
                sublayers,
                scores,
                agree,
                num_skipped=min(num_skipped, len(sublayers.places) - 1),
                window=window,
                every=every,
                trials=trials,
                fruitless=-(-trials // _FRUITLESS_SHARE),
            )
        case Search.clasp:
            num_skipped = min(max(1, round(config.skip_share * num_layers)), num_layers - 1)
            return ClaspSearch(num_layers, replay, agree, num_skipped=num_skipped, every=every)
        case Search.fly:
            return FlySearch(num_layers, replay, agree, threshold=config.least_cosine, window=window)
        case Search.exit:
            longest, shares = config.num_draft_tokens, PassShares(target.decoder)
            return ExitSearch(num_layers, scores, agree, shares, longest=longest, window=window, every=every)
