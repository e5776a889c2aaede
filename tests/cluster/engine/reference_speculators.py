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
    """Shape of decoder layers such as Llama's."""

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


def pair_layer(tensors: Tensors, name: str, embedded: Tensor, features: Tensor, shape: LayerShape) -> Tensor:
    """EAGLE-3's: queries, keys and values read both halves of the pair, normalised; the stream is the features."""
    pair = rms(embedded, tensors[f"{name}.input_layernorm.weight"], shape.eps)
    pair = torch.cat((pair, rms(features, tensors[f"{name}.hidden_norm.weight"], shape.eps)), -1)
    count = len(features)
    x = features + attention(tensors, f"{name}.self_attn", pair, torch.arange(count), causal(count), shape)
    return x + mlp(tensors, f"{name}.mlp", rms(x, tensors[f"{name}.post_attention_layernorm.weight"], shape.eps))


def eagle3(tensors: Tensors, target: Target, shape: LayerShape, taps_read: Sequence[int]) -> Reference:
    """arXiv 2503.01840, section 3: three taps fused; a head of its own for a part of the vocabulary."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        embedded = target.embedding[torch.tensor([*tokens[1:], *path])]
        fused = torch.cat([taps[tap][: len(tokens) - 1] for tap in taps_read], -1) @ tensors["fc.weight"].T
        last = unrolled(lambda *rows: pair_layer(tensors, "midlayer", *rows, shape), embedded, fused)
        return draft_head(tensors, rms(last, tensors["norm.weight"], shape.eps), len(target.embedding))

    return logits


def p_eagle(
    tensors: Tensors, embedding: Tensor, shape: LayerShape, taps_read: Sequence[int], layers: int, mask: int
) -> Reference:
    """arXiv 2602.01469, section 3: behind the newest token a row for each further depth, of the mask token and of one
    learned vector in place of the taps."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        embedded = embedding[torch.tensor([*tokens[1:], *[mask] * len(path)])]
        features = torch.cat([taps[tap][: len(tokens) - 1] for tap in taps_read], -1)
        features = torch.cat((features, tensors["mask_hidden"][0].expand(len(path), -1))) @ tensors["fc.weight"].T
        x = pair_layer(tensors, "layers.0", embedded, features, shape)
        for layer in range(1, layers):
            x = llama_layer(tensors, f"layers.{layer}", x, shape)
        return draft_head(tensors, rms(x[-1], tensors["norm.weight"], shape.eps), len(embedding))

    return logits


def draft_head(tensors: Tensors, normed: Tensor, vocab_size: int) -> Tensor:
    """Row i of the head is of token i + d2t[i]; without `d2t` it has all tokens."""
    own = tensors["lm_head.weight"] @ normed
    if "d2t" not in tensors:
        return own
    return torch.full((vocab_size,), -torch.inf).index_copy(0, torch.arange(len(own)) + tensors["d2t"], own)


def mtp(
    tensors: Tensors, target: Target, shape: LayerShape, names: Mapping[str, str], *, hidden_first: bool = False
) -> Reference:
    """DeepSeek-V3 (arXiv 2412.19437), section 2.2: both halves of the pair normalised, projected, through a layer; what
    follows its norm is read by the target's head, and by the next step. `names`: part -> its name."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        def rows(embedded: Tensor, features: Tensor) -> Tensor:
            pair = (
                rms(embedded, tensors[f"{names['embedding norm']}.weight"], shape.eps),
                rms(features, tensors[f"{names['hidden norm']}.weight"], shape.eps),
            )
            x = torch.cat(pair[::-1] if hidden_first else pair, -1) @ tensors[f"{names['join']}.weight"].T
            x = llama_layer(tensors, names["layer"], x, shape)
            return rms(x, tensors[f"{names['norm']}.weight"], shape.eps)

        embedded = target.embedding[torch.tensor([*tokens[1:], *path])]
        return target.head @ unrolled(rows, embedded, taps[-1][: len(tokens) - 1])

    return logits


# --- block drafters ---------------------------------------------------------------------------------------------------


def block_states(
    tensors: Tensors, target: Target, shape: LayerShape, layers: int, taps_read: Sequence[int], size: int, mask: int
) -> Callable[[Sequence[int], Taps], Tensor]:
    """DFlash (arXiv 2602.06036), section 4: the states [block, H] of the newest token and the masks behind it, which
    attend to each other and to the text before, of which every layer reads the same projected taps."""

    def states(tokens: Sequence[int], taps: Taps) -> Tensor:
        count = len(tokens) - 1
        text = torch.cat([taps[tap][:count] for tap in taps_read], -1) @ tensors["fc.weight"].T
        text = rms(text, tensors["hidden_norm.weight"], shape.eps)
        x = target.embedding[torch.tensor([tokens[-1], *[mask] * (size - 1)])]
        positions, sees = torch.arange(count + size), torch.ones(size, count + size, dtype=torch.bool)
        for layer in range(layers):
            name = f"layers.{layer}"
            normed = rms(x, tensors[f"{name}.input_layernorm.weight"], shape.eps)
            x = x + attention(tensors, f"{name}.self_attn", normed, positions, sees, shape, text)
            x = x + mlp(tensors, f"{name}.mlp", rms(x, tensors[f"{name}.post_attention_layernorm.weight"], shape.eps))
        return rms(x, tensors["norm.weight"], shape.eps)

    return states


def dflash(states: Callable[[Sequence[int], Taps], Tensor], target: Target) -> Reference:
    """The first mask's row drafts first."""
    return lambda tokens, taps, path: target.head @ states(tokens, taps)[len(path) + 1]


def dspark(states: Callable[[Sequence[int], Taps], Tensor], target: Target, tensors: Tensors, kind: str) -> Reference:
    """arXiv 2607.05147: the newest token's row drafts first; to the logits is added what the token before says."""

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        hidden, state = states(tokens, taps), torch.zeros(tensors["markov_head.markov_w1.weight"].shape[1])
        added = state
        for depth, token in enumerate((tokens[-1], *path)):
            added = before = tensors["markov_head.markov_w1.weight"][token]
            if kind == "gated":
                both = torch.cat((hidden[depth], before))
                gate = tensors["markov_head.gate_proj.weight"] @ both + tensors["markov_head.gate_proj.bias"]
                added = gate.sigmoid() * before
            elif kind == "rnn":
                both = torch.cat((state, before, hidden[depth]))
                joint = tensors["markov_head.joint_proj.weight"] @ both + tensors["markov_head.joint_proj.bias"]
                keep, new, output = joint.chunk(3)
                state = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh()
                added = output.tanh()
        return target.head @ hidden[len(path)] + tensors["markov_head.markov_w2.weight"] @ added

    return logits


def domino(
    states: Callable[[Sequence[int], Taps], Tensor], target: Target, tensors: Tensors, *, shifted: bool
) -> Reference:
    """arXiv 2605.29707: a GRU over the block's tokens; the first drafted position has its bare logits. `shifted`: the
    newest token's row drafts first."""
    inputs, size = tensors["prefix_gru.weight_ih_l0"].shape[1], tensors["prefix_gru.weight_hh_l0"].shape[1]
    gru = torch.nn.GRU(inputs, size, bias=False)
    gru.load_state_dict({name.removeprefix("prefix_gru."): t for name, t in tensors.items() if "prefix_gru" in name})

    @torch.no_grad()
    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        hidden = states(tokens, taps)[len(path) + (not shifted)]
        if not path:
            return target.head @ hidden
        last = gru(target.embedding[torch.tensor([tokens[-1], *path])])[0][-1]
        inner = F.silu(tensors["embed_proj.0.weight"] @ torch.cat((hidden, last)))
        return target.head @ hidden + tensors["embed_proj.2.weight"] @ inner

    return logits


# --- heads ------------------------------------------------------------------------------------------------------------


def gloeckle(tensors: Tensors, norm: Tensor, target: Target, shape: LayerShape, trunk: int) -> Reference:
    """arXiv 2404.19737, section 2, by the names and the rotation of Meta's code: heads are layers over the output of
    the `trunk` first ones, with neighbouring coordinates as complex numbers; the final norm and the head are shared."""

    def heads_of(rows: Tensor, name: str, num_heads: int) -> Tensor:
        heads = F.linear(rows, tensors[f"{name}.weight"]).view(len(rows), num_heads, shape.head_size)
        return heads.repeat_interleave(shape.heads // num_heads, 1)

    def turned(heads: Tensor) -> Tensor:
        places, size = torch.arange(len(heads)), shape.head_size
        angles = torch.outer(places, 1.0 / shape.theta ** (torch.arange(0, size, 2) / size))
        numbers = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    def logits(tokens: Sequence[int], taps: Taps, path: Sequence[int]) -> Tensor:
        x, name = taps[trunk][: len(tokens) - 1], f"extra_heads.{len(path)}"
        normed = rms(x, tensors[f"{name}.attention_norm.weight"], shape.eps)
        q = turned(heads_of(normed, f"{name}.attention.wq", shape.heads))
        k = turned(heads_of(normed, f"{name}.attention.wk", shape.kv_heads))
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_size**0.5
        shares = scores.masked_fill(~causal(len(x)), -torch.inf).softmax(-1)
        v = heads_of(normed, f"{name}.attention.wv", shape.kv_heads)
        x = x + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ tensors[f"{name}.attention.wo.weight"].T
        normed = rms(x, tensors[f"{name}.ffn_norm.weight"], shape.eps)
        gate, down, up = (tensors[f"{name}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        x = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return target.head @ rms(x[-1], norm, shape.eps)

    return logits


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
