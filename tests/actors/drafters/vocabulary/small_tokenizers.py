"""Small tokenizers of three kinds, trained in milliseconds on text that is awkward to cut into tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

AWKWARD = [
    "def f(x):\r\n    return x + 1\r\n\r\n\r\n\tif x:  # caf\u00e9 na\u00efve\n",
    "a  b   c    d     e\n\n\n   \n f\t\tg  ",
    "smile \U0001f600\U0001f600 family \U0001f469\u200d\U0001f469\u200d\U0001f467 flags \U0001f1e8\U0001f1e6!",
    "\u4f60\u597d\uff0c\u4e16\u754c \u043f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 e\u0301 \ufeff",
    "hello hello world, the wholesome theory; hellothere <st> 3.14159 <0x41>",
]
END = "<|endoftext|>"
KINDS = ("bytes", "words", "pieces")


def train(kind: str, vocab_size: int) -> Tokenizer:
    """`bytes`: byte-level BPE as GPT-2's; `words`: the same with a space before every text; `pieces`: BPE with a marker
    for spaces and single bytes for unknown characters, as Llama 2's."""
    if kind == "pieces":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        named = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=named, limit_alphabet=20, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "words")
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(AWKWARD * 3, trainer)
    if kind != "pieces":
        return tokenizer
    content = tokenizer.to_str()  # a trainer marks every token it is given as special; bytes are none
    from json import dumps, loads

    loaded = loads(content)
    loaded["added_tokens"] = [token for token in loaded["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(dumps(loaded))


def save(path: Path, kind: str, vocab_size: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    train(kind, vocab_size).save(str(path / "tokenizer.json"))
    return path
