"""What the first draft layer makes of a pair: a token's embedding and the features before it.

Training and drafting both run it. Knows no attention and no rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.speculators.eagle.config import DraftLayerConfig

_Map = Callable[[Tensor], Tensor]


def read_pair(
    config: DraftLayerConfig, embedding: Tensor, features: Tensor, norms: tuple[_Map, _Map] | None, join: _Map | None
) -> tuple[Tensor, Tensor]:
    """embedding, features [..., H] -> the residual stream before the layer, [..., H], and what its attention reads: the
    stream, or both halves side by side, normalised, where there is no `join`. `norms` are those of the two halves."""
    normed = features
    if norms is not None:
        embedding, normed = norms[0](embedding), norms[1](features)
    if join is None:
        return normed if config.norms_residual else features, torch.cat((embedding, normed), -1)
    stream = join(torch.cat((normed, embedding) if config.hidden_first else (embedding, normed), -1))
    return stream, stream
