"""What the pair is worth: held-out loss, greedy agreement, acceptance length. Trains nothing and writes nothing.

Acceptance length is tokens emitted per round: the accepted draft tokens plus the one the target adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from cluster.tools.training.continuations import continue_greedily
from cluster.tools.training.objectives import logits_of
from cluster.tools.training.tokenizer import END_OF_TEXT_ID


def spread_rows(stream: torch.Tensor, length: int, num_tokens: int) -> torch.Tensor:
    """Return about `num_tokens` tokens of a stream as rows of `length` + 1, evenly spread over it."""
    starts = torch.arange(0, len(stream) - length, length)
    keep = max(1, min(len(starts), num_tokens // length))
    chosen = starts[torch.linspace(0, len(starts) - 1, keep).long()]
    return stream[chosen[:, None] + torch.arange(length + 1)]


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean cross entropy over all rows, in nats per token; its exponential is the perplexity."""
    losses = []
    for row in rows.to(model.device).split(4):
        logits = logits_of(model, row[:, :-1]).flatten(0, 1).float()
        losses.append(F.cross_entropy(logits, row[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean())


@torch.inference_mode()
def agreement_rate(target: LlamaForCausalLM, drafter: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the fraction of positions of real text at which both models' most likely next tokens are equal."""
    equal = []
    for row in rows.to(target.device).split(4):
        pair = [logits_of(model, row[:, :-1]).argmax(-1) for model in (target, drafter)]
        equal.append((pair[0] == pair[1]).flatten())
    return float(torch.cat(equal).float().mean())


@torch.inference_mode()
def overlap(target: LlamaForCausalLM, drafter: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean of `sum(min(p, q))` over all positions of real text, at temperature 1.

    It is the chance that one draft token, drawn from q, is accepted by the rejection rule.
    """
    shares = []
    for row in rows.to(target.device).split(4):
        p, q = (logits_of(model, row[:, :-1]).flatten(0, 1).float().softmax(-1) for model in (target, drafter))
        shares.append(torch.minimum(p, q).sum(-1))
    return float(torch.cat(shares).mean())


@torch.inference_mode()
def greedy_matches(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int
) -> list[bool]:
    """Return, for each token of the target's greedy continuation, whether the drafter's greedy choice is the same.

    The continuation has `num_tokens` tokens, or fewer when it ends with the end-of-text token. The drafter sees the
    true prefix at every position. This is all a greedy chain needs: draft token `i` of a round only counts when those
    before it were accepted, and then the prefix it was drafted from is the true one.
    """
    tokens = continue_greedily(target, torch.tensor([list(prompt)]), len(prompt) + num_tokens)
    answer = tokens[0, len(prompt) :]
    guesses = logits_of(drafter, tokens[:, :-1].to(drafter.device))[0, len(prompt) - 1 :].argmax(-1).cpu()
    ends = (answer == END_OF_TEXT_ID).nonzero()
    kept = int(ends[0]) + 1 if len(ends) else num_tokens
    return (guesses == answer)[:kept].tolist()


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
