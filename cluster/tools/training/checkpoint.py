"""Writing and reading one model folder in Hugging Face format. Knows no training and no text."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from cluster.tools.training.architecture import generation_config

logging.disable_progress_bar()  # for models of a blink's size, beside our own progress


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, generation config and bfloat16 weights into `folder`; `model` keeps its own precision."""
    rounded = copy.deepcopy(model).to("cpu", torch.bfloat16)
    rounded.generation_config = generation_config()
    rounded.save_pretrained(folder)


def load_model(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Read a model written by `save_model`, ready for inference.

    Raises:
        FileNotFoundError: `folder` holds no weights.
    """
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"no model.safetensors in {folder}; run the stage that trains it first")
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
