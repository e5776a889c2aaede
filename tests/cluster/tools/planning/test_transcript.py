"""Recorded text played back, and recording it, against reading a token at a time."""

from __future__ import annotations

import random

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import SamplingParams, TokenTree
from actors.sampling.logits import LogitRows, process_logits, top_children
from cluster.tools.planning.layouts import Shape
from cluster.tools.planning.measuring import PairTimings, RolePair, RoleTimings, derive_costs
from cluster.tools.planning.rounds import KnownText, ReplayResult, TimedPass
from cluster.tools.planning.transcript import CHOICES, STRIDE, RecordedToken, Transcript, record
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model


def recorded(count, seed=0):
    draw = random.Random(seed)
    return tuple(
        RecordedToken(token := draw.randrange(9), (draw.choice([token, 20]), 30, 40), (-0.1, -1.0, -2.0))
        for _ in range(count)
    )


@pytest.mark.parametrize("count", [STRIDE - 10, 3 * STRIDE + 1])
def test_requests_play_the_text_from_places_of_their_own_and_again_from_its_start(count):
    tokens, prompt = recorded(count), (7, 8)
    for request_id in range(4):
        text = Transcript(tokens).text(request_id, prompt)
        assert [text.token(position) for position in range(2)] == [7, 8]
        for i in range(2 * count):
            expected = tokens[(request_id * STRIDE + i) % count]
            assert text.token(2 + i) == expected.token
            assert text.children(2 + i, 0, 2) == (list(expected.choices[:2]), [-0.1, -1.0])


def test_a_worse_drafter_keeps_a_share_of_the_right_choices_by_distance():
    tokens = tuple(RecordedToken(5, (5, 6, 7), (-0.1, -1.0, -2.0)) for _ in range(1500))
    text = Transcript(tokens, kept=(1.0, 0.75, 0.25)).text(0)
    for distance, kept in ((0, 1.0), (1, 0.75), (2, 0.25), (9, 0.25)):
        drafts = [text.children(position, distance, 3)[0] for position in range(len(tokens))]
        assert sum(draft == [5, 6, 7] for draft in drafts) / len(tokens) == pytest.approx(kept, abs=0.04)
        assert {tuple(draft) for draft in drafts} <= {(5, 6, 7), (6, 5, 7)}, "the first two change places"
        assert {tuple(text.children(position, distance, 1)[0]) for position in range(99)} <= {(5,), (6,)}
    wrong = Transcript((RecordedToken(5, (6, 5), (-0.1, -1.0)),), kept=(0.0,)).text(0)
    assert wrong.children(0, 0, 2)[0] == [6, 5], "what is wrong already stays so"


def test_what_is_recorded_are_the_drafters_choices_after_the_true_text(tiny_checkpoint):
    path = str(tiny_checkpoint("Llama"))
    texts = [KnownText((5, 6, 7, 8, 9), 2), KnownText((10, 11, 12), 1)]
    found = record(ModelDrafterConfig(path=path, dtype="float32"), "cpu", texts, SamplingParams(), (0,)).tokens
    assert [one.token for one in found] == [7, 8, 9, 11, 12]
    runner, places = open_model(path, num_slots=16), [(texts[0], 2), (texts[0], 3), (texts[0], 4)]
    places += [(texts[1], 1), (texts[1], 2)]
    for one, (text, length) in zip(found, places, strict=True):
        runner.open(0)
        logits = runner.forward([Span(0, length)], text.token_ids[:length]).logits[-1]
        runner.close(0)
        best = logits.log_softmax(dim=-1).topk(CHOICES)
        assert one.choices == tuple(best.indices.tolist())
        assert one.log_probs == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_choices_are_recorded_as_the_sampling_asks(tiny_checkpoint, temperature):
    """Penalties and least lengths look at the text before each token, and the noise is that of its position."""
    path, eos = str(tiny_checkpoint("Llama")), 12
    edits = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.9,
        presence_penalty=1.5,
        frequency_penalty=1.0,
        bad_words=((8, 20),),
        logit_bias=((eos, 9.0),),
        min_tokens=3,
        seed=5,
    )
    texts = [KnownText((5, 6, 7, 8, 7, 9, 30, 7), 2), KnownText((9, 10, 8, 10), 2)]
    found = iter(record(ModelDrafterConfig(path=path, dtype="float32"), "cpu", texts, edits, (eos,)).tokens)
    runner = open_model(path, num_slots=16)
    for text in texts:
        for length in range(text.prompt_len, len(text.token_ids)):
            before = text.token_ids[:length]
            runner.open(0)
            logits = runner.forward([Span(0, length)], before).logits[-1:]
            runner.close(0)
            rows = LogitRows(edits, text.prompt_len, before, TokenTree.root(before[-1]))
            scores = process_logits(logits, rows, (eos,))
            best, log_probs = top_children(scores, [edits], [length], CHOICES)
            one = next(found)
            assert (one.token, one.choices) == (text.token_ids[length], tuple(best[0].tolist()))
            assert one.log_probs == pytest.approx(log_probs[0].tolist(), abs=1e-3)
            assert (eos in one.choices) == (length >= text.prompt_len + 3), "no end before the third token"


def test_what_is_lost_by_a_worse_drafter_follows_from_the_seed():
    tokens = tuple(RecordedToken(5, (5, 6), (-0.1, -1.0)) for _ in range(200))

    def drafts(seed):
        text = Transcript(tokens, kept=(0.5,), seed=seed).text(0)
        return [text.children(position, 0, 1)[0][0] for position in range(200)]

    assert drafts(1) == drafts(1) != drafts(2)


def timings(seconds, *, fuzzy=False):
    passes = [TimedPass(rows, False, rows * seconds) for rows in (1, 4) for _ in range(30)]
    passes += [TimedPass(rows, True, rows * seconds / 2) for rows in (1, 4) for _ in range(30)] if fuzzy else []
    random.Random(0).shuffle(passes)
    return RoleTimings(ReplayResult(passes), ReplayResult(), {})


def test_costs_are_those_of_the_passes_of_their_role_and_kind():
    class Place:
        def __init__(self, *cores):
            self.cores = cores

    layer = Shape("layer", 2, 2, partition=(1, 2, 1))
    alone = PairTimings(RolePair((Place(0, 1),)), timings(0.1))
    pair = RolePair((Place(0), Place(1)), (Place(2), Place(3)), layer, overlaps=True)
    beside = PairTimings(pair, timings(0.2), timings(0.01, fuzzy=True))
    single = PairTimings(RolePair((Place(0),), (Place(1),), Shape()), timings(0.3), timings(0.02))
    acceptance = {(): (0.9,), (1, 2, 1): (0.7, 0.6)}
    costs = derive_costs([alone, beside, single], 4, 0.005, acceptance)
    assert (costs.num_devices, costs.link_s, costs.coordinator_s, costs.acceptance) == (4, 0.005, 0.0, (0.9,))
    assert [(one.ranks, one.cores, one.beside, one.shape) for one in costs.target] == [
        (1, 2, False, None),
        (2, 1, True, layer),
        (1, 1, False, Shape()),
    ]
    assert [one.passes(4) for one in costs.target] == pytest.approx([0.4, 0.8, 1.2])
    by_layer, whole = costs.drafter
    assert (by_layer.shape, by_layer.acceptance, by_layer.cores, by_layer.beside) == (layer, (0.7, 0.6), 1, True)
    assert (by_layer.target_ranks, whole.target_ranks, whole.exact, whole.acceptance) == (2, 1, None, ())
    assert (by_layer.passes(4), by_layer.exact(4), whole.passes(4)) == pytest.approx((0.02, 0.04, 0.08))
