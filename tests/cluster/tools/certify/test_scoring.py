"""What the certificate reads of whole texts, against reading them token by token; counted draws of right rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig, VerifyRule
from actors.protocol.messages import SamplingKind, SamplingParams
from actors.sampling.logits import probabilities
from actors.sampling.noise import NoiseStream, gumbel, noise_key, uniform
from actors.verification import by_ratio
from actors.verification.compatibility import EXACT_FOR
from actors.verification.rules import RULES
from cluster.tools.certify.checks import check_rounding, draw_fits
from cluster.tools.certify.draws import DraftScheme, VerifiedText, fit_draws
from cluster.tools.certify.identity import OutputPair
from cluster.tools.certify.scoring import OutputScorer, TextReader, fit_ranks
from parallel.kernels.attention import has_attention

PROMPT, TEXT = (3, 14, 15), (92, 65, 35, 89, 79)
SAMPLED = SamplingParams(temperature=0.7, seed=5)
EOS = (0,)


@pytest.fixture(scope="module")
def readers(tiny_checkpoint, half_agreeing_drafter):
    """The target, and a draft model that agrees with it now and then."""
    target = TargetConfig(path=str(tiny_checkpoint("Llama")), device="cpu")
    drafter = ModelDrafterConfig(path=str(half_agreeing_drafter), device="cpu")
    return TextReader(target, num_slots=64), TextReader(drafter, num_slots=64)


def output(sampling=SAMPLED, plain=TEXT, speculative=TEXT):
    return OutputPair(1, PROMPT, sampling, plain, speculative, 2)


def test_a_text_is_read_alike_in_every_shape_of_pass(readers):
    reader, _ = readers
    text = (*PROMPT, *TEXT)
    each = torch.cat([reader.after(text[:length]) for length in range(len(PROMPT), len(text))])
    torch.testing.assert_close(reader.in_one_pass(text, len(PROMPT)), each, atol=1e-4, rtol=0)
    torch.testing.assert_close(reader.row_by_row(text, len(PROMPT)), each, atol=1e-4, rtol=0)
    children = (7, 8, 9)
    below = torch.cat([reader.after(PROMPT), *(reader.after((*PROMPT, child)) for child in children)])
    torch.testing.assert_close(reader.after(PROMPT, children), below, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [SAMPLED, replace(SAMPLED, temperature=0.0), replace(SAMPLED, top_k=9)])
def test_leads_and_ranks_are_those_of_the_rows_that_chose(readers, sampling):
    reader, _ = readers
    scorer, other = OutputScorer(reader, VerifyRule.coupled, EOS), (7, 8, 9)
    scores = [reader.after((*PROMPT, *TEXT[:i]))[0] for i in range(len(TEXT))]
    if sampling.temperature:
        noise = [noise_key(sampling.seed, NoiseStream.COUPLED, len(PROMPT) + i) for i in range(len(TEXT))]
        scores = [
            (row if not sampling.top_k else row.masked_fill(row < row.topk(9).values[-1], -torch.inf))
            / sampling.temperature
            + gumbel([key], torch.arange(len(row)))[0]
            for row, key in zip(scores, noise, strict=True)
        ]
    best = [row.topk(2).values for row in scores]
    leads = [float(first - second) * (sampling.temperature or 1.0) for first, second in best]
    assert scorer.gaps(output(sampling, speculative=other)) == pytest.approx(leads, abs=1e-3)
    if sampling.temperature and not sampling.top_k:
        places = []
        for i, token in enumerate(other):
            law = probabilities(reader.after((*PROMPT, *other[:i])) / sampling.temperature, sampling)[0]
            share = uniform(noise_key(sampling.seed, NoiseStream.DRAFT, 1, i))
            places.append(float(law[law > law[token]].sum() + law[token] * share))
        assert scorer.ranks(output(sampling, speculative=other)) == pytest.approx(places, abs=1e-4)


def test_movement_is_the_largest_change_of_a_logit(readers, monkeypatch):
    reader, _ = readers
    scorer, narrow = OutputScorer(reader, VerifyRule.coupled, EOS), TextReader.row_by_row
    still = scorer.movement([output(), output()])
    assert still.num_rows == 2 * len(TEXT) and still.largest < 1e-4 and still.num_flips == 0

    def moved(self, text, start):
        logits = narrow(self, text, start)
        logits[1, logits[1].argmax()] -= 50.0
        return logits

    monkeypatch.setattr(TextReader, "row_by_row", moved)
    found = scorer.movement([output(), output()])
    assert (
        found.num_flips == 2 and found.largest == pytest.approx(50, abs=1e-3) and found.tie_below == 2 * found.largest
    )


def test_an_invariant_target_is_allowed_no_movement(tiny_checkpoint):
    """A target whose rows depend, in any bit, on the rows beside them is refused."""
    config = TargetConfig(path=str(tiny_checkpoint("Llama")), device="cpu", dtype="bfloat16", numerics="invariant")
    if not has_attention():
        with pytest.raises(ValueError, match="numerics=invariant"):
            TextReader(config, num_slots=64)
        return
    reader = TextReader(config, num_slots=64)
    scorer = OutputScorer(reader, VerifyRule.coupled, EOS)
    movement = scorer.movement([output()])
    assert reader.explained == movement.largest == 0
    assert check_rounding(movement, [output()], scorer, reader).passed
    moved = replace(movement, largest=1e-6)
    assert not check_rounding(moved, [output()], scorer, reader).passed


@pytest.mark.parametrize("seed", range(4))
def test_the_texts_of_a_certificate_share_the_largest_movement_and_add_up_the_flips(readers, monkeypatch, seed):
    """Whichever text holds it, and whichever row: a threshold of another text would call its ties mistakes."""
    reader, _ = readers
    draw, narrow = np.random.default_rng(seed), TextReader.row_by_row
    moves = draw.permutation([0.0, 0.01, 0.02, 40.0])
    changes = iter(moves)

    def moved(self, text, start):
        logits = narrow(self, text, start)
        row = int(draw.integers(len(logits)))
        logits[row, logits[row].argmax()] -= next(changes)
        return logits

    monkeypatch.setattr(TextReader, "row_by_row", moved)
    found = OutputScorer(reader, VerifyRule.coupled, EOS).movement([output(plain=TEXT[: 2 + i]) for i in range(4)])
    assert found.largest == pytest.approx(40, abs=1e-3) and found.tie_below == pytest.approx(80, abs=2e-3)
    assert (found.num_rows, found.num_flips) == (2 + 3 + 4 + 5, 1)


@pytest.mark.parametrize("rule", [VerifyRule.coupled, VerifyRule.rejection])
def test_only_arg_maxes_have_ties(readers, rule):
    scorer = OutputScorer(readers[0], rule, EOS)
    assert scorer.has_ties(output(replace(SAMPLED, temperature=0.0)))
    assert scorer.has_ties(output()) == (rule is VerifyRule.coupled)


def test_ranks_of_the_targets_own_draws_are_uniform_and_of_others_not(readers):
    reader, _ = readers
    scorer, drawn, likeliest = OutputScorer(reader, VerifyRule.rejection, EOS), [], []
    for seed in range(50):
        draws, tokens = np.random.default_rng(seed), []
        sampling = SamplingParams(temperature=1.0, seed=seed)
        for _ in range(4):
            law = probabilities(reader.after((*PROMPT, *tokens)), sampling)[0].double().numpy()
            tokens.append(int(draws.choice(len(law), p=law / law.sum())))
        drawn.append(OutputPair(seed, PROMPT, sampling, (), tuple(tokens), 0))
        likeliest.append(OutputPair(seed, PROMPT, sampling, (), (*tokens[:-1], int(law.argmax())), 0))
    (fit,), (biased,) = fit_ranks(scorer, drawn), fit_ranks(scorer, likeliest)
    assert fit.num_draws == biased.num_draws == 200 and biased.p_value < 1e-4 < fit.p_value
    assert fit_ranks(scorer, [output(replace(SAMPLED, temperature=0.0))]) == []


def fits_of(readers, rule, kind, *, lookup=False, width=2, num_draws=600):
    target, draft = readers
    scheme = DraftScheme(rule, kind, width, law_size=12)
    text = VerifiedText(PROMPT, SamplingParams(temperature=0.4), EOS, scheme, target, None if lookup else draft)
    return fit_draws("text", text, num_draws, lambda: None)


def rules_and_kinds():
    """Every rule with each kind of draw that it is exact for; by default with one, another for the next rule."""
    for place, rule in enumerate(RULES):
        kinds = sorted(EXACT_FOR[rule][0])
        for i, kind in enumerate(kinds):
            yield pytest.param(rule, kind, marks=[] if i == place % len(kinds) else pytest.mark.slow)
    yield "coupled", 1


@pytest.mark.extended
@pytest.mark.parametrize(("rule", "kind"), list(rules_and_kinds()))
def test_counted_draws_of_a_right_rule_fit(readers, rule, kind):
    lookup = kind == SamplingKind.DETERMINISTIC
    width = 1 if lookup or rule == "block" else 2
    for fit in fits_of(readers, rule, SamplingKind(kind), lookup=lookup, width=width, num_draws=150):
        assert fit.p_value > 1e-4 and fit.num_draws


def test_every_text_is_drawn_at_every_temperature_under_every_scheme(readers):
    schemes = [DraftScheme("rejection", kind, 2, 8) for kind in (SamplingKind.DETERMINISTIC, SamplingKind.IID)]
    params = [SamplingParams(temperature=temperature) for temperature in (0.5, 1.0)]
    counted: list[int] = []
    names = {}
    for chosen in (schemes[:1], schemes):
        fits = draw_fits([PROMPT, TEXT], params, chosen, EOS, readers, 3, lambda: counted.append(1))
        names[len(chosen)] = [fit.name.rpartition(", ")[0] for fit in fits if fit.name.endswith("first token")]
    each = [f"T={temperature}, text {number}" for temperature in ("0.5", "1") for number in (1, 2)]
    assert names[1] == each and len(counted) == 4 + 8
    kinds = [f"T={t}, text {n}, {scheme.kind.name}" for t in ("0.5", "1") for scheme in schemes for n in (1, 2)]
    assert names[2] == kinds, "the kind is named where there are several"


@pytest.mark.extended
@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_that_stands_untested_is_found_at_its_token(readers, monkeypatch, depth):
    """The first or the second draft token is accepted whatever the target says."""
    right = RULES["rejection"]

    def untested(draft, target_row, random_source):
        path, token = right(draft, target_row, random_source)
        below = draft.tree.children()[path[-1] if path else 0]
        if len(path) == depth and below:
            path = (*path, below[0])
            token = random_source.sample(target_row(below[0]), below[0])
        return path, token

    monkeypatch.setattr(by_ratio, "RULES", RULES | {"rejection": untested})
    first, *_, second = fits_of(readers, "rejection", SamplingKind.IID, width=1)
    assert (first.p_value < 1e-3) == (depth == 0) and (second.p_value < 1e-3) == (depth == 1)
