"""Logit processors against transformers and written-out formulas, and the coupled draw against its law."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocol.messages import SamplingParams, TokenTree
from actors.sampling.edits import _Edits
from actors.sampling.logits import (
    NO_TOKEN,
    ChildrenAhead,
    LogitRows,
    choose,
    choose_batch,
    is_greedy,
    is_plain,
    probabilities,
    process_batch,
    process_logits,
    top_children,
)
from tests.examples import examples

VOCAB = 50
EOS = (7,)
PROMPT = [3, 5, 3, 9, 11, 4]
OUTPUT = [5, 20, 20, 21]
TREE = TokenTree((21, 5, 20, 30, 20, 21), (-1, 0, 0, 1, 1, 4))  # the root is the last committed token

HF_CASES = {
    "repetition penalty": SamplingParams(temperature=1.0, repetition_penalty=1.3),
    "repetition bonus": SamplingParams(repetition_penalty=0.7),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=0.8, top_k=7),
    "top-k beyond the vocabulary": SamplingParams(temperature=0.8, top_k=VOCAB + 1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.7),
    "tiny top-p": SamplingParams(temperature=0.8, top_p=1e-6),
    "min-p": SamplingParams(temperature=0.8, min_p=0.1),
    "min-p of one": SamplingParams(temperature=0.8, min_p=1.0),
    "top-k and top-p": SamplingParams(temperature=1.7, top_k=12, top_p=0.8),
    "min tokens": SamplingParams(temperature=1.0, min_tokens=7, stop_token_ids=(8, 2)),
    "bad words": SamplingParams(bad_words=((20, 21), (1,), (5, 20, 30), (21, 5), (20, 20))),
    "no n-gram twice": SamplingParams(no_repeat_ngram_size=2),
    "no token twice": SamplingParams(no_repeat_ngram_size=1),
    "n-grams longer than the text": SamplingParams(no_repeat_ngram_size=16),
    "a forced end": SamplingParams(temperature=0.7, forced_eos_token_id=3, max_tokens=len(OUTPUT) + 2),
    "allowed tokens": SamplingParams(temperature=0.8, allowed_token_ids=(30, 7, 7, 9, 20)),
    "logit bias": SamplingParams(logit_bias=((4, 2.5), (9, -100.0))),
    "all": SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        min_tokens=7,
        bad_words=((20, 21), (1,)),
        allowed_token_ids=tuple(range(0, VOCAB, 2)),
        logit_bias=((4, 2.5),),
    ),
}


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def processed(logits: torch.Tensor, params: SamplingParams, tree: TokenTree = TREE, nodes=None) -> torch.Tensor:
    return process_logits(logits, LogitRows(params, len(PROMPT), PROMPT + OUTPUT, tree, nodes), EOS)


def transformers_row(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> torch.Tensor:
    """One row [V] through transformers' own processors, in the order of `process_logits`."""
    ends = [*EOS, *params.stop_token_ids]
    chain = []
    if params.logit_bias:
        chain.append(transformers.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.bad_words:
        chain.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if size := params.no_repeat_ngram_size:
        chain.append(transformers.NoRepeatNGramLogitsProcessor(size))
    if params.forced_eos_token_id is not None:
        end = len(PROMPT) + params.max_tokens, params.forced_eos_token_id
        chain.append(transformers.ForcedEOSTokenLogitsProcessor(*end, device="cpu"))
    if params.allowed_token_ids:
        others = sorted({*range(len(logits))} - {*params.allowed_token_ids})
        chain.append(transformers.SuppressTokensLogitsProcessor(others, device="cpu"))
    if params.min_tokens:
        chain.append(transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends, device="cpu"))
    if params.repetition_penalty != 1.0:
        chain.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        chain.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        chain.append(transformers.MinPLogitsWarper(params.min_p))
    if params.top_k:
        chain.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(transformers.TopPLogitsWarper(params.top_p))
    scores = logits[None].clone()
    for processor in chain:
        scores = processor(torch.tensor([history]), scores)
    return scores[0]


def history_of(node: int) -> list[int]:
    return PROMPT + OUTPUT + [TREE.token_ids[i] for i in TREE.path_to(node)]


# --- processors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", HF_CASES)
def test_processors_equal_those_of_transformers_on_every_path(case):
    params = HF_CASES[case]
    logits = random_logits(6)
    ours = processed(logits, params)
    for node in range(6):
        theirs = transformers_row(logits[node], params, history_of(node))
        torch.testing.assert_close(ours[node], theirs, rtol=1e-6, atol=1e-6)


def test_min_tokens_lets_the_end_through_from_the_node_where_it_is_due():
    params = SamplingParams(min_tokens=len(OUTPUT) + 2, stop_token_ids=(2,))
    banned = torch.isinf(processed(random_logits(6), params))
    depths = torch.tensor(TREE.depths())
    assert torch.equal(banned[:, 7], depths < 2)
    assert torch.equal(banned[:, 2], depths < 2)
    assert banned.sum() == 2 * (depths < 2).sum()


def test_an_end_token_beyond_the_vocabulary_of_a_drafter_is_banned_nowhere():
    """Models of one family pad their vocabularies differently."""
    rows = LogitRows(SamplingParams(min_tokens=9), len(PROMPT), [*PROMPT, *OUTPUT], TREE)
    banned = torch.isinf(process_logits(random_logits(6), rows, (7, VOCAB, VOCAB + 3)))
    assert banned[:, 7].any() and banned.sum() == banned[:, 7].sum()


@pytest.mark.parametrize("presence, frequency", [(0.7, 0.0), (0.0, 0.4), (1.5, -0.3)])
def test_presence_and_frequency_penalties_count_the_output_only(presence, frequency):
    """The formula of OpenAI and vLLM: logit - frequency * count - presence * (count > 0)."""
    logits = random_logits(6)
    ours = processed(logits, SamplingParams(presence_penalty=presence, frequency_penalty=frequency))
    for node in range(6):
        output = history_of(node)[len(PROMPT) :]
        for token in range(VOCAB):
            expected = logits[node, token] - frequency * output.count(token) - presence * (token in output)
            assert ours[node, token] == pytest.approx(float(expected), abs=1e-5)


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value, default):
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=maybe(rng.uniform(0.2, 2), 0.0),
        top_k=maybe(rng.randrange(1, 60), 0),
        top_p=maybe(rng.uniform(0.1, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(((rng.randrange(VOCAB), rng.uniform(-9, 9)),), ()),
        bad_words=maybe(tuple(tuple(rng.choices(range(6), k=rng.randrange(1, 4))) for _ in range(4)), ()),
        allowed_token_ids=maybe(tuple(rng.choices(range(VOCAB), k=9)), ()),
        stop_token_ids=maybe((rng.randrange(VOCAB),), ()),
        min_tokens=maybe(rng.randrange(12), 0),
        no_repeat_ngram_size=maybe(rng.randrange(4), 0),
        forced_bos_token_id=maybe(rng.randrange(VOCAB), None),
        forced_eos_token_id=maybe(rng.randrange(VOCAB), None),
        max_tokens=rng.randrange(1, 12),
        seed=rng.randrange(1 << 62),
    )


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(60))
def test_a_node_is_processed_as_if_its_path_were_committed(seed):
    rng = random.Random(seed)
    params = random_params(rng)
    committed = rng.choices(range(6), k=rng.randrange(1, 12))
    prompt_len = rng.randrange(1, len(committed) + 1)
    size = rng.randrange(1, 9)
    tree = TokenTree(
        (committed[-1], *rng.choices(range(6), k=size - 1)), (-1, *(rng.randrange(i) for i in range(1, size)))
    )
    logits = random_logits(size, seed=seed)
    together = process_logits(logits, LogitRows(params, prompt_len, committed, tree), EOS)
    for node in range(size):
        line = committed + [tree.token_ids[i] for i in tree.path_to(node)]
        alone = process_logits(
            logits[node : node + 1], LogitRows(params, prompt_len, line, TokenTree.root(line[-1])), EOS
        )
        assert torch.equal(together[node], alone[0])
    some = rng.sample(range(size), k=rng.randrange(1, size + 1))
    assert torch.equal(
        process_logits(logits[some], LogitRows(params, prompt_len, committed, tree, some), EOS), together[some]
    )


@pytest.mark.parametrize("case", HF_CASES)
def test_the_model_s_logits_are_left_alone(case):
    logits = random_logits(6)
    before = logits.clone()
    rows = LogitRows(HF_CASES[case], len(PROMPT), PROMPT + OUTPUT, TREE)
    choose_batch(logits, [rows], EOS)
    choose_batch(logits, [replace(rows, nodes=(0, 1, 2)), replace(rows, nodes=(3, 4, 5))], EOS)
    assert torch.equal(logits, before)


def test_the_first_token_of_an_output_is_forced_and_its_last_one_before_that():
    logits, tree = random_logits(3), TokenTree.chain(PROMPT[-1], [20, 21])
    for max_tokens, forced in ((9, {0: 3}), (3, {0: 3, 2: 4}), (1, {0: 4})):
        params = SamplingParams(
            forced_bos_token_id=3, forced_eos_token_id=4, max_tokens=max_tokens, bad_words=((3,),), min_tokens=1
        )
        scores = process_logits(logits, LogitRows(params, len(PROMPT), PROMPT, tree), EOS)
        for node in range(3):
            if node in forced:
                assert scores[node].isfinite().nonzero().tolist() == [[forced[node]]]
            else:
                assert scores[node].isfinite().sum() > 2


def test_plain_logits_pass_through_untouched():
    logits = random_logits(6)
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)):
        assert is_plain(params)
        assert processed(logits, params) is logits
    assert not is_plain(SamplingParams(temperature=1.0, top_k=3))
    assert not is_plain(SamplingParams(min_tokens=1))
    assert is_greedy(SamplingParams(temperature=1e-6)) and not is_greedy(SamplingParams(temperature=1e-3))


@pytest.mark.parametrize("top_k, widest", [(0, 2000), (700, 512), (400, 300)])
def test_a_nucleus_wider_than_the_first_ranked_tokens(top_k, widest):
    logits = torch.cat([random_logits(2, 3000) * 0.1, random_logits(1, 3000)])  # two flat rows and a peaked one
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=0.9)
    ours = process_logits(logits, LogitRows(params, 1, [0], TokenTree.chain(0, (1, 2))), EOS)
    assert torch.isfinite(ours[0]).sum() > widest > torch.isfinite(ours[2]).sum()
    for row in range(3):
        torch.testing.assert_close(ours[row], transformers_row(logits[row], params, [0]))
    alone = process_logits(logits[2:], LogitRows(params, 1, [0], TokenTree.root(0)), EOS)
    assert torch.equal(ours[2:], alone)


def kept_by_definition(row: torch.Tensor, params: SamplingParams) -> tuple[set[int], bool]:
    """The tokens that min-p, top-k and top-p keep, by sorting, and whether rounding could decide about one."""
    scores = (row / params.temperature).tolist()
    alive = (
        [x for x in scores if x >= (torch.tensor(max(scores)) + math.log(params.min_p)).item()]
        if params.min_p
        else scores
    )
    alive = sorted(alive, reverse=True)
    if params.top_k:
        alive = alive[: params.top_k]
    weights = [math.exp(x - alive[0]) for x in alive]
    least, before, total, close = alive[-1], 0.0, math.fsum(weights), False
    for i, weight in enumerate(weights):
        share = before / total
        close |= params.top_p < 1 and abs(share - params.top_p) < 1e-12
        if i and params.top_p < 1 and share >= params.top_p:
            least = alive[i - 1]
            break
        before += weight
    return {token for token, x in enumerate(scores) if x >= least}, close


@pytest.mark.extended
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_truncation_keeps_the_set_that_sorting_the_vocabulary_gives(data):
    """Rows of one batch with limits of their own, flat and peaked, with many ties."""
    vocab_size = data.draw(st.sampled_from([1, 2, 5, 40, 1500]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    share = st.floats(0.01, 0.999)
    batch, parts = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([1.0, 0.7, 2.0])),
            top_k=data.draw(st.sampled_from([0, 0, 1, 3, 30, 1100, 4000])),
            top_p=data.draw(st.just(1.0) | share),
            min_p=data.draw(st.just(0.0) | share),
        )
        step = data.draw(st.sampled_from([0.0, 0.5, 1e-6]))
        row = rng.normal(size=vocab_size) * data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        parts.append(torch.tensor(np.round(row / step) * step if step else row, dtype=torch.float32)[None])
        batch.append(LogitRows(params, 1, [0], TokenTree.root(0)))
    logits = torch.cat(parts)
    ours = process_batch(logits, batch, EOS)
    for row, (rows, scores) in enumerate(zip(batch, ours, strict=True)):
        expected, close = kept_by_definition(logits[row], rows.params)
        if not close:
            assert set(torch.isfinite(scores).nonzero()[:, 0].tolist()) == expected
        alone = process_batch(logits[row : row + 1], [rows], EOS)
        assert torch.equal(scores, alone[0])


def test_a_batch_larger_than_what_is_ranked_at_once(monkeypatch):
    logits = random_logits(9, 3000)
    rows = LogitRows(SamplingParams(temperature=1.0, top_p=0.9), 1, [0], TokenTree.chain(0, range(8)))
    together = process_logits(logits, rows, EOS)
    monkeypatch.setattr("actors.sampling.logits._RANKED_AT_ONCE", (2 * 3000, 0))
    assert torch.equal(process_logits(logits, rows, EOS), together)


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.8)):
        kept = torch.isfinite(process_logits(logits, LogitRows(params, 1, [0], TokenTree.root(0)), EOS))
        assert kept.tolist() == [[True, True, True, False]]


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_among_ties(dtype):
    scores = torch.zeros(2, 5000, dtype=dtype)
    scores[0, [777, 40, 4000]] = 1.0
    assert choose(scores, [SamplingParams()] * 2, [0, 0]).tolist() == [40, 0]
    assert choose_batch(scores, [LogitRows(SamplingParams(), 1, [1, 2], TokenTree.chain(2, [3]))], EOS).tolist() == [
        40,
        0,
    ]
    assert top_children(scores, [SamplingParams()] * 2, [0, 0], 1)[0].tolist() == [[40], [0]]


@pytest.mark.extended
def test_choices_follow_the_processed_law():
    """Two consecutive tokens over many seeds: chi-square on the joint, as single positions would miss dependence."""
    n = 20_000
    params = SamplingParams(temperature=0.7, top_k=4, min_p=0.05)
    logits = torch.tensor([[1.0, 0.2, -0.5, 0.8, 0.1, -3.0]])
    scores = process_logits(logits, LogitRows(params, 1, [0], TokenTree.root(0)), EOS)
    distribution = probabilities(scores, params)[0].numpy()
    per_seed = [replace(params, seed=seed) for seed in range(n)]
    first = choose(scores.expand(n, -1), per_seed, [100] * n).numpy()
    second = choose(scores.expand(n, -1), per_seed, [101] * n).numpy()
    counts = np.zeros((6, 6))
    np.add.at(counts, (first, second), 1)
    expected = n * np.outer(distribution, distribution)
    assert counts[expected == 0].sum() == 0
    cells = expected > 0
    degrees = cells.sum() - 1
    assert ((counts - expected)[cells] ** 2 / expected[cells]).sum() < degrees + 5 * math.sqrt(2 * degrees)


def test_a_banned_token_is_never_chosen():
    scores = torch.full((1, 300), -torch.inf)
    scores[0, [123, 200]] = torch.tensor([0.0, -60.0])
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(500)]
    assert set(choose(scores.expand(500, -1), params, range(500)).tolist()) == {123}


@pytest.mark.parametrize("seed", range(10))
def test_a_sequence_chooses_the_same_tokens_in_any_batch(seed):
    rng = random.Random(seed)
    batch = []
    for _ in range(6):
        token_ids = rng.choices(range(6), k=rng.randrange(2, 9))
        size = rng.randrange(1, 6)
        parents = (-1, *(rng.randrange(i) for i in range(1, size)))
        tree = TokenTree((token_ids[-1], *rng.choices(range(6), k=size - 1)), parents)
        nodes = rng.choice([None, tuple(range(size))[::-1]])
        params = rng.choice([random_params(rng), SamplingParams(), SamplingParams(temperature=0.9, seed=seed)])
        batch.append(LogitRows(params, 1, token_ids, tree, nodes))
    parts = [random_logits(len(rows.row_nodes()), seed=i) for i, rows in enumerate(batch)]
    together = choose_batch(torch.cat(parts), batch, EOS)
    scores = process_batch(torch.cat(parts), batch, EOS)
    start = 0
    for rows, logits in zip(batch, parts, strict=False):
        end = start + len(logits)
        assert torch.equal(choose_batch(logits, [rows], EOS), together[start:end])
        assert torch.equal(process_batch(logits, [rows], EOS), scores[start:end])
        start = end


def test_noise_belongs_to_the_position_of_the_chosen_token():
    """A node chooses as plain decoding would with its path committed, whatever the tree around it."""
    params = SamplingParams(temperature=1.0, seed=5)
    logits = random_logits(6)
    chosen = choose_batch(logits, [LogitRows(params, len(PROMPT), PROMPT + OUTPUT, TREE)], EOS).tolist()
    for node in range(6):
        rows = LogitRows(params, len(PROMPT), history_of(node), TokenTree.root(0))
        assert rows.positions() == [len(history_of(node))]
        assert choose_batch(logits[node : node + 1], [rows], EOS).tolist() == [chosen[node]]
    moved = choose(logits, [params] * 6, [1000] * 6).tolist()
    assert moved != chosen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_children_are_the_target_s_choice_and_its_runners_up(temperature):
    params = [SamplingParams(temperature=temperature, seed=3)] * 8
    scores, positions = random_logits(8, 400), list(range(8))
    ids, log_probs = top_children(scores, params, positions, 4)
    torch.testing.assert_close(log_probs, scores.log_softmax(-1).gather(1, ids))
    left = scores.clone()
    for rank in range(4):  # banning the winner makes the next one win
        assert torch.equal(choose(left, params, positions), ids[:, rank])
        left.scatter_(1, ids[:, rank : rank + 1], -torch.inf)
    assert torch.equal(top_children(scores, params, positions, 1)[0], ids[:, :1])


def test_greedy_children_of_any_rows_are_chosen_alike_and_need_nothing_of_them():
    def of(count, temperature=0.0):
        return ChildrenAhead.of(
            [SamplingParams(temperature=temperature)] * count, range(count), 1, torch.device("cpu"), draws=True
        )

    assert of(3) is of(8) and of(3).noise is None
    assert of(3, temperature=1.0).noise is not None
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    expected = top_children(scores, [SamplingParams()] * 3, range(3), 4)
    assert all(map(torch.equal, of(3).best(scores, 0, 4), expected))


def test_probabilities_are_the_softmax_or_one_hot():
    scores = random_logits(3)
    sampled = probabilities(scores, SamplingParams(temperature=0.5))
    assert sampled.dtype == torch.float64
    torch.testing.assert_close(sampled, scores.double().softmax(-1))
    greedy = probabilities(scores, SamplingParams())
    assert torch.equal(greedy.argmax(-1), scores.argmax(-1))
    assert torch.equal(greedy.sum(-1), torch.ones(3, dtype=torch.float64)) and greedy.max() == 1


def test_the_lists_of_a_request_are_walked_once_however_many_rows_and_passes():
    class Counted(tuple):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    biases, words = [(token, 0.5) for token in range(90)], [(token, token + 1) for token in range(90)]
    params = SamplingParams(logit_bias=Counted(biases), bad_words=Counted(words), stop_token_ids=Counted(range(9)))
    rows = LogitRows(params, len(PROMPT), PROMPT + OUTPUT, TREE)
    walks = set()
    for _ in range(3):
        process_logits(torch.randn(len(TREE.parents), 97), rows, EOS)
        walks.add(Counted.walks)
    assert len(walks) == 1 and Counted.walks < 9


def test_what_a_row_looks_up_does_not_grow_with_the_number_of_bad_words():
    """All of these end a beginning with the same token: a text of it would compare each of them in every row."""
    words = [(5, 7, token) for token in range(97)] + [(7, token) for token in range(97)] + [(5, 7, 7)] * 500
    own = _Edits.of(SamplingParams(bad_words=tuple(words)), EOS)
    assert own.lengths == {7: [1, 2]} and len(own.words) == 2
    assert sorted(own.banned_after([5], [7])) == sorted([*range(97)] * 2)
    assert own.banned_after([7], []) == [*range(97)] and own.banned_after([7, 5], []) == []


IMPOSSIBLE = {"NaN": (13, torch.nan), "infinite": (13, torch.inf), "all banned": (slice(None), -torch.inf)}


@pytest.mark.parametrize("what", IMPOSSIBLE)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1)])
def test_a_row_that_is_no_distribution_has_no_token(params, what):
    logits, (places, value) = torch.randn(len(TREE.parents), 97), IMPOSSIBLE[what]
    rows = LogitRows(params, len(PROMPT), PROMPT + OUTPUT, TREE)
    right = choose_batch(logits, [rows], EOS).tolist()
    for node in range(len(right)):
        broken = logits.clone()
        broken[node, places] = value
        assert choose_batch(broken, [rows], EOS).tolist() == [*right[:node], NO_TOKEN, *right[node + 1 :]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_sampling_rules_every_token_out_none_is_chosen(temperature):
    everything = tuple((token,) for token in range(97))
    for ruled_out in (dict(bad_words=everything), dict(bad_words=((OUTPUT[-1], token) for token in range(97)))):
        params = SamplingParams(temperature, bad_words=tuple(ruled_out["bad_words"]))
        rows = LogitRows(params, len(PROMPT), PROMPT + OUTPUT, TokenTree.root(OUTPUT[-1]))
        assert choose_batch(torch.randn(1, 97), [rows], EOS).tolist() == [NO_TOKEN]
    params = SamplingParams(temperature, min_tokens=99, stop_token_ids=tuple(range(97)))
    rows = LogitRows(params, len(PROMPT), PROMPT + OUTPUT, TREE)
    assert {*choose_batch(torch.randn(len(TREE.parents), 97), [rows], EOS).tolist()} == {NO_TOKEN}
