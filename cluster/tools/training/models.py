"""Fresh draft models as small as the bundled ones, their folders, and generation.

It must not know corpus, losses or optimizers.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from cluster.tools.training.token_stream import END_OF_TEXT_ID
from parallel.whole_files import naming

CONTEXT = 8192
"""Longest sequence, in tokens, the configurations allow. Training sees far shorter ones."""
SPECIAL_TOKENS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}

logging.disable_progress_bar()  # loading takes milliseconds, and the job shows a progress bar of its own


def llama_config(
    vocab_size: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int
) -> LlamaConfig:
    """A Llama of these sizes, with heads of 48."""
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
        **SPECIAL_TOKENS,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  # passed on to the base class
    )


def drafter_config(vocab_size: int, layers: int = 2) -> LlamaConfig:
    """The draft model: layers of 192; with 2 of them 1.6 M parameters at 4096 entries, with 8 of them 4.0 M."""
    return llama_config(vocab_size, hidden=192, layers=layers, heads=4, kv_heads=2, intermediate=512)


def initialised(config: LlamaConfig, seed: int, device: str) -> LlamaForCausalLM:
    """A model with random float32 weights; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return on_device(LlamaForCausalLM(config), device)


def save_rounded(model: LlamaForCausalLM, folder: Path) -> None:
    """Write its configs and bfloat16 weights; `model` keeps its own precision."""
    with naming(folder):
        copy.deepcopy(model).cpu().bfloat16().save_pretrained(folder)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Put the tokenizer of one checkpoint into another; the folder must exist."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def on_device(model: LlamaForCausalLM, device: str) -> LlamaForCausalLM:
    torch.nn.Module.to(model, device)  # in place; the decorator of transformers' own `to` hides its type
    return model


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    length: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue int64 prompts `[prompts, prompt length]`, past ends of text too: the most likely token at temperature 0,
    else one drawn from `generator`, which lives on the CPU.

    Return int64 `[prompts, length]` on the CPU. Raises ValueError if the prompts leave no room for a continuation.
    """
    if prompts.shape[1] >= length:
        raise ValueError(f"prompts of {prompts.shape[1]} tokens leave no room in {length}")
    cache = DynamicCache(config=model.config)
    rows = [prompts.to(model.device)]
    for _ in range(length - prompts.shape[1]):
        logits = model(input_ids=rows[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if temperature:
            probs = (logits.cpu().float() / temperature).softmax(-1)
            rows.append(torch.multinomial(probs, 1, generator=generator).to(model.device))
        else:
            rows.append(logits.argmax(-1, keepdim=True))
    return torch.cat(rows, dim=1).cpu()


def grouped(prompts: list[list[int]], length: int, batch: int) -> list[torch.Tensor]:
    """Prompts of any length as batches of one length each, int64 `[prompts, prompt length]`, the shortest first.

    Prompts of similar length share a batch and are cut to its shortest, at most half of `length`.
    """
    ordered = sorted(prompts, key=len)
    groups = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    return [torch.tensor([prompt[: min(len(group[0]), length // 2)] for prompt in group]) for group in groups]
