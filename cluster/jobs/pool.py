"""`job=pool`: lends the drafter to the targets of other engines (`drafter=pool`), until SIGTERM or Ctrl-C.

One process with one drafter on one device; no engine and no target are started. `target.path` names the model of the
engines, for its vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path

from actors.logs import LogSpec, close_logs, open_logs
from actors.worker import openmp
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.jobs.serve import first_signal

_SWITCH_INTERVAL_S = 2e-4
"""The threads of the leases must not wait for that of the passes."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a drafter that cannot be lent, and for an address or a file that cannot be used."""
    openmp.configure_threads(shared=False)
    from cluster.draft_pool import DraftPool  # loads PyTorch, which reads these settings

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    terminal = Terminal()
    directory = run_dir / "logs"
    open_logs("pool", LogSpec(config.cluster.log_level, (str(directory),)))
    try:
        with first_signal() as stopping:
            with terminal.starting() as progress:
                progress("loading the drafter")
                pool = DraftPool(config, run_dir, terminal.line)
            with pool:
                terminal.line(f"lending drafter={config.drafter.name} at {pool.address}, key in {pool.key_file}")
                pool.serve(stopping.is_set)
    finally:
        close_logs()
