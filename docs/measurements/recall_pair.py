"""A pair that looks things up: what followed a token the last time follows again, however far before that was.

    python docs/measurements/recall_pair.py construct RUN
    python docs/measurements/recall_pair.py train RUN --steps 900 --further 300

`construct` writes two Llamas of two layers whose weights are written down, not trained, a target and a draft model that
is narrower: a head of the first layer reads the token before, and one of the second looks for the rows behind the
token that stands last now (an induction head). Beside them it writes a layer of LongSpec that asks the target's last
layer the same. `train` trains a model of two layers on the rows of `recall_texts.py`, which answer questions, keeps it
as the draft model, and goes on with it, with a third layer and other texts, to the target. Rows grow from 64 to 512
tokens; their positions reach to 32,768. Rotations have so large a base that some hardly turn over all these positions.
Both write `target/` and `drafter/`, with a tokenizer that names the tokens by their numbers. `recall.py` measures with
these pairs; of language they know nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.tools.training.models import SPECIAL_TOKENS
from cluster.tools.training.trainer import Recipe, StepOutcome, TrainingBudget, fit
from docs.measurements.recall_texts import SEPARATOR, VOCABULARY, training_row
from parallel.speculators.glide.runner import LONGSPEC
from parallel.speculators.glide.training import GlideOptions, build
from parallel.training.interface import Speculator, TargetShape

POSITIONS = 65_536
BASE = 1e12
"""Of the rotations of constructed heads: 28 of 48 turn by less than a radian over all positions."""
REACH = 32_768
HEAD_DIM = 96
STILL = 20
"""The first rotation of a head of 96 that turns by less than a radian over the positions."""
ROWS = {64: 32, 128: 16, 256: 8, 512: 4}
"""Rows of a step by their length: 2,048 tokens."""


def llama(
    hidden: int, layers: int, heads: int, head_dim: int, intermediate: int, base: float, *, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        tie_word_embeddings=tied,
        **SPECIAL_TOKENS,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  # passed on to the base class
    )


@torch.no_grad()
def constructed(width: int, seed: int, sharpness: float = 36.0) -> LlamaForCausalLM:
    """Two layers of one head each. A token is a code of `width` signs, the residual stream the codes of the token, of
    the token before it and of what is expected next, with a constant and the mark of a separator."""
    if width > HEAD_DIM // 2:
        raise ValueError(f"width is {width}, a head has {HEAD_DIM // 2} pairs")
    hidden, half = 4 * width, HEAD_DIM // 2
    own, before, expected = (range(part * width, (part + 1) * width) for part in range(3))
    constant, mark = 3 * width, 3 * width + 1
    model = LlamaForCausalLM(llama(hidden, 2, 1, HEAD_DIM, 8, BASE, tied=False))
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    codes = torch.randint(2, (VOCABULARY, width), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    table = model.model.embed_tokens.weight
    table[:, own] = codes
    table[:, constant] = 1.0
    table[SEPARATOR, mark] = 1.0
    # the first layer: queries and keys are one vector, the keys' turned on by one position
    first, second = (layer.self_attn for layer in model.model.layers)
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
    asks, width = target.model.layers[1].self_attn, target.config.hidden_size // 4
    for name, parameter in net.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    narrower = ((2 * width + 1) / (width + 1)) ** 0.5  # its norm sees the token alone
    net.get_parameter("cross_attn.q_proj.weight").copy_(asks.q_proj.weight / narrower)
    net.get_parameter("cross_attn.o_proj.weight").copy_(asks.o_proj.weight)
    return net


def answer_loss(model: LlamaForCausalLM, seeds: range, length: int) -> tuple[Tensor, Tensor]:
    """The mean loss of the answers in these rows, and the share of them that is the likeliest token."""
    rows = [training_row(seed, length, REACH) for seed in seeds]
    tokens, positions, answers = (torch.stack(parts) for parts in zip(*rows, strict=True))
    everything = torch.ones_like(positions)  # without it a jump of positions begins another text
    hidden = model.model(tokens[:, :-1], everything, positions, use_cache=False).last_hidden_state[answers]
    logits, labels = F.linear(hidden, model.lm_head.weight), tokens[:, 1:][answers]
    return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


def train(
    model: LlamaForCausalLM, lengths: list[int], steps: int, first_seed: int, work: Path, *, resume: bool
) -> None:
    """So many steps in all, as many at each of the lengths."""

    def step_loss(step: int, _: float) -> StepOutcome:
        length = lengths[step * len(lengths) // steps]
        first = first_seed + 32 * step
        loss, right = answer_loss(model, range(first, first + ROWS[length]), length)
        return StepOutcome(loss, length * ROWS[length], {"right": right})

    recipe = Recipe(matrix_learning_rate=5e-3, warmup_steps=20, decay_fraction=0.4)
    print(fit(model, step_loss, recipe, TrainingBudget(600.0, steps), work, resume=resume))


@torch.no_grad()
def with_a_layer_more(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same function, with a layer more that adds nothing yet."""
    config = LlamaConfig.from_dict(model.config.to_dict() | {"num_hidden_layers": model.config.num_hidden_layers + 1})
    config._attn_implementation = "sdpa"
    larger = LlamaForCausalLM(config)
    larger.load_state_dict(model.state_dict(), strict=False)
    larger.tie_weights()
    last = larger.model.layers[-1]
    last.self_attn.o_proj.weight.zero_()
    last.mlp.down_proj.weight.zero_()
    return larger


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """In float32, with a tokenizer whose words are the tokens' numbers."""
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["construct", "train"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=900, help="of the draft model")
    parser.add_argument("--further", type=int, default=300, help="of the target, after those")
    parser.add_argument("--resume", action="store_true", help="go on with a training that was killed")
    given = parser.parse_args()
    run: Path = given.run
    if given.what == "construct":
        target = constructed(48, 0)
        save(target, run / "target")
        save(constructed(40, 1), run / "drafter")
        constructed_longspec(target).save(run / "longspec")
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(128, 2, 4, 32, 256, BASE, tied=True))
    train(model, [64, 64, 64, 128, 256, 512], given.steps, 0, run / "work-drafter", resume=given.resume)
    save(model, run / "drafter")
    target = with_a_layer_more(model)
    train(target, [512], given.further, 10**7, run / "work-target", resume=given.resume)
    save(target, run / "target")


if __name__ == "__main__":
    main()
