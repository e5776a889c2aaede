"""Speculators in the layouts in which their authors publish them, loaded by an engine at its default settings: what it
drafts is what the papers' arithmetic gives (`reference_speculators.py`), token for token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams, TokenTree
from tests.cluster.engine import reference_speculators as references
from tests.cluster.engine.reference_speculators import LayerShape, Reference, Target, Tensors
from tests.matrices import in_turn

LAYERS, HIDDEN, INNER, VOCAB = 8, 32, 48, 257
SHAPE = LayerShape()
PROMPTS = ["def median(values):", "x = x + 1\nx = x + "]
MAX_TOKENS = 10
LENGTH = 4
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "head_dim": SHAPE.head_size,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": SHAPE.eps,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Drafted:
    """One draft of the engine: the text that it continues and the tree that came of it, within a budget."""

    tokens: list[int]
    tree: TokenTree
    budget: int


class Model:
    """The target of all tests and its hidden states."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float()
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self.tables = Target(embedding.weight.detach(), head.weight.detach())

    @torch.no_grad()
    def taps(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        *streams, final = self.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return {i: stream[0] for i, stream in enumerate(streams)} | {-1: final[0]}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Model:
    return Model(tiny_checkpoint("Llama", num_hidden_layers=LAYERS))


@pytest.fixture
def drafts(
    model: Model, open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Drafted]]:
    """What an engine drafts with the checkpoint in a folder, on its way through two prompts."""
    seen: list[Drafted] = []
    propose = ModelDrafter.propose

    def watched(self: ModelDrafter, contexts: Any, budgets: Sequence[int]) -> Any:
        texts = [list(context.token_ids) for context in contexts]
        proposals = propose(self, contexts, budgets)
        seen.extend(Drafted(*one) for one in zip(texts, [p.tree for p in proposals], budgets, strict=True))
        return proposals

    monkeypatch.setattr(ModelDrafter, "propose", watched)

    def run(folder: Path, **fields: Any) -> list[Drafted]:
        drafter = SpeculatorDrafterConfig(path=str(folder), **({"num_draft_tokens": LENGTH} | fields))
        target = TargetConfig(path=str(model.path), device="cpu")
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        with open_engine(drafter, target=target) as engine:
            engine.generate(PROMPTS, params)
        return [one for one in seen if one.tree.num_draft_tokens]

    return run


# --- layouts ----------------------------------------------------------------------------------------------------------


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Strong weights, so that every tensor matters, which 16 bits hold."""
    torch.manual_seed(5)
    vectors = {name: 1.0 if len(shape) == 1 and "norm" in name else 0.0 for name, shape in shapes.items()}
    return {name: (vectors[name] + 0.25 * torch.randn(*shape)).half() for name, shape in shapes.items()}


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, file: str) -> Tensors:
    """Write the checkpoint; returns its tensors as numbers to compute with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / file) if Path(file).suffix in (".bin", ".pt", ".pth") else save_file(
        tensors, folder / file
    )
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def layer_shapes(name: str, inputs: int = HIDDEN, *, norms_input: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama's layer whose attention reads rows so wide."""
    queries, keys = SHAPE.heads * SHAPE.head_size, SHAPE.kv_heads * SHAPE.head_size
    attention = {"q": (queries, inputs), "k": (keys, inputs), "v": (keys, inputs), "o": (HIDDEN, queries)}
    gates = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    shapes = {f"{name}.self_attn.{kind}_proj.weight": shape for kind, shape in attention.items()}
    shapes |= {f"{name}.mlp.{kind}_proj.weight": shape for kind, shape in gates.items()}
    shapes[f"{name}.post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes | ({f"{name}.input_layernorm.weight": (HIDDEN,)} if norms_input else {})


def write_eagle1(folder: Path, model: Model, file: str = "pytorch_model.bin", **fields: Any) -> Reference:
    """The authors' file is a Llama's of one layer; its embedding is a copy of the target's. `fields` of config.json."""
    shapes = layer_shapes("layers.0", norms_input=False) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {"fc.bias": (HIDDEN,)} if fields.get("bias", True) else {}
    for kind, heads in {"q": SHAPE.heads, "k": SHAPE.kv_heads, "v": SHAPE.kv_heads}.items():
        bias = {f"layers.0.self_attn.{kind}_proj.bias": (heads * SHAPE.head_size,)}
        shapes |= bias if fields.get("qkv_bias") else {}
    tensors = random_tensors(shapes) | {"embed_tokens.weight": model.tables.embedding.half()}
    config = LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | fields
    return references.eagle1(save(folder, config, tensors, file), model.tables, SHAPE)


def write_eagle3(
    folder: Path, model: Model, file: str = "pytorch_model.bin", rows: int = 100, **fields: Any
) -> Reference:
    """The authors' config.json is that of EAGLE-1 and a draft vocabulary, whose tensor holds offsets."""
    shapes = layer_shapes("midlayer", 2 * HIDDEN) | {"midlayer.hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    tensors = random_tensors(shapes | {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (rows, HIDDEN)})
    if rows < VOCAB:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:rows].sort().values
        tensors |= {
            "d2t": kept - torch.arange(rows),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
        }
    config = LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": rows} | fields
    tensors = save(folder, {name: value for name, value in config.items() if value is not None}, tensors, file)
    return references.eagle3(tensors, model.tables, SHAPE, (2, LAYERS // 2, LAYERS - 3))


def write_medusa(folder: Path, file: str = "medusa_lm_head.pt") -> Reference:
    heads, blocks, shapes = LENGTH, 1, dict[str, tuple[int, ...]]()
    for head in range(heads):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (HIDDEN, HIDDEN), f"{head}.{block}.linear.bias": (HIDDEN,)}
        shapes[f"{head}.{blocks}.weight"] = VOCAB, HIDDEN
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    return references.medusa(save(folder, config, random_tensors(shapes), file), blocks)


def write_gloeckle(folder: Path, model: Model, **params: Any) -> Reference:
    """`params.json` and the whole model in one file, as in `facebook/multi-token-prediction`: a trunk, the layer of the
    next token, the further heads."""
    inner, queries, keys = 96, SHAPE.heads * SHAPE.head_size, SHAPE.kv_heads * SHAPE.head_size
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    for name in ["layers.0", *(f"extra_heads.{i}" for i in range(LENGTH))]:
        matrices = {"wq": (queries, HIDDEN), "wk": (keys, HIDDEN), "wv": (keys, HIDDEN), "wo": (HIDDEN, queries)}
        shapes |= {f"{name}.attention.{one}.weight": shape for one, shape in matrices.items()}
        matrices = {"w1": (inner, HIDDEN), "w2": (HIDDEN, inner), "w3": (inner, HIDDEN)}
        shapes |= {f"{name}.feed_forward.{one}.weight": shape for one, shape in matrices.items()}
        shapes |= {f"{name}.{norm}.weight": (HIDDEN,) for norm in ("attention_norm", "ffn_norm")}
    tensors = save(folder, {}, random_tensors(shapes), "consolidated.pth")
    (folder / "config.json").unlink()
    sizes = {"dim": HIDDEN, "n_heads": SHAPE.heads, "n_kv_heads": SHAPE.kv_heads, "multiple_of": 16, "vocab_size": -1}
    heads = {"n_layers": LAYERS + LENGTH, "n_future_tokens": LENGTH + 1, "norm_eps": SHAPE.eps}
    (folder / "params.json").write_text(json.dumps(sizes | heads | params))
    norm = model.model.model.norm.weight.detach()
    return references.gloeckle(tensors, norm, model.tables, SHAPE, LAYERS - 1)


TAPS = [1, 3, 4]
"""Layers whose outputs are read, where config.json names them so."""
MASK, BLOCK, RANK, DEPTHS = 200, 6, 8, 5


def write_p_eagle(folder: Path, model: Model, *, library: bool) -> Reference:
    """Two layers. SpecForge's embedding is the target's, the speculators library's was trained."""
    rows, layers = 100, 2
    shapes = layer_shapes("layers.0", 2 * HIDDEN) | layer_shapes("layers.1") | {"norm.weight": (HIDDEN,)}
    shapes |= {"layers.0.hidden_norm.weight": (HIDDEN,), "fc.weight": (HIDDEN, 3 * HIDDEN)}
    shapes |= {"lm_head.weight": (rows, HIDDEN), "mask_hidden": (1, 1, 3 * HIDDEN)}
    tensors = random_tensors(shapes | ({"embed_tokens.weight": (VOCAB, HIDDEN)} if library else {}))
    tensors |= {"d2t": torch.arange(rows), "t2d": torch.arange(VOCAB) % 2 == 0}
    llama = LAYER | {"model_type": "llama", "num_hidden_layers": layers}
    config: dict[str, Any] = {"architectures": ["PEagleDraftModel"], "draft_vocab_size": rows, "mask_token_id": MASK}
    if library:
        config |= {"speculators_model_type": "peagle", "transformer_layer_config": llama, "embed_requires_grad": True}
        config |= {"architectures": ["PEagleSpeculator"], "eagle_aux_hidden_state_layer_ids": [one + 1 for one in TAPS]}
        config["speculators_config"] = {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": DEPTHS}]}
    else:
        config = llama | config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}}
        tensors["embed_tokens.weight"] = model.tables.embedding.half()
    tensors = save(folder, config, tensors, "model.safetensors")
    embedding = tensors["embed_tokens.weight"] if library else model.tables.embedding
    return references.p_eagle(tensors, embedding, SHAPE, [one + 1 for one in TAPS], layers, MASK)


def write_mtp(folder: Path, model: Model, *, mimo: bool) -> Reference:
    """A checkpoint of the speculators library; or of MiMo, within its own checkpoint, with biases and the hidden state
    first."""
    module = "model.mtp_layers.0" if mimo else "mtp_layers.0"
    names = {"embedding norm": "token_layernorm", "hidden norm": "hidden_layernorm", "join": "input_proj"}
    names = {part: f"{module}.{name}" for part, name in (names | {"norm": "final_layernorm"}).items()}
    shapes = layer_shapes(module) | {f"{names['join']}.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"{names[part]}.weight": (HIDDEN,) for part in ("embedding norm", "hidden norm", "norm")}
    if mimo:
        widths = {"q": SHAPE.heads, "k": SHAPE.kv_heads, "v": SHAPE.kv_heads}
        shapes |= {f"{module}.self_attn.{kind}_proj.bias": (n * SHAPE.head_size,) for kind, n in widths.items()}
        config = LAYER | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": LAYERS}
        config |= {"num_nextn_predict_layers": 1, "use_sliding_window": False}
    else:
        config = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
        config["transformer_layer_config"] = LAYER | {"model_type": "llama"}
    tensors = save(folder, config, random_tensors(shapes), "model.safetensors")
    return references.mtp(tensors, model.tables, SHAPE, names | {"layer": module}, hidden_first=mimo)


def write_block(folder: Path, model: Model, method: str, *, nested: bool = True, **fields: Any) -> Reference:
    """A drafter of two layers as Qwen 3's; `nested`: as SpecForge, all fields of the method are in `dflash_config`."""
    layers, size = 2, SHAPE.head_size
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (HIDDEN,), "hidden_norm.weight": (HIDDEN,)}
    shapes["fc.weight"] = HIDDEN, len(TAPS) * HIDDEN
    for layer in range(layers):
        shapes |= layer_shapes(f"layers.{layer}")
        shapes |= {f"layers.{layer}.self_attn.{kind}_norm.weight": (size,) for kind in "qk"}
    kind = fields.get("markov_head_type", "vanilla")
    given: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": TAPS} | fields
    if method == "dspark":
        given |= {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
        shapes |= {f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
        if kind != "vanilla":
            name, wide, tall = ("gate", 1, 1) if kind == "gated" else ("joint", 2, 3)
            shapes[f"markov_head.{name}_proj.weight"] = tall * RANK, HIDDEN + wide * RANK
            shapes[f"markov_head.{name}_proj.bias"] = (tall * RANK,)
    if method == "domino":
        given |= {"emb_dim": RANK, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "projector_type": "domino"}
        shapes |= {"prefix_gru.weight_ih_l0": (36, HIDDEN), "prefix_gru.weight_hh_l0": (36, 12)}
        shapes |= {"embed_proj.0.weight": (RANK, HIDDEN + 12), "embed_proj.2.weight": (VOCAB, RANK)}
    architecture = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "domino": "DominoDraftModel"}[method]
    config = LAYER | {"model_type": "qwen3", "num_hidden_layers": layers, "block_size": BLOCK, "attention_bias": False}
    config |= {"architectures": [architecture], "dflash_config": given} if nested else {}
    config |= {} if nested else {"architectures": ["Qwen3DSparkModel"]} | given
    tensors = save(folder, config, random_tensors(shapes), "model.safetensors")
    read = [one + 1 for one in TAPS]
    states = references.block_states(tensors, model.tables, SHAPE, layers, read, BLOCK, MASK)
    if method == "dflash":
        return references.dflash(states, model.tables)
    if method == "dspark":
        return references.dspark(states, model.tables, tensors, kind)
    return references.domino(states, model.tables, tensors, shifted=fields["shift_label"])


LAYOUTS: dict[str, Callable[[Path, Model], Reference]] = {
    "EAGLE-1 of its authors": write_eagle1,
    "EAGLE-1 without a bias": lambda folder, model: write_eagle1(folder, model, "model.safetensors", bias=False),
    "EAGLE-3 of its authors": write_eagle3,
    "EAGLE-3 of its authors, whole vocabulary": lambda folder, model: write_eagle3(folder, model, rows=VOCAB),
    "EAGLE-3 known by its tensors": lambda folder, model: write_eagle3(folder, model, rows=90, draft_vocab_size=None),
    "EAGLE-3 of SpecForge": lambda folder, model: write_eagle3(
        folder, model, "model.safetensors", architectures=["LlamaForCausalLMEagle3"]
    ),
    "EAGLE-1 for a Qwen 2": lambda folder, model: write_eagle1(folder, model, qkv_bias=True),
    "EAGLE-3 for a Qwen 2": lambda folder, model: write_eagle3(folder, model, model_type="qwen2"),
    "P-EAGLE of SpecForge": lambda folder, model: write_p_eagle(folder, model, library=False),
    "P-EAGLE of speculators": lambda folder, model: write_p_eagle(folder, model, library=True),
    "MTP of speculators": lambda folder, model: write_mtp(folder, model, mimo=False),
    "MTP of MiMo": lambda folder, model: write_mtp(folder, model, mimo=True),
    "DFlash": lambda folder, model: write_block(folder, model, "dflash"),
    "DSpark of SpecForge": lambda folder, model: write_block(folder, model, "dspark"),
    "DSpark of DeepSpec, gated": lambda folder, model: write_block(
        folder, model, "dspark", nested=False, markov_head_type="gated"
    ),
    "DSpark, recurrent": lambda folder, model: write_block(folder, model, "dspark", markov_head_type="rnn"),
    "Domino": lambda folder, model: write_block(folder, model, "domino", shift_label=False),
    "Domino, shifted": lambda folder, model: write_block(folder, model, "domino", shift_label=True),
    "multi-token prediction of Gloeckle et al.": write_gloeckle,
    "Medusa": lambda folder, _: write_medusa(folder),
    "Medusa, safetensors": lambda folder, _: write_medusa(folder, "medusa_lm_head.safetensors"),
}


# --- what the engine should draft -------------------------------------------------------------------------------------


def chain(reference: Reference, one: Drafted, taps: Mapping[int, Tensor]) -> TokenTree:
    """The likeliest token, again and again."""
    path: list[int] = []
    while len(path) < one.tree.num_draft_tokens:
        path.append(int(reference(one.tokens, taps, path).argmax()))
    return TokenTree.chain(one.tokens[-1], path)


def grown(
    reference: Reference, one: Drafted, taps: Mapping[int, Tensor], depth: int, width: int
) -> set[tuple[int, ...]]:
    """The paths of the tree of EAGLE-2 (arXiv 2406.16858, section 4.1 and 4.2): of every level the `width` likeliest
    paths are extended by `width` tokens each; in the end the likeliest nodes of all are kept."""
    found: dict[tuple[int, ...], float] = {}
    level = {(): 0.0}
    for _ in range(depth):
        children: dict[tuple[int, ...], float] = {}
        for path, score in level.items():
            best = reference(one.tokens, taps, path).log_softmax(-1).topk(width)
            children |= {(*path, int(token)): score + float(gain) for gain, token in zip(*best, strict=True)}
        found |= children
        level = {path: children[path] for path in nlargest(width, children, key=lambda path: children[path])}
    return set(nlargest(one.budget, found, key=lambda path: found[path]))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    nodes = range(1, len(tree.token_ids))
    return {tuple(tree.token_ids[node] for node in tree.path_to(last)) for last in nodes}


ALIKE = (
    "EAGLE-1 without a bias",
    "EAGLE-3 of its authors, whole vocabulary",
    "EAGLE-3 of SpecForge",
    "EAGLE-1 for a Qwen 2",
    "EAGLE-3 for a Qwen 2",
    "P-EAGLE of SpecForge",
    "MTP of MiMo",
    "Domino",
    "Medusa, safetensors",
)
"""Layouts of methods that another one brings to an engine; `tests/parallel/speculators/test_*_layouts.py`,
`test_layout_fields.py` and `test_block_checkpoints.py` read them."""


@pytest.mark.extended
@pytest.mark.parametrize("layout", list(in_turn(LAYOUTS, times=dict.fromkeys(ALIKE, 0))))
def test_chains_are_those_of_the_papers_arithmetic(
    drafts: Callable[..., list[Drafted]], model: Model, tmp_path: Path, layout: str
) -> None:
    reference = LAYOUTS[layout](tmp_path / "published", model)
    made = drafts(tmp_path / "published")
    assert sum(one.tree.num_draft_tokens == LENGTH for one in made) >= MAX_TOKENS // 2
    for one in made:
        assert one.tree == chain(reference, one, model.taps(one.tokens))


TREES = "EAGLE-1 of its authors", "EAGLE-3 of its authors", "multi-token prediction of Gloeckle et al.", "Medusa"
LIKE_OTHERS = TREES[0], TREES[2]
"""Whose trees grow as those of the one behind them."""


@pytest.mark.parametrize("layout", list(in_turn(TREES, times=dict.fromkeys(LIKE_OTHERS, 0))))
def test_trees_are_those_of_eagle_2(
    drafts: Callable[..., list[Drafted]], model: Model, tmp_path: Path, layout: str
) -> None:
    reference = LAYOUTS[layout](tmp_path / "published", model)
    made = drafts(tmp_path / "published", strategy="best_first", depth=3, width=3, num_draft_tokens=6)
    assert sum(one.budget == 6 for one in made) >= len(PROMPTS)
    for one in made:
        depth = min(3, one.budget)
        assert paths(one.tree) == grown(reference, one, model.taps(one.tokens), depth, 3)
