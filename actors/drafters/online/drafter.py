"""`drafter.online=true`: a draft model or speculator that learns from the target in the idle time of its rank.

Stands around the drafter and drafts nothing itself. It collects what the target said at verified rows, takes
the learner's steps when the role lets it, and puts new weights into the model only where a draft begins. So all passes
of a draft, and the distributions that travel with it, are of one version of the weights: q is the distribution that the
tokens were drawn from, as the ratio rules need it. KV rows of earlier versions stay: they are an input like any other.
What draft-ahead prepared with an earlier version stays too, because those tokens are offered without a q (as likeliest
tokens, or drawn with the target's noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actors.drafters.interface import Context, Draft, Drafter, FeatureRows
from actors.drafters.online.learner import OnlineLearner
from actors.drafters.online.window_features import WindowFeatures
from actors.drafters.online.windows import TargetWindow, WindowBuilder
from actors.protocol.messages import Commit, LearningWork, TopTokens
from parallel.model.layers.weight import Weight
from parallel.runtime.interface import Runner

STEPS_PER_SAVE = 64
"""Steps of AdamW from one saved state to the next."""


class OnlineDrafter:
    """`drafter` drafts by passes of `runner`, whose weights `served` are replaced; `idle_share` of the rank's idle time
    may be spent learning. With a `state` file the learner continues from it, and saves itself there."""

    def __init__(
        self,
        drafter: Drafter,
        runner: Runner,
        served: Sequence[Weight],
        learner: OnlineLearner,
        idle_share: float,
        state: Path | None,
    ) -> None:
        self.drafter = drafter
        self.runner = runner
        self.learner = learner
        self.idle_share = idle_share
        self._state = state
        self._num_saved = learner.num_steps
        self._windows_of_text = WindowBuilder()
        self._contexts: dict[int, Context] = {}
        self._served = served
        self._reader = drafter.capabilities.reads_features
        self._features = None if self._reader is None else WindowFeatures()
        reads_features = None if self._reader is None else self
        self.capabilities = replace(
            drafter.capabilities, reads_top_tokens=self, learns=self, reads_features=reads_features
        )

    # --- drafting -----------------------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        self._contexts[context.request_id] = context
        if self._features is not None:
            self._features.open(context.request_id)
        self.drafter.open(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        if (weights := self.learner.take_weights()) is not None:
            for weight, matrix in zip(self._served, weights, strict=True):
                weight.assign(matrix)
        return self.drafter.propose(contexts, budgets)

    def observe(self, context: Context, commit: Commit) -> None:
        self._remember(context.request_id, self._windows_of_text.observe(context, commit))
        self.drafter.observe(context, commit)

    def release(self, request_id: int) -> None:
        self._remember(request_id, self._windows_of_text.release(self._contexts.pop(request_id)))
        for window in [] if self._features is None else self._features.release(request_id):
            self.learner.memory.add(window)
        self.drafter.release(request_id)

    # --- learning -----------------------------------------------------------------------------------------------------

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        for request_id, window in self._windows_of_text.read(top_tokens, self._contexts):
            self._remember(request_id, window)

    @property
    def feature_size(self) -> int:
        return 0 if self._reader is None else self._reader.feature_size

    def read_features(self, features: FeatureRows) -> None:
        assert self._reader is not None
        assert self._features is not None
        self._reader.read_features(features)
        for window in self._features.read(features):
            self.learner.memory.add(window)

    def _remember(self, request_id: int, window: TargetWindow | None) -> None:
        if window is None:
            return
        for complete in [window] if self._features is None else self._features.add(request_id, window):
            self.learner.memory.add(complete)

    @property
    def wants_learning(self) -> bool:
        return self.learner.wants_step

    def learn(self) -> None:
        self.learner.learn()
        if self.learner.num_steps >= self._num_saved + STEPS_PER_SAVE:
            self.save()

    def save(self) -> None:
        if self._state is not None and self.learner.num_steps != self._num_saved:
            self.learner.save(self._state)
            self._num_saved = self.learner.num_steps

    def learning(self) -> LearningWork:
        """What was learned so far."""
        learner = self.learner
        return LearningWork(
            version=learner.version,
            is_served=learner.serves,
            num_steps=learner.num_steps,
            num_positions=learner.num_positions,
            num_held=learner.memory.num_positions,
            num_rollbacks=learner.num_rollbacks,
            loss=learner.loss.mean,
            adapted_share=learner.adapted_share.mean,
            shipped_share=learner.shipped_share.mean,
        )
