"""The tokenizer: byte-level BPE learnt from sources, and the packing of sources into one token stream.

It must not know models or training; what it writes is an ordinary Hugging Face tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.tools.training.corpus import Source
from parallel.whole_files import write_text

END_OF_TEXT = "<|endoftext|>"
"""The one special token: separates sources, ends a generation, pads a batch. Its id is 0."""
END_OF_TEXT_ID = 0


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


def pack(tokenizer: Tokenizer, sources: Iterable[Source]) -> torch.Tensor:
    """Return one int64 stream of all sources' tokens, each source preceded by the end-of-text token."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([source.text for source in sources]):
        stream.append(END_OF_TEXT_ID)
        stream.extend(encoding.ids)
    return torch.tensor(stream, dtype=torch.long)
