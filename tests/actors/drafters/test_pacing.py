"""`drafter.pace_ms`: every pass of every drafter with a model waits, no lookup does, and no token changes."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Translation
from actors.drafters.registry import DRAFTERS
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from parallel.runtime import pacing
from tests.matrices import in_turn

LOOKUP = NgramDrafterConfig(min_ngram=1)
PACE_MS = 500.0


def model(**keys):
    return ModelDrafterConfig(num_draft_tokens=4, kv_slots=4096, pace_ms=PACE_MS, **keys)


PACED = {
    "model": model(),
    "prefixes": model(prefixes=[1, 2], prefix_confidence=0.3),
    "foreign": model(path="foreign", tokenizer="target"),
    "strings": model(path="foreign", tokenizer="target", translate=Translation.strings),
    "auto": AutoDrafterConfig(drafters=[LOOKUP, model()], num_draft_tokens=4),
    "cascade": CascadeDrafterConfig(levels=[LOOKUP, model(path="drafter")], num_draft_tokens=4),
    "first level": CascadeDrafterConfig(
        levels=[model(path="small"), ModelDrafterConfig(path="drafter")], num_draft_tokens=4
    ),
}
ON_TARGET = {
    "model": model(),
    "self": SelfDrafterConfig(exit=1, pace_ms=PACE_MS),
    "self above a lookup": CascadeDrafterConfig(
        levels=[LOOKUP, SelfDrafterConfig(exit=1, pace_ms=PACE_MS)], num_draft_tokens=4
    ),
    "eagle": SpeculatorDrafterConfig(path="eagle", num_draft_tokens=4, pace_ms=PACE_MS),
}


@pytest.fixture
def sleeps(monkeypatch):
    """Seconds of every wait for a pace, which end at once."""
    waited: list[float] = []
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=waited.append))
    return waited


def serve(open_room, make_requests, config=None, **options):
    room = open_room(config, **options).serve(make_requests(2, max_tokens=12))
    return room.tokens, room.ends


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "pipeline"),
    list(in_turn(PACED, ["sync", "branches"], exists=lambda *of: of != ("strings", "branches"))),
)
def test_a_draft_model_waits_in_its_own_role(open_room, make_requests, sleeps, drafter, pipeline):
    plain = serve(open_room, make_requests, pipeline="plain")
    assert not sleeps, "a pace of the drafter is not the target's"
    assert serve(open_room, make_requests, PACED[drafter], pipeline=pipeline) == plain
    assert sleeps and all(0 < seconds <= 4 * PACE_MS / 1e3 for seconds in sleeps)


@pytest.mark.extended
@pytest.mark.parametrize("drafter", ON_TARGET)
def test_a_drafter_waits_on_the_target_too(open_room, make_requests, sleeps, drafter):
    plain = serve(open_room, make_requests, pipeline="plain")
    assert serve(open_room, make_requests, ON_TARGET[drafter], attached=True) == plain
    assert sleeps and all(0 < seconds <= 5 * PACE_MS / 1e3 for seconds in sleeps)


def test_what_has_no_passes_has_no_pace():
    """A key that would do nothing does not exist."""
    for name, record in DRAFTERS.items():
        is_paced = "pace_ms" in record.__dataclass_fields__
        assert is_paced == (name in ("model", "speculator", "self")), name
