"""The completions of one HTTP request while they grow, and the place they hold in the server's count until they end.

It must not know HTTP or the form of replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from actors.drafters.lookup.copy import num_followed
from actors.protocol.messages import RequestStats
from cluster.completion import Completion, Following, Piece
from cluster.serving.reasoning import ReasoningCount


@dataclass(frozen=True, slots=True)
class RequestedText:
    """One of the texts that a request asked for. `seed` gives it again when it is asked for alone."""

    index: int
    completion: Completion
    seed: int


class Generation:
    """The choices of one request; `close` it in the end, which aborts what still runs. `began` is called for each once
    it has a token, `release` in the end. `count_reasoning` makes the count of one choice's tokens of reasoning. Without
    `of_parts` it is followed only where each choice begins and ends."""

    def __init__(
        self,
        choices: Sequence[RequestedText],
        num_prompt_tokens: int,
        began: Callable[[], None],
        release: Callable[[], None],
        prediction: Sequence[int] = (),
        count_reasoning: Callable[[], ReasoningCount] | None = None,
        *,
        of_parts: bool = True,
    ) -> None:
        self.choices = choices
        self._following = Following([choice.completion for choice in choices], of_parts=of_parts)
        self._reasoning = [count_reasoning() for _ in choices] if count_reasoning is not None else None
        self._prediction = prediction
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0  # of all pieces so far
        self._waiting = {choice.index for choice in choices}
        self._began = began
        self._release: Callable[[], None] | None = release

    async def gained(self) -> list[tuple[int, Piece]]:
        """(index of a choice, what it gained) for each `take`, once there is something; empty after the ends of all."""
        return await self._following.gained()

    def take(self, index: int, piece: Piece) -> RequestedText:
        """Count what this choice gained."""
        choice = self.choices[index]
        self.num_tokens += len(piece.token_ids)
        if self._reasoning is not None:
            completion = choice.completion
            self._reasoning[index].feed(completion.token_ids, completion.numbered_texts(piece))
        if index in self._waiting:
            self._waiting.remove(index)
            self._began()
        return choice

    def num_reasoning_tokens(self, without: RequestedText | None = None) -> int | None:
        """Tokens so far of the blocks of reasoning of all choices, but one; None where the model has none."""
        if self._reasoning is None:
            return None
        counts = zip(self.choices, self._reasoning, strict=True)
        return sum([count.num for choice, count in counts if choice is not without])

    @property
    def version(self) -> int | None:
        """That of the weights which made the newest token; None before the first."""
        versions = [choice.completion.version for choice in self.choices]
        return max([version for version in versions if version is not None], default=None)

    @property
    def num_waiting(self) -> int:
        """Choices without a token."""
        return len(self._waiting)

    @property
    def num_predicted(self) -> tuple[int, int] | None:
        """Tokens of the prediction that the choices followed, and the others, in all; None without one."""
        if not self._prediction:
            return None
        outputs = [choice.completion.token_ids for choice in self.choices]
        followed = sum([num_followed(self._prediction, output) for output in outputs])
        return followed, len(outputs) * len(self._prediction) - followed

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompts that the target had read before, for each prompt those of all its choices; None while
        one grows."""
        if not all(choice.completion.finished for choice in self.choices):
            return None
        of_prompts = groupby([choice.completion for choice in self.choices], key=lambda one: id(one.prompt))
        return sum([min([one.stats.num_cached_tokens for one in choices]) for _, choices in of_prompts])

    @property
    def stats(self) -> RequestStats | None:
        """How speculation went; None for several choices, as in vLLM."""
        return self.choices[0].completion.stats if len(self.choices) == 1 else None

    def fail(self, reason: str) -> None:
        """End what still grows with this error. From any thread."""
        for choice in self.choices:
            choice.completion.fail(reason)

    def close(self) -> None:
        """Abort what has not ended, and give the place back. Safe to call twice."""
        if self._release is not None:
            self._following.leave()
            self._release()
            self._release = None
