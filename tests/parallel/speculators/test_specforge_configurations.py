"""Every draft configuration of SpecForge (github.com/sgl-project/SpecForge, `configs/`, commit a6b6b023): as which
speculator it is read, or why it is refused. Rows are facts of those files, the files themselves are not here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from parallel.speculators.block.config import BlockConfig
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.registry import read_speculator

EAGLE3, PEAGLE = "LlamaForCausalLMEagle3", "PEagleDraftModel"
DFLASH, DSPARK, DOMINO = "DFlashDraftModel", "DSparkDraftModel", "DominoDraftModel"
Row = tuple[str, str, str, tuple[int, int, int, int, int], int, int, list[int], str]

CONFIGURATIONS: list[Row] = [
    ("deepseek-v2-lite-eagle3", EAGLE3, "llama", (2048, 16, 16, 128, 1), 102400, 32000, [], "yarn"),
    ("deepseek-v3-671b-eagle3", EAGLE3, "llama", (7168, 56, 8, 0, 1), 129280, 32000, [1, 29, 57], ""),
    ("gemma3-1b-eagle3", EAGLE3, "llama", (1152, 4, 1, 256, 1), 262144, 32000, [], ""),
    ("glm-5.2-dspark", DSPARK, "qwen3", (6144, 64, 16, 64, 5), 154880, 7, [1, 19, 38, 57, 76], ""),
    ("gpt-oss-120B-eagle3", EAGLE3, "llama", (2880, 64, 8, 64, 1), 201088, 32000, [1, 17, 33], ""),
    ("gpt-oss-20B-eagle3", EAGLE3, "llama", (2880, 64, 8, 64, 1), 201088, 32000, [1, 11, 21], ""),
    ("inkling-dspark", DSPARK, "qwen3", (6144, 64, 16, 64, 5), 201024, 7, [5, 17, 35, 47, 59], ""),
    ("kimi-k3-dspark", DSPARK, "qwen3", (7168, 64, 16, 64, 5), 163840, 7, [7, 23, 51, 67, 83], "yarn"),
    ("lfm2.5-1.2b-instruct-dflash", DFLASH, "qwen3", (2048, 32, 8, 64, 8), 65536, 16, [1, 4, 7, 10, 13], ""),
    ("ling-flash-2.0-eagle3", EAGLE3, "llama", (4096, 32, 8, 0, 1), 157184, 32000, [], ""),
    ("llama3-70B-ealge3", EAGLE3, "llama", (8192, 64, 8, 128, 1), 128256, 32000, [], "llama3"),
    ("llama3-8B-eagle3", EAGLE3, "llama", (4096, 32, 8, 0, 1), 128256, 32000, [], ""),
    ("llama4-scout-17B-16E-eagle3", EAGLE3, "llama", (5120, 40, 8, 0, 1), 202048, 32000, [], ""),
    ("longcat-flash-dflash", DFLASH, "qwen3", (6144, 32, 8, 128, 5), 131072, 16, [1, 7, 13, 19, 25], ""),
    ("longcat-flash-eagle3", EAGLE3, "llama", (6144, 64, 16, 128, 1), 131072, 131072, [], ""),
    ("phi4-eagle3", EAGLE3, "phi3", (5120, 40, 10, 0, 1), 100352, 32000, [], ""),
    ("qwen2-5-vl-7b-eagle3", EAGLE3, "llama", (3584, 28, 4, 128, 1), 152064, 32000, [], "mrope"),
    ("qwen2.5-0.5b-dflash", DFLASH, "qwen3", (896, 14, 2, 64, 5), 151936, 16, [1, 6, 11, 16, 21], ""),
    ("qwen2.5-0.5b-eagle3", EAGLE3, "llama", (896, 14, 2, 0, 1), 151936, 16000, [], ""),
    ("qwen2.5-7b-eagle3", EAGLE3, "llama", (3584, 28, 4, 0, 1), 152064, 16000, [], ""),
    ("qwen2.5-vl-32b-eagle3", EAGLE3, "llama", (5120, 28, 4, 128, 1), 152064, 32000, [], "mrope"),
    ("qwen3-235B-A22B-eagle3", EAGLE3, "llama", (4096, 64, 4, 128, 1), 151936, 32000, [1, 46, 90], ""),
    ("qwen3-30B-A3B-eagle3.1", EAGLE3, "llama", (2048, 32, 4, 128, 1), 151936, 32000, [], "normed"),
    ("qwen3-30B-A3B-eagle3", EAGLE3, "llama", (2048, 32, 4, 128, 1), 151936, 32000, [], ""),
    ("qwen3-32b-eagle3", EAGLE3, "llama", (5120, 64, 8, 128, 1), 151936, 32000, [], ""),
    ("qwen3-4b-dflash", DFLASH, "qwen3", (2560, 32, 8, 128, 5), 151936, 16, [1, 9, 17, 25, 33], ""),
    ("qwen3-4b-dspark", DSPARK, "qwen3", (2560, 32, 8, 128, 5), 151936, 7, [1, 9, 17, 25, 33], ""),
    ("qwen3-4b-eagle3", EAGLE3, "llama", (2560, 32, 8, 128, 1), 151936, 32000, [], ""),
    ("qwen3-8b-dflash", DFLASH, "qwen3", (4096, 32, 8, 128, 5), 151936, 16, [1, 9, 17, 25, 33], ""),
    ("qwen3-8b-domino", DOMINO, "qwen3", (4096, 32, 8, 128, 5), 151936, 16, [1, 9, 17, 25, 33], "shifted"),
    ("qwen3-8b-dspark", DSPARK, "qwen3", (4096, 32, 8, 128, 5), 151936, 7, [1, 9, 17, 25, 33], ""),
    ("qwen3-8b-eagle3", EAGLE3, "llama", (4096, 32, 8, 128, 1), 151936, 32000, [], ""),
    ("qwen3-8b-peagle", PEAGLE, "llama", (4096, 32, 8, 128, 4), 151936, 32000, [], ""),
    ("qwen3-coder-30B-A3B-instruct-eagle3", EAGLE3, "llama", (2048, 32, 4, 128, 1), 151936, 32000, [], ""),
    ("qwen3-coder-480B-A35B-instruct-eagle3", EAGLE3, "llama", (6144, 96, 8, 128, 1), 151936, 32000, [], ""),
    ("qwen3-coder-next-eagle3", EAGLE3, "llama", (2048, 16, 4, 128, 1), 151936, 32000, [], ""),
    ("qwen3-next-80b-a3b-eagle3", EAGLE3, "llama", (2048, 16, 2, 256, 1), 151936, 32000, [], ""),
    ("qwen3.5-35b-a3b-dflash", DFLASH, "qwen3", (2048, 32, 4, 128, 8), 248320, 16, [1, 10, 19, 28, 37], ""),
    ("qwen3.5-35b-a3b-eagle3", EAGLE3, "llama", (2048, 16, 2, 256, 1), 248320, 32000, [], ""),
    ("qwen3.5-4b-dflash", DFLASH, "qwen3", (2560, 32, 8, 128, 5), 248320, 16, [1, 8, 15, 22, 29], ""),
    ("qwen3.5-4b-domino", DOMINO, "qwen3", (2560, 32, 8, 128, 5), 248320, 16, [3, 11, 19, 27, 31], "shifted"),
    ("qwen3.6-27b-dflash", DFLASH, "qwen3", (5120, 32, 8, 128, 5), 248320, 16, [1, 16, 31, 46, 61], "sliding"),
    ("qwen3.6-27b-domino-full-attention", DOMINO, "qwen3", (5120, 32, 8, 128, 5), 248320, 16, [1, 16, 31, 46, 61], ""),
    ("qwen3.6-27b-dspark", DSPARK, "qwen3", (5120, 32, 8, 128, 5), 248320, 16, [2, 17, 32, 47, 62], ""),
    ("qwq-32B-eagle3", EAGLE3, "qwen2", (5120, 40, 8, 0, 1), 152064, 32000, [], ""),
]
"""File, architecture, `model_type`; hidden size, heads, KV heads, head size (0: not said) and layers; vocabulary; draft
vocabulary or block size; layers of the target that it names; scaling of rotary frequencies and flags."""

ROPE: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    "mrope": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
REFUSED = {
    "qwen2-5-vl-7b-eagle3": "rope_type='mrope' is not supported",
    "qwen2.5-vl-32b-eagle3": "rope_type='mrope' is not supported",
    "qwen3-8b-peagle": "lacks mask_token_id",
    "qwen3.6-27b-dflash": "sliding layers whose blocks are causal",
}
"""Images give positions of several dimensions; a mask token is an option of the training that is not written down;
rows of a block see each other."""
TARGET_LAYERS = 36
METHODS = {EAGLE3: "eagle3", PEAGLE: "p_eagle", DFLASH: "dflash", DSPARK: "dspark", DOMINO: "domino"}


def write(row: Row, folder: Path) -> None:
    _, architecture, model_type, (hidden, heads, kv_heads, head_size, layers), vocab, width, ids, marks = row
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    config |= {"head_dim": head_size} if head_size else {}
    for scaling in set(marks.split()) & set(ROPE):
        config["rope_scaling"] = ROPE[scaling] | {"rope_theta": 1e4}
    config |= {"fc_norm": True, "norm_output": True} if "normed" in marks else {}
    if architecture in (EAGLE3, PEAGLE):
        config |= {"draft_vocab_size": width}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {}
    else:
        sliding = {"layer_types": ["sliding_attention"] * layers, "use_sliding_window": True, "sliding_window": 2048}
        config |= {"block_size": width} | (sliding if "sliding" in marks else {})
        config["dflash_config"] = {"mask_token_id": 3, "target_layer_ids": ids}
    if architecture == DSPARK:
        config["dflash_config"] |= {"markov_rank": 256, "markov_head_type": "vanilla", "confidence_head_alpha": 1.0}
        config["dflash_config"] |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if architecture == DOMINO:
        config["dflash_config"] |= {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}
        config["dflash_config"] |= {"shift_label": "shifted" in marks}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("row", CONFIGURATIONS, ids=lambda row: row[0])
def test_a_configuration_is_read_or_refused_for_a_reason(row: Row, tmp_path: Path) -> None:
    name, architecture, _, (hidden, heads, kv_heads, _, layers), vocab, width, ids, marks = row
    write(row, tmp_path)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]) as refusal:
            read_speculator(tmp_path, TARGET_LAYERS)
        assert "\n" not in str(refusal.value)
        return
    config = read_speculator(tmp_path, TARGET_LAYERS)
    expected = METHODS[architecture] + (".1" if "normed" in marks else "")
    usual = (2, TARGET_LAYERS // 2, TARGET_LAYERS - 3)
    assert (config.method, config.vocab_size, config.target_hidden) == (expected, vocab, hidden)
    assert config.taps == (tuple(one + 1 for one in ids) or usual)
    if isinstance(config, DraftLayerConfig):
        block = config.block
        assert (config.head_rows, block.qkv_bias) == (width, False)
    else:
        assert isinstance(config, BlockConfig)
        block = config.block
        anchor_first = architecture == DSPARK or "shifted" in marks
        assert (config.block_size, config.num_drafted) == (width, width - (not anchor_first))
    assert (block.num_heads, block.num_kv_heads, block.num_layers) == (heads, kv_heads, layers)


def test_of_the_45_configurations_41_are_read() -> None:
    assert len(CONFIGURATIONS) == 45 and len(REFUSED) == 4
    read = Counter(row[1] for row in CONFIGURATIONS if row[0] not in REFUSED)
    assert read == {EAGLE3: 25, DFLASH: 7, DSPARK: 6, DOMINO: 3}
