from __future__ import annotations

import copy

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from tests.families import FAMILIES
from tests.matrices import in_turn
from tests.parallel.backends import BACKENDS

TOKENS = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(1)).tolist()
MODELS = {family: FAMILIES[family] | {"num_hidden_layers": 4} for family in ("Llama", "Gemma2", "Mixtral")} | {
    "OPT": FAMILIES["OPT"] | {"num_hidden_layers": 4, "do_layer_norm_before": False}
}
PLANS = {
    "exit": LayerPlan.prefix(2),
    "layers": LayerPlan.skipping(4, attention=[1, 3], mlp=[1, 3]),
    "sublayers": LayerPlan.skipping(4, attention=[0, 2], mlp=[2, 3]),
    "exit less a sublayer": LayerPlan.prefix(3).without(mlp=[1]),
}


def decoder_of(model):
    return model.model.decoder if hasattr(model.model, "decoder") else model.model


def without(model, plan):
    """The transformers model with layers taken out, and sublayers that return nothing."""
    shallow = copy.deepcopy(model)
    layers = decoder_of(shallow).layers
    for index, layer in enumerate(layers):
        if index not in plan.attention and index in plan.mlp:
            layer.self_attn.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), *out[1:]))
        if index not in plan.mlp and index in plan.attention:
            layer.mlp.register_forward_hook(lambda _, __, out: torch.zeros_like(out))
    kept = [index for index, _, _ in plan.steps()]
    decoder_of(shallow).layers = torch.nn.ModuleList(layers[index] for index in kept)
    if getattr(shallow.config, "layer_types", None):
        shallow.config.layer_types = [shallow.config.layer_types[index] for index in kept]
    return shallow


def logits_of(runner, plan, taps=()):
    runner.open("a")
    layout = runner.plan([Span("a", len(TOKENS), num_logits=len(TOKENS))])
    layout.layers = plan
    output = runner.run(layout, TOKENS, taps)
    runner.close("a")
    return output


def pairs():
    """A post-norm block without a sublayer has no norm in its place: only whole layers can be compared."""
    return [(family, name) for family in MODELS for name in PLANS if family != "OPT" or "sublayer" not in name]


@pytest.mark.extended
@pytest.mark.parametrize(("family", "name", "backend"), list(in_turn(pairs(), BACKENDS)))
def test_a_plan_is_the_model_without_those_sublayers(make_checkpoint, family, name, backend):
    one, plan = make_checkpoint(family, **MODELS[family]), PLANS[name]
    ours = logits_of(open_model(one.path, num_slots=64, backend=backend), plan).logits
    with torch.no_grad():
        theirs = without(one.model, plan)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_the_taps_of_a_plan_are_the_stream_that_passes(make_checkpoint):
    one = make_checkpoint("Llama", **MODELS["Llama"])
    runner = open_model(one.path, num_slots=64)
    whole = logits_of(runner, None, (0, 1, 2, 3, 4)).features
    exits = logits_of(runner, LayerPlan.prefix(2), (0, 1, 2)).features
    for ours, theirs in zip(exits, whole[:3], strict=True):
        assert torch.equal(ours, theirs)
    skipping = logits_of(runner, LayerPlan.skipping(4, attention=[0, 2], mlp=[0, 2]), (0, 1, 2, 3, 4)).features
    assert torch.equal(skipping[0], skipping[1]) and torch.equal(skipping[2], skipping[3])
    assert not torch.equal(skipping[1], skipping[2]) and not torch.equal(skipping[3], skipping[4])
    rest = runner.decoder.run_layers
    runner.open("a")
    layout = runner.plan([Span("a", len(TOKENS))])
    lower, _ = rest(whole[0], layout, LayerPlan.prefix(3))
    upper, _ = rest(lower, layout, LayerPlan.span(3, 4))
    assert torch.equal(lower, whole[3]) and torch.equal(upper, whole[4])


def test_what_a_plan_says_of_itself():
    plan = LayerPlan.skipping(5, attention=[2], mlp=[2, 4])
    assert (plan.stop, plan.exact_stop, plan.num_sublayers) == (5, 2, 7)
    assert plan.steps() == ((0, True, True), (1, True, True), (3, True, True), (4, True, False))
    assert (LayerPlan.prefix(3).stop, LayerPlan.prefix(3).exact_stop) == (3, 3)
    assert LayerPlan.whole(3).without(mlp=[0]).exact_stop == 0
    assert LayerPlan((), ()).stop == 0
