"""Greedy continuations by the target: the text on which a drafter is judged, so a drafter should learn from it.

Knows no loss and no files.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaForCausalLM


@torch.no_grad()
def continue_greedily(model: LlamaForCausalLM, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """Continue prompts of equal length with the most likely token each time, past ends of text too.

    Args:
        model: on any device.
        prompts: int64 `[prompts, prompt length]`.
        length: tokens per row of the result, prompt included.

    Returns:
        int64 `[prompts, length]` on the CPU.

    Raises:
        ValueError: the prompts leave no room for a continuation.
    """
    if prompts.shape[1] >= length:
        raise ValueError(f"prompts of {prompts.shape[1]} tokens leave no room in {length}")
    cache = DynamicCache(config=model.config)
    rows = [prompts.to(model.device)]
    for _ in range(length - prompts.shape[1]):
        output = model(input_ids=rows[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows.append(output.logits[:, -1:].argmax(-1))
    return torch.cat(rows, dim=1).cpu()


def continue_all(model: LlamaForCausalLM, prompts: list[list[int]], length: int, batch: int) -> torch.Tensor:
    """Continue prompts of any length to `length` tokens and return them as one stream, in order of prompt length.

    Prompts of similar length share a batch and are cut to its shortest, at most half of `length`.
    """
    ordered = sorted(prompts, key=len)
    streams = []
    for start in range(0, len(ordered), batch):
        group = ordered[start : start + batch]
        shortest = min(len(group[0]), length // 2)
        tokens = torch.tensor([prompt[:shortest] for prompt in group])
        streams.append(continue_greedily(model, tokens, length).flatten())
    return torch.cat(streams)
