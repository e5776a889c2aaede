"""`job=tree`: the best fixed trees for a target and its draft model or speculator, for `drafter.tree` (Sequoia).

Completes prompts with a draft of `job.width` children of the root and counts how often each of them is the accepted
one; a dynamic program makes the best tree of every size from that. In one process, no engine: nothing is timed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.fixed_trees import best_trees, expected_accepted, write_trees
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.verification.features import FeatureReader
from actors.verification.verifier import Verifier
from cluster.config.jobs import TreeConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.observability.report import write_json
from cluster.tools.bench.rounds import CountedRound, acceptance_by_rank, complete
from cluster.tools.offline import OfflineTask, open_alone, read_task, setup_beside
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.nested_runner import NestedRunner
from parallel.whole_files import make_folder

BATCH = 8
"""Prompts that are completed together."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read or leave no room for their completions."""
    job: TreeConfig = config.job
    terminal, task = Terminal(), read_task(config)
    assert isinstance(config.drafter, ModelDrafterConfig | SpeculatorDrafterConfig)
    num_slots = BATCH * (task.longest + 2 * job.width + 2)
    with terminal.starting() as progress:
        progress("loading target and drafter")
        runner = config.drafter.on_target(open_alone(config.target, num_slots))
        drafter = _drafter(config, runner, num_slots, task)
    task.check_room(min(one.config.max_positions for one in (runner, drafter.runner)) - job.width - 1)
    features = (
        FeatureReader(config.drafter.taps(runner.config.num_layers - config.target.stretch))
        if config.drafter.reads_features
        else None
    )
    verifier = Verifier(runner, str(config.verify.rule), task.eos_token_ids, features=features)
    rounds: list[CountedRound] = []
    with torch.inference_mode(), terminal.counting("completing prompts", len(task.prompts)) as bar:
        for first in range(0, len(task.prompts), BATCH):
            some = task.prompts[first : first + BATCH]
            rounds += complete(verifier, drafter, some, task.sampling[0], job.width, task.num_tokens, features)
            for _ in some:
                bar.advance()
    acceptance = acceptance_by_rank(rounds, job.width)
    trees = best_trees(acceptance, job.nodes, min(job.depth, drafter.runner.longest_draft))
    out = Path(job.out).expanduser() if job.out else run_dir / "trees.json"
    make_folder(out.parent)
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


def _drafter(config: LaunchConfig, target: DecoderRunner, num_slots: int, task: OfflineTask) -> ModelDrafter:
    """The launch's drafter, in turn; each draft has `job.width` children of the root."""
    assert isinstance(config.drafter, ModelDrafterConfig | SpeculatorDrafterConfig)
    width = config.job.width
    star = replace(
        config.drafter, strategy=Strategy.tree, branching=[width], tree="", num_draft_tokens=width, merge_ngram=0
    )
    setup = setup_beside(target, config, task)
    if isinstance(star, ModelDrafterConfig):
        return ModelDrafter(_open(star, num_slots), star, setup.model_options)
    drafter, _ = star.build(setup)
    assert isinstance(drafter, ModelDrafter)
    return drafter


def _open(config: ModelDrafterConfig, num_slots: int) -> DecoderRunner:
    runner = open_alone(config, num_slots)
    if config.prefixes:
        return NestedRunner(runner.decoder, runner.pool, config.prefixes, config.prefix_confidence)
    return runner
