"""What passes on a GPU take beside weights and KV rows. No process without one loads this."""

from __future__ import annotations

import torch

from parallel.model.config import DecoderConfig
from parallel.model.layers.split_kv import most_partial_bytes
from parallel.runtime.graph_list import GraphList, graph_bytes


def pass_bytes(
    config: DecoderConfig,
    ranks: int,
    dtype: torch.dtype,
    graphs: GraphList,
    device: str,
    *,
    num_rows: int,
    num_seqs: int,
    longest: int,
) -> int:
    """Bytes of graphs and of parts of the attention of at most so many rows; `longest` as of `most_partial_bytes`."""
    shape = config.num_heads // ranks, config.local_kv_heads(ranks), config.head_dim
    tree_rows = max((total for _, _, total in graphs.passes), default=0)
    sizes = {"longest": longest, "tree_rows": tree_rows}
    partial = most_partial_bytes(*shape, num_rows, num_seqs, torch.device(device), **sizes)
    return graph_bytes(config, dtype.itemsize, graphs) + partial
