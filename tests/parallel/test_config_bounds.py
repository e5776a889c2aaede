"""The bounds of every number in a config.json: the least and the greatest are read, what is beyond them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.model.config_fields import DecoderFields, check_fields
from parallel.speculators.config_fields import SpeculatorFields

SIZE, TOKENS, POSITIONS, HEADS, LAYERS = (1, 2**22), (1, 2**24), (1, 2**30), (1, 2**14), (1, 4096)
DEPTH, STATE = (1, 1024), (0, 2**22)

WHOLE = {
    "vocab_size": TOKENS,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEADS,
    "intermediate_size": SIZE,
    "ffn_dim": SIZE,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": (0, 2**30),
    "sliding_window_pattern": LAYERS,
    "max_window_layers": (0, 2**30),
    "num_experts": HEADS,
    "num_local_experts": HEADS,
    "num_experts_per_tok": HEADS,
    "moe_intermediate_size": SIZE,
    "eos_token_id": (-1, 2**31 - 1),
    "pard_token": (0, 2**24 - 1),
    "pard_depth": DEPTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "mlp_hidden_size": SIZE,
    "mlp_ratio": (1, 64),
    "max_sequence_length": POSITIONS,
    "embedding_size": TOKENS,
    "rope_scaling.original_max_position_embeddings": POSITIONS,
    "quantization_config.group_size": (-1, 2**20),
    "quantization_config.q_group_size": (-1, 2**20),
}
"""Field -> least and greatest."""
SPECULATORS = {
    "block_size": DEPTH,
    "conv_kernel_size": DEPTH,
    "conv_group_size": SIZE,
    "mask_token_id": (0, 2**24 - 1),
    "selector_rank": SIZE,
    "selector_top_k": TOKENS,
    "markov_rank": STATE,
    "gru_hidden_dim": SIZE,
    "pure_draft_prefix_len": (0, 1024),
    "emb_dim": SIZE,
    "num_nextn_predict_layers": (0, 4096),
    "draft_vocab_size": TOKENS,
    "target_hidden_size": SIZE,
    "medusa_num_heads": DEPTH,
    "medusa_num_layers": (0, 1024),
    "num_heads": DEPTH,
    "exit_dim": SIZE,
    "num_draft_layers": (0, 1024),
    "n_predict": DEPTH,
    "inner_dim": STATE,
    "proj_dim": SIZE,
    "input_hidden_dim": SIZE,
    "speculator.vocab_size": TOKENS,
    "speculator.max_positions": SIZE,
    "speculator.target_hidden": SIZE,
    "speculator.head_rows": (0, 2**24),
    "speculator.num_depths": DEPTH,
    "speculator.exit": LAYERS,
    "speculator.kv_layer": (0, 4096),
    "speculator.num_heads": (0, 1024),
    "speculator.inner": STATE,
    "speculator.num_blocks": (0, 4096),
    "speculator.rank": STATE,
    "speculator.start_rank": STATE,
    "speculator.prune_rank": STATE,
    "speculator.block_size": (0, 1024),
    "speculator.mask_token_id": (0, 2**24 - 1),
    "speculator.corrector_rank": STATE,
    "speculator.state_size": STATE,
    "speculator.top_k": TOKENS,
    "speculator.conv_taps": (0, 1024),
    "speculator.conv_group": SIZE,
}
STEP = 1e-9
REAL = {
    "rms_norm_eps": (0.0, 1.0 - STEP),
    "rope_theta": (1.0 + STEP, 1e15),
    "rope_local_base_freq": (1.0 + STEP, 1e15),
    "query_pre_attn_scalar": (STEP, 1e9),
    "attn_logit_softcapping": (0.0, 1e9),
    "final_logit_softcapping": (0.0, 1e9),
    "rope_scaling.factor": (STEP, 1e6),
    "rope_scaling.mscale": (0.0, 1e6),
    "rope_scaling.mscale_all_dim": (0.0, 1e6),
    "speculator.embedding_scale": (STEP, 1e6),
    "speculator.logit_scale": (STEP, 1e6),
    "speculator.logit_softcap": (STEP, 1e6),
    "input_embedding_scale": (STEP, 1e6),
    "output_multiplier": (STEP, 1e6),
}
LISTS = {
    "quantization_config.weight_block_size": (1, 2**22, 2, 2),
    "target_layer_ids": (-1, 4096, 1, 4096),
    "speculator.taps": (-4098, None, 1, 4096),
    "speculator.layers": (0, 4096, 0, 5000),
}
"""Field -> least and greatest entry, and how many there are."""


def refused(field: str, value: Any) -> bool:
    """Whether the value is refused, by a line that begins with the field."""
    section, _, name = field.rpartition(".")
    try:
        check_fields({section: {name: value}} if section else {name: value}, SpeculatorFields)
    except ValueError as error:
        return str(error).startswith(field)
    return False


@pytest.mark.parametrize("field", WHOLE | SPECULATORS)
def test_whole_numbers(field):
    least, most = (WHOLE | SPECULATORS)[field]
    assert [refused(field, value) for value in (least - 1, least, most, most + 1)] == [True, False, False, True]


@pytest.mark.parametrize("field", REAL)
def test_real_numbers(field):
    least, most = REAL[field]
    values = least - STEP, least, most, most * (1 + STEP) + STEP
    assert [refused(field, value) for value in values] == [True, False, False, True]


@pytest.mark.parametrize("field", LISTS)
def test_lists(field):
    least, most, shortest, longest = LISTS[field]
    some = most if most is not None else 0
    assert refused(field, [least - 1] * max(1, shortest)) and not refused(field, [least] * max(1, shortest))
    assert not refused(field, [some] * longest)
    assert most is None or refused(field, [most + 1] * max(1, shortest))
    assert not shortest or refused(field, [least] * (shortest - 1))
    assert longest == 5000 or refused(field, [least] * (longest + 1))


def test_texts_of_numbers_are_short():
    for field in ("emb_dim", "proj_dim", "inner_dim"):
        assert not refused(field, "9" * 100) and refused(field, "9" * 101)


def test_every_field_may_be_left_out():
    for section in ("rope_scaling", "quantization_config", "speculator", "dflash_config", "eagle_config"):
        check_fields({section: {}}, SpeculatorFields)
    check_fields({"transformer_layer_config": {}}, SpeculatorFields)
    check_fields({"rope_parameters": {"full_attention": {}}}, DecoderFields)
    check_fields({"quantization_config": {"config_groups": {"a": {}, "b": {"weights": {}}}}}, DecoderFields)
    check_fields({})
