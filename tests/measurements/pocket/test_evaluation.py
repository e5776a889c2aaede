"""Acceptance length counted from matches equals what a real draft-and-verify loop does."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.tools.training.models import continue_text, grouped, llama_config
from cluster.tools.training.token_stream import spread_rows
from docs.measurements.pocket.batches import DistillationSet
from docs.measurements.pocket.evaluation import (
    acceptance_length,
    agreement_rate,
    count_rounds,
    greedy_matches,
    mean_loss,
    overlap,
)
from docs.measurements.pocket.make import cross_entropy, distillation

VOCABULARY = 64


def model(seed: int) -> LlamaForCausalLM:
    """A tiny random model whose greedy text varies."""
    torch.manual_seed(seed)
    config = llama_config(VOCABULARY, hidden=48, layers=2, heads=2, kv_heads=1, intermediate=64)
    config.initializer_range = 0.2
    return LlamaForCausalLM(config).eval()


def nearly(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy of `target`, disturbed so that its choices differ now and then."""
    copy = model(0)
    copy.load_state_dict(target.state_dict())
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return copy


@torch.inference_mode()
def rounds_of_a_loop(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, prompt: list[int], num_tokens: int, depth: int
) -> int:
    """Speculate for real: the drafter continues its own tokens, the target checks, both without cache."""
    tokens, rounds = list(prompt), 0
    while len(tokens) - len(prompt) < num_tokens:
        drafted = list(tokens)
        for _ in range(depth):
            drafted.append(int(drafter(torch.tensor([drafted])).logits[0, -1].argmax()))
        choices = target(torch.tensor([drafted])).logits[0].argmax(-1).tolist()
        while len(tokens) < len(drafted) and drafted[len(tokens)] == choices[len(tokens) - 1]:
            tokens.append(drafted[len(tokens)])
        tokens.append(choices[len(tokens) - 1])
        rounds += 1
    return rounds


@pytest.mark.extended
def test_counted_rounds_are_those_of_a_real_loop():
    target = model(1)
    drafter = nearly(target)
    partly = 0
    for seed in range(3):
        prompt = torch.randint(1, VOCABULARY, (10,), generator=torch.Generator().manual_seed(seed)).tolist()
        matches = greedy_matches(target, drafter, prompt, 20)
        partly += 0 < sum(matches) < len(matches)
        if len(matches) == 20:  # the loop above does not stop at an end of text
            for depth in (2, 5):
                assert count_rounds(matches, depth) == rounds_of_a_loop(target, drafter, prompt, 20, depth)
    assert partly, "models agree everywhere or nowhere: the comparison proves nothing"


@pytest.mark.parametrize(
    ("matches", "depth", "rounds"),
    [([True] * 12, 5, 2), ([False] * 4, 5, 4), ([True, False, True, True], 1, 2), ([True] * 3, 5, 1), ([], 5, 0)],
)
def test_rounds_of_known_matches(matches: list[bool], depth: int, rounds: int):
    assert count_rounds(matches, depth) == rounds


def test_acceptance_length_is_one_without_and_depth_plus_one_with_full_agreement():
    assert acceptance_length([[False] * 6, [False] * 3], 5) == 1.0
    assert acceptance_length([[True] * 12, [True] * 6], 5) == 6.0


def test_cached_continuation_equals_recomputation():
    target = model(2)
    tokens = continue_text(target, torch.tensor([[1, 2, 3], [4, 5, 6]]), 12)
    assert tokens.shape == (2, 12)
    assert torch.equal(target(tokens).logits[:, 2:-1].argmax(-1), tokens[:, 3:])
    with pytest.raises(ValueError, match="no room"):
        continue_text(target, tokens, 12)


def test_continuations_begin_with_their_prompts_and_are_drawn_anew_at_a_temperature():
    first, second = grouped([[9] * 12, [1, 2, 3], [4, 5, 6, 7]], length=16, batch=2)
    assert first.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert second.tolist() == [[9] * 8]
    greedy = continue_text(model(3), first, 16)
    drawn = [continue_text(model(3), first, 16, 1.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert all(torch.equal(rows[:, :3], first) for rows in (greedy, *drawn))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    nearly_cold = continue_text(model(3), first, 16, 1e-4, torch.Generator().manual_seed(0))
    assert torch.equal(greedy, nearly_cold)


def test_loss_and_agreement_of_known_models():
    uniform = model(4)
    with torch.no_grad():
        uniform.lm_head.weight.zero_()
    rows = torch.randint(VOCABULARY, (6, 20), generator=torch.Generator().manual_seed(0))
    assert mean_loss(uniform, rows) == pytest.approx(math.log(VOCABULARY), rel=1e-5)
    assert mean_loss(model(5), rows) == pytest.approx(
        float(cross_entropy(model(5))(rows[:, :-1], rows[:, 1:]).detach()), rel=1e-4
    )
    assert agreement_rate(model(5), model(5), rows) == 1.0
    assert agreement_rate(model(5), model(6), rows) < 0.5
    assert overlap(model(5), model(5), rows) == pytest.approx(1.0)
    assert 0.0 < overlap(model(5), uniform, rows) < 0.9


def test_distillation_is_zero_only_for_equal_models_and_teaches_only_the_student():
    teacher, student = model(5), model(6)
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    hidden = teacher.model(tokens).last_hidden_state.detach()
    assert float(distillation(teacher, teacher)(tokens, hidden).detach()) == pytest.approx(0.0, abs=1e-6)
    loss = distillation(student, teacher)(tokens, hidden)
    expected = torch.nn.functional.kl_div(
        student(tokens).logits.log_softmax(-1).flatten(0, 1),
        teacher(tokens).logits.softmax(-1).flatten(0, 1),
        reduction="batchmean",
    )
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_hidden_states_of_the_teacher_are_computed_once():
    teacher = model(5)
    rows = torch.randint(VOCABULARY, (6, 12), generator=torch.Generator().manual_seed(0))
    distillation_set = DistillationSet(teacher, rows, seed=0)
    first = [distillation_set.draw(2) for _ in range(3)]
    assert sorted(torch.cat([tokens for tokens, _ in first]).tolist()) == sorted(rows.tolist())
    states = {tuple(row.tolist()): state for tokens, hidden in first for row, state in zip(tokens, hidden, strict=True)}
    with torch.no_grad():
        expected = teacher.model(rows).last_hidden_state
        teacher.model.norm.weight.zero_()
    for row, state in zip(rows.tolist(), expected, strict=True):
        assert (states[tuple(row)].float() - state).abs().mean() < 0.05
    for tokens, hidden in (distillation_set.draw(2) for _ in range(3)):
        for row, state in zip(tokens.tolist(), hidden, strict=True):
            assert torch.equal(state, states[tuple(row)])


def test_rows_are_spread_over_the_stream():
    rows = spread_rows(torch.arange(1001), length=10, num_tokens=50)
    assert rows.shape == (5, 11)
    assert rows[0, 0] == 0
    assert rows[-1, 0] == 990
    assert (rows.diff(dim=1) == 1).all()
