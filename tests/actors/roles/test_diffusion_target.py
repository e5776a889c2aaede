"""The role of a target that fills masks, behind the real coordinator, against its static decoder in transformers."""

from __future__ import annotations

import random

import pytest

from actors.options import SchedulerConfig
from actors.protocol.messages import Request, SamplingParams
from actors.roles.diffusion_target import DiffusionTargetRole
from actors.sampling import unmasking
from parallel.kernels.attention import has_attention
from parallel.runtime.runner import open_model
from tests.actors.conftest import EOS, Room
from tests.actors.masked_diffusion import BLOCK, MaskedDiffusion

PROMPTS = [[5, 9, 33], [7, 11, 4, 60], [8, 3, 90, 44, 21, 17, 2, 60, 5], [12]]
NUM_TOKENS = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return MaskedDiffusion.made(tmp_path_factory.mktemp("diffusion"))


def room_of(target, *, num_states=1, threshold=0.0, slots=512, limits=None, backend=None):
    runner = open_model(target.path, num_slots=slots + 16 * num_states * BLOCK, backend=backend)
    options = {"is_lead": True, "num_states": num_states, "threshold": threshold}
    role = DiffusionTargetRole(runner, [EOS], **options)
    return Room(role, None, 0, limits or SchedulerConfig(), slots, "plain")


def requests_of(prompts, **sampling):
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    return [Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]


def served(target, prompts=PROMPTS, sampling=None, **options):
    room = room_of(target, **options)
    room.serve(requests_of(prompts, **(sampling or {})))
    room.target.runner.pool.check()
    return [room.tokens[i] for i in range(len(prompts))]


@pytest.mark.parametrize("backend", ["sdpa", "padded", *(["ragged"] if has_attention() else [])])
@pytest.mark.parametrize("num_states", [1, 3])
def test_it_writes_what_its_static_decoder_writes(target, num_states, backend):
    """Prompts that end within a block, at its end, and within a further one; one pass for all."""
    expected = [target.decoded(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert served(target, num_states=num_states, backend=backend) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS) and len({*expected[0]}) > 4


@pytest.mark.parametrize("num_states", [1, 2, 4, 8])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("threshold", [0.0, 0.3], ids=["one", "sure"])
def test_guessed_states_change_no_token(target, num_states, sampling, threshold):
    expected = [target.decoded(prompt, NUM_TOKENS, threshold=threshold, **sampling) for prompt in PROMPTS]
    assert served(target, sampling=sampling, num_states=num_states, threshold=threshold) == expected


def test_chunks_preemption_and_shared_rows_change_no_token(target):
    """Chunks that are no blocks, a pool that holds one request at a time, rows of earlier requests."""
    prompts = 2 * [[*PROMPTS[2], 6, 7, 8], [*PROMPTS[2], 6, 7, 8], [*PROMPTS[2], 6, 70], PROMPTS[0]]
    expected = [target.decoded(prompt, NUM_TOKENS) for prompt in prompts]
    limits = SchedulerConfig(max_num_seqs=3, prefill_chunk=3, max_num_batched_tokens=7)
    room = room_of(target, num_states=3, slots=48, limits=limits)
    room.serve(requests_of(prompts))
    room.target.runner.pool.check()
    assert [room.tokens[i] for i in range(len(prompts))] == expected
    assert sum(room.preempted.values()) > 0 and max(room.cached.values()) > 0


def test_tokens_that_the_client_has_are_not_sent_again(target):
    """It comes again in the middle of a block, whose masks were not filled from the left."""
    (prompt,) = PROMPTS[2:3]
    whole = target.decoded(prompt, NUM_TOKENS)
    for known in range(1, NUM_TOKENS):
        room = room_of(target, num_states=2)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        room.tokens[0] = whole[:known]
        room.serve([Request(0, tuple(prompt), params, generated=tuple(whole[:known]))])
        assert room.tokens[0] == whole


def test_an_end_token_ends_a_text_within_a_block(target):
    prompt = PROMPTS[0]
    whole = target.decoded(prompt, NUM_TOKENS)
    room = room_of(target, num_states=4)
    room.serve([Request(0, tuple(prompt), SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=(whole[6],)))])
    assert room.tokens[0] == whole[: whole.index(whole[6]) + 1] and room.ends[0] == "stop"


@pytest.mark.parametrize("num_states", [1, 2, 3, 4, 8])
def test_guesses_save_passes(target, num_states, monkeypatch):
    """One pass a token without them."""
    passes = []
    for i, prompt in enumerate(PROMPTS):
        room = room_of(target, num_states=num_states)
        count, forward = list[int](), room.target.runner.forward
        monkeypatch.setattr(
            room.target.runner, "forward", lambda *args, own=forward, count=count: count.append(1) or own(*args)
        )
        num_tokens = 4 * BLOCK - len(prompt) % BLOCK
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        room.serve([Request(i, tuple(prompt), params)])
        passes.append(len(count) / num_tokens)
    if num_states == 1:
        assert passes == [1.0] * len(PROMPTS)
    else:
        assert sum(passes) / len(passes) < 1.0 and max(passes) <= 1.0


@pytest.mark.parametrize(("field", "value"), [("repetition_penalty", 1.5), ("min_tokens", 3), ("bad_words", ((4,),))])
def test_what_follows_from_the_text_before_a_token_is_refused(field, value):
    request = Request(0, (3, 4), SamplingParams(**{field: value}))
    assert f"sampling.{field}: is for targets that write token by token" in (request.block_misfit() or "")
    assert Request(0, (3, 4)).block_misfit() is None


class TestWrongDecoders:
    """Each mistake of a released decoder changes a text here."""

    @staticmethod
    def differs(target, monkeypatch, **options):
        rng = random.Random(0)
        prompts = [[rng.randrange(90) for _ in range(rng.randrange(1, 12))] for _ in range(12)]
        expected = [target.decoded(prompt, NUM_TOKENS, threshold=options.get("threshold", 0.0)) for prompt in prompts]
        assert served(target, prompts, **options) == expected
        yield
        assert served(target, prompts, **options) != expected

    def test_blocks_aligned_to_the_end_of_the_prompt(self, target):
        wrong = [target.decoded(prompt, NUM_TOKENS, start=len(prompt) % BLOCK) for prompt in PROMPTS]
        assert wrong != [target.decoded(prompt, NUM_TOKENS) for prompt in PROMPTS]

    def test_a_state_that_is_a_subset_of_the_next_one(self, target, monkeypatch):
        check = self.differs(target, monkeypatch, num_states=4, threshold=0.3)
        next(check)

        def furthest(found):
            best = 0
            for j in range(1, len(found)):
                state, following = found[j].state, found[best].following
                pairs = zip(state, following, strict=False)
                is_subset = all(own in (unmasking.MASKED, other) for own, other in pairs)
                best = j if is_subset and len(state) <= len(following) else best
            return best

        monkeypatch.setattr("actors.roles.diffusion_target.furthest", furthest)
        next(check, None)

    def test_ties_without_an_order(self, target, monkeypatch):
        """Confidences as bfloat16 has them, of which many are equal: another order is another text."""
        texts = []
        for sign in (1, -1):

            def choices(*args, sign=sign, choices=unmasking._choices):
                tokens, confidences = choices(*args)
                return tokens, [round(8 * one) / 8 + sign * 1e-9 * i for i, one in enumerate(confidences)]

            with monkeypatch.context() as patch:
                patch.setattr(unmasking, "_choices", choices)
                texts.append(served(target))
        assert texts[0] != texts[1]
