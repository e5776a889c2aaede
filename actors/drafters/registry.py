"""The registry of drafters: name -> configuration record. Torch-free.

To add a drafter, write one file with its record and its class, and add one row here and one in
`tests/actors/test_contract.py`.
"""

from __future__ import annotations

from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig
from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig, NoDrafterConfig
from actors.drafters.jacobi.config import JacobiDrafterConfig, LookaheadDrafterConfig
from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.retrieval.config import RestDrafterConfig
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig

DRAFTERS: dict[str, type[DrafterConfig]] = {
    "none": NoDrafterConfig,
    "model": ModelDrafterConfig,
    "speculator": SpeculatorDrafterConfig,
    "self": SelfDrafterConfig,
    "ngram": NgramDrafterConfig,
    "suffix": SuffixDrafterConfig,
    "maxgram": MaxgramDrafterConfig,
    "copy": CopyDrafterConfig,
    "recycling": RecyclingDrafterConfig,
    "aded": AdedDrafterConfig,
    "rest": RestDrafterConfig,
    "jacobi": JacobiDrafterConfig,
    "lookahead": LookaheadDrafterConfig,
    "cascade": CascadeDrafterConfig,
    "auto": AutoDrafterConfig,
}
