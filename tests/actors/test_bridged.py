"""Drafters on ranks of their own that are sent hidden states: tokens, drafts and the hidden states themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.drafters.model.config import Strategy
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import PipelineName, SchedulerConfig
from parallel.speculators.config import FINAL
from tests import matrices
from tests.matrices import in_turn

DRAFTED = [pipeline for pipeline in PipelineName if pipeline != "plain"]


@torch.no_grad()
def streams_of(reference, tokens):
    """The taps of the reference's pass over these tokens [B, T, H], by number."""
    streams: list[torch.Tensor] = []
    layers = [*reference.model.layers, reference.model.norm]
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0])) for layer in layers]
    final = reference.model(tokens).last_hidden_state
    for hook in hooks:
        hook.remove()
    return dict(enumerate(streams)) | {FINAL: final}


@pytest.fixture
def config():
    """Its three taps are fused before they leave."""
    return SpeculatorDrafterConfig(path="eagle3", num_draft_tokens=4)


@pytest.fixture
def sent(speculator, config):
    """What is sent of the target's streams."""
    opened = replace(config, path=str(speculator(config.path)))
    fuser, taps = opened.open_fuser(2, "cpu"), opened.taps(2)
    return lambda streams: fuser(torch.cat([streams[tap] for tap in taps], -1)[0])


class Reading:
    """Keeps the hidden states that a drafter reads, and passes them on."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.num_rows = 0

    def wrap(self, drafter):
        read, open_ = drafter.read_features, drafter.open

        def keep(features):
            known = self.rows[features.request_id]
            assert features.start == sum(map(len, known)), "none is left out, and none comes twice"
            known.append(features.rows.clone())
            self.num_rows += len(features.rows)
            read(features)

        def opened(context):
            self.rows[context.request_id] = []  # again after a preemption
            open_(context)

        drafter.read_features, drafter.open = keep, opened
        return drafter

    def check(self, room, requests, reference, sent) -> None:
        """They are those of the target's passes over the whole text."""
        for request in requests:
            rows = torch.cat(self.rows[request.request_id])
            text = torch.tensor([[*request.prompt, *room.tokens[request.request_id]]])
            assert len(rows) >= text.shape[1] - 7, "the last draft knew all but the token before it"
            expected = sent(streams_of(reference, text))[: len(rows)]
            torch.testing.assert_close(rows[: text.shape[1]], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(("pipeline", "temperature"), list(in_turn(DRAFTED, [0.0, 1.0])))
def test_tokens_are_those_of_plain_decoding(open_room, make_requests, config, sent, models, pipeline, temperature):
    requests = make_requests(3, max_tokens=14, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    reading = Reading()
    room = open_room(config, pipeline=pipeline, wrap=reading.wrap).serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    assert room.stats.num_accepted_tokens > 0
    assert room.stats.exported_rows >= reading.num_rows
    assert room.stats.exported_bytes == room.stats.exported_rows * 32 * 4
    reading.check(room, requests, models["reference"], sent)
    names = {(lane, name) for lane, name, *_ in room.stats.spans}
    assert ("target", "export") in names


LIKE_EAGLE3 = {"eagle3.1": 0, "p_eagle": 0, "mtp": 0}


@pytest.mark.extended
@pytest.mark.parametrize(
    "method", list(in_turn(["eagle3", "eagle3.1", "p_eagle", "dflash", "mtp", "glide"], times=LIKE_EAGLE3))
)
def test_drafts_are_those_of_an_attached_drafter(open_room, make_requests, config, method):
    """Which reads the taps themselves, whether or not they are fused on their way to the other."""
    requests, config = make_requests(3, max_tokens=14, temperature=1.0), replace(config, path=method)
    separate = open_room(config).serve(requests)
    attached = open_room(config, attached=True).serve(requests)
    assert separate.stats.num_accepted_per_pos == attached.stats.num_accepted_per_pos
    assert separate.stats.num_accepted_tokens > 0


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", ["sync", pytest.param("branches", marks=pytest.mark.slow)])
def test_chunked_prompts_and_preempted_requests(open_room, make_requests, config, sent, models, pipeline):
    count, max_tokens, slots = (6, 40, 190) if matrices.is_whole else (5, 24, 130)
    requests = make_requests(count, max_tokens=max_tokens)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, prefill_chunk=16)
    plain = open_room(pipeline="plain").serve(requests)
    reading = Reading()
    room = open_room(config, pipeline=pipeline, limits=limits, slots=slots, wrap=reading.wrap).serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    assert room.stats.num_preemptions and room.stats.num_draft_tokens
    reading.check(room, requests, models["reference"], sent)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", [Strategy.tree, Strategy.best_first])
def test_trees(open_room, make_requests, config, sent, models, strategy):
    requests = make_requests(3, max_tokens=14)
    config = replace(config, strategy=strategy, num_draft_tokens=9, depth=4, width=3)
    reading = Reading()
    room = open_room(config, wrap=reading.wrap).serve(requests)
    assert room.tokens == open_room(pipeline="plain").serve(requests).tokens
    reading.check(room, requests, models["reference"], sent)


def test_a_request_that_does_not_speculate_sends_nothing(open_room, make_requests, config):
    requests = [replace(one, drafter=None if one.request_id % 2 else "none") for one in make_requests(4, max_tokens=20)]
    reading = Reading()
    room = open_room(config, wrap=reading.wrap).serve(requests)
    assert room.tokens == open_room(pipeline="plain").serve(requests).tokens
    assert set(reading.rows) == {1, 3} and room.stats.exported_rows <= reading.num_rows + 2 * 5
