"""`job.recipe=specdec`: a non-autoregressive drafter for a target with an encoder (SpecDec, arXiv 2203.16487).

The drafter is an encoder-decoder that goes on from the target, or from another checkpoint, and learns to fill a block
of masks in one pass. A text is cut at a random place; the rows before the cut see what is before them, the masks behind
it those rows and each other. Glancing (GLAT, arXiv 2008.07905): of the tokens that a first look gets wrong a share is
shown, the smaller the further the training is. It writes a checkpoint that `drafter=model` drafts with
(`parallel/speculators/pard.py`). It must not know how a checkpoint is served.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from cluster.config.compose import typed_record
from cluster.config.jobs import TrainConfig
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import library_sources, load_corpus
from cluster.tools.training.models import copy_tokenizer
from cluster.tools.training.pairs import Pair, library_pairs, read_pairs
from cluster.tools.training.trainer import StepOutcome, fit_job
from parallel.model.config_fields import MASK_FIELD
from parallel.ranges import Range, require
from parallel.speculators.pard import DEPTH_FIELD, MUTUAL_FIELD
from parallel.training.interface import TrainingOptions, depth_metrics
from parallel.whole_files import naming, write_text

NAME = "specdec"
HELD_OUT = 128
"""Pairs that are held out, at most; and one of so many is, of fewer."""
HELD_OUT_SHARE = 10
_IGNORED = -100
_BATCH = 32


@dataclass(frozen=True, slots=True)
class SpecDecOptions(TrainingOptions):
    """Options of `job.recipe=specdec`."""

    start: str = "target"
    """Checkpoint with an encoder to go on from, with the target's tokenizer."""
    decoder_layers: Annotated[int, Range(0)] = 0
    """Decoder layers of the drafter, spread evenly over those of `start`, the first one among them; 0: all of them. A
    draft costs these alone, but for the first one of a text, which waits for the encoder."""
    block: Annotated[int, Range(2, 256)] = 25
    """Tokens that a pass drafts."""
    mask_token: Annotated[int, Range(0)] = 1
    """Token whose rows are filled; one that never stands inside a text."""
    shown_first: Annotated[float, Range(0, 1)] = 0.5
    """Share of the tokens that a first look gets wrong which is shown, at the start of the training."""
    shown_last: Annotated[float, Range(0, 1)] = 0.3
    """The same at its end."""
    cuts: Annotated[int, Range(1)] = 2
    """Random cuts of each text in a step."""

    def check_fields(self, where: str) -> None:
        require(self.shown_last <= self.shown_first, f"{where}.shown_last", self.shown_last, "must not grow")


@dataclass(frozen=True)
class TokenPairs:
    """Sources and texts, padded: int64 `[pairs, length]`, and their lengths. A text begins with the decoder's start."""

    sources: Tensor
    source_lens: Tensor
    texts: Tensor
    text_lens: Tensor

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, places: Tensor) -> TokenPairs:
        """These pairs, no longer than the longest of them."""
        source_lens, text_lens = self.source_lens[places], self.text_lens[places]
        sources, texts = self.sources[places, : source_lens.max()], self.texts[places, : text_lens.max()]
        return TokenPairs(sources, source_lens, texts, text_lens)

    @staticmethod
    def of(sources: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> TokenPairs:
        return TokenPairs(*_padded(sources), *_padded(texts))


class MaskedBlockDrafter(nn.Module):
    """`model` of transformers, which fills the masks behind a cut."""

    def __init__(self, model: Any, options: SpecDecOptions) -> None:
        super().__init__()
        self.model = model
        self._options = options

    def logits(self, pairs: TokenPairs, cuts: Tensor, shown: Tensor | None = None) -> Tensor:
        """Logits `[pairs, block, vocabulary]` of the tokens behind the first `cuts` ones of every text: of the last row
        before the cut, then of the masks. `shown` `[pairs, block]`: places whose input is the text's token."""
        block, device = self._options.block, pairs.texts.device
        length = int(cuts.max()) + block - 1
        rows = torch.arange(length, device=device)
        is_text = rows < cuts[:, None]  # [B, T]
        texts = F.pad(pairs.texts, (0, max(0, length - pairs.texts.shape[1])))[:, :length]
        if shown is not None:  # place k of a block is the input of the row k behind the cut, and place 0 of none
            behind = rows - cuts[:, None] + 1
            is_text = is_text | ((behind >= 1) & shown.gather(1, behind.clamp(0, block - 1)))
        inputs = torch.where(is_text, texts, self._options.mask_token)
        of_source = torch.arange(pairs.sources.shape[1], device=device) < pairs.source_lens[:, None]
        output = self.model(
            input_ids=pairs.sources,
            attention_mask=of_source.long(),
            decoder_input_ids=inputs,
            decoder_attention_mask=visible(cuts, length, block)[:, None],
            use_cache=False,
        )
        at = (cuts[:, None] - 1 + torch.arange(block, device=device)).unsqueeze(-1)
        return output.logits.gather(1, at.expand(-1, -1, output.logits.shape[-1]))

    def labels(self, pairs: TokenPairs, cuts: Tensor) -> Tensor:
        """The tokens behind the cuts, `[pairs, block]`; `_IGNORED` behind the end of a text."""
        places = cuts[:, None] + torch.arange(self._options.block, device=cuts.device)
        texts = F.pad(pairs.texts, (0, self._options.block))
        return torch.where(places < pairs.text_lens[:, None], texts.gather(1, places), _IGNORED)

    def loss(self, pairs: TokenPairs, progress: float, random_: torch.Generator) -> Tensor:
        """Cross entropy at the places behind random cuts that are not shown."""
        options = self._options
        cuts = 1 + (torch.rand(len(pairs), generator=random_) * (pairs.text_lens - 1)).long()
        labels = self.labels(pairs, cuts)
        is_label = labels != _IGNORED
        with torch.no_grad():
            wrong = (self.logits(pairs, cuts).argmax(-1) != labels) & is_label
        ratio = options.shown_first + (options.shown_last - options.shown_first) * progress
        num_shown = (wrong.sum(1) * ratio).round().long()
        # input k is the label of place k - 1; as many random ones of a text are shown, the first row is text already
        order = torch.rand(labels.shape, generator=random_).masked_fill(~is_label, 2.0).argsort(1).argsort(1)
        shown_labels = order < num_shown[:, None]
        shown = F.pad(shown_labels[:, :-1], (1, 0))
        logits = self.logits(pairs, cuts, shown)
        return F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(shown_labels, _IGNORED).flatten())

    @torch.no_grad()
    def metrics(self, pairs: TokenPairs) -> dict[str, float]:
        """Held-out loss and acceptance of greedy drafts behind a third of each text."""
        cuts = 1 + (pairs.text_lens - 1) // 3
        labels, logits = self.labels(pairs, cuts), self.logits(pairs, cuts)
        valid = labels != _IGNORED
        rates = (logits.argmax(-1) == labels).float().masked_fill(~valid, 0)
        by_depth = depth_metrics(rates, valid)
        survival = (rates.cumprod(1) * valid).sum(1)
        values = {name: float(value) for name, value in by_depth.items() if name != "length"}
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": float(loss), **values, "length": 1 + float(survival.mean())}

    def save(self, out: Path) -> None:
        """The model in float32, and in its config.json what makes it a drafter."""
        with naming(out):
            self.model.save_pretrained(out)
        file = out / "config.json"
        fields = {MASK_FIELD: self._options.mask_token, DEPTH_FIELD: self._options.block, MUTUAL_FIELD: True}
        write_text(file, json.dumps(json.loads(file.read_text()) | fields, indent=2))


def visible(cuts: Tensor, length: int, block: int) -> Tensor:
    """Which of `length` rows each row sees, bool `[texts, length, length]`: rows before the cut what is before them,
    the `block` - 1 rows behind it all up to their block's end."""
    rows = torch.arange(length, device=cuts.device)
    is_block = rows >= cuts[:, None]
    last = torch.where(is_block, (cuts + block - 2)[:, None].clamp(max=length - 1), rows)
    return rows <= last[:, :, None]


def keep_decoder_layers(model: Any, count: int) -> None:
    """Drop decoder layers of a model of transformers but for so many. ValueError, one line, if it has fewer."""
    decoder = model.get_decoder()
    name = "block" if hasattr(decoder, "block") else "layers"  # T5's, whose first block has the bias of all
    layers = getattr(decoder, name)
    require(count <= len(layers), "job.options.decoder_layers", count, f"is more than the {len(layers)} that there are")
    kept = [layers[place * (len(layers) - 1) // max(1, count - 1)] for place in range(count)]
    setattr(decoder, name, nn.ModuleList(kept))
    setattr(model.config, "num_decoder_layers" if name == "block" else "decoder_layers", count)


def train(config: TrainConfig, target: Path, out: Path, work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a drafter for the target; writes `drafter/` and returns what was reached. ValueError, one line, for options
    and text that cannot be used."""
    options = typed_record(SpecDecOptions(), config.options, "job.options")
    options.check("job.options")
    require(config.data in ("target", "fixed"), "job.data", config.data, "use target or fixed with job.recipe=specdec")
    require(config.ranks == 1, "job.ranks", config.ranks, "job.recipe=specdec trains on one rank")
    tokenizer = load_tokenizer(target)
    teacher = AutoModelForSeq2SeqLM.from_pretrained(target).eval().to(config.device)
    require(options.mask_token < teacher.config.vocab_size, "job.options.mask_token", options.mask_token, "is no token")
    pairs = _pairs(config)
    held_out = min(HELD_OUT, max(1, len(pairs) // HELD_OUT_SHARE))
    tokens = written_pairs(teacher, tokenizer, pairs, config, say)
    places = torch.arange(len(tokens))
    kept, training = tokens.part(places[:held_out]), tokens.part(places[held_out:])
    torch.manual_seed(config.seed)
    model = teacher if options.start == "target" else AutoModelForSeq2SeqLM.from_pretrained(options.start)
    if options.decoder_layers:
        keep_decoder_layers(model, options.decoder_layers)
    net = MaskedBlockDrafter(model.float().train().to(config.device), options)
    size = max(1, config.batch_tokens // (int(training.text_lens.max()) + options.block))

    def step_loss(step: int, progress: float) -> StepOutcome:
        random_ = torch.Generator().manual_seed(hash((config.seed, step)) % 2**63)
        chosen = torch.randint(len(training), (size,), generator=random_)
        batch = training.part(chosen.repeat_interleave(options.cuts))
        return StepOutcome(net.loss(batch, progress, random_), int(batch.text_lens.sum()))

    def evaluate() -> dict[str, float]:
        return net.metrics(kept)

    record = fit_job(config, net, step_loss, (1e-3, 5e-4), work / NAME, evaluate=evaluate)
    before = json.loads((work / NAME / "evaluation.jsonl").read_text().splitlines()[0])
    net.eval()
    net.save(out / "drafter")
    copy_tokenizer(target, out / "drafter")
    return {
        "recipe": NAME,
        "options": asdict(options),
        "data": config.data,
        "target": str(target),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "rows": len(training),
        "training": asdict(record),
        "held_out_before": before,
        "held_out": evaluate(),
    }


def _pairs(config: TrainConfig) -> list[Pair]:
    """Those of `job.text`, else corrupted lines of the standard library."""
    if not config.text:
        return library_pairs(library_sources(load_corpus(config.seed)), config.continuation_prompts, config.seed)
    pairs = list(read_pairs(Path(config.text).expanduser()))
    if len(pairs) < 2:
        raise ValueError(f"job.text={config.text}: holds {len(pairs)} pairs, and one is held out; give more")
    random.Random(config.seed).shuffle(pairs)
    return pairs[: config.continuation_prompts]


def written_pairs(
    model: Any, tokenizer: Tokenizer, pairs: Sequence[Pair], config: TrainConfig, say: Callable[[str], None]
) -> TokenPairs:
    """The pairs in tokens: with the target's own greedy texts, or with `job.data=fixed` those that the pairs have."""
    start, end = model.config.decoder_start_token_id, model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    sources = [tokenizer.encode(pair.source).ids for pair in pairs]
    if config.data == "fixed":
        texts = [tokenizer.encode(pair.text).ids for pair in pairs]
        return TokenPairs.of(sources, [[start, *ids, *([end] if ids[-1:] != [end] else [])] for ids in texts])
    texts = list[list[int]]()
    for first in range(0, len(sources), _BATCH):
        ids, lengths = _padded(sources[first : first + _BATCH])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        limit = {"max_new_tokens": config.continuation_length, "num_beams": 1, "do_sample": False}
        written = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **limit).tolist()
        texts += [_ended(row, end) for row in written]
        say(f"the target writes texts: {len(texts)} of {len(sources)}")
    return TokenPairs.of(sources, texts)


def _ended(row: list[int], end: int) -> list[int]:
    """A text up to its end token, which may be its start token too; what follows is padding."""
    return row[: row.index(end, 1) + 1] if end in row[1:] else row


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row)
    return padded, lengths
