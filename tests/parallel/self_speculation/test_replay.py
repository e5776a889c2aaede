"""Reading text once more: what it says, and that nothing of the target's changes."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from parallel.self_speculation.replay import Replay
from tests.parallel.backends import BACKENDS

NUM_LAYERS = 4
TEXT = torch.randint(0, 97, (12,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint("Llama", num_hidden_layers=NUM_LAYERS)


def opened(path, **options):
    """A target that has read TEXT, and its logits at every token."""
    target = open_model(path, num_slots=64, **options)
    target.open("a")
    logits = target.forward([Span("a", len(TEXT), num_logits=len(TEXT))], TEXT).logits
    target.commit("a", range(len(TEXT)))
    return target, logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_layers_say_what_they_said_and_the_target_keeps_its_rows(checkpoint, backend):
    target, logits = opened(checkpoint.path, backend=backend)
    slots, num_free = target.pool.slots("a").copy(), target.pool.num_free
    rows = [part[:, slots].clone() for part in (target.pool.keys, target.pool.values)]
    replay, whole = Replay(target), LayerPlan.whole(NUM_LAYERS)
    for first, last in ((7, 12), (0, 5), (11, 12)):
        with replay.rows("a", first, last - first) as again:
            stream = again.embed(TEXT[first:last])
            torch.testing.assert_close(again.logits(again.run(stream, whole)), logits[first:last], atol=1e-4, rtol=0)
            again.run(stream, LayerPlan.skipping(NUM_LAYERS, attention=[1], mlp=[2]))
            for layer in range(NUM_LAYERS):  # one sublayer after the other
                stream = again.run(again.run(stream, LayerPlan((layer,), ())), LayerPlan((), (layer,)))
            torch.testing.assert_close(again.logits(stream), logits[first:last], atol=1e-4, rtol=0)
            target.pool.check()
            assert target.pool.num_free == num_free - (last - first)
        target.pool.check()
    assert target.pool.num_free == num_free and target.pool.slots("a").tolist() == slots.tolist()
    for before, after in zip(rows, (target.pool.keys, target.pool.values), strict=True):
        assert torch.equal(before, after[:, slots])


def test_siblings_see_the_text_and_themselves(checkpoint):
    """Rows of one position in one pass say what each says alone."""
    target, logits = opened(checkpoint.path)
    whole = LayerPlan.whole(NUM_LAYERS)
    with Replay(target).rows("a", 11, 3, [-1, -1, -1]) as rows:
        said = rows.logits(rows.run(rows.embed([TEXT[11]] * 3), whole))
    torch.testing.assert_close(said, logits[11].expand(3, -1), atol=1e-4, rtol=0)


def test_an_error_within_gives_the_slots_back(checkpoint):
    target, _ = opened(checkpoint.path)
    num_free = target.pool.num_free
    with pytest.raises(RuntimeError), Replay(target).rows("a", 3, 4):
        raise RuntimeError
    assert target.pool.num_free == num_free
    target.pool.check()
