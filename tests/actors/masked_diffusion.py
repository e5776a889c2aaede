"""A tiny masked-diffusion model with random weights, and its static decoder in transformers: no cache, no batch, the
whole text in every pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from actors.sampling.noise import NoiseStream, gumbel, noise_key
from tests.families import tiny_model

VOCAB_SIZE, MASK, BLOCK = 97, 96, 4
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "sliding_window": None,
}


class MaskedDiffusion:
    """The checkpoint of a Qwen 3 at `path`, turned into one of SDAR, which has the same weights."""

    def __init__(self, path: Path, model: Any, mask: int = MASK, block: int = BLOCK) -> None:
        self.path, self.model, self.mask, self.block = path, model, mask, block
        config = json.loads((path / "config.json").read_text())
        config |= {"architectures": ["SDARForCausalLM"], "block_size": block, "mask_token_id": mask}
        (path / "config.json").write_text(json.dumps(config))

    @staticmethod
    def made(path: Path, seed: int = 0, block: int = BLOCK) -> MaskedDiffusion:
        """A checkpoint with random weights."""
        model = tiny_model("Qwen3", seed, **SHAPE)
        model.save_pretrained(path)
        return MaskedDiffusion(path, model, block=block)

    @torch.no_grad()
    def logits(self, text: list[int]) -> torch.Tensor:
        """Rows see their own block and those before it."""
        blocks = torch.arange(len(text)) // self.block
        hidden = (blocks[None] > blocks[:, None]).float() * torch.finfo(torch.float32).min
        return self.model(torch.tensor([text]), attention_mask=hidden[None, None]).logits[0]

    def decoded(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        threshold: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
        start: int = 0,
        precision: int = 0,
    ) -> list[int]:
        """What the static decoder writes; `start` is where the first block begins, 0 in the layout's alignment. With a
        `precision` confidences are multiples of one in so many."""
        text = list(prompt)
        while len(text) < len(prompt) + num_tokens:
            first = start + (len(text) - start) // self.block * self.block
            block = text[first:] + [self.mask] * (self.block - len(text) + first)
            masked = [i for i, token in enumerate(block) if token == self.mask]
            while masked:
                rows = self.logits(text[:first] + block)[first:]
                rows[:, self.mask] = -torch.inf
                rows = rows / temperature if temperature else rows
                found = []
                for i in masked:
                    key = noise_key(seed, NoiseStream.UNMASKING, first + i, self.block - len(masked))
                    noise = gumbel([key], torch.arange(rows.shape[1]))[0] if temperature else 0.0
                    token = int((rows[i] + noise).argmax())
                    confidence = float(rows[i].softmax(-1)[token])
                    confidence = round(confidence * precision) / precision if precision else confidence
                    found.append((-confidence, i, token))
                found.sort()
                sure = [one for one in found if threshold and -one[0] >= threshold] or found[:1]
                for _, i, token in sure:
                    block[i] = token
                    masked.remove(i)
            text[first:] = block
        return text[len(prompt) : len(prompt) + num_tokens]
