"""`job=tree`: the best fixed trees for a target and its draft model or speculator, for `drafter.tree` (Sequoia).

Completes prompts with a draft of `job.width` children of the root and counts how often each of them is the accepted
one; a dynamic program makes the best tree of every size from that. In one process, no engine: nothing is timed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from actors.drafters.config import DraftSetup
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.fixed_trees import best_trees, expected_accepted, write_trees
from actors.drafters.model.loading import head_rows
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.verification.features import FeatureReader
from actors.verification.verifier import Verifier
from cluster.config.jobs import TreeConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.observability.report import write_json
from cluster.tools.bench.rounds import CountedRound, acceptance_by_rank, complete
from cluster.tools.planning.layer_choice import open_target
from parallel.comm.group import SINGLE
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.kv_sizing import choose_dtype, choose_weights
from parallel.runtime.nested_runner import NestedRunner
from parallel.runtime.runner import open_model

BATCH = 8
"""Prompts that are completed together."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read or leave no room for their completions."""
    job: TreeConfig = config.job
    terminal, target = Terminal(), Path(config.target.path)
    assert isinstance(config.drafter, ModelDrafterConfig | SpeculatorDrafterConfig)
    tokenizer, eos = load_tokenizer(target), read_eos_token_ids(target)
    texts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in read_prompts(Path(job.prompts), job.limit)]
    sampling, length = config.sampling_params(tokenizer), max(map(len, texts)) + config.sampling.max_tokens
    num_slots = BATCH * (length + 2 * job.width + 2)
    with terminal.starting() as progress:
        progress("loading target and drafter")
        runner = config.drafter.on_target(open_target(config.target, num_slots))
        drafter = _drafter(config, runner, num_slots, eos)
    longest = min(one.config.max_positions for one in (runner, drafter.runner)) - job.width - 1
    if length > longest:
        raise ValueError(f"sampling.max_tokens={config.sampling.max_tokens}: prompt and completion exceed {longest}")
    features = (
        FeatureReader(config.drafter.taps(runner.config.num_layers - config.target.stretch))
        if config.drafter.reads_features
        else None
    )
    verifier = Verifier(runner, str(config.verify.rule), eos, features=features)
    rounds: list[CountedRound] = []
    with torch.inference_mode(), terminal.counting("completing prompts", len(texts)) as bar:
        for first in range(0, len(texts), BATCH):
            some = texts[first : first + BATCH]
            rounds += complete(verifier, drafter, some, sampling, job.width, config.sampling.max_tokens, features)
            for _ in some:
                bar.advance()
    acceptance = acceptance_by_rank(rounds, job.width)
    trees = best_trees(acceptance, job.nodes, min(job.depth, drafter.runner.longest_draft))
    out = Path(job.out).expanduser() if job.out else run_dir / "trees.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "acceptance": acceptance,
        "rounds": len(rounds),
        "verify": str(config.verify.rule),
        "sampling": asdict(config.sampling),
    }
    write_trees(out, trees, about)
    write_json(run_dir / "tree_report.json", {"job": job.name, "trees": str(out), **about, "config": asdict(config)})
    ranks = ", ".join(f"{probability:.3f}" for probability in acceptance)
    accepted = expected_accepted(trees[-1], acceptance)
    terminal.line(f"acceptance by rank: {ranks}, over {len(rounds):,} rounds")
    terminal.line(f"trees of 1 to {job.nodes} tokens written to {out}; the largest is expected to give {accepted:.2f}:")
    terminal.line(f"drafter.strategy=tree drafter.tree={out} drafter.num_draft_tokens={job.nodes}")


def _drafter(config: LaunchConfig, target: DecoderRunner, num_slots: int, eos: tuple[int, ...]) -> ModelDrafter:
    """The launch's drafter, in turn; each draft has `job.width` children of the root."""
    assert isinstance(config.drafter, ModelDrafterConfig | SpeculatorDrafterConfig)
    width = config.job.width
    star = replace(
        config.drafter, strategy=Strategy.tree, branching=[width], tree="", num_draft_tokens=width, merge_ngram=0
    )
    device = str(target.decoder.device)
    setup = DraftSetup(config.verify, "sync", config.scheduler, SINGLE, device, eos, config.target)
    if isinstance(star, ModelDrafterConfig):
        return ModelDrafter(_open(star, num_slots), star, setup.model_options)
    drafter, _ = star.build(replace(setup, target_runner=target))
    assert isinstance(drafter, ModelDrafter)
    return drafter


def _open(config: ModelDrafterConfig, num_slots: int) -> DecoderRunner:
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype, weights = (
        choose_dtype(config.dtype, device),
        choose_weights(config.weights, config.dtype, device, config.path),
    )
    runner = open_model(config.path, SINGLE, device, dtype, num_slots, weights=weights, head=head_rows(config))
    if config.prefixes:
        return NestedRunner(runner.decoder, runner.pool, config.prefixes, config.prefix_confidence)
    return runner
