"""A pair that looks things up: what followed a token the last time follows again, however far before that was.

    python -m docs.measurements.recall_pair RUN

Writes two Llamas of two layers whose weights are written down, not trained, a target and a draft model that is
narrower: a head of the first layer reads the token before, and one of the second looks for the rows behind the token
that stands last now (an induction head). Beside them a layer of LongSpec that asks the target's last layer the same.
Rotations have so large a base that some hardly turn over all 65,536 positions, by which tokens are compared. The
tokenizer names tokens by their numbers. `recall.py` measures with the pair; of language it knows nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from cluster.tools.training.models import SPECIAL_TOKENS
from docs.measurements import lines
from docs.measurements.recall_texts import SEPARATOR, VOCABULARY
from parallel.speculators.glide.layouts import LONGSPEC
from parallel.speculators.glide.training import GlideOptions, build
from parallel.training.interface import Speculator, TargetShape

POSITIONS = 65_536
BASE = 1e12
"""Of the rotations of constructed heads: 28 of 48 turn by less than a radian over all positions."""
HEAD_DIM = 96
STILL = 20
"""The first rotation of a head of 96 that turns by less than a radian over the positions."""


def llama(hidden: int) -> LlamaConfig:
    """Two layers with a head each."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        intermediate_size=8,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=False,
        **SPECIAL_TOKENS,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  # passed on to the base class
    )


def attentions(model: LlamaForCausalLM) -> list[LlamaAttention]:
    return [cast(LlamaAttention, layer.self_attn) for layer in model.model.layers]


@torch.no_grad()
def constructed(width: int, seed: int, sharpness: float = 36.0) -> LlamaForCausalLM:
    """Two layers of one head each. A token is a code of `width` signs, the residual stream the codes of the token, of
    the token before it and of what is expected next, with a constant and the mark of a separator."""
    if width > HEAD_DIM // 2:
        raise ValueError(f"width is {width}, a head has {HEAD_DIM // 2} pairs")
    hidden, half = 4 * width, HEAD_DIM // 2
    own, before, expected = (range(part * width, (part + 1) * width) for part in range(3))
    constant, mark = 3 * width, 3 * width + 1
    model = LlamaForCausalLM(llama(hidden))
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    codes = torch.randint(2, (VOCABULARY, width), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    table = model.model.embed_tokens.weight
    table[:, own] = codes
    table[:, constant] = 1.0
    table[SEPARATOR, mark] = 1.0
    # the first layer: queries and keys are one vector, the keys' turned on by one position
    first, second = attentions(model)
    turn = torch.tensor(BASE) ** (-torch.arange(half) / half)
    scale = (hidden / (width + 1)) ** 0.5  # of what the norm makes of a row
    strength = 14.0 / scale
    first.q_proj.weight[:half, constant] = strength
    first.k_proj.weight[:half, constant] = strength * turn.cos()
    first.k_proj.weight[half:, constant] = strength * turn.sin()
    pairs = torch.arange(width)
    first.v_proj.weight[pairs, own] = 1 / scale
    first.o_proj.weight[before, pairs] = 1.0
    # the second: the token's code against the code before each row, in rotations that stand still
    scale = (hidden / (2 * width + 1)) ** 0.5
    still = torch.tensor([*range(STILL, half), *range(half + STILL, HEAD_DIM)])
    strength = (sharpness * HEAD_DIM**0.5 / width) ** 0.5 / scale
    places, left = still[:width], still[width]
    second.q_proj.weight[places, own] = strength
    second.k_proj.weight[places, before] = strength
    second.q_proj.weight[left, constant] = strength  # a row of a separator is never the answer
    second.k_proj.weight[left, mark] = -width * strength
    second.v_proj.weight[pairs, own] = 1 / scale
    second.o_proj.weight[expected, pairs] = 1.0
    model.lm_head.weight[:, expected] = codes
    return model.eval()


@torch.no_grad()
def constructed_longspec(target: LlamaForCausalLM) -> Speculator:
    """LongSpec's layer, in which only the attention to the target's last layer is not 0, and asks what that asks."""
    head = target.lm_head.weight
    nothing = torch.zeros(VOCABULARY, dtype=torch.long)
    shape = TargetShape(target.config, target.model.embed_tokens.weight, head, nothing)
    net = build(GlideOptions(method=LONGSPEC), shape)
    asks, width = attentions(target)[1], target.config.hidden_size // 4
    for name, parameter in net.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    narrower = ((2 * width + 1) / (width + 1)) ** 0.5  # its norm sees the token alone
    net.get_parameter("cross_attn.q_proj.weight").copy_(asks.q_proj.weight / narrower)
    net.get_parameter("cross_attn.o_proj.weight").copy_(asks.o_proj.weight)
    return net


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """In float32, with a tokenizer whose words are the tokens' numbers."""
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("run", type=Path)
    run: Path = parser.parse_args().run
    target = constructed(48, 0)
    constructed_longspec(target).save(run / "longspec")
    save(target, run / "target")
    save(constructed(40, 1), run / "drafter")


if __name__ == "__main__":
    main()
