"""Jacobi decoding: the target's answers at one draft are the next, at the positions that they are about."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.drafters.interface import Context
from actors.drafters.jacobi.config import JacobiDrafterConfig
from actors.drafters.jacobi.jacobi import JacobiDrafter
from actors.protocol.messages import Commit, SamplingParams, TopTokens
from actors.sampling.noise import NoiseStream, gumbel, noise_key
from tests.actors.conftest import VOCAB_SIZE
from tests.actors.drafters.jacobi.scripted_target import ScriptedTarget, rows_of

PROMPT = [5, 3, 8, 1]


def open_drafter():
    return JacobiDrafter(guesses_draws=True)


def test_what_does_not_depend_on_the_guesses_is_right_after_one_round():
    target = ScriptedTarget(open_drafter(), lambda text: 20 + len(text) % 7, PROMPT)
    for _ in range(6):
        target.round(5)
    assert [len(tokens) for tokens in target.rounds] == [1, 6] * 3


def test_guesses_begin_as_tokens_of_the_prompt():
    tree = ScriptedTarget(open_drafter(), lambda text: 50, PROMPT).round(6)
    assert tree.is_chain and set(tree.token_ids[1:]) <= set(PROMPT)


def test_the_iteration_is_that_of_the_text_book():
    """y_i <- f(text, y_<i), for all i at once; right tokens leave on the left, the prompt's come in on the right."""

    def next_token(text):
        return (text[-1] // 2 + text[-3] // 2 + len(text)) % 4  # a wrong guess need not make the next answer wrong

    drafter = open_drafter()
    target = ScriptedTarget(drafter, next_token, [1, 2, 3, 0, 2], seed=3)
    guesses, lengths = [], []
    for _ in range(40):
        text = tuple(target.context.token_ids)
        tree = target.round(6)
        drafted = list(tree.token_ids[1:])
        assert drafted[: len(guesses)] == guesses, "what the target said is proposed again, where it said it"
        answers = [next_token((*text, *drafted[:i])) for i in range(7)]
        guesses = answers[len(target.rounds[-1]) :]
        lengths.append(len(target.rounds[-1]))
    assert max(lengths) > 1, "nothing was ever accepted: the test shows nothing"


@pytest.mark.parametrize("budget", [1, 3])
def test_positions_beyond_a_short_draft_keep_their_guesses(budget):
    drafter, text = open_drafter(), [1, 2, 3]
    target = ScriptedTarget(drafter, lambda text: 20 + len(text), text)
    target.round(6)
    assert target.round(budget).token_ids[1:] == tuple(range(24, 24 + budget))
    target.round(3)
    start = 25 + budget
    assert target.rounds[-1] == tuple(range(start, start + min(4, 6 - budget))), "they were guessed in the first round"


def test_rows_of_another_draft_change_nothing():
    drafter = open_drafter()
    context = Context(1, 0, [1, 2, 3], 3, SamplingParams())
    (draft,) = drafter.propose([context], [4])
    nodes, answers = draft.tree.token_ids, [30, 31, 32, 33, 34]
    for prefix_len, token_ids in ((4, nodes), (3, (*nodes[:-1], 77)), (3, nodes[:-1])):
        drafter.read_top_tokens(rows_of(1, prefix_len, token_ids, answers[: len(token_ids)]))
    drafter.observe(context, Commit(1, 0, 3, (), (40,)))
    context.extend([40])
    assert drafter.propose([context], [3])[0].tree.token_ids[1:] == nodes[2:]


@pytest.mark.extended
@pytest.mark.parametrize("guesses_draws", [True, False])
def test_the_draws_of_sampled_text_are_guessed_with_their_noise(open_room, make_requests, guesses_draws):
    """The answers along what was accepted are the committed tokens; arg-maxes, which other rules get, are not."""
    checked, agreed = [], []

    class Watching(JacobiDrafter):
        def __init__(self, drafter):
            super().__init__(guesses_draws=guesses_draws)

        def _answers(self, context, rows):
            checked.append((tuple(context.token_ids), super()._answers(context, rows)))
            return checked[-1][1]

        def observe(self, context, commit):
            num_checked = len(checked)
            super().observe(context, commit)
            if len(checked) > num_checked:
                agreed.append(checked[-1][1][: len(commit.token_ids)] == list(commit.token_ids))

    config = JacobiDrafterConfig(width=VOCAB_SIZE)
    open_room(config, wrap=Watching).serve(make_requests(4, max_tokens=60, temperature=1.0))
    assert len(agreed) > 40
    assert all(agreed) if guesses_draws else sum(agreed) < len(agreed)


def candidates_of(context: Context, nodes: tuple[int, ...]) -> TopTokens:
    """Three candidates at every node, the likeliest first: ten times its place, and the numbers behind that."""
    own = np.array(nodes, np.int32)
    token_ids = np.array([[10 * place + rank for rank in range(3)] for place in range(len(nodes))], np.int32)
    probs = np.tile(np.array([0.5, 0.3, 0.2], np.float32), (len(nodes), 1))
    contexts = np.stack([np.roll(own, 1), own], 1)
    spans = ((context.request_id, len(context.token_ids), len(nodes)),)
    return TopTokens(3, contexts.tobytes(), token_ids.tobytes(), probs.tobytes(), spans)


@pytest.mark.parametrize(("temperature", "guesses_draws"), [(0.0, True), (0.0, False), (1.0, False), (1.0, True)])
def test_a_guess_is_the_likeliest_candidate_or_the_draw_among_them(temperature, guesses_draws):
    """The draw is that of the position, with the noise that the coupled rule takes."""
    drafter = JacobiDrafter(guesses_draws=guesses_draws)
    context = Context(1, 0, [1, 2, 3], 3, SamplingParams(temperature=temperature, seed=6))
    (draft,) = drafter.propose([context], [4])
    drafter.read_top_tokens(candidates_of(context, draft.tree.token_ids))
    drafter.observe(context, Commit(1, 0, 3, (), (40,)))
    context.extend([40])
    expected = [10 * place for place in range(1, 5)]
    if temperature and guesses_draws:
        log_probs = torch.tensor([0.5, 0.3, 0.2]).log()
        for place in range(1, 5):
            row = torch.tensor([[10 * place, 10 * place + 1, 10 * place + 2]], dtype=torch.int32)
            noise = gumbel([noise_key(6, NoiseStream.COUPLED, 3 + place)], row)[0]
            expected[place - 1] += int((log_probs + noise).argmax())
        assert expected != [10, 20, 30, 40]
    assert list(drafter.propose([context], [4])[0].tree.token_ids[1:]) == expected
