"""The role of a target that fills masks, behind the real coordinator, against its static decoder in transformers."""

from __future__ import annotations

import random

import pytest

from actors.options import SchedulerConfig
from actors.protocol.messages import PLAIN_DECODING, Request, SamplingParams
from actors.roles.diffusion_target import BlockwiseTargetRole, copied_rows
from actors.sampling import unmasking
from parallel.kernels.attention import has_attention
from parallel.runtime.runner import open_model
from tests.actors.conftest import EOS, Room
from tests.actors.masked_diffusion import BLOCK, MaskedDiffusion
from tests.matrices import in_turn

PROMPTS = [[5, 9, 33], [7, 11, 4, 60], [8, 3, 90, 44, 21, 17, 2, 60, 5], [12]]
EIGHT = [*PROMPTS, [33, 9], [60, 4, 11, 7, 50], [44, 2, 21], [1, 6, 6, 1, 30, 31]]
NUM_TOKENS = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return MaskedDiffusion.made(tmp_path_factory.mktemp("diffusion"))


class Watched(BlockwiseTargetRole):
    """`passes`: rows of each pass, and the number of states of each request in it; `rounds`: of each round, how many
    requests were in it, how many had a verdict, and how many passes it took."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.passes, self.rounds = [], []

    def _fill(self, rows):
        verdicts, num_rows = super()._fill(rows)
        self.passes.append((num_rows, {one.request_id: len(one.states) for one in rows}))
        return verdicts, num_rows

    def answer(self, batch):
        before = len(self.passes)
        for answer in super().answer(batch):
            self.rounds.append((len(batch.items), len(answer.verdicts), len(self.passes) - before))
            yield answer


def room_of(target, *, num_states=1, threshold=0.0, slots=512, limits=None, backend=None, max_rows=2048, role=Watched):
    """Its pool has as many slots beside `slots` as that of a rank."""
    limits = limits or SchedulerConfig(max_num_seqs=8)
    num_copied = min(limits.max_num_seqs * copied_rows(BLOCK, num_states), max_rows + limits.max_num_seqs * BLOCK)
    runner = open_model(target.path, num_slots=slots + num_copied, backend=backend)
    options = {"is_lead": True, "num_states": num_states, "threshold": threshold, "max_rows": max_rows}
    return Room(role(runner, [EOS], **options), None, 0, limits, slots, "plain")


def requests_of(prompts, drafter=None, **sampling):
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    return [Request(i, tuple(prompt), params, drafter) for i, prompt in enumerate(prompts)]


def served(target, prompts=PROMPTS, sampling=None, **options):
    room = room_of(target, **options)
    room.serve(requests_of(prompts, **(sampling or {})))
    room.target.runner.pool.check()
    return [room.tokens[i] for i in range(len(prompts))]


BACKENDS = ["sdpa", "padded", *(["ragged"] if has_attention() else [])]


@pytest.mark.parametrize(("backend", "num_states"), list(in_turn(BACKENDS, [1, 3])))
def test_it_writes_what_its_static_decoder_writes(target, num_states, backend):
    """Prompts that end within a block, at its end, and within a further one; one pass for all."""
    expected = [target.decoded(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert served(target, num_states=num_states, backend=backend) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS) and len({*expected[0]}) > 4


@pytest.mark.extended
@pytest.mark.parametrize(("num_states", "temperature", "threshold"), list(in_turn(range(1, 9), [0.0, 0.8], [0.0, 0.3])))
def test_guessed_states_change_no_token(target, num_states, temperature, threshold):
    """Eight requests in a pass, and each by itself."""
    sampling = {"temperature": temperature, "seed": 5}
    expected = [target.decoded(prompt, NUM_TOKENS, threshold=threshold, **sampling) for prompt in EIGHT]
    options = {"sampling": sampling, "num_states": num_states, "threshold": threshold}
    assert served(target, EIGHT, **options) == expected
    assert served(target, EIGHT[-1:], **options) == expected[-1:]


@pytest.mark.extended
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_masks_become_allowed_tokens_alone(target, temperature):
    allowed = (4, 9, *range(20, 40))
    sampling = {"temperature": temperature, "seed": 5, "allowed_token_ids": allowed}
    plain, guessed = (served(target, sampling=sampling, num_states=num) for num in (1, 4))
    assert plain == guessed and {token for tokens in plain for token in tokens} <= {*allowed}


@pytest.mark.extended
def test_chunks_preemption_and_shared_rows_change_no_token(target):
    """Chunks that are no blocks, a pool that holds one request at a time, rows of earlier requests."""
    prompts = 2 * [[*PROMPTS[2], 6, 7, 8], [*PROMPTS[2], 6, 7, 8], [*PROMPTS[2], 6, 70], PROMPTS[0]]
    expected = [target.decoded(prompt, NUM_TOKENS) for prompt in prompts]
    limits = SchedulerConfig(max_num_seqs=3, prefill_chunk=3, max_num_batched_tokens=7)
    room = room_of(target, num_states=3, slots=48, limits=limits, max_rows=7 + BLOCK)
    room.serve(requests_of(prompts))
    room.target.runner.pool.check()
    assert [room.tokens[i] for i in range(len(prompts))] == expected
    assert sum(room.preempted.values()) > 0 and max(room.cached.values()) > 0


def test_tokens_that_the_client_has_are_not_sent_again(target):
    """It comes again in the middle of a block, whose masks were not filled from the left."""
    (prompt,) = PROMPTS[2:3]
    whole = target.decoded(prompt, NUM_TOKENS)
    for known in range(1, NUM_TOKENS, 3):
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


@pytest.mark.parametrize("num_states", [1, 3, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 4, 8))])
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
        saved, counters = num_tokens - len(count), vars(room.stats)
        assert saved <= counters["num_accepted_states"] <= counters["num_guessed_states"]
        assert (counters["num_guessed_states"] > 0) == (num_states > 1)
    if num_states == 1:
        assert passes == [1.0] * len(PROMPTS)
    else:
        assert sum(passes) / len(passes) < 1.0 and max(passes) <= 1.0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("max_rows", "most_states", "most_passes"), [(2 * BLOCK, 0, 4), (4 * BLOCK, 1, 2), (8 * BLOCK, 2, 1), (1000, 4, 1)]
)
def test_passes_have_no_more_rows_than_they_may(target, max_rows, most_states, most_passes):
    """Guesses are dropped first, of all requests alike, and the rest is computed in several passes: no request waits,
    and no token changes."""
    room = room_of(target, num_states=4, max_rows=max_rows, slots=2 * 48)
    prompts = [[*prompt[:3], 20 + i] for i, prompt in enumerate(2 * PROMPTS[:2])]
    room.serve(requests_of(prompts))
    assert [room.tokens[i] for i in range(4)] == [target.decoded(prompt, NUM_TOKENS) for prompt in prompts]
    whole = [(rows, states) for rows, states in room.target.passes if len(states) == 4]
    assert max(rows for rows, _ in room.target.passes) <= max_rows
    assert max([0, *(max(states.values()) for _, states in whole)]) == most_states
    assert all(num_items == num_verdicts for num_items, num_verdicts, _ in room.target.rounds), "a request waited"
    assert max(num_passes for *_, num_passes in room.target.rounds) == most_passes


def test_a_text_and_a_state_that_do_not_fit_one_pass_are_in_two(target):
    prompt = [*PROMPTS[2], *PROMPTS[1]]
    room = room_of(target, num_states=4, max_rows=3 * BLOCK)
    room.serve(requests_of([prompt]))
    assert room.tokens[0] == target.decoded(prompt, NUM_TOKENS)
    assert room.target.rounds[0] == (1, 1, 2)
    assert [rows for rows, _ in room.target.passes[:2]] == [3 * BLOCK, BLOCK]


def test_a_request_without_speculation_has_one_state_a_pass(target):
    requests = requests_of(PROMPTS[:1], PLAIN_DECODING) + requests_of(PROMPTS)[1:2]
    room = room_of(target, num_states=4)
    room.serve(requests)
    assert [room.tokens[i] for i in range(2)] == [target.decoded(prompt, NUM_TOKENS) for prompt in PROMPTS[:2]]
    assert {states[0] for _, states in room.target.passes if 0 in states} == {1}
    assert {states[1] for _, states in room.target.passes if 1 in states} > {1}


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
        """As those of LLaDA and Dream are: another text, and rows of other blocks, which a pass refuses."""
        expected = [target.decoded(prompt, NUM_TOKENS) for prompt in PROMPTS]
        wrong = [target.decoded(prompt, NUM_TOKENS, start=len(prompt) % BLOCK) for prompt in PROMPTS]
        assert served(target) == expected != wrong

        class Aligned(Watched):
            def _rows(self, item):
                self.offset = self.contexts[item.request_id].prompt_len % BLOCK
                return super()._rows(item)

            def _whole(self, length):
                return max(0, super()._whole(length - self.offset) + self.offset)

        whole = [prompt for prompt in PROMPTS if len(prompt) % BLOCK == 0]
        assert served(target, whole, role=Aligned) == served(target, whole)
        with pytest.raises(AssertionError, match="no blocks of"):
            served(target, role=Aligned)

    @pytest.mark.extended
    def test_a_state_that_is_a_subset_of_the_next_one(self, target, monkeypatch):
        check = self.differs(target, monkeypatch, num_states=4, threshold=0.3)
        next(check)

        def accepted(found):
            best = 0
            for j in range(1, len(found)):
                state, following = found[j].state, found[best].following
                pairs = zip(state, following, strict=False)
                is_subset = all(own in (unmasking.MASKED, other) for own, other in pairs)
                best = j if is_subset and len(state) <= len(following) else best
            return [0, best]

        monkeypatch.setattr("actors.roles.diffusion_target.accepted", accepted)
        next(check, None)

    @pytest.mark.parametrize("num_states", [1, 3])
    def test_ties_in_another_order(self, target, monkeypatch, num_states):
        """Confidences of few digits, as bfloat16 has them, are often equal: the earlier position comes first, and with
        another order of equals it is another text."""
        expected = [target.decoded(prompt, NUM_TOKENS, precision=8) for prompt in PROMPTS]
        for later_first in (False, True):

            def choices(*args, later_first=later_first, choices=unmasking._choices):
                tokens, confidences = choices(*args)
                return tokens, [round(8 * one) / 8 + 1e-9 * later_first * i for i, one in enumerate(confidences)]

            with monkeypatch.context() as patch:
                patch.setattr(unmasking, "_choices", choices)
                assert (served(target, num_states=num_states) != expected) == later_first
