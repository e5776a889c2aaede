"""What running layers side by side costs in quality: how near fuzzy passes are to exact ones, and how much acceptance
that leaves, by layers side by side and by how often the KV is calibrated.

On one rank, which computes the same as many do. Acceptance is that of the drafter itself along the target's text;
nearness is taken there too, over as many fuzzy rows as gather between two calibrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.drafters.config import DraftSetup
from actors.drafters.model.config import CalibrationPolicy, ModelDrafterConfig, Parallel
from actors.options import SchedulerConfig, VerifyConfig
from actors.protocol.messages import SamplingParams
from actors.roles.draft import DraftRole
from cluster.tools.planning.layouts import FEWEST_LAYERS
from cluster.tools.planning.rounds import Script, Stage, Text, play_drafts
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.families.registry import read_config
from parallel.model.partition import LayerLayout, default_partition, partition_of
from parallel.runtime.kv_sizing import choose_dtype
from parallel.runtime.layer_parallel_runner import LayerParallelRunner, open_layer_parallel

WIDTHS = (1, 2, 3, 4)
"""Layers side by side."""


@dataclass(frozen=True, slots=True)
class Calibrating:
    """A policy: calibrate every so many rounds; 0 = never."""

    every: int = 1

    def describe(self) -> str:
        return {0: "never", 1: "every round"}.get(self.every, f"every {self.every} rounds")

    def configure(self, config: ModelDrafterConfig) -> ModelDrafterConfig:
        if not self.every:
            return replace(config, calibration_policy=CalibrationPolicy.never, calibrate_every=1)
        return replace(config, calibration_policy=CalibrationPolicy.every, calibrate_every=self.every)


POLICIES = (Calibrating(1), Calibrating(2), Calibrating(4), Calibrating(0))
"""What an ablation compares; the first is how the engine works by default."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One width under one policy, beside exact drafting on the same texts."""

    layer_group: int
    partition: tuple[int, ...]
    """Hyper-layers by their sizes."""
    calibration: str
    acceptance: tuple[float, ...]
    """By distance from the committed text, given that everything in front was accepted."""
    acceptance_length: float
    length_kept: float
    """Of the acceptance length of exact drafting, the bonus token included."""
    accepted_kept: float
    """The same of accepted draft tokens alone."""
    top1_agreement: float
    """Of the fuzzy rows: how often the likeliest token is that of an exact pass."""
    cosine: float
    """Of the hidden state behind the last layer."""
    divergence: float
    """Kullback-Leibler, exact from fuzzy, nats."""
    logit_distance: float
    """Root mean square over the vocabulary, relative to the spread of the exact logits."""


def engine_sizes(num_layers: int, width: int) -> list[int]:
    """Hyper-layers of the engine's own partition; a model too shallow for it runs its first `width` side by side."""
    if num_layers > FEWEST_LAYERS or width == 1:
        return [len(members) for members in default_partition(num_layers, width)]
    return [width, *[1] * (num_layers - width)]


def full_sizes(num_layers: int, width: int) -> list[int]:
    """The same with hyper-layers really `width` wide, as far as the layers go, where the engine evens them out."""
    sizes = engine_sizes(num_layers, width)
    if max(sizes) >= width:
        return sizes
    between = num_layers - 2
    return [1, *[width] * (between // width), *[between % width] * (between % width > 0), 1]


def widths_of(config: ModelDrafterConfig) -> list[int]:
    """Those at which this draft model has something side by side, and 1."""
    num_layers = read_config(Path(config.path)).num_layers
    most = num_layers - 2 if num_layers > FEWEST_LAYERS else num_layers
    return [width for width in WIDTHS if width <= max(1, most)]


def measure_acceptance(
    config: ModelDrafterConfig,
    sizes: Sequence[int],
    calibrating: Calibrating,
    texts: Sequence[Text],
    sampling: SamplingParams,
    device: str = "cpu",
) -> tuple[tuple[float, ...], float]:
    """(acceptance by distance, accepted draft tokens a round) of the drafter itself, once along all texts."""
    drafter = calibrating.configure(replace(config, parallel=Parallel.layer, ranks=1))
    drafter = replace(drafter, layer_group=0, layer_partition=list(sizes))
    built, _ = drafter.build(DraftSetup(VerifyConfig(), "sync", SchedulerConfig(max_num_seqs=1), SINGLE, device, ()))
    script = Script(tuple(texts), sampling, 1, (config.num_draft_tokens,), seconds=0.0)
    played = play_drafts(DraftRole(built), script, Stage(device=device))
    return played.acceptance(), sum(played.accepted) / played.num_rounds


class Nearness:
    """Compares fuzzy rows with exact ones along texts, for one partition."""

    def __init__(self, config: ModelDrafterConfig, sizes: Sequence[int], num_slots: int, device: str = "cpu") -> None:
        dtype = choose_dtype(config.dtype, device)
        layout = LayerLayout(partition_of(sizes, sum(sizes)), 1)
        self._runner: LayerParallelRunner = open_layer_parallel(
            config.path, layout, device=device, dtype=dtype, num_slots=num_slots
        )

    @torch.inference_mode()
    def measure(self, texts: Sequence[Text], run: int) -> tuple[float, float, float, float]:
        """(top-1 agreement, cosine, divergence, distance of logits), means over runs of `run` fuzzy rows behind exact
        ones; 0: from the prompt to the end."""
        pairs = [pair for text in texts for pair in self._runs(text, run or len(text.token_ids))]
        exact, fuzzy, exact_hidden, fuzzy_hidden = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        p, q = exact.log_softmax(-1), fuzzy.log_softmax(-1)
        distance = (exact - fuzzy).square().mean(-1).sqrt() / exact.std(-1)
        return (
            (exact.argmax(-1) == fuzzy.argmax(-1)).float().mean().item(),
            F.cosine_similarity(exact_hidden, fuzzy_hidden, dim=-1).mean().item(),
            max(0.0, (p.exp() * (p - q)).sum(-1).mean().item()),
            distance.mean().item(),
        )

    @torch.inference_mode()
    def input_similarity(self, texts: Sequence[Text]) -> list[float]:
        """Cosine of a layer's input and the input of the layer 1, 2, 3 layers further on: what it reads instead."""
        num_layers = self._runner.config.num_layers
        sums = [[] for _ in range(min(3, num_layers - 1))]
        for text in texts:
            self._runner.open(0)
            output = self._runner.forward([_whole(text)], text.token_ids, taps=range(num_layers))
            self._runner.close(0)
            for ahead, found in enumerate(sums, 1):
                for first in range(1, num_layers - ahead):
                    pair = output.features[first], output.features[first + ahead]
                    found.append(F.cosine_similarity(*pair, dim=-1).mean().item())
        return [sum(found) / len(found) for found in sums if found]

    def _runs(self, text: Text, run: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        runner, tokens = self._runner, text.token_ids
        runner.open(0)
        exact = runner.forward([_whole(text)], tokens)
        runner.drop_pending(0)
        for start in range(text.prompt_len, len(tokens), run):
            done = runner.cached_len(0)
            runner.forward([Span(0, start - done, num_logits=0)], tokens[done:start])
            runner.commit(0, range(start - done))
            count = min(run, len(tokens) - start)
            fuzzy = runner.forward([Span(0, count, num_logits=count)], tokens[start : start + count], fuzzy=True)
            runner.drop_pending(0)
            rows = slice(start, start + count)
            yield exact.logits[rows], fuzzy.logits, exact.hidden[rows], fuzzy.hidden
        runner.close(0)


def _whole(text: Text) -> Span:
    return Span(0, len(text.token_ids), num_logits=len(text.token_ids))


def compare(
    config: ModelDrafterConfig,
    texts: Sequence[Text],
    sampling: SamplingParams,
    policies: Sequence[Calibrating],
    device: str = "cpu",
    planned: Iterable[tuple[int, ...]] = (),
) -> list[Fidelity]:
    """Every partition under every policy, each once; the first is exact drafting. Those that are `planned` are among
    them, and with several policies also the widths that the engine's own partition of this model does not reach."""
    num_layers = read_config(Path(config.path)).num_layers
    widths = widths_of(config)
    tried = [tuple(engine_sizes(num_layers, width)) for width in widths] + list(planned)
    if len(policies) > 1:
        tried += [tuple(full_sizes(num_layers, width)) for width in widths]
    num_slots = max(len(text.token_ids) for text in texts) + 1
    found: list[Fidelity] = []
    exact_accepted = 0.0
    for sizes in dict.fromkeys(tried):
        width = max(sizes)
        nearness = Nearness(config, sizes, num_slots, device)
        for policy in policies if width > 1 else [Calibrating()]:
            acceptance, accepted = measure_acceptance(config, sizes, policy, texts, sampling, device)
            exact_accepted = exact_accepted or accepted
            run = round(policy.every * (accepted + 1)) if policy.every != 1 else config.num_draft_tokens - 1
            found.append(
                Fidelity(
                    width,
                    sizes,
                    policy.describe() if width > 1 else "exact",
                    acceptance,
                    accepted + 1,
                    (accepted + 1) / (exact_accepted + 1),
                    accepted / exact_accepted if exact_accepted else 1.0,
                    *nearness.measure(texts, max(1, run) if policy.every else 0),
                )
            )
    return found


def input_similarity(config: ModelDrafterConfig, texts: Sequence[Text], device: str = "cpu") -> list[float]:
    """Cosine of a layer's input and that of the layer 1, 2, 3 further on, which would read it in its place."""
    num_layers = read_config(Path(config.path)).num_layers
    num_slots = max(len(text.token_ids) for text in texts)
    return Nearness(config, [1] * num_layers, num_slots, device).input_similarity(texts)
