"""Milliseconds in which tokens are chosen from rows of logits: `python -m docs.measurements.sampling [--rows 6]`.

One thread, medians and quartiles of repeats, in turn over the settings. Without the compiled kernels
(`SPECDEC_KERNELS=0`) PyTorch and NumPy compute the same.
"""

from __future__ import annotations

import time
from statistics import quantiles

import torch

from actors.protocol.messages import SamplingParams
from actors.sampling.logits import choose_plain, top_children
from docs.measurements import lines

SETTINGS = {
    "greedy": SamplingParams(),
    "temperature=1": SamplingParams(temperature=1.0),
    "top_p=0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top_k=50": SamplingParams(temperature=1.0, top_k=50),
    "top_k=50, top_p=0.9": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    "top_k=2000": SamplingParams(temperature=1.0, top_k=2000),
    "min_p=0.05": SamplingParams(temperature=1.0, min_p=0.05),
}
CHILDREN = 6
"""Children of a node of a draft tree, with their log-probabilities."""


def choose(name: str, logits: torch.Tensor) -> None:
    params, positions = [SETTINGS.get(name, SamplingParams())] * len(logits), range(len(logits))
    if name in SETTINGS:
        choose_plain(logits, params, positions)
    else:
        top_children(logits, params, positions, CHILDREN)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[4096, 128_256])
    parser.add_argument("--deviation", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.vocabulary:
        logits = options.deviation * torch.randn(options.rows, size, generator=torch.Generator().manual_seed(0))
        took: dict[str, list[float]] = {name: [] for name in (*SETTINGS, f"greedy, {CHILDREN} children")}
        for _ in range(options.repeats):
            for name, times in took.items():
                started = time.perf_counter()
                choose(name, logits)
                times.append(1e3 * (time.perf_counter() - started))
        for name, one in took.items():
            low, middle, high = quantiles(one, n=4)
            print(f"{options.rows} rows of {size}, {name}: {middle:.3f} ms ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
