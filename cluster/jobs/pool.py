"""`job=pool`: lends the drafter to the targets of other engines (`drafter=pool`), until SIGTERM or Ctrl-C.

One process with one drafter on one device: an actor of Ray, or with `cluster=inprocess` this process. No engine and no
target are started. `target.path` names the model of the engines, for its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.logs import LogSpec, close_logs, open_logs
from actors.worker import openmp
from cluster.config.schema import ClusterName, LaunchConfig
from cluster.io.console import Terminal
from cluster.jobs.serve import first_signal

if TYPE_CHECKING:
    from cluster.draft_pool import DraftPool
    from cluster.pool_on_ray import PoolOnRay


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a drafter that cannot be lent, and for an address or a file that cannot be used."""
    terminal = Terminal()
    try:
        with first_signal() as stopping:
            with terminal.starting() as progress:
                pool = _open(config, run_dir, terminal.line, progress)
            with pool:
                terminal.line(
                    f"lending drafter={config.drafter.name} at {pool.address}, keys in {pool.key_file.parent}"
                )
                pool.serve(stopping.is_set)
    finally:
        close_logs()


def _open(
    config: LaunchConfig, run_dir: Path, observe: Callable[[str], None], progress: Callable[[str], None]
) -> DraftPool | PoolOnRay:
    if config.cluster.name != ClusterName.inprocess:
        from cluster.pool_on_ray import PoolOnRay  # with Ray

        return PoolOnRay(config, run_dir, observe, progress)
    open_logs("pool", LogSpec(config.cluster.log_level, (str(run_dir / "logs"),)))
    openmp.configure_threads(shared=False)
    progress("loading the drafter")
    from cluster.draft_pool import open_alone  # loads PyTorch, which reads these settings

    return open_alone(config, run_dir, observe)
