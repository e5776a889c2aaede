"""Quality of the pair: held-out loss, greedy agreement, acceptance length. Trains nothing and writes nothing.

Acceptance length is tokens emitted per round: the accepted draft tokens plus the one the target adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from cluster.tools.training.models import continue_text
from cluster.tools.training.token_stream import END_OF_TEXT_ID
from docs.measurements.pocket.models import logits_of


@torch.inference_mode()
def _mean(rows: torch.Tensor, per_token: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """The mean over all tokens of `per_token(inputs [rows, length], successors [rows * length])`, four rows a pass."""
    values = [per_token(part[:, :-1], part[:, 1:].flatten()) for part in rows.split(4)]
    return float(torch.cat(values).float().mean())


def _flat_logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    return logits_of(model, tokens).flatten(0, 1).float()


def mean_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean cross entropy over all rows, in nats per token; its exponential is the perplexity."""
    return _mean(
        rows.to(model.device),
        lambda tokens, successors: F.cross_entropy(_flat_logits(model, tokens), successors, reduction="none"),
    )


def agreement_rate(target: LlamaForCausalLM, drafter: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the fraction of positions of real text at which both models' most likely next tokens are equal."""
    return _mean(
        rows.to(target.device),
        lambda tokens, _: _flat_logits(target, tokens).argmax(-1) == _flat_logits(drafter, tokens).argmax(-1),
    )


def overlap(target: LlamaForCausalLM, drafter: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean of `sum(min(p, q))` over all positions of real text, at temperature 1.

    It is the probability that the rejection rule accepts one draft token drawn from q.
    """

    def shared(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        p, q = (_flat_logits(model, tokens).softmax(-1) for model in (target, drafter))
        return torch.minimum(p, q).sum(-1)

    return _mean(rows.to(target.device), shared)


@torch.inference_mode()
def greedy_matches(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int
) -> list[bool]:
    """Return, for each token of the target's greedy continuation, whether the drafter's greedy choice is the same.

    The continuation has `num_tokens` tokens, or fewer when it ends with the end-of-text token. The drafter sees the
    true prefix at every position. This is all a greedy chain needs: draft token `i` of a round only counts when those
    before it were accepted, and then the prefix it was drafted from is the true one.
    """
    tokens = continue_text(target, torch.tensor([list(prompt)]), len(prompt) + num_tokens)
    answer = tokens[0, len(prompt) :]
    drafted = logits_of(drafter, tokens[:, :-1].to(drafter.device))[0, len(prompt) - 1 :].argmax(-1).cpu()
    ends = (answer == END_OF_TEXT_ID).nonzero()
    kept = int(ends[0]) + 1 if len(ends) else num_tokens
    return (drafted == answer)[:kept].tolist()


def count_rounds(matches: Sequence[bool], draft_depth: int) -> int:
    """Return how many rounds of `draft_depth` draft tokens emit a continuation with these matches."""
    position, rounds = 0, 0
    while position < len(matches):
        accepted = 0
        while accepted < draft_depth and position + accepted < len(matches) and matches[position + accepted]:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


def acceptance_length(all_matches: Sequence[Sequence[bool]], draft_depth: int) -> float:
    """Return tokens emitted per round over all continuations; a last, shortened round counts in full."""
    tokens = sum(len(matches) for matches in all_matches)
    return tokens / sum(count_rounds(matches, draft_depth) for matches in all_matches)
