"""The pocket architectures: two Llama configurations that share vocabulary and context. Knows no weights."""

from __future__ import annotations

from transformers import GenerationConfig, LlamaConfig

from cluster.tools.training.tokenizer import END_OF_TEXT_ID

CONTEXT = 8192
"""Longest sequence, in tokens, the configurations allow. Training sees far shorter ones."""


def _llama(vocab_size: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=48,
        intermediate_size=intermediate,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )


def target_config(vocab_size: int) -> LlamaConfig:
    """The target: 6 layers of 384, 10.4 M parameters at 4096 entries."""
    return _llama(vocab_size, hidden=384, layers=6, heads=8, kv_heads=4, intermediate=896)


def drafter_config(vocab_size: int, layers: int = 2) -> LlamaConfig:
    """The draft model: layers of 192; with 2 of them 1.6 M parameters at 4096 entries, with 8 of them 4.0 M."""
    return _llama(vocab_size, hidden=192, layers=layers, heads=4, kv_heads=2, intermediate=512)


def generation_config() -> GenerationConfig:
    """Greedy generation that stops at the end-of-text token."""
    return GenerationConfig(
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        do_sample=False,
    )
