"""Training on several ranks: Ray Train starts the processes and their process group. It must not know any method.

`ray.train` imports pandas, pyarrow and fsspec, which the extra `train` of this project installs. Ranks on several
machines read and write the same `job.work` and `job.out`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.config.schema import LaunchConfig
from cluster.runtime.ray_backend import RayBackend
from cluster.tools.training.speculators.run import Course, Texts, train_rank
from cluster.tools.training.trainer import Ranks
from parallel.whole_files import write_text

OUTCOME = "outcome.json"
"""File of the run's folder by which the first rank hands over what was reached."""


def train_on_ranks(config: LaunchConfig, course: Course, texts: Texts) -> dict[str, Any]:
    """Train on `job.ranks` processes, in a Ray of our own or that of `cluster.address`; return the first one's report.

    ValueError, one line, where Ray Train is not installed; RuntimeError for a rank that failed.
    """
    try:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.base_trainer import TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        count = course.config.ranks
        raise ValueError(f"job.ranks={count}: needs Ray Train; install it with pip install specdec[train]") from error
    on_gpus = course.config.device != "cpu"
    cluster = replace(config.cluster, name="local") if config.cluster.name == "inprocess" else config.cluster
    backend = RayBackend(replace(config, cluster=cluster))
    backend.connect()
    try:
        TorchTrainer(
            _train,
            train_loop_config={"course": course, "texts": texts},
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
            scaling_config=ScalingConfig(num_workers=course.config.ranks, use_gpu=on_gpus),
            run_config=RunConfig(name=course.config.recipe, storage_path=str(Path(course.work).absolute() / "ray")),
        ).fit()
    except TrainingFailedError as error:
        raise RuntimeError(f"job.ranks: a rank failed: {str(error).strip().splitlines()[-1]}") from error
    finally:
        backend.close()
    return json.loads((course.folder / OUTCOME).read_text())


def _train(settings: dict[str, Any]) -> None:
    """What every rank runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    course: Course = settings["course"]
    torch.set_num_threads(course.config.threads or 1)  # ranks on one machine share its cores
    if course.config.device != "cpu":
        course = replace(course, config=replace(course.config, device=str(get_device())))
    context = get_context()
    ranks = Ranks(context.get_world_rank(), context.get_world_size())
    outcome = train_rank(course, settings["texts"], ranks)
    if ranks.rank == 0:
        write_text(course.folder / OUTCOME, json.dumps(outcome))
