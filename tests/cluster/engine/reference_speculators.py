"""What published speculators draft, computed from their papers and from the layouts of their checkpoints in plain
PyTorch, one whole text at a time. Shares no code with the product.

A reference is a function of the tokens of a text, the target's hidden states there by tap, and a path of draft tokens
behind the text; it returns the logits [V] of the token after that path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]
Taps = Mapping[int, Tensor]
"""Tap -> the hidden states [T, H] of a text there: i after i layers, -1 behind the final norm."""
Reference = Callable[[Sequence[int], Taps, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Target:
    """The tables that speculators share with their target."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class LayerShape:
    """Of decoder layers as Llama's."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    eps: float = 1e-6
    theta: float = 10000.0


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Heads [T, n, D], halves rotated against each other."""
    size = x.shape[-1]
    angles = positions[:, None] / theta ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    tensors: Tensors,
    name: str,
    x: Tensor,
    positions: Tensor,
    sees: Tensor,
    shape: LayerShape,
    text: Tensor | None = None,
) -> Tensor:
    """x [T, inputs] -> [T, H]; `sees` [T, S] says which keys a row attends to. The keys are those of `text`, if there
    is one, and of x behind it; `positions` [S]."""
    keys_of = x if text is None else torch.cat((text, x))

    def project(kind: str, rows: Tensor, places: Tensor) -> Tensor:
        bias = tensors.get(f"{name}.{kind}_proj.bias")
        heads = F.linear(rows, tensors[f"{name}.{kind}_proj.weight"], bias).view(len(rows), -1, shape.head_size)
        if kind == "v":
            return heads
        if f"{name}.{kind}_norm.weight" in tensors:
            heads = rms(heads, tensors[f"{name}.{kind}_norm.weight"], shape.eps)
        return rotated(heads, places, shape.theta)

    q = project("q", x, positions[len(positions) - len(x) :])
    k, v = (project(kind, keys_of, positions).repeat_interleave(shape.heads // shape.kv_heads, 1) for kind in "kv")
    scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_size**0.5
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)
    return attended.flatten(1) @ tensors[f"{name}.o_proj.weight"].T


def mlp(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    gate, up, down = (tensors[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up", "down"))
    return (F.silu(x @ gate) * (x @ up)) @ down


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def llama_layer(tensors: Tensors, name: str, x: Tensor, shape: LayerShape, *, norms_input: bool = True) -> Tensor:
    """A causal layer over rows at positions 0, 1, .."""
    normed = rms(x, tensors[f"{name}.input_layernorm.weight"], shape.eps) if norms_input else x
    x = x + attention(tensors, f"{name}.self_attn", normed, torch.arange(len(x)), causal(len(x)), shape)
    return x + mlp(tensors, f"{name}.mlp", rms(x, tensors[f"{name}.post_attention_layernorm.weight"], shape.eps))


# --- EAGLE ------------------------------------------------------------------------------------------------------------


def unrolled(rows: Callable[[Tensor, Tensor], Tensor], embedded: Tensor, features: Tensor) -> Tensor:
    """Row j is of the pair (token j + 1, features j); a drafted token's features are the output of the row before.
    `rows` computes the outputs [T, H] of the embeddings and features [T, H] of so many rows; returned is the last."""
    outputs = rows(embedded[: len(features)], features)
    while len(features) < len(embedded):
        features = torch.cat((features, outputs[-1:]))
        outputs = rows(embedded[: len(features)], features)
    return outputs[-1]


def eagle1(tensors: Tensors, target: Target, shape: LayerShape) -> Reference:
    """arXiv 2401.15077, figure 6: a projection of the pair, a layer without an input norm, the target's head."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        def rows(embedded: Tensor, features: Tensor) -> Tensor:
            pair = torch.cat((embedded, features), -1)
            x = F.linear(pair, tensors["fc.weight"], tensors.get("fc.bias"))
            return llama_layer(tensors, "layers.0", x, shape, norms_input=False)

        embedded = target.embedding[torch.tensor([*tokens[1:], *path])]
        return target.head @ unrolled(rows, embedded, taps[-1][: len(tokens) - 1])

    return logits


def eagle3(tensors: Tensors, target: Target, shape: LayerShape, taps_read: Sequence[int]) -> Reference:
    """arXiv 2503.01840, section 3: three taps fused; queries, keys and values read both halves of the pair."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        def rows(embedded: Tensor, features: Tensor) -> Tensor:
            embedded = rms(embedded, tensors["midlayer.input_layernorm.weight"], shape.eps)
            pair = torch.cat((embedded, rms(features, tensors["midlayer.hidden_norm.weight"], shape.eps)), -1)
            count = len(features)
            x = features + attention(tensors, "midlayer.self_attn", pair, torch.arange(count), causal(count), shape)
            normed = rms(x, tensors["midlayer.post_attention_layernorm.weight"], shape.eps)
            return x + mlp(tensors, "midlayer.mlp", normed)

        embedded = target.embedding[torch.tensor([*tokens[1:], *path])]
        fused = torch.cat([taps[tap][: len(tokens) - 1] for tap in taps_read], -1) @ tensors["fc.weight"].T
        hidden = rms(unrolled(rows, embedded, fused), tensors["norm.weight"], shape.eps)
        own = tensors["lm_head.weight"] @ hidden
        if "d2t" not in tensors:
            return own
        columns = torch.arange(len(own)) + tensors["d2t"]
        return torch.full((len(target.embedding),), -torch.inf).index_copy(0, columns, own)

    return logits


# --- heads ------------------------------------------------------------------------------------------------------------


def medusa(tensors: Tensors, num_blocks: int) -> Reference:
    """arXiv 2401.10774, section 2.1.1: head k, of the target's last hidden state, gives the token k + 1 places on. The
    newest token of a text has no hidden state yet, so head 0 gives what follows it."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        x, head = taps[-1][len(tokens) - 2], len(path)
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            x = x + F.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        return tensors[f"{head}.{num_blocks}.weight"] @ x

    return logits
