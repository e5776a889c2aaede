"""Attention of parts of prompts by PyTorch's flash kernels, beside the kernel of `split_kv.py`, which takes the rest.

Many rows of one sequence, each of which sees all rows before it, are what those kernels are made for: products of large
tiles while the next keys are on their way. They read keys and values that lie in a row, so a part qualifies whose
sequence is one run of slots: a view of the pool. They are exact in 16 bits up to the order of sums. Knows no tables of
slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from parallel.kv.pass_plan import SpanRows
from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionShape, Heads

FLASH_ROWS = 1024
"""Rows of a sequence from which on flash kernels take them; more than passes that are captured have. With fewer the
host's calls take longer than the kernels save: on an H100 a pass of an 8B model is 3 % shorter at 2,048 rows and 18 %
longer at 512 (`docs/gpu/session.py --steps prompts`)."""
_LARGEST_HEAD = 256
_CAPABILITY = 8, 0


def flash_runs(pool: KVPool) -> bool:
    """Whether PyTorch has flash kernels for this pool here: for 16-bit rows, from compute capability 8.0 on."""
    keys = pool.keys
    if keys.device.type != "cuda" or keys.dtype not in (torch.bfloat16, torch.float16):
        return False
    if keys.shape[3] % 8 or keys.shape[3] > _LARGEST_HEAD:
        return False
    is_there = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    return is_there and torch.cuda.get_device_capability(keys.device) >= _CAPABILITY


def takes_flash(shape: AttentionShape, rows: SpanRows) -> bool:
    """Whether these rows can be computed so: a long chain over one run of slots, and no window that hides any."""
    if rows.num_rows < FLASH_ROWS or rows.run is None or not rows.pending.is_chain or shape.softcap is not None:
        return False
    return shape.window is None or len(rows.slots) <= shape.window


@dataclass(frozen=True, slots=True)
class FlashSpan:
    """Rows of a pass and the slots of all keys of their sequence, those of the rows themselves last. Row i of n sees
    all keys but the last n - 1 - i: the mask is aligned to the last row and key."""

    rows: slice
    run: range
    mask: CausalBias

    @classmethod
    def of(cls, rows: SpanRows) -> FlashSpan:
        assert rows.run is not None
        return cls(rows.rows, rows.run, causal_lower_right(rows.num_rows, len(rows.run)))

    def attend(self, pool: KVPool, heads: Heads, queries: Tensor, scale: float | None) -> Tensor:
        """`queries` [T, >= num_heads * head_dim] of the whole pass -> [rows, num_heads * head_dim]."""
        q = queries[self.rows, : heads.num_heads * heads.head_dim].unflatten(1, (heads.num_heads, heads.head_dim))
        slots = slice(self.run.start, self.run.stop)
        # [1, heads, rows, head_dim] each; keys and values are views
        q, k, v = (
            part.transpose(0, 1)[None] for part in (q, *(kept[heads.layer, slots] for kept in (pool.keys, pool.values)))
        )
        return (
            F.scaled_dot_product_attention(q, k, v, self.mask, scale=scale, enable_gqa=True)[0]
            .transpose(0, 1)
            .flatten(1)
        )
