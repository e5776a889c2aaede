"""The log-probabilities of one request at the coordinator, which it keeps as long as the request lives.

They come with the target's verdicts and go to the client with the tokens; a client that missed tokens is sent those of
the tokens again. Knows lengths and parts, no text.
"""

from __future__ import annotations

from actors.protocol.logprobs import Logprobs, PromptLogprobs
from actors.protocol.messages import Request, Verdict


class RequestLogprobs:
    """Those of the tokens after the ones that came with the `request`, and of its prompt, if none did."""

    def __init__(self, request: Request) -> None:
        self._asked = request.logprobs
        self._prompt_asked = request.prompt_logprobs if not request.generated else None
        self._prompt_len = len(request.prompt)
        self._num_before = len(request.generated)
        self._generated: list[Logprobs] = []
        self._prompt: list[Logprobs] = []

    def prompt_asked(self, num_generated: int) -> int | None:
        """What a target that reads the text from its first token is to be asked: the client has those of the prompt
        once it has a token."""
        return self._prompt_asked if not num_generated else None

    def restart(self, num_generated: int) -> None:
        """The target reads the text again."""
        if not num_generated:
            self._prompt = []

    # --- what the target says -----------------------------------------------------------------------------------------

    def fits(self, verdict: Verdict, prompt: PromptLogprobs | None, num_generated: int) -> bool:
        """Whether a verdict brings what it must, and nothing else; the first one with the rest of the `prompt`."""
        if not num_generated and self._lacks_prompt(prompt):
            return False
        if verdict.logprobs is None or self._asked is None:
            return verdict.logprobs is None and self._asked is None
        num_tokens = len(verdict.path) + len(verdict.token_ids)
        return len(verdict.logprobs) == num_tokens and _lists_as(verdict.logprobs, self._generated, self._asked)

    def fits_prompt(self, part: PromptLogprobs) -> bool:
        """Whether it continues what is known of the prompt."""
        if self._prompt_asked is None or part.first != 1 + sum(map(len, self._prompt)):
            return False
        is_inside = part.first + len(part.logprobs) <= self._prompt_len
        return is_inside and _lists_as(part.logprobs, self._prompt, self._prompt_asked)

    def _lacks_prompt(self, part: PromptLogprobs | None) -> bool:
        """Whether the whole prompt is to be known before a first token, and is not with this part."""
        known = sum(map(len, self._prompt)) + (len(part.logprobs) if part is not None else 0)
        return self._prompt_asked is not None and known != self._prompt_len - 1

    def add_prompt(self, part: PromptLogprobs) -> None:
        self._prompt.append(part.logprobs)

    def add(self, logprobs: Logprobs | None, num_tokens: int) -> Logprobs | None:
        """Those of a verdict whose first tokens were committed; returns what goes with these to the client."""
        if logprobs is None:
            return None
        self._generated.append(kept := logprobs.part(0, num_tokens))
        return kept

    # --- what the client is sent --------------------------------------------------------------------------------------

    def can_resend(self, num_generated: int) -> bool:
        """Whether those of all tokens after so many are here."""
        return self._asked is None or num_generated >= self._num_before

    def since(self, num_generated: int) -> Logprobs | None:
        """Those of the generated tokens after the first ones."""
        if self._asked is None or not self._generated:
            return None
        joined = Logprobs.joined(self._generated[0].k, self._generated)
        return joined.part(num_generated - self._num_before, len(joined))

    def prompt_with(self, position: int) -> Logprobs | None:
        """What goes with the tokens from this one on."""
        if position or self._prompt_asked is None:
            return None
        return Logprobs.joined(self._prompt[0].k if self._prompt else self._prompt_asked, self._prompt)


def _lists_as(part: Logprobs, parts: list[Logprobs], asked: int) -> bool:
    """Whether it lists as many tokens as the others: as many as are asked for, or all of a small vocabulary."""
    return part.k == parts[0].k if parts else part.k <= asked
