"""Pictures of figures: a page of panels without frames, written whole at the end. It must not know what is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from parallel.whole_files import replaced_whole

COLOURS = ("#2f6fb0", "#e08a2e", "#5aa469", "#a3487f", "#8a8a8a", "#c9a227", "#4bb0b8", "#7a5cc2")
"""The first is that of bars; lines take them in their order."""


_STYLE = Path(__file__).with_suffix(".mplstyle")


@contextmanager
def picture(
    path: Path, width: float, height: float, rows: int = 1, columns: int = 1, **sharing: Any
) -> Iterator[np.ndarray]:
    """The panels [rows, columns] of a page of so many inches, which is written as PNG when the block ends."""
    with rc_context(fname=_STYLE):
        page = Figure(figsize=(width, height))
        yield page.subplots(rows, columns, squeeze=False, **sharing)
        with replaced_whole(path) as partial:
            page.savefig(partial, format="png")
