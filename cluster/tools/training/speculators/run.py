"""One training run of a speculator: its text, the loop on one rank or several, and the report.

It must not know any method, nor how ranks are started.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from cluster import pocket
from cluster.config.compose import typed_record
from cluster.config.jobs import TrainConfig
from cluster.io.pictures import picture
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer
from cluster.tools.training.continuations import (
    TextRows,
    joined,
    prompts_of_text,
    read_texts,
    write_rows,
    written_rows,
)
from cluster.tools.training.corpus import library_sources, load_corpus
from cluster.tools.training.models import copy_tokenizer, grouped
from cluster.tools.training.parts import parts_of
from cluster.tools.training.prompts import choose_prompts
from cluster.tools.training.speculators.distill import DistilledDrafter
from cluster.tools.training.speculators.frozen_target import FrozenTarget, load_target, shape_of
from cluster.tools.training.speculators.recipes import RECIPES, SpeculatorRecipe
from cluster.tools.training.token_stream import pack, spread_rows
from cluster.tools.training.trainer import Ranks, StepOutcome, fit_job
from parallel.ranges import require
from parallel.training.interface import Speculator, TargetBatch, TrainingOptions
from parallel.training.precision import fast_dtype, fast_passes

HELD_OUT_SHARE = 20
"""One of so many prompts is held out where no held-out prompts are given."""
HELD_OUT_PROMPTS = 48
EVALUATED_ROWS = 8
"""Rows of one pass of an evaluation."""
REFRESH_STEPS = 10
"""Steps trained on one batch of text that the drafter wrote itself."""
POOL_PROMPTS = 48
"""Prompts of that batch."""


@dataclass(frozen=True)
class Course:
    """What every rank needs to know of a run."""

    config: TrainConfig
    target: str
    """Directory of the target's checkpoint."""
    out: str
    """Receives the checkpoint, in a folder named after what it is."""
    work: str
    """Receives text, logs and state, those of the run in a folder named after its recipe."""

    @property
    def recipe(self) -> SpeculatorRecipe:
        """The chosen row. ValueError, one line, if there is none."""
        name = self.config.recipe
        if name not in RECIPES:
            raise ValueError(f"job.recipe={name}: is unknown; choose one of {', '.join(RECIPES)}")
        return RECIPES[name]

    def options(self) -> TrainingOptions:
        """The recipe's settings with those of `job.options`. ValueError, one line, for what it does not have."""
        options = typed_record(self.recipe.options, self.config.options, "job.options")
        options.check("job.options")
        has_parts = self.config.ranks > 1 and options.num_parts > 1
        remedy = "is for several job.ranks that train the prefixes of job.recipe=sorted; use all"
        require(has_parts or self.config.average == "all", "job.average", self.config.average, remedy)
        return options

    @property
    def folder(self) -> Path:
        """Receives the run's logs and state."""
        return Path(self.work) / self.config.recipe


@dataclass(frozen=True)
class Texts:
    """The rows of a run."""

    training: TextRows
    held_out: dict[float, TextRows]
    """Held-out texts by the temperature at which the target wrote them."""
    prompts: list[list[int]]
    """Those of the training rows, for text that the drafter writes itself."""


def prepare(course: Course, say: Callable[[str], None]) -> Texts:
    """Prompts and what the target writes after them; written once for equal settings and weights, and kept in `work`.

    ValueError, one line, for settings or text that cannot be used.
    """
    config = course.config
    tokenizer = load_tokenizer(Path(course.target))
    prompts, held_out = _prompts(course, tokenizer)
    model = load_target(Path(course.target), config.device, fast_dtype(config.device))
    check_recipe(course, model)
    length, ends, weights = config.continuation_length, _end_ids(model), _weights_digest(model)

    def write(some: list[list[int]], temperature: float) -> TextRows:
        key = json.dumps([some, length, temperature, config.seed, weights])
        parts = Path(course.work) / "continuations" / hashlib.sha256(key.encode()).hexdigest()[:12]
        return write_rows(model, some, length, temperature, ends, config.seed, parts, say)

    if config.data == "fixed":
        training = _fixed_rows(course, tokenizer, len(prompts) * len(config.temperatures))
    elif config.data == "on_policy":
        training = _empty(length)
    else:
        training = joined([write(prompts, temperature) for temperature in config.temperatures])
    kept = {temperature: write(held_out, temperature) for temperature in config.temperatures}
    return Texts(training, kept, prompts)


def check_recipe(course: Course, model: LlamaForCausalLM) -> None:
    """Raise ValueError, one line, for settings that do not suit the target: they are refused where the module is built,
    so one is built and dropped before hours go into the target's text."""
    config = course.config
    net = course.recipe.build(course.options(), shape_of(model, _empty(config.continuation_length)))
    writes_own = config.data in ("on_policy", "mixed")
    remedy = "only job.recipe=distill writes text of its own; use job.data=target"
    require(not writes_own or isinstance(net, DistilledDrafter), "job.data", config.data, remedy)


def train_rank(course: Course, texts: Texts, ranks: Ranks) -> dict[str, Any]:
    """Train on this rank's share of the rows and return what was reached; the first rank also writes the module."""
    config, recipe = course.config, course.recipe
    model = load_target(Path(course.target), config.device)
    torch.manual_seed(config.seed)
    counted = texts.training if len(texts.training) else next(iter(texts.held_out.values()))
    net = recipe.build(course.options(), shape_of(model, counted)).to(config.device)
    source = _Source(course, texts, model, net, ranks)
    wrapped = _Wrapped(net)
    ranks = replace(ranks, train_parts=ranks.count > 1 and config.average == "participants")
    if ranks.train_parts:
        net.take_part(ranks.rank)
    averaged = ranks.count > 1 and not ranks.train_parts
    whole = DistributedDataParallel(wrapped, find_unused_parameters=True) if averaged else wrapped
    judge = _Judge(model, net, texts.held_out, config)

    def step_loss(step: int, _: float) -> StepOutcome:
        batch = source.batch(step)
        loss, metrics = whole(batch, _generator(config.seed, step, ranks.rank))
        return StepOutcome(loss, batch.tokens.numel(), metrics)

    folder, loop = course.folder, {"sources": [source], "evaluate": judge, "ranks": ranks}
    record = fit_job(config, net, step_loss, recipe.rates, folder, **loop)
    if ranks.rank:
        return {}
    checkpoint = Path(course.out) / recipe.writes
    net.save(checkpoint)
    copy_tokenizer(Path(course.target), checkpoint)
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    return {
        "recipe": config.recipe,
        "options": asdict(cast(Any, course.options())),
        "data": config.data,
        "target": course.target,
        "ranks": ranks.count,
        "parameters": sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad),
        "rows": len(texts.training),
        "label_tokens": int(texts.training.mask().sum()),
        "training": asdict(record),
        "held_out_before": lines[0],
        "held_out": lines[-1],
    }


class _Wrapped(nn.Module):
    """A module whose forward pass is the loss, as `DistributedDataParallel` wants it."""

    def __init__(self, net: Speculator) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net.loss(batch, generator)


class _Source:
    """Batches by step: of the target's text, of the drafter's own, or half of each. A rank takes every n-th row."""

    def __init__(self, course: Course, texts: Texts, model: LlamaForCausalLM, net: Speculator, ranks: Ranks) -> None:
        config = course.config
        self._config, self._model, self._net, self._ranks = config, model, net, ranks
        self._taps, self._kv_layers, self._reach = net.taps, net.kv_layers, net.reach
        self._rows = texts.training
        self._target = FrozenTarget(model, texts.training, net.taps, net.kv_layers, config.cache_mb << 20, net.reach)
        self._size = max(1, config.batch_tokens // config.continuation_length // ranks.count)
        self._is_own = {"on_policy": 1.0, "mixed": 0.5}.get(config.data, 0.0)
        self._groups = grouped(texts.prompts, config.continuation_length, POOL_PROMPTS)
        self._ends = _end_ids(model)
        self._pool: FrozenTarget | None = None

    def batch(self, step: int) -> TargetBatch:
        """The batch of a step: equal for equal steps, except that text of the drafter's own depends on its weights."""
        random = _generator(self._config.seed, step, self._ranks.rank)
        if self._is_own and (self._pool is None or step % REFRESH_STEPS == 0):
            self._pool = FrozenTarget(
                self._model, self._write(random), self._taps, self._kv_layers, 1 << 30, self._reach
            )
        own = self._pool
        if own is None or (self._is_own < 1 and step % 2 == 0):
            return self._target.batch(self._shuffled(step))
        return own.batch(torch.randint(len(own.rows), (self._size,), generator=random))

    def _shuffled(self, step: int) -> Tensor:
        """The rows of this rank at a step, each once per epoch."""
        count = len(self._rows)
        first = (step * self._ranks.count + self._ranks.rank) * self._size
        places = torch.arange(first, first + self._size)
        orders = {
            epoch: torch.randperm(count, generator=torch.Generator().manual_seed(self._config.seed + epoch))
            for epoch in set((places // count).tolist())
        }
        return torch.stack([orders[int(place // count)][place % count] for place in places])

    def _write(self, random: torch.Generator) -> TextRows:
        assert isinstance(self._net, DistilledDrafter)
        group = self._groups[int(torch.randint(len(self._groups), (1,), generator=random))]
        heats = self._config.temperatures
        temperature = heats[int(torch.randint(len(heats), (1,), generator=random))]
        tokens = self._net.write(group, self._config.continuation_length, temperature, random)
        return written_rows(tokens, group.shape[1], self._ends)

    def state_dict(self) -> dict[str, Any]:
        """The drafter's own text: its weights have moved on since it wrote it."""
        rows = self._pool.rows if self._pool else _empty(self._config.continuation_length)
        return {"tokens": rows.tokens, "begins": rows.begins, "ends": rows.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that text."""
        if len(state["tokens"]):
            self._pool = FrozenTarget(self._model, TextRows(**state), self._taps, self._kv_layers, 1 << 30, self._reach)


class _Judge:
    """Held-out loss and acceptance, by temperature."""

    def __init__(
        self, model: LlamaForCausalLM, net: Speculator, rows: Mapping[float, TextRows], config: TrainConfig
    ) -> None:
        self._net, self._config = net, config
        kept = config.cache_mb << 20
        self._targets = {heat: FrozenTarget(model, part, net.taps, net.kv_layers, kept) for heat, part in rows.items()}

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Means over all rows; names end with the temperature where it is not 0."""
        values: dict[str, float] = {}
        device = torch.device(self._config.device).type
        for heat, target in self._targets.items():
            sums: dict[str, float] = {}
            for part in torch.arange(len(target.rows)).split(EVALUATED_ROWS):
                batch = replace(target.batch(part), temperature=heat)
                with fast_passes(device):
                    loss, metrics = self._net.loss(batch, _generator(self._config.seed, 0, 0))
                for name, value in {"loss": loss, **metrics}.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(part)
            suffix = f"_at_{heat:g}" if heat else ""
            values |= {f"{name}{suffix}": round(total / len(target.rows), 4) for name, total in sums.items()}
        return values


def draw_curves(folder: Path, path: Path) -> None:
    """Draw training and held-out loss, acceptance by depth and expected length over the tokens into a PNG."""
    logs = {name: folder / f"{name}.jsonl" for name in ("loss", "evaluation")}
    lines = {name: [json.loads(line) for line in log.read_text().splitlines()] for name, log in logs.items()}
    held_out = lines["evaluation"]
    at = [line["tokens"] / 1e6 for line in held_out]
    with picture(path, 12, 3.4, columns=3) as ((loss, by_depth, length),):
        at_steps = [line["tokens"] / 1e6 for line in lines["loss"]]
        loss.plot(at_steps, [line["loss"] for line in lines["loss"]], label="training")
        for name in held_out[0]:
            values = [line[name] for line in held_out]
            if name.startswith("loss"):
                loss.plot(at, values, marker=".", label=f"held out{name.removeprefix('loss').replace('_', ' ')}")
            elif name.startswith("length"):
                length.plot(at, values, marker=".", label=name.replace("_", " "))
            elif name.startswith("accept_") and "_at_" not in name:
                by_depth.plot(at, values, marker=".", label=name.removeprefix("accept_"))
        for plot, title in ((loss, "loss"), (by_depth, "greedy acceptance by depth"), (length, "tokens per round")):
            plot.set(title=title, xlabel="million tokens")
            plot.grid(axis="y")
            plot.legend()


def _prompts(course: Course, tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Training prompts and held-out ones."""
    config = course.config
    if config.text:
        prompts = prompts_of_text(Path(config.text).expanduser(), tokenizer, config.continuation_prompts)
    else:
        sources = library_sources(load_corpus(config.seed))
        chosen = choose_prompts(sources, tokenizer, config.seed, config.continuation_prompts)
        prompts = [tokenizer.encode(prompt.prompt).ids for prompt in chosen]
    file = config.prompts or ("" if config.text else str(pocket.PROMPTS))
    if file:
        held_out = [tokenizer.encode(prompt.text).ids for prompt in read_prompts(Path(file), HELD_OUT_PROMPTS)]
        return prompts, held_out
    if len(prompts) < 2:
        raise ValueError(f"job.text={config.text}: holds one prompt, and one must be held out; give more text")
    return (
        [prompt for i, prompt in enumerate(prompts) if i % HELD_OUT_SHARE],
        prompts[::HELD_OUT_SHARE][:HELD_OUT_PROMPTS],
    )


def _fixed_rows(course: Course, tokenizer: Tokenizer, count: int) -> TextRows:
    """About `count` rows of the text as it is; all tokens but a row's first are labels."""
    config = course.config
    if config.text:
        texts = [tokenizer.encode(text).ids for _, text in read_texts(Path(config.text).expanduser())]
        stream = torch.tensor([token for ids in texts for token in ids], dtype=torch.long)
    else:
        stream = pack(tokenizer, library_sources(load_corpus(config.seed)))
    length = config.continuation_length
    if len(stream) <= length:
        raise ValueError(f"job.text={config.text}: has {len(stream)} tokens, a row {length}; give more text")
    tokens = spread_rows(stream, length, count * length)[:, :length]
    return TextRows(tokens, torch.ones(len(tokens), dtype=torch.long), torch.full((len(tokens),), length))


def _empty(length: int) -> TextRows:
    nothing = torch.empty(0, dtype=torch.long)
    return TextRows(torch.empty(0, length, dtype=torch.long), nothing, nothing)


def _end_ids(model: LlamaForCausalLM) -> list[int]:
    """Tokens that end a text."""
    ids = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def _weights_digest(model: LlamaForCausalLM) -> str:
    """Tells one target from another by its output layer."""
    head = parts_of(model).lm_head.weight.detach().cpu()
    return hashlib.sha256(head.float().numpy().tobytes()).hexdigest()


def _generator(*numbers: int) -> torch.Generator:
    """Equal numbers give equal random numbers."""
    return torch.Generator().manual_seed(hash(numbers) % 2**63)
