"""Tiny models of the layouts of LLaDA and Dream with random weights, and their decoders in transformers, one request at
a time: `static` without a cache, `prefix` and `dual` over caches as they are at the start of a block."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.sampling.noise import NoiseStream, gumbel, noise_key
from tests.actors.masked_diffusion import MASK, SHAPE
from tests.families import tiny_model

BLOCK = 5
DECODERS = ("static", "prefix", "dual")
_LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def llada_config(config: dict[str, Any]) -> dict[str, Any]:
    """A Llama's config.json as LLaDA writes it."""
    return {
        "architectures": ["LLaDAModelLM"],
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": config["hidden_size"],
        "embedding_size": config["vocab_size"],
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "max_sequence_length": config["max_position_embeddings"],
        "mlp_hidden_size": config["intermediate_size"],
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "n_layers": config["num_hidden_layers"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope": True,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "scale_logits": False,
        "vocab_size": config["vocab_size"],
        "weight_tying": config["tie_word_embeddings"],
    }


class WholeTextDiffusion:
    """The checkpoint of a Llama or a Qwen 2 at `path`, turned into one of LLaDA or Dream."""

    def __init__(self, path: Path, model: Any, mask: int = MASK, block: int = BLOCK) -> None:
        self.path, self.model, self.mask, self.block = path, model, mask, block
        config = json.loads((path / "config.json").read_text())
        self.shift = int(config["model_type"] == "qwen2")
        if self.shift:
            config["architectures"] = ["DreamModel"]
        else:
            config = llada_config(config)
            file = path / "model.safetensors"
            save_file({_in_llada(name): tensor for name, tensor in load_file(file).items()}, file)
        config |= {"block_size": block, "mask_token_id": mask}
        (path / "config.json").write_text(json.dumps(config))

    @staticmethod
    def made(path: Path, layout: str, seed: int = 0) -> WholeTextDiffusion:
        """A checkpoint with random weights."""
        family = {"llada": "Llama", "dream": "Qwen2"}[layout]
        model = tiny_model(family, seed, **(SHAPE | {"head_dim": 8, "use_sliding_window": False}))
        if family == "Qwen2":
            for layer in model.model.layers:  # transformers starts with biases of 0
                for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                    torch.nn.init.normal_(part.bias, std=0.3)
        model.save_pretrained(path)
        return WholeTextDiffusion(path, model)

    @torch.no_grad()
    def _pass(self, token_ids: list[int], first: int, cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Logits of these tokens from position `first` on, which see each other and all that is in the cache."""
        num_cached = 0 if cache is None else cache.get_seq_length()
        seen = torch.zeros(1, 1, len(token_ids), num_cached + len(token_ids))
        places = torch.arange(first, first + len(token_ids))[None]
        out = self.model(
            torch.tensor([token_ids]),
            attention_mask=seen,
            position_ids=places,
            past_key_values=copy.deepcopy(cache),
            use_cache=True,
        )
        return out.logits[0], out.past_key_values

    def decoded(
        self,
        prompt: list[int],
        num_tokens: int,
        decoder: str = "static",
        *,
        threshold: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
        first: int = 0,
    ) -> list[int]:
        """The text behind the prompt; the first block is shorter by `first`, 0 in the layouts' alignment."""
        text = [*prompt, *[self.mask] * num_tokens]
        starts = [len(prompt), *range(len(prompt) + self.block - first, len(text), self.block)]
        for start, end in pairwise([*starts, len(text)]):
            cache = None
            while masked := [i for i in range(start, end) if text[i] == self.mask]:
                is_first, origin = cache is None, 0
                if decoder == "static" or is_first:
                    rows, cache = self._pass(text, 0)
                    if decoder != "static":
                        cache = _frozen(cache, start, end if decoder == "dual" else len(text))
                else:
                    origin = start
                    rows, _ = self._pass(text[start : end if decoder == "dual" else len(text)], start, cache)
                found = []
                for i in masked:
                    if i - self.shift < origin:
                        raise AssertionError("no row predicts the first token of a block over a cache")
                    scores = rows[i - self.shift - origin].clone()
                    scores[self.mask] = -torch.inf
                    scores = scores / temperature if temperature else scores
                    key = noise_key(seed, NoiseStream.UNMASKING, i, end - start - len(masked))
                    noise = gumbel([key], torch.arange(len(scores)))[0] if temperature else 0.0
                    token = int((scores + noise).argmax())
                    found.append((-float(scores.softmax(-1)[token]), i, token))
                if self.shift and is_first and decoder != "static":
                    sure = found[:1]
                else:
                    found.sort()
                    sure = [one for one in found if threshold and -one[0] >= threshold] or found[:1]
                for _, i, token in sure:
                    text[i] = token
        return text[len(prompt) :]


def _frozen(cache: Any, start: int, end: int) -> Any:
    """The rows of the cache but for those from `start` to `end`."""
    for layer in cache.layers:
        layer.keys = torch.cat((layer.keys[:, :, :start], layer.keys[:, :, end:]), dim=2)
        layer.values = torch.cat((layer.values[:, :, :start], layer.values[:, :, end:]), dim=2)
    return cache


def _in_llada(name: str) -> str:
    for ours, theirs in _LLADA_NAMES.items():
        name = name.replace(ours, theirs)
    return name
