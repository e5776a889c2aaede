"""The registry of drafters: name -> configuration record, whose module is loaded when it is looked up. Torch-free.

To add a drafter, write one file with its record and its class, and add one row here; `CONTRIBUTING.md` names the rows
of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from actors.drafters.config import DrafterConfig


class DrafterRegistry(Mapping[str, type[DrafterConfig]]):
    """`rows`: name -> module below `actors.drafters` and class."""

    def __init__(self, rows: Mapping[str, tuple[str, str]]) -> None:
        self._rows = rows

    def __getitem__(self, name: str) -> type[DrafterConfig]:
        module, record = self._rows[name]
        return getattr(import_module(f"actors.drafters.{module}"), record)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows


DRAFTERS = DrafterRegistry(
    {
        "none": ("config", "NoDrafterConfig"),
        "model": ("model.config", "ModelDrafterConfig"),
        "speculator": ("speculator.config", "SpeculatorDrafterConfig"),
        "self": ("self_speculation.config", "SelfDrafterConfig"),
        "ngram": ("lookup.ngram", "NgramDrafterConfig"),
        "suffix": ("lookup.suffix", "SuffixDrafterConfig"),
        "maxgram": ("lookup.maxgram", "MaxgramDrafterConfig"),
        "copy": ("lookup.copy", "CopyDrafterConfig"),
        "recycling": ("adjacency.config", "RecyclingDrafterConfig"),
        "aded": ("adjacency.config", "AdedDrafterConfig"),
        "rest": ("retrieval.config", "RestDrafterConfig"),
        "jacobi": ("jacobi.config", "JacobiDrafterConfig"),
        "lookahead": ("jacobi.config", "LookaheadDrafterConfig"),
        "cascade": ("cascade.config", "CascadeDrafterConfig"),
        "auto": ("auto.config", "AutoDrafterConfig"),
        "routed": ("routed.config", "RoutedDrafterConfig"),
        "pool": ("pool.config", "PoolDrafterConfig"),
    }
)
