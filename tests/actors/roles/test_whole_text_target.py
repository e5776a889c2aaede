"""The role of a target whose rows see the whole text, behind the real coordinator, against decoders in transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from actors.options import SchedulerConfig
from actors.protocol.messages import Request, SamplingParams
from actors.roles.diffusion_target import DiffusionTargetRole, FedRows
from actors.roles.whole_text_target import WholeTextTargetRole
from parallel.kernels.attention import has_attention
from parallel.runtime.runner import open_model
from tests.actors.conftest import EOS, MAX_LEN, Room
from tests.actors.whole_text_diffusion import BLOCK, DECODERS, WholeTextDiffusion
from tests.matrices import in_turn

PROMPTS = [[5, 9, 33], [7, 11, 4, 60], [8, 3, 90, 44, 21, 17, 2, 60, 5]]
EIGHT = [*PROMPTS, [33, 9], [60, 4, 11, 7, 50], [44, 2, 21], [1, 6, 6, 1, 30, 31], [12]]
NUM_TOKENS = 3 * BLOCK - 1
LAYOUTS = ("llada", "dream")
in_every_layout = pytest.mark.parametrize("target", LAYOUTS, indirect=True)
"""By default; they differ in configuration, in names of weights and in a shift, and the other tests have the first."""


@pytest.fixture(scope="module", params=["llada", pytest.param("dream", marks=pytest.mark.slow)])
def target(request, tmp_path_factory):
    return WholeTextDiffusion.made(tmp_path_factory.mktemp(request.param), request.param)


def room_of(target, decoder, *, role=WholeTextTargetRole, limits=None, max_rows=MAX_LEN, backend=None, **options):
    runner = open_model(target.path, num_slots=4 * MAX_LEN + max_rows, backend=backend)
    sizes: dict[str, Any] = {"max_model_len": MAX_LEN, "max_rows": max_rows} | options
    made = role(runner, [EOS], is_lead=True, decoder=decoder, **sizes)
    return Room(made, None, 0, limits or SchedulerConfig(), 4 * MAX_LEN, "plain")


@functools.cache
def _decoded(target, prompt, *args, **options):
    return target.decoded([*prompt], *args, **options)


def expected_of(target, decoder, prompts=PROMPTS, **options):
    return [_decoded(target, tuple(prompt), NUM_TOKENS, decoder, **options) for prompt in prompts]


def served(target, decoder, prompts=PROMPTS, sampling=None, **options):
    room = room_of(target, decoder, **options)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **(sampling or {}))
    room.serve([Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)])
    room.target.runner.pool.check()
    return [room.tokens[i] for i in range(len(prompts))]


BACKENDS = ["sdpa", "padded", *(["ragged"] if has_attention() else [])]


@in_every_layout
@pytest.mark.parametrize(("decoder", "backend"), list(in_turn(DECODERS, BACKENDS)))
def test_it_writes_what_its_decoder_writes(target, decoder, backend):
    expected = expected_of(target, decoder)
    for num_states in (1, 3):
        assert served(target, decoder, num_states=num_states, backend=backend) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS) and len({*expected[0]}) > 4


def test_the_decoders_are_different_functions(target):
    texts = {decoder: expected_of(target, decoder) for decoder in DECODERS}
    assert texts["static"] != texts["prefix"] != texts["dual"] != texts["static"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("num_states", "decoder", "temperature", "threshold"),
    list(in_turn(range(1, 9), DECODERS, [0.0, 0.8], [0.0, 0.3])),
)
def test_guessed_states_change_no_token(target, decoder, num_states, temperature, threshold):
    """Eight requests at a time, and one."""
    sampling = {"temperature": temperature, "seed": 5}
    expected = expected_of(target, decoder, EIGHT, threshold=threshold, **sampling)
    options = {"sampling": sampling, "num_states": num_states, "threshold": threshold}
    assert served(target, decoder, EIGHT, max_rows=2 * MAX_LEN, **options) == expected
    assert served(target, decoder, EIGHT[-1:], **options) == expected[-1:]


@pytest.mark.parametrize("decoder", DECODERS)
def test_chunks_and_small_passes_change_no_token(target, decoder):
    """Prompts that are given in chunks, and a pass that has room for one text."""
    limits = SchedulerConfig(max_num_seqs=3, prefill_chunk=3, max_num_batched_tokens=7)
    expected = expected_of(target, decoder)
    assert served(target, decoder, limits=limits, num_states=3) == expected
    largest = list[int]()

    class Watched(WholeTextTargetRole):
        def _fill(self, rows):
            verdicts, num_rows = super()._fill(rows)
            largest.append(num_rows)
            return verdicts, num_rows

    longest = max(map(len, PROMPTS)) + NUM_TOKENS
    context = {"max_rows": longest, "max_model_len": longest}
    assert served(target, decoder, num_states=3, role=Watched, **context) == expected
    assert max(largest) <= longest


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_text_ends_where_the_context_does(target, decoder):
    """The model sees no mask beyond it."""
    prompt = [2 + i % 90 for i in range(MAX_LEN - 7)]
    assert served(target, decoder, [prompt], num_states=3) == [target.decoded(prompt, 7, decoder)]


@pytest.mark.parametrize("decoder", DECODERS)
def test_tokens_that_the_client_has_are_not_sent_again(target, decoder):
    """It comes again in the middle of a block, whose masks were not filled from the left."""
    prompt = PROMPTS[2]
    (whole,) = expected_of(target, decoder, [prompt])
    for known in range(1, NUM_TOKENS, 5):
        room = room_of(target, decoder, num_states=2)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        room.tokens[0] = whole[:known]
        room.serve([Request(0, tuple(prompt), params, generated=tuple(whole[:known]))])
        assert room.tokens[0] == whole


@pytest.mark.extended
@pytest.mark.parametrize("decoder", DECODERS)
def test_guesses_save_passes(target, decoder):
    """One pass a token without them."""
    counts = dict[int, int]()
    for num_states in (1, 3):
        passes = list[int]()

        class Counted(WholeTextTargetRole):
            def _fill(self, rows, passes=passes):
                passes.append(len(rows))
                return super()._fill(rows)

        for prompt in PROMPTS:
            served(target, decoder, [prompt], num_states=num_states, role=Counted)
        counts[num_states] = len(passes)
    assert counts[1] == len(PROMPTS) * NUM_TOKENS > counts[3]


class TestWrongDecoders:
    """Each mistake changes a text here."""

    def differs(self, target, decoder, role, **options):
        expected = expected_of(target, decoder)
        assert served(target, decoder, **options) == expected
        return served(target, decoder, role=role, **options) != expected

    @pytest.mark.parametrize("decoder", ["static", "prefix"])
    def test_eager_acceptance_over_a_frozen_prefix(self, target, decoder):
        """A full block, with masks behind it, as the first state of the next one: of the static decoder alone it is."""

        class Eager(WholeTextTargetRole):
            def _num_next(self, context, start):
                return DiffusionTargetRole._num_next(self, context, start)

            def _rows(self, item):
                rows, context = super()._rows(item), self.contexts[item.request_id]
                num_kept, start = self.runner.cached_len(item.request_id), context.block_start
                if context.step is None or num_kept == start or decoder == "static":
                    return rows
                before, end = context.token_ids[num_kept:start], self._end(context)
                return FedRows(item.request_id, end - num_kept, (), rows.states, before, end, kept=())

        assert self.differs(target, decoder, Eager, num_states=4) == (decoder == "prefix")

    @pytest.mark.extended
    @in_every_layout
    @pytest.mark.parametrize("decoder", DECODERS)
    def test_a_shift_that_the_model_has_not(self, target, decoder):
        """Dream without its shift, LLaDA with one."""

        class Shifted(WholeTextTargetRole):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self._shift = not self._shift

        assert self.differs(target, decoder, Shifted)

    @pytest.mark.extended
    @pytest.mark.parametrize("decoder", DECODERS)
    def test_blocks_aligned_to_the_start_of_the_text(self, target, decoder):
        """As those of SDAR are; then the first block is what is left of the prompt's last one."""
        wrong = [target.decoded(prompt, NUM_TOKENS, decoder, first=len(prompt) % BLOCK) for prompt in PROMPTS]
        assert wrong != expected_of(target, decoder)
