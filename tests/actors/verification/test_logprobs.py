"""Log-probabilities of rows: what they are, that no row beside one changes a bit of it, and whose rows are read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.protocol.logprobs import Logprobs
from actors.protocol.messages import NO_TOKEN, Proposal, SamplingParams, TokenTree
from actors.verification.logprobs import read_logprobs
from actors.verification.verifier import Verifier, VerifyInput
from parallel.runtime.runner import open_model
from tests.parallel.conftest import make_checkpoint, on_ranks  # noqa: F401  fixtures

TEXT = [5, 9, 60, 33, 2]


def listed(record: Logprobs) -> list[list[tuple[int, float, int]]]:
    return [[(token, one.logprob, one.rank) for token, one in row.items()] for row in record.entries()]


def test_they_are_the_log_softmax_at_the_token_and_at_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.5, 0.5, 2.0, 2.0]])
    wanted = torch.log_softmax(logits, -1).tolist()
    found = listed(read_logprobs(logits, [3, 3], 2).record(2, 0, 2))
    assert found[0] == [(3, wanted[0][3], 4), (1, wanted[0][1], 1), (2, wanted[0][2], 2)]
    # The text's own token counts those that tie with it, as in vLLM; where it is listed too, its place there counts.
    assert found[1] == [(3, wanted[1][3], 2), (2, wanted[1][2], 1)]
    assert listed(read_logprobs(logits, [2, 0], 0).record(0, 0, 2)) == [[(2, wanted[0][2], 2)], [(0, wanted[1][0], 4)]]
    assert read_logprobs(logits, [0, 0], 20).record(20, 0, 2).k == 4, "all tokens of a small vocabulary"


@pytest.mark.parametrize("vocab_size", [97, 5003])
def test_a_row_has_the_same_bits_whatever_is_read_beside_it(vocab_size):
    """Rows of few values tie at every rank, so that another order of ties would show."""
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(37, vocab_size) * 5, torch.randint(0, 3, (37, vocab_size)).float()])
    tokens = torch.randint(0, vocab_size, (74,)).tolist()
    whole = read_logprobs(logits, tokens, 20)
    for row, token in enumerate(tokens):
        k = row % 21
        assert read_logprobs(logits[row : row + 1], [token], k).record(k, 0, 1) == whole.record(k, row, row + 1)


def test_of_tokens_that_tie_the_lowest_are_listed():
    logits = torch.zeros(1, 300)
    logits[0, [200, 40, 7]] = 1.0
    assert list(read_logprobs(logits, [9], 5).record(5, 0, 1).entries()[0]) == [9, 7, 40, 200, 0, 1]


def test_a_row_that_is_not_finite_has_no_probability_anywhere():
    logits = torch.randn(3, 11)
    logits[1, 4] = torch.nan
    logits[2, 5] = torch.inf
    record = read_logprobs(logits, [1, 1, 1], 2).record(2, 0, 3)
    record.check(11)
    values = np.frombuffer(record.values, np.float32).reshape(3, 3)
    assert np.isfinite(values[0]).all() and (values[1:] == -np.inf).all()


def texts(runner):
    """Three texts, the second with a tree; the last two ask, of which the third is a prompt."""
    tree = TokenTree((2, 8, 71, 40), (-1, 0, 0, 1))
    inputs = [VerifyInput(i, TEXT, 4, SamplingParams(), 5) for i in range(3)]
    inputs[1] = replace(inputs[1], proposal=Proposal.deterministic(1, 0, 5, 0, tree), logprobs=3)
    inputs[2] = replace(inputs[2], logprobs=0, prompt_logprobs=2)
    for one in inputs:
        runner.open(one.seq_id)
    return inputs


def read(path, group=None, *, splits=False):
    """What a pass says, and (rows, columns) of what the ranks gathered after it chose its tokens."""
    runner = open_model(path, num_slots=64, **({} if group is None else {"group": group}))
    verifier, gathered = Verifier(runner, "coupled", (1,), splits_choice=splits), []
    inputs = texts(runner)
    if group is not None:
        gather = group.all_gather
        group.all_gather = lambda tensor, dim=-1: gathered.append(tuple(tensor.shape)) or gather(tensor, dim)
    logits, _ = verifier.forward(inputs)
    return verifier.verify(inputs, logits), verifier.prompt_logprobs(), gathered


def near(one: Logprobs, other: Logprobs) -> bool:
    values = [np.frombuffer(part.values, np.float32) for part in (one, other)]
    return (one.token_ids, one.ranks) == (other.token_ids, other.ranks) and np.allclose(*values, atol=1e-5)


def test_they_are_those_of_the_reference_model_at_the_tokens_of_the_text(make_checkpoint):  # noqa: F811
    checkpoint = make_checkpoint("Llama")
    results, (prompt,), _ = read(checkpoint.path)
    expected = torch.log_softmax(checkpoint.logits(TEXT), -1)
    assert results[0].logprobs is None, "it did not ask"
    assert (prompt.request_id, prompt.first, len(prompt.logprobs), prompt.logprobs.k) == (2, 1, 3, 2)
    for row, entries in enumerate(prompt.logprobs.entries()):
        token = TEXT[row + 1]
        assert next(iter(entries)) == token and entries[token].logprob == pytest.approx(float(expected[row, token]))
        assert set(entries) == {token, *expected[row].topk(2).indices.tolist()}
    (last,) = results[2].logprobs.entries()
    assert last[results[2].next_token].logprob == pytest.approx(float(expected[4, results[2].next_token]))
    assert last[results[2].next_token].rank == 1 and len(last) == 1


def test_ranks_of_a_split_head_exchange_the_rows_that_are_asked_for_and_no_others(make_checkpoint, on_ranks):  # noqa: F811
    path = make_checkpoint("Llama").path
    expected, (prompt,), _ = read(path)
    (lead, *others) = on_ranks(2, lambda group: read(path, group, splits=True))
    for one, wanted in zip(lead[0], expected, strict=True):
        assert (one.path, one.next_token) == (wanted.path, wanted.next_token)
        assert one.logprobs is wanted.logprobs is None or near(one.logprobs, wanted.logprobs)
    assert near(lead[1][0].logprobs, prompt.logprobs)
    whole = 49  # half of the 97 tokens
    for *_, gathered in (lead, *others):
        assert [shape for shape in gathered if shape[-1] == whole] == [(5, whole), (3, whole)], "nodes, then the prompt"
        assert (1, 2, 6) in gathered, "two numbers of each row chose the tokens"


def test_nothing_is_said_of_a_token_that_cannot_follow(make_checkpoint):  # noqa: F811
    runner = open_model(make_checkpoint("Llama").path, num_slots=64)
    runner.open(1)
    verifier, stops = Verifier(runner, "coupled", (1,)), tuple(range(97))
    sampling = SamplingParams(stop_token_ids=stops, min_tokens=3)  # each is ruled out
    inputs = [VerifyInput(1, TEXT, 5, sampling, 5, logprobs=2)]
    (result,) = verifier.verify(inputs, verifier.forward(inputs)[0])
    assert result.next_token == NO_TOKEN and len(result.logprobs) == 0
