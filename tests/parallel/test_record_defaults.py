"""A field that a record leaves out asks for nothing, counts nothing and switches nothing on, but for these."""

from __future__ import annotations

import pytest

from tests.record_defaults import defaults_that_say_something

SAYS_SOMETHING: dict[str, dict[str, float]] = {
    "parallel.ranges": {"Range.cap": 2**31 - 1},
    "parallel.kernels.packing": {"Packing.scale_bytes": 4},
    "parallel.kv.pass_plan": {"Span.num_logits": 1, "Span.has_streams": True},
    "parallel.model.config": {
        "RopeScaling.rope_theta": 10000.0,
        "RopeScaling.factor": 1.0,
        "RopeScaling.low_freq_factor": 1.0,
        "RopeScaling.high_freq_factor": 4.0,
        "RopeScaling.beta_fast": 32.0,
        "RopeScaling.beta_slow": 1.0,
        "RopeScaling.truncate": True,
        "DecoderConfig.final_norm": True,
        "DecoderConfig.gated": True,
        "DecoderConfig.normalize_expert_weights": True,
    },
    "parallel.model.layers.attention": {},
    "parallel.model.layers.split_kv": {},
    "parallel.model.quantization": {},
    "parallel.runtime.graph_list": {"GraphList.of_every_row": True},
    "parallel.speculators.block.config": {
        "BlockConfig.corrector_rank": 256,
        "BlockConfig.state_size": 1024,
        "BlockConfig.top_k": 16,
        "BlockConfig.conv_group": 16,
        "BlockConfig.logit_scale": 1.0,
    },
    "parallel.speculators.eagle.config": {
        "DraftLayerConfig.norms_first_input": True,
        "DraftLayerConfig.has_final_norm": True,
        "DraftLayerConfig.num_depths": 1,
    },
    "parallel.speculators.heads.config": {
        "HeadsConfig.num_blocks": 1,
        "HeadsConfig.block_bias": True,
        "HeadsConfig.recurrent": True,
    },
    "parallel.speculators.place": {},
    "parallel.speculators.streams.layouts": {},
}


@pytest.mark.parametrize("module", SAYS_SOMETHING)
def test_what_is_left_out_says_nothing_but_this(module):
    assert defaults_that_say_something(module) == SAYS_SOMETHING[module]
