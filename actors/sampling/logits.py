"""From logits to tokens: logit processors with every tree node's own history, and the coupled draw at a node.

Plain decoding, verification and drafting use the same functions, so that all choose the next token in the same way.
Knows logits, tokens and trees; knows no model and no verification rule.

The coupled draw is arg-max(processed logits + Gumbel noise of (seed, position, token)): a sample of the processed
distribution that is the same for every role (drafter-invariant sampling, arXiv 2408.07978; the drafter's children are
the Gumbel-top-k under the same noise). Greedy decoding is its zero-temperature case: no noise, ties to the lowest token
id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.protocol.messages import NO_TOKEN, SamplingParams, TokenTree
from actors.sampling.noise import NoiseStream, gumbel, noise_key

_GREEDY_BELOW = 1e-5  # as vLLM: a smaller temperature would overflow the division
_BANNED = -math.inf
_RANKED_FIRST = 512


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The meaning of one sequence's logit rows: row i holds the logits at tree node `nodes[i]`.

    `token_ids` are the committed tokens, the first `prompt_len` of them the prompt; the last one is the tree's root.
    `nodes` None means all nodes of the tree, in order.
    """

    params: SamplingParams
    prompt_len: int
    token_ids: Sequence[int]
    tree: TokenTree
    nodes: Sequence[int] | None = None

    def row_nodes(self) -> Sequence[int]:
        return range(len(self.tree.parents)) if self.nodes is None else self.nodes

    def positions(self) -> list[int]:
        """Index in the text of the token that each row chooses: the key of its noise."""
        depths = self.tree.depths()
        return [len(self.token_ids) + depths[node] for node in self.row_nodes()]


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY_BELOW


def is_plain(params: SamplingParams) -> bool:
    """Whether nothing but the temperature changes the logits."""
    return not _edits(params) and (is_greedy(params) or not _truncates(params))


def _edits(params: SamplingParams) -> bool:
    """Whether the parameters change the logits of single tokens."""
    return (
        bool(params.logit_bias or params.bad_words or params.min_tokens)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


# --- logit processors ------------------------------------------------------------------------------------------------


def process_logits(logits: Tensor, rows: LogitRows, eos_token_ids: Sequence[int]) -> Tensor:
    """Processed logits [n, V]; the history of row i is the committed tokens and the path to its node.

    Order of vLLM: logit bias, bad words, min tokens, repetition, presence and frequency penalty, temperature, min-p,
    top-k, top-p. Bad words and the repetition penalty look at prompt and output, as in transformers; presence and
    frequency at the output only. Tokens that tie with the last kept one are kept too. Returns `logits` itself if
    nothing applies, else a tensor of its own; banned tokens hold -inf.
    """
    params, prompt_len, token_ids = rows.params, rows.prompt_len, rows.token_ids
    if _edits(params):
        paths = [[rows.tree.token_ids[i] for i in rows.tree.path_to(node)] for node in rows.row_nodes()]
        logits = logits.clone()
        _bias_(logits, params)
        _ban_words_(logits, params, token_ids, paths)
        _ban_early_end_(logits, params, eos_token_ids, len(token_ids) - prompt_len, paths)
        _penalise_(logits, params, prompt_len, token_ids, paths)
    if is_greedy(params):
        return logits
    logits = _divide(logits, [params.temperature])
    return _keep_likely(logits, params)


def _bias_(logits: Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(1, _indices(token_ids, logits), logits.new_tensor(biases).expand(len(logits), -1))


def _ban_words_(logits: Tensor, params: SamplingParams, token_ids: Sequence[int], paths: list[list[int]]) -> None:
    """Ban the last token of each bad word after a history that ends with the rest of it."""
    if not params.bad_words:
        return
    reach = max(len(word) for word in params.bad_words) - 1
    committed = list(token_ids[max(0, len(token_ids) - reach) :])
    cells = []
    for row, path in enumerate(paths):
        history = tuple(committed + path)
        for *beginning, last in params.bad_words:
            if history[len(history) - len(beginning) :] == tuple(beginning):
                cells.append((row, last))
    if cells:
        rows, banned = _indices(list(zip(*cells, strict=True)), logits)
        logits[rows, banned] = _BANNED


def _ban_early_end_(
    logits: Tensor, params: SamplingParams, eos_token_ids: Sequence[int], num_output: int, paths: list[list[int]]
) -> None:
    """Ban end-of-sequence and stop tokens while fewer than `min_tokens` have been generated."""
    early = [row for row, path in enumerate(paths) if num_output + len(path) < params.min_tokens]
    ends = sorted({*eos_token_ids, *params.stop_token_ids})
    if early and ends:
        logits[_indices(early, logits)[:, None], _indices(ends, logits)] = _BANNED


def _penalise_(
    logits: Tensor, params: SamplingParams, prompt_len: int, token_ids: Sequence[int], paths: list[list[int]]
) -> None:
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if repetition == 1.0 and presence == 0.0 and frequency == 0.0:
        return
    counts = _count(token_ids[prompt_len:], logits).repeat(len(paths), 1)  # [n, V] occurrences in the output
    cells = [(row, token) for row, path in enumerate(paths) for token in path]
    if cells:
        rows, columns = _indices(list(zip(*cells, strict=True)), logits)
        counts.index_put_((rows, columns), counts.new_ones(()), accumulate=True)
    if repetition != 1.0:  # Keskar et al., CTRL, arXiv 1909.05858, with the sign rule of transformers
        seen = (counts > 0) | (_count(token_ids[:prompt_len], logits) > 0)
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits))
    if frequency != 0.0:
        logits.sub_(counts * frequency)
    if presence != 0.0:
        logits.sub_((counts > 0) * presence)


def _keep_likely(logits: Tensor, params: SamplingParams) -> Tensor:
    """Min-p, top-k and top-p as one threshold after the other on tempered logits [n, V]."""
    if params.min_p > 0:
        logits = _ban_below(logits, logits.amax(dim=-1, keepdim=True) + math.log(params.min_p))
    vocab_size = logits.shape[-1]
    top_k = min(params.top_k or vocab_size, vocab_size)
    if params.top_p < 1:
        logits = _ban_below(logits, _nucleus_threshold(logits, top_k, params.top_p))
    elif top_k < vocab_size:
        logits = _ban_below(logits, logits.topk(top_k, dim=-1).values[:, -1:])
    return logits


def _nucleus_threshold(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The least kept logit [n, 1]: of the `top_k` tokens, those with less than `top_p` of their mass before them.

    A few hundred tokens nearly always hold that mass; ranking the whole vocabulary costs ten times as much. Both ways
    sum the same numbers, so that a row does not depend on whether another row of the batch needs the whole vocabulary.
    """
    if top_k < logits.shape[-1]:
        ranked = logits.topk(top_k, dim=-1)
        mass = ranked.values.softmax(dim=-1, dtype=torch.float64)
    else:
        distribution = logits.softmax(dim=-1, dtype=torch.float64)
        ranked = logits.topk(min(top_k, _RANKED_FIRST), dim=-1)
        mass = distribution.gather(1, ranked.indices)
        if bool((mass.sum(dim=-1) < top_p).any()):
            ranked = logits.topk(top_k, dim=-1)
            mass = distribution.gather(1, ranked.indices)
    num_kept = (mass.cumsum(dim=-1) - mass < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ranked.values.gather(1, num_kept - 1)


def _ban_below(logits: Tensor, least: Tensor) -> Tensor:
    return logits.masked_fill(logits < least, _BANNED)


def _divide(logits: Tensor, temperatures: list[float]) -> Tensor:
    """Row i over `temperatures[i]`, or all rows over the only one; a tensor divisor rounds alike in every batch."""
    if all(temperature == 1.0 for temperature in temperatures):
        return logits
    return logits / logits.new_tensor(temperatures)[:, None]


def _count(token_ids: Sequence[int], like: Tensor) -> Tensor:
    """How often every token of the vocabulary occurs, [V]."""
    occurrences = torch.bincount(torch.tensor(token_ids, dtype=torch.int64), minlength=like.shape[-1])
    return occurrences.to(like.device, like.dtype)


def _indices(values: Sequence, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(like.device)


# --- choosing --------------------------------------------------------------------------------------------------------


def process_batch(logits: Tensor, batch: Sequence[LogitRows], eos_token_ids: Sequence[int]) -> Tensor:
    """`process_logits` for the rows of many sequences, flat in `logits` [N, V]; plain sequences share one division."""
    if len(batch) == 1:
        return process_logits(logits, batch[0], eos_token_ids)
    divisors, touched, start = [], [], 0
    for rows in batch:
        num_rows, plain = len(rows.row_nodes()), is_plain(rows.params)
        divisors += [rows.params.temperature if plain and not is_greedy(rows.params) else 1.0] * num_rows
        if not plain:
            touched.append((rows, slice(start, start + num_rows)))
        start += num_rows
    assert start == len(logits), "every logit row belongs to one tree node"
    scores = _divide(logits, divisors)
    if touched and scores is logits:
        scores = logits.clone()
    for rows, where in touched:
        scores[where] = process_logits(logits[where], rows, eos_token_ids)
    return scores


def choose_batch(logits: Tensor, batch: Sequence[LogitRows], eos_token_ids: Sequence[int]) -> Tensor:
    """The target's own token at every node, int64 [N], or `NO_TOKEN`: one arg-max, noise for the sampled rows only."""
    scores = process_batch(logits, batch, eos_token_ids)
    params = [rows.params for rows in batch for _ in rows.row_nodes()]
    positions = [position for rows in batch for position in rows.positions()]
    values, token_ids = _with_noise(scores, params, positions).max(dim=-1)
    return torch.where(values.isnan(), NO_TOKEN, token_ids)  # NaN is the largest value of a row that has any


def choose(scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Coupled draw from processed logits [n, V], int64 [n]; `positions[i]` is the index of the token being chosen."""
    return _with_noise(scores, params, positions).argmax(dim=-1)


def top_children(
    scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], width: int, *, given_noise: bool = False
) -> tuple[Tensor, Tensor]:
    """The drafter's side of `choose`: the `width` likeliest winners under the target's noise, best first.

    Returns token ids [n, width] and their log-probabilities [n, width] under softmax(scores); with `given_noise`, under
    softmax(scores + noise), which is closer to the probability that the target draws them: it has the same noise and
    slightly different scores.
    """
    raced = _with_noise(scores, params, positions)
    # arg-max breaks ties as the target does; top-k promises no order among ties
    token_ids = raced.argmax(dim=-1, keepdim=True) if width == 1 else raced.topk(width, dim=-1).indices
    distribution = raced if given_noise else scores
    return token_ids, distribution.gather(1, token_ids) - distribution.logsumexp(dim=-1, keepdim=True)


def _with_noise(scores: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Scores plus the coupled noise of every sampled row; rows of one (seed, position) share one noise vector."""
    sampled = [row for row in range(len(scores)) if not is_greedy(params[row])]
    if not sampled:
        return scores
    vectors: dict[tuple[int, int], int] = {}
    which = [vectors.setdefault((params[row].seed, positions[row]), len(vectors)) for row in sampled]
    keys = [noise_key(seed, NoiseStream.COUPLED, position) for seed, position in vectors]
    noise = gumbel(keys, torch.arange(scores.shape[-1], device=scores.device))
    if len(vectors) < len(sampled):
        noise = noise[_indices(which, scores)]
    if len(sampled) == len(scores):
        return noise.add_(scores)
    return scores.index_add(0, _indices(sampled, scores), noise)


def probabilities(scores: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of processed logits [n, V], float64 [n, V]; one-hot at the arg-max when greedy."""
    if is_greedy(params):
        return torch.zeros_like(scores, dtype=torch.float64).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return scores.softmax(dim=-1, dtype=torch.float64)
