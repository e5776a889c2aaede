"""Rounds of drafting and verifying in one process, for what is counted in tokens: no engine, no clock.

A draft model and a target complete prompts in one batch, each round with the production drafter and the production
rule. `CountedRound` states what was proposed and accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actors.drafters.interface import Context, Drafter
from actors.drafters.model.prefill import prefill
from actors.protocol.messages import Commit, Proposal, SamplingParams, TokenTree
from actors.verification.features import FeatureReader
from actors.verification.verifier import Verifier, VerifyInput

_PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class CountedRound:
    """One proposal for prompt number `prompt` and the accepted path of it."""

    prompt: int
    tree: TokenTree
    path: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the round, with the one that the target adds."""
        return len(self.path) + 1

    def ranks(self) -> list[int]:
        """The rank among its siblings of each accepted node."""
        children = self.tree.children()
        return [children[self.tree.parents[node]].index(node) for node in self.path]


def complete(
    verifier: Verifier,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    num_draft_tokens: int,
    num_tokens: int,
    features: FeatureReader | None = None,
    first_id: int = 0,
) -> Iterator[CountedRound]:
    """Rounds until every prompt has `num_tokens` more; ends of text do not end it. Prompt i takes seed + i, and
    `first_id` + i as its request.

    `features` is the verifier's reader, for a drafter that reads the target's hidden states; it drafts once the target
    has read the prompt, in the first round.
    """
    target = verifier.runner
    live = [
        Context(first_id + i, 0, list(prompt), len(prompt), replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    shares = drafter.capabilities.shares_rows
    for context in live:
        target.open(context.request_id)
        if shares is not None and features is None:  # it drafts where the target has rows of the text
            prefill(target, context.request_id, context.token_ids, leave=1, chunk=_PREFILL_CHUNK)
        drafter.open(context)
    while live:
        drafts = drafter.propose(live, [num_draft_tokens] * len(live))
        inputs = [
            VerifyInput(
                context.request_id,
                context.token_ids,
                context.prompt_len,
                context.sampling,
                len(context.token_ids) - target.cached_len(context.request_id),
                Proposal(
                    context.request_id,
                    0,
                    len(context.token_ids),
                    context.prefix_hash,
                    draft.tree,
                    draft.sampling_kinds,
                    draft.distributions,
                ),
            )
            for context, draft in zip(live, drafts, strict=True)
        ]
        if shares is not None:
            shares.release_rows()
        first_positions = [target.cached_len(one.seq_id) for one in inputs]
        logits, _ = verifier.forward(inputs)
        results = verifier.verify(inputs, logits)
        if features is not None and (reader := drafter.capabilities.reads_features) is not None:
            paths = {one.seq_id: result.path for one, result in zip(inputs, results, strict=True)}
            for rows in features.rows(inputs, first_positions, paths):
                reader.read_features(rows)
        for context, one, result in zip(live, inputs, results, strict=True):
            target.commit(one.seq_id, [*range(one.num_fed), *(one.num_fed - 1 + node for node in result.path)])
            tokens = (*(one.tree.token_ids[node] for node in result.path), result.next_token)
            commit = Commit(context.request_id, 0, len(context.token_ids), result.path, tokens)
            drafter.observe(context, commit)
            context.extend(tokens)
            yield CountedRound(context.request_id, one.tree, result.path)
        ended = [context for context in live if len(context.token_ids) - context.prompt_len >= num_tokens]
        live = [context for context in live if context not in ended]
        for context in ended:
            drafter.release(context.request_id)
            target.close(context.request_id)


def acceptance_by_rank(rounds: Sequence[CountedRound], width: int) -> list[float]:
    """How often the child of each rank below the root was the accepted one, of the rounds that had a draft."""
    rounds = [one for one in rounds if one.tree.num_draft_tokens]
    first = [one.ranks()[0] for one in rounds if one.path]
    return [first.count(rank) / len(rounds) for rank in range(width)]
