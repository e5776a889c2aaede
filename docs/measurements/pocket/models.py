"""The models of the bundled pair and their tokenizer: shapes, folders, and logits of whole texts.

It must not know corpus, losses or optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cluster.tools.training.corpus import Source
from cluster.tools.training.models import SPECIAL_TOKENS, llama_config, on_device, save_rounded
from parallel.whole_files import write_text

END_OF_TEXT = "<|endoftext|>"
"""The one special token: separates sources, ends a generation, pads a batch. Its id is `END_OF_TEXT_ID`."""


def target_config(vocab_size: int) -> LlamaConfig:
    """The target: 6 layers of 384, 10.4 M parameters at 4096 entries."""
    return llama_config(vocab_size, hidden=384, layers=6, heads=8, kv_heads=4, intermediate=896)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, greedy generation config and bfloat16 weights; `model` keeps its own precision."""
    model.generation_config = GenerationConfig(**SPECIAL_TOKENS, do_sample=False)
    save_rounded(model, folder)


def load_model(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Read a model written by `save_model`, ready for inference. FileNotFoundError if `folder` holds no weights."""
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"no model.safetensors in {folder}; run the stage that trains it first")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return on_device(model, device).eval()


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[sequences, length, vocabulary]` logits of one forward pass without cache or mask tensors."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return F.linear(hidden, model.lm_head.weight)


def train_tokenizer(sources: Iterable[Source], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` entries; every text round-trips because all 256 bytes are entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in sources), trainer)
    return tokenizer


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""The model goes on with a text: a chat is its messages, one after the other."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`; `context` is the model's limit in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": context,
    }
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer that `save_tokenizer` wrote. FileNotFoundError if `folder` holds no `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer.json in {folder}; run the tokenizer stage first")
    return Tokenizer.from_file(str(path))
