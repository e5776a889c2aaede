"""What every field of a published config.json becomes, said or left out; and which records make no speculator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel.model.families.registry import read_config
from parallel.speculators.block.config import BlockConfig
from parallel.speculators.config import FINAL, STREAMS, FuserShape, SpeculatorConfig, kv_tap, record_of
from parallel.speculators.eagle.config import LISTED, DraftLayerConfig, DraftLayerNames
from parallel.speculators.heads.config import HeadsConfig
from parallel.speculators.registry import read_speculator

V, H = 97, 32
LAYER: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}
EAGLE3 = LAYER | TAPS | {"architectures": ["LlamaForCausalLMEagle3"]}
VLLM = {
    "speculators_model_type": "eagle3",
    "eagle_aux_hidden_state_layer_ids": [2, 3],
    "transformer_layer_config": LAYER,
}
EAGLE = LAYER | {"architectures": ["LlamaForCausalLM"]}
MIMO = LAYER | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "num_hidden_layers": 6}
P_EAGLE = LAYER | TAPS | {"architectures": ["PEagleDraftModel"], "mask_token_id": 7}
PLAIN3 = dict(method="eagle3", fuses=True, joins_in_attention=True, norms_taps=False, norms_features=False)
PLAIN3 |= dict(norms_residual=False, feeds_normed=False, norms_first_input=True, has_final_norm=True, head_rows=V)
PLAIN3 |= dict(own_embedding=False, num_depths=1, mask_token_id=None, join_bias=False, norms_pair=False)
FIELD: dict[str, Any] = {"draft_vocab_size": 40}
LLAMA_OWN = LAYER | {"architectures": ["LlamaForCausalLM"]}

DRAFT_LAYERS: list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    (EAGLE3, (), PLAIN3 | dict(taps=(1, 2, 4), target_hidden=H, names=DraftLayerNames())),
    (EAGLE3 | {"draft_vocab_size": 40}, (), dict(head_rows=40)),
    (EAGLE3 | {"target_hidden_size": 64}, (), dict(target_hidden=64)),
    (EAGLE3 | {"fc_norm": True}, (), dict(method="eagle3", norms_taps=True, feeds_normed=False)),
    (EAGLE3 | {"norm_output": True}, (), dict(method="eagle3", norms_taps=False, feeds_normed=True)),
    (EAGLE3 | {"fc_norm": True, "norm_output": True}, (), dict(method="eagle3.1", norms_taps=True, feeds_normed=True)),
    (EAGLE3 | {"norm_before_fc": True}, (), dict(norms_features=True, norms_residual=False)),
    (EAGLE3 | {"norm_before_residual": True}, (), dict(norms_features=False, norms_residual=True)),
    (EAGLE3, ("layers.0.hidden_norm.weight",), dict(names=LISTED)),
    (EAGLE | TAPS | FIELD, (), PLAIN3 | dict(head_rows=40, taps=(1, 2, 4))),
    (EAGLE | TAPS, ("midlayer.hidden_norm.weight",), dict(method="eagle3", names=DraftLayerNames())),
    (EAGLE | {"architectures": ["EagleLlamaForCausalLM"]}, (), dict(method="eagle")),
    (EAGLE, (), dict(method="eagle", taps=(FINAL,), join_bias=True, norms_first_input=False, has_final_norm=False)),
    (EAGLE, (), dict(fuses=False, joins_in_attention=False, head_rows=0, names=replace(LISTED, join="fc"))),
    (EAGLE | {"bias": False}, (), dict(join_bias=False)),
    (VLLM, (), PLAIN3 | dict(taps=(2, 3), names=LISTED)),
    (VLLM | {"embed_requires_grad": True}, (), dict(own_embedding=True)),
    (VLLM | {"embed_requires_grad": False}, (), dict(own_embedding=False)),
    (VLLM | {"norm_output": True, "fc_norm": True}, (), dict(method="eagle3.1", own_embedding=False)),
    (P_EAGLE, (), dict(method="p_eagle", num_depths=8, mask_token_id=7, own_embedding=False, names=LISTED)),
    (VLLM | {"speculators_model_type": "peagle", "mask_token_id": 7}, (), dict(own_embedding=True, num_depths=8)),
    (
        VLLM
        | {"speculators_model_type": "peagle", "mask_token_id": 7, "embed_requires_grad": False}
        | {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}},
        (),
        dict(own_embedding=False, num_depths=5, method="p_eagle"),
    ),
    (MIMO, (), dict(method="mtp", hidden_first=True, norms_pair=True, feeds_normed=True, has_final_norm=True)),
    (MIMO, (), dict(head_rows=0, fuses=False, norms_first_input=True, taps=(FINAL,))),
    (
        {"speculators_model_type": "mtp", "transformer_layer_config": LAYER | {"num_hidden_layers": 5}},
        (),
        dict(method="mtp", hidden_first=False, norms_pair=True, feeds_normed=True, taps=(FINAL,)),
    ),
    (
        LLAMA_OWN | {"speculator": {"method": "eagle3", "taps": [1, 2], "head_rows": 40}},
        (),
        dict(method="eagle3", taps=(1, 2), head_rows=40, num_depths=1, names=DraftLayerNames()),
    ),
    (
        LLAMA_OWN | {"speculator": {"method": "p_eagle", "taps": [1], "num_depths": 4}},
        (),
        dict(method="p_eagle", num_depths=4, mask_token_id=None, names=LISTED, head_rows=0),
    ),
    (LLAMA_OWN | {"speculator": {"method": "eagle3.1", "taps": [1]}}, (), dict(norms_taps=True, feeds_normed=True)),
    (LLAMA_OWN | {"speculator": {"method": "mtp", "taps": [-1]}}, (), dict(norms_pair=True, hidden_first=False)),
]


def written(folder: Path, hf: dict[str, Any], tensors: tuple[str, ...] | dict[str, torch.Tensor] = ()) -> Path:
    (folder / "config.json").write_text(json.dumps(hf))
    stored = tensors if isinstance(tensors, dict) else {name: torch.zeros(H) for name in tensors or ("none",)}
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("number", range(len(DRAFT_LAYERS)))
def test_fields_of_draft_layers(tmp_path, number):
    hf, tensors, expected = DRAFT_LAYERS[number]
    config = read_speculator(written(tmp_path, hf, tensors))
    assert isinstance(config, DraftLayerConfig) and config.block.num_layers == 1
    assert (config.vocab_size, config.max_positions) == (V, 128)
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_rows_of_an_own_head_are_those_that_are_stored(tmp_path):
    assert read_speculator(written(tmp_path, EAGLE3, {"lm_head.weight": torch.zeros(33, H)})).head_rows == 33


@pytest.mark.parametrize(
    ("said", "stored", "qkv", "o"),
    [
        ({}, (), False, False),
        ({"attention_bias": True}, (), False, False),
        ({"qkv_bias": True}, (), True, False),
        ({}, ("midlayer.self_attn.q_proj.bias",), True, False),
        ({}, ("midlayer.self_attn.o_proj.bias",), False, True),
    ],
)
def test_biases_of_a_layer_are_those_that_are_stored(tmp_path, said, stored, qkv, o):
    block = read_speculator(written(tmp_path, EAGLE3 | said, stored)).block
    assert (block.qkv_bias, block.o_bias) == (qkv, o)


@pytest.mark.parametrize(
    ("hf", "layers", "taps"),
    [
        (LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}, 32, (2, 16, 29)),
        (LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}, 5, (2, 2, 2)),
        ({key: value for key, value in VLLM.items() if "aux" not in key}, 32, (2, 16, 29)),
    ],
)
def test_the_usual_layers_are_read_where_none_are_named(tmp_path, hf, layers, taps):
    path = written(tmp_path, hf)
    assert read_speculator(path, layers).taps == taps
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids.*add it"):
        read_speculator(path)


REFUSED_LAYERS = [
    ({key: value for key, value in P_EAGLE.items() if key != "mask_token_id"}, "lacks mask_token_id"),
    (VLLM | {"transformer_layer_config": LAYER | {"model_type": "gemma"}}, "model_type='gemma' of draft layers"),
    (EAGLE3 | {"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
    (EAGLE3 | {"draft_vocab_size": V + 1}, f"{V + 1} tokens of an own head"),
    (LLAMA_OWN | {"speculator": {"method": "p_eagle", "taps": [1], "num_depths": 1}}, "p_eagle drafts 2 or more"),
    (LLAMA_OWN | {"speculator": {"method": "eagle3", "taps": [1], "num_depths": 2}}, "p_eagle drafts 2 or more"),
    (LLAMA_OWN | {"speculator": {"method": "eagle", "taps": [1]}}, "reads the final hidden state"),
    (EAGLE | {"num_hidden_layers": 2}, "is of no known speculator; use drafter=model for a whole model; known are"),
    (MIMO | {"num_nextn_predict_layers": 0}, "is of no known speculator"),
    (EAGLE | {"medusa_num_heads": 3}, "lacks medusa_num_layers"),
]


@pytest.mark.parametrize(("hf", "line"), REFUSED_LAYERS)
def test_what_is_no_draft_layer_is_refused(tmp_path, hf, line):
    with pytest.raises(ValueError, match=line):
        read_speculator(written(tmp_path, hf))


def test_a_draft_model_of_one_layer_is_no_eagle(tmp_path):
    path = written(tmp_path, EAGLE, ("model.norm.weight",))
    with pytest.raises(ValueError, match=r"is of no known speculator; use drafter=model for a whole model"):
        read_speculator(path)


# --- heads ------------------------------------------------------------------------------------------------------------

VLLM_MEDUSA = {
    "architectures": ["MedusaModel"],
    "hidden_size": H,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 2,
}
REDRAFTER = {"model_type": "recurrent_drafting_drafter", "vocab_size": V, "hidden_size": H, "exit_dim": 24}
REDRAFTER |= {"num_draft_layers": 2}
MLP = {"architectures": ["MLPSpeculatorPreTrainedModel"], "vocab_size": V, "emb_dim": H, "n_predict": 3}
LSTM: dict[str, Any] = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "vocab_size": V,
    "input_hidden_dim": H,
}
LSTM |= {"n_predict": 3, "inner_dim": "24", "emb_dim": "24", "proj_dim": "24"}
SUM_LSTM = LSTM | {"method": "sum_lstm", "tie_weights": True, "tie_lstm_embs": True}
HEADS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (VLLM_MEDUSA, dict(method="medusa", num_heads=3, num_blocks=2, inner=H, head="own", block_bias=False)),
    (VLLM_MEDUSA | {"medusa_fc_bias": True, "original_lm_head": True}, dict(head="shared", block_bias=True)),
    (VLLM_MEDUSA | {"truncated_vocab_size": V}, dict(vocab_size=V)),
    (REDRAFTER, dict(method="rnn", num_heads=0, inner=24, num_blocks=2, head="shared", recurrent=False)),
    (REDRAFTER | {"rnn": True}, dict(recurrent=True, longest=2**20)),
    (MLP, dict(method="mlp", num_heads=3, inner=H, tied=False, head="own", scale_input=False, own_embedding=True)),
    (MLP | {"inner_dim": 0}, dict(inner=H)),
    (MLP | {"inner_dim": 24, "tie_weights": True}, dict(inner=24, tied=True, head="shared", scale_input=False)),
    (MLP | {"scale_input": True}, dict(tied=False, head="own", scale_input=True)),
    (LSTM, dict(method="mlp", inner=24, tied=False, head="own", scale_input=False, own_embedding=True)),
    (LSTM | {"method": "sum_rnn", "tie_weights": True}, dict(method="mlp", tied=True, head="shared")),
    (SUM_LSTM | {"scale_input": True}, dict(method="lstm", tied=True, head="shared", scale_input=True, longest=3)),
]


@pytest.mark.parametrize(("hf", "expected"), HEADS)
def test_fields_of_heads(tmp_path, hf, expected):
    config = read_speculator(written(tmp_path, hf))
    assert isinstance(config, HeadsConfig) and (config.taps, config.target_hidden) == ((FINAL,), H)
    assert {name: getattr(config, name) for name in expected} == expected and config.max_positions == 2**20


@pytest.mark.parametrize(
    ("hf", "line"),
    [
        (VLLM_MEDUSA | {"truncated_vocab_size": 40}, "truncated_vocab_size=40"),
        (SUM_LSTM | {"tie_lstm_embs": False}, "method must be sum_rnn"),
        (SUM_LSTM | {"tie_weights": False}, "method must be sum_rnn"),
        (LSTM | {"method": "other"}, "method must be sum_rnn"),
        (LSTM | {"proj_dim": "12"}, "must be one number, the same"),
        (LSTM | {"emb_dim": "12"}, "must be one number, the same"),
    ],
)
def test_heads_that_cannot_be_read_are_refused(tmp_path, hf, line):
    with pytest.raises(ValueError, match=line):
        read_speculator(written(tmp_path, hf))


# --- block drafters ---------------------------------------------------------------------------------------------------

BLOCK = LAYER | {"num_hidden_layers": 2, "block_size": 7, "mask_token_id": 90, "target_layer_ids": [0, 2]}
DFLASH = BLOCK | {"architectures": ["DFlashDraftModel"], "dflash_config": {}}
CONV: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 5}
DFLASH2 = BLOCK | {"architectures": ["DFlash2DraftModel"], "dflash_config": CONV}
DSPARK = BLOCK | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8}
DOMINO = BLOCK | {"architectures": ["DominoDraftModel"], "emb_dim": 8, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1}
BARE = dict(embedding_scale=1.0, logit_scale=1.0, logit_softcap=None, conv_taps=0, anchor_first=False, num_drafted=6)
BLOCKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DFLASH, BARE | dict(method="dflash", corrector="none", confidence=False, taps=(1, 3), mask_token_id=90)),
    (DFLASH | {"dflash_config": {"block_size": 9, "mask_token_id": 3}}, dict(block_size=9, mask_token_id=3)),
    (DFLASH | {"dflash_config": {"target_layer_ids": [-1, 1]}}, dict(taps=(0, 2))),
    (DFLASH | {"input_embedding_scale": 2.0, "output_multiplier": 0.5}, dict(embedding_scale=2.0, logit_scale=0.5)),
    (DFLASH | {"final_logit_softcapping": 3.0}, dict(logit_softcap=3.0)),
    (DFLASH | {"final_logit_softcapping": 0.0}, dict(logit_softcap=None)),
    (DFLASH2, dict(method="dflash2", conv_taps=2, conv_group=4, corrector="selector", corrector_rank=8, top_k=5)),
    (DSPARK, dict(method="dspark", corrector="markov", corrector_rank=8, confidence=False, anchor_first=True)),
    (DSPARK | {"markov_rank": 0}, dict(corrector="none", num_drafted=7, embedding_scale=1.0)),
    (DSPARK | {"architectures": ["DSparkDraftModel"], "markov_head_type": "gated"}, dict(corrector="gated")),
    (DSPARK | {"markov_head_type": "rnn"}, dict(corrector="rnn")),
    (DSPARK | {"enable_confidence_head": True, "confidence_head_with_markov": True}, dict(confidence=True)),
    (DSPARK | {"confidence_head_alpha": 0.5, "confidence_head_with_markov": True}, dict(confidence=True)),
    (DSPARK | {"enable_confidence_head": False, "confidence_head_alpha": 0.5}, dict(confidence=False)),
    (DSPARK | {"markov_rank": 0, "enable_confidence_head": True}, dict(confidence=True, corrector="none")),
    (DOMINO, dict(method="domino", corrector="gru", corrector_rank=8, state_size=12, anchor_first=False)),
    (DOMINO | {"shift_label": True}, dict(anchor_first=True, num_drafted=7)),
    (
        LAYER | {"speculator": {"method": "dflash", "taps": [1], "block_size": 4, "mask_token_id": None}},
        dict(method="dflash", taps=(1,), block_size=4, mask_token_id=None, embedding_scale=None),
    ),
]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_fields_of_block_drafters(tmp_path, number):
    hf, expected = BLOCKS[number]
    config = read_speculator(written(tmp_path, hf))
    assert isinstance(config, BlockConfig) and config.drafts_blocks and config.block.qk_norm
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.block.names.blocks, config.block.names.final_norm) == ("layers", "norm")


OWN_BLOCK = {"method": "dflash", "taps": [1], "block_size": 4, "mask_token_id": 96}


@pytest.mark.parametrize(
    ("hf", "line"),
    [
        (DFLASH | {"is_causal": True}, "is_causal=True is not supported"),
        (DFLASH | {"layer_types": ["sliding_attention"] * 2}, "sliding layers whose blocks are causal"),
        (DFLASH | {"target_layer_ids": None}, "lacks target_layer_ids"),
        (DFLASH | {"block_size": 1}, "block_size=1: drafts no token"),
        (DFLASH | {"mask_token_id": V}, f"mask_token_id={V}: is no token"),
        (DFLASH2 | {"dflash_config": CONV | {"conv_group_size": 5}}, "conv_group=5: must divide 32"),
        (DFLASH2 | {"dflash_config": {**CONV, "selector_rank": None}}, "lacks selector_rank"),
        (DSPARK | {"markov_head_type": "other"}, "markov_head_type='other'"),
        (DSPARK | {"enable_confidence_head": True}, "confidence_head_with_markov=false"),
        (DSPARK | {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True}, "=false is"),
        (DOMINO | {"pure_draft_prefix_len": 2}, "pure_draft_prefix_len=2 is not supported"),
        (LAYER | {"speculator": OWN_BLOCK | {"corrector": "other"}}, "corrector='other': is none"),
        (LAYER | {"speculator": OWN_BLOCK | {"corrector": "markov", "corrector_rank": 0}}, "a corrector needs one"),
        (LAYER | {"speculator": OWN_BLOCK | {"corrector": "gru", "state_size": 0}}, "a GRU needs one"),
        (LAYER | {"speculator": OWN_BLOCK | {"conv_taps": 2, "conv_group": 5}}, "must divide"),
        (LAYER | {"speculator": OWN_BLOCK | {"inner": 5}}, r"speculator\.inner: is no field of this method"),
        (LAYER | {"speculator": {"method": "dflash"}}, "missing"),
    ],
)
def test_block_drafters_that_cannot_be_read_are_refused(tmp_path, hf, line):
    with pytest.raises(ValueError, match=line):
        read_speculator(written(tmp_path, hf))


@pytest.mark.parametrize("fields", [{"conv_taps": 0, "conv_group": 5}, {"corrector_rank": 0}, {"state_size": 0}, {}])
def test_sizes_of_parts_that_are_not_there_do_not_matter(tmp_path, fields):
    assert read_speculator(written(tmp_path, LAYER | {"speculator": OWN_BLOCK | fields})).mask_token_id == 96


# --- records ----------------------------------------------------------------------------------------------------------


class Reading(SpeculatorConfig):
    """One that reads keys and values."""

    __slots__ = ()

    @property
    def reads_kv(self):
        return True


def record(taps, kind=SpeculatorConfig):
    return kind(method="x", vocab_size=V, max_positions=9, target_hidden=H, taps=taps)


@pytest.mark.parametrize(
    ("taps", "kind", "good"),
    [
        ((), SpeculatorConfig, False),
        ((-1,), SpeculatorConfig, True),
        ((-2,), SpeculatorConfig, False),
        ((-2,), Reading, True),
        ((4096,), SpeculatorConfig, True),
        ((4097,), SpeculatorConfig, False),
        ((STREAMS,), SpeculatorConfig, True),
        ((0, STREAMS + 1), SpeculatorConfig, False),
    ],
)
def test_taps_are_layers_of_a_target(taps, kind, good):
    one = record(taps, kind)
    if good:
        one.check_record()
        return
    with pytest.raises(ValueError, match="are no layers of a target"):
        one.check_record()


TARGET = read_config(LLAMA_OWN | {"num_hidden_layers": 6})


@pytest.mark.parametrize(
    ("taps", "target", "good"),
    [
        ((-1, 0, 6), TARGET, True),
        ((7,), TARGET, False),
        ((kv_tap(5),), TARGET, True),
        ((kv_tap(6),), TARGET, False),
        ((STREAMS,), TARGET, True),
        ((6,), TARGET.stretched(3), True),
        ((7,), TARGET.stretched(3), False),
        ((99,), replace(TARGET, num_layers=0), True),
        ((0,), replace(TARGET, vocab_size=V + 1), False),
        ((0,), replace(TARGET, hidden_size=H + 1), False),
    ],
)
def test_a_speculator_reads_layers_that_its_target_has(taps, target, good):
    one = record(taps, Reading)
    if good:
        one.check_target(target)
        return
    with pytest.raises(ValueError, match="use one of its own"):
        one.check_target(target)


def test_the_tap_of_a_layer_and_the_layer_of_a_tap():
    assert [kv_tap(layer) for layer in (0, 1, 5)] == [-2, -3, -7] and kv_tap(-7) == 5


def test_tensors_that_fuse_taps():
    plain = FuserShape(num_taps=3, tap_size=8, outputs=5, eps=1e-5, projection="fc")
    assert plain.inputs == 24 and plain.tensor_shapes() == {"fc.weight": (5, 24)}
    whole = replace(plain, tap_norms="t", features_norm="f", result_norm="r")
    norms = {"t.0.weight": (8,), "t.1.weight": (8,), "t.2.weight": (8,), "f.weight": (24,), "r.weight": (5,)}
    assert whole.tensor_shapes() == {"fc.weight": (5, 24)} | norms


@pytest.mark.parametrize(("taps", "travels"), [((0,), False), ((0, 1), True)])
def test_features_are_fused_before_they_leave_if_that_makes_them_narrower(taps, travels):
    block = replace(TARGET, num_layers=1)
    config = DraftLayerConfig(
        method="eagle3", vocab_size=V, max_positions=9, target_hidden=H, taps=taps, block=block, fuses=True
    )
    assert config.feature_size == H * len(taps) and config.travels_fused == travels
    assert not replace(config, fuses=False).travels_fused and replace(config, fuses=False).fuser is None


def test_lists_of_a_record_are_tuples():
    given = {"method": "x", "vocab_size": V, "max_positions": 9, "target_hidden": H, "taps": [1, 2]}
    assert record_of(SpeculatorConfig, given) == record((1, 2))
