"""The loss of quality in layer-parallel drafting: the acceptance, and the distance of fuzzy passes from exact ones.

By layers side by side and by how often the KV is calibrated. Runs on one rank, which computes the same as many.
Acceptance is that of the drafter along the target's text; the distance is measured over as many fuzzy rows as gather
between two calibrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.drafters.config import DraftSetup
from actors.drafters.model.config import CalibrationPolicy, ModelDrafterConfig
from actors.options import Parallel, SchedulerConfig, VerifyConfig
from actors.protocol.messages import SamplingParams
from actors.roles.draft import DraftRole
from cluster.tools.offline import open_alone
from cluster.tools.planning.layouts import FEWEST_LAYERS
from cluster.tools.planning.rounds import KnownText, ReplayRank, ReplayScript, replay_drafts
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.families.registry import read_config
from parallel.model.partition import LayerLayout, default_partition, partition_of
from parallel.runtime.decoder_runner import DecoderRunner

WIDTHS = (1, 2, 3, 4)
"""Layers side by side."""
INTERVALS = (1, 2, 4, 0)
"""Rounds between calibrations that an ablation compares, 0 = never; the first is the engine's default."""


def describe_interval(every: int) -> str:
    return {0: "never", 1: "every round"}.get(every, f"every {every} rounds")


def calibrated(config: ModelDrafterConfig, every: int) -> ModelDrafterConfig:
    """`config` with one calibration in `every` rounds, 0 = none."""
    policy = CalibrationPolicy.every if every else CalibrationPolicy.never
    return replace(config, calibration_policy=policy, calibrate_every=every or 1)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One partition under one calibration interval, relative to exact drafting on the same texts."""

    layer_group: int
    partition: tuple[int, ...]
    """Sizes of its hyper-layers."""
    calibration: str
    acceptance: tuple[float, ...]
    """Acceptance by distance from the committed text, given that all draft tokens before were accepted."""
    acceptance_length: float
    length_kept: float
    """Acceptance length over that of exact drafting, the bonus token included."""
    accepted_kept: float
    """The same without the bonus token."""
    top1_agreement: float
    """Share of fuzzy rows whose likeliest token is that of an exact pass."""
    cosine: float
    """Cosine of the hidden states after the last layer."""
    divergence: float
    """KL(exact || fuzzy) in nats."""
    logit_distance: float
    """Root mean square over the vocabulary, relative to the spread of the exact logits."""


def engine_sizes(num_layers: int, width: int) -> list[int]:
    """The engine's own partition; a model too shallow for it runs its first `width` layers side by side."""
    if num_layers > FEWEST_LAYERS or width == 1:
        return [len(members) for members in default_partition(num_layers, width)]
    return [width, *[1] * (num_layers - width)]


def full_sizes(num_layers: int, width: int) -> list[int]:
    """Sizes of hyper-layers, as many of exactly `width` as fit; `engine_sizes` makes them nearly equal instead."""
    sizes = engine_sizes(num_layers, width)
    if max(sizes) >= width:
        return sizes
    between = num_layers - 2
    return [1, *[width] * (between // width), *[between % width] * (between % width > 0), 1]


def widths_of(config: ModelDrafterConfig) -> list[int]:
    """1, and the widths at which layers of this draft model run side by side."""
    num_layers = read_config(Path(config.path)).num_layers
    most = num_layers - 2 if num_layers > FEWEST_LAYERS else num_layers
    return [width for width in WIDTHS if width <= max(1, most)]


def measure_acceptance(
    config: ModelDrafterConfig,
    sizes: Sequence[int],
    every: int,
    texts: Sequence[KnownText],
    sampling: SamplingParams,
    device: str = "cpu",
) -> tuple[tuple[float, ...], float]:
    """(acceptance by distance, accepted draft tokens a round) of the drafter, once along all texts."""
    drafter = calibrated(replace(config, parallel=Parallel.layer, ranks=1), every)
    drafter = replace(drafter, layer_group=0, layer_partition=list(sizes))
    built, _ = drafter.build(DraftSetup(VerifyConfig(), "sync", SchedulerConfig(max_num_seqs=1), SINGLE, device, ()))
    script = ReplayScript(tuple(texts), sampling, 1, (config.num_draft_tokens,), seconds=0.0)
    result = replay_drafts(DraftRole(built), script, ReplayRank(device=device))
    return result.acceptance(), sum(result.accepted) / result.num_rounds


def open_partition(
    config: ModelDrafterConfig, sizes: Sequence[int], texts: Sequence[KnownText], device: str = "cpu"
) -> DecoderRunner:
    """The draft model with these hyper-layers on one rank."""
    layout = LayerLayout(partition_of(sizes, sum(sizes)), 1)
    return open_alone(config, max(len(text.token_ids) for text in texts) + 1, device, layout=layout)


@torch.inference_mode()
def nearness(runner: DecoderRunner, texts: Sequence[KnownText], run: int) -> tuple[float, float, float, float]:
    """(top-1 agreement, cosine, divergence, logit distance) of fuzzy rows and exact ones: means over runs of `run`
    fuzzy rows after exact ones; 0: from the prompt to the end."""
    pairs = [pair for text in texts for pair in _runs(runner, text, run or len(text.token_ids))]
    exact, fuzzy, exact_hidden, fuzzy_hidden = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    p, q = exact.log_softmax(-1), fuzzy.log_softmax(-1)
    distance = (exact - fuzzy).square().mean(-1).sqrt() / exact.std(-1)
    return (
        (exact.argmax(-1) == fuzzy.argmax(-1)).float().mean().item(),
        F.cosine_similarity(exact_hidden, fuzzy_hidden, dim=-1).mean().item(),
        max(0.0, (p.exp() * (p - q)).sum(-1).mean().item()),
        distance.mean().item(),
    )


def _runs(runner: DecoderRunner, text: KnownText, run: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(exact logits, fuzzy logits, exact hidden states, fuzzy hidden states) of each run."""
    tokens = text.token_ids
    runner.open(0)
    exact = runner.forward([_whole(text)], tokens)
    runner.drop_pending(0)
    for start in range(text.prompt_len, len(tokens), run):
        cached_len, count = runner.cached_len(0), min(run, len(tokens) - start)
        runner.forward([Span(0, start - cached_len, num_logits=0)], tokens[cached_len:start])
        runner.commit(0, range(start - cached_len))
        rows = slice(start, start + count)
        fuzzy = runner.forward([Span(0, count, num_logits=count)], tokens[rows], fuzzy=True)
        runner.drop_pending(0)
        yield exact.logits[rows], fuzzy.logits, exact.hidden[rows], fuzzy.hidden
    runner.close(0)


def _whole(text: KnownText) -> Span:
    return Span(0, len(text.token_ids), num_logits=len(text.token_ids))


@torch.inference_mode()
def input_similarity(config: ModelDrafterConfig, texts: Sequence[KnownText], device: str = "cpu") -> list[float]:
    """Cosine of a layer's input and that of the layer 1, 2, 3 further on, which would read it in its place."""
    num_layers = read_config(Path(config.path)).num_layers
    runner = open_partition(config, [1] * num_layers, texts, device)
    cosines: list[list[float]] = [[] for _ in range(min(3, num_layers - 1))]
    for text in texts:
        runner.open(0)
        features = runner.forward([_whole(text)], text.token_ids, taps=range(num_layers)).features
        runner.close(0)
        for ahead, found in enumerate(cosines, 1):
            for first in range(1, num_layers - ahead):
                found.append(F.cosine_similarity(features[first], features[first + ahead], dim=-1).mean().item())
    return [fmean(found) for found in cosines if found]


def compare(
    config: ModelDrafterConfig,
    texts: Sequence[KnownText],
    sampling: SamplingParams,
    intervals: Sequence[int],
    device: str = "cpu",
    planned: Iterable[tuple[int, ...]] = (),
) -> list[Fidelity]:
    """Every partition at every calibration interval, each once; the first is exact drafting. Includes the `planned`
    ones and, with several intervals, widths that the engine's own partition of this model does not reach."""
    num_layers = read_config(Path(config.path)).num_layers
    widths = widths_of(config)
    tried = [tuple(engine_sizes(num_layers, width)) for width in widths] + list(planned)
    if len(intervals) > 1:
        tried += [tuple(full_sizes(num_layers, width)) for width in widths]
    found: list[Fidelity] = []
    exact_accepted = 0.0
    for sizes in dict.fromkeys(tried):
        width = max(sizes)
        runner = open_partition(config, sizes, texts, device)
        for every in intervals if width > 1 else [1]:
            acceptance, accepted = measure_acceptance(config, sizes, every, texts, sampling, device)
            exact_accepted = exact_accepted or accepted
            run = max(1, round(every * (accepted + 1)) if every != 1 else config.num_draft_tokens - 1)
            calibration = describe_interval(every) if width > 1 else "exact"
            kept = (accepted + 1) / (exact_accepted + 1), accepted / exact_accepted if exact_accepted else 1.0
            near = nearness(runner, texts, run if every else 0)
            found.append(Fidelity(width, sizes, calibration, acceptance, accepted + 1, *kept, *near))
    return found
