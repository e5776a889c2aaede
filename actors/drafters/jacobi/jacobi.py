"""`drafter=jacobi`: the target's answers at the rows of one draft are the guesses of the next.

No model, no device. A draft is a chain of guesses for the coming positions; the target's token after each guess, also
after a rejected one, is the next guess for that position (Santilli et al., "Accelerating Transformer Inference for
Translation via Parallel Decoding", arXiv 2305.10427). Positions that were never answered are guessed as random tokens
of the prompt. Under greedy decoding the chain converges to the output, at one token a round or more.

Sampled text converges too under the coupled rule: the draw of a position depends on its noise, which is known here, and
on the target's distribution, of which the likeliest tokens are. Penalties and truncation are left out, and draws beyond
those tokens are missed. Under other rules the guess is the likeliest token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.jacobi.proposed_rows import ProposedRows, Rows
from actors.protocol.messages import Commit, TokenTree, TopTokens
from actors.sampling.logits import is_greedy
from actors.sampling.noise import NoiseStream, gumbel, noise_key


@dataclass(slots=True)
class _Guesses:
    """Guesses for the positions from `start` on."""

    start: int
    token_ids: list[int]


class JacobiDrafter(RequestwiseDrafter):
    """Keeps the guesses of each request. `guesses_draws`: sampled tokens are guessed with the noise of their draw."""

    def __init__(self, *, guesses_draws: bool) -> None:
        self.capabilities = Capabilities(truncates=self, reads_top_tokens=self)
        self._guesses_draws = guesses_draws
        self._rows = ProposedRows()
        self._guesses: dict[int, _Guesses] = {}

    def open(self, context: Context) -> None:
        """A request arrived: nothing is guessed yet."""
        self.release(context.request_id)

    def observe(self, context: Context, commit: Commit) -> None:
        """Replace the guesses for the positions that the target's rows are about."""
        if (rows := self._rows.take(context)) is not None:
            answers = self._answers(context, rows)
            guesses = self._guesses[context.request_id]
            guesses.token_ids[: len(answers)] = answers

    def truncate(self, context: Context) -> None:
        """Guesses behind the cut were made for another text."""
        self.release(context.request_id)

    def release(self, request_id: int) -> None:
        self._guesses.pop(request_id, None)
        self._rows.release(request_id)

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        self._rows.read(top_tokens)

    def _propose(self, context: Context, budget: int) -> Draft:
        start = len(context.token_ids)
        guesses = self._guesses.setdefault(context.request_id, _Guesses(start, []))
        del guesses.token_ids[: start - guesses.start]
        guesses.start = start
        for position in range(start + len(guesses.token_ids), start + budget):
            key = noise_key(context.sampling.seed, NoiseStream.DRAFT, position)
            guesses.token_ids.append(context.token_ids[key % context.prompt_len])
        tree = TokenTree.chain(context.token_ids[-1], guesses.token_ids[:budget])
        self._rows.proposed(context, tree)
        return Draft.chosen(tree)

    def _answers(self, context: Context, rows: Rows) -> list[int]:
        """The target's token after each node of the chain, as far as the rows tell; position by position."""
        sampling, start = context.sampling, len(context.token_ids)
        if is_greedy(sampling) or not self._guesses_draws:
            return rows.token_ids[:, 0].tolist()
        keys = [noise_key(sampling.seed, NoiseStream.COUPLED, start + i) for i in range(len(rows.token_ids))]
        token_ids, probs = torch.from_numpy(rows.token_ids.copy()), torch.from_numpy(rows.probs.copy())
        draws = (probs.log() / sampling.temperature + gumbel(keys, token_ids)).argmax(1, keepdim=True)
        return token_ids.gather(1, draws).flatten().tolist()
