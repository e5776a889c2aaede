"""Perplexity of the bundled models on held-out text by the type that they compute in and that their matrices have.

The text are the modules of Python's library that no training has seen, in windows of 512 tokens, each token predicted
from those before it in its window. Also the share of places where the likeliest token is that of float32. No engine.

    python -m docs.measurements.perplexity --tokens 16384
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from cluster import pocket
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import HELD_OUT
from docs.measurements import lines
from parallel.kv.pass_plan import Span
from parallel.model.layers.weight import Stored
from parallel.runtime.runner import open_model

WINDOW = 512
TYPES = {
    "float32": (torch.float32, None),
    "float32, int8 weights": (torch.float32, torch.int8),
    "float32, w8a8": (torch.float32, "w8a8"),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, w8a8": (torch.bfloat16, "w8a8"),
}


def held_out_windows(num_tokens: int) -> Tensor:
    """[windows, WINDOW] tokens."""
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer = load_tokenizer(pocket.TARGET)
    tokens: list[int] = []
    for module in HELD_OUT:
        tokens += tokenizer.encode((library / module).read_text(encoding="utf-8")).ids
    count = min(num_tokens, len(tokens)) // WINDOW
    return torch.tensor(tokens[: count * WINDOW]).view(count, WINDOW)


@torch.inference_mode()
def measure(path: Path, windows: Tensor, dtype: torch.dtype, weights: Stored | None) -> tuple[float, Tensor]:
    """Mean loss in nats a token, and the likeliest token of every place."""
    runner = open_model(path, dtype=dtype, weights=weights, num_slots=WINDOW)
    loss, likeliest = 0.0, []
    for window in windows:
        runner.open("text")
        logits = runner.forward([Span("text", WINDOW, num_logits=WINDOW)], window.tolist()).logits
        runner.close("text")
        loss += torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
        likeliest.append(logits.argmax(-1))
    return loss / (windows.numel() - len(windows)), torch.cat(likeliest)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    windows = held_out_windows(parser.parse_args().tokens)
    print(f"{windows.numel()} tokens in windows of {WINDOW}")
    for name, path in (("target", pocket.TARGET), ("drafter", pocket.DRAFTER)):
        exact = None
        for label, types in TYPES.items():
            loss, likeliest = measure(path, windows, *types)
            exact = likeliest if exact is None else exact
            same = (likeliest == exact).float().mean().item()
            print(f"{name}, {label}: perplexity {math.exp(loss):.3f}, likeliest token as in float32 {same:.2%}")


if __name__ == "__main__":
    main()
