"""A request's own bound on its drafts holds in every pipeline and placement, and changes no token."""

from __future__ import annotations

import pytest

from actors.drafters.draft_ahead.tree import AHEAD
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.options import PipelineConfig, PipelineName
from actors.protocol.messages import SamplingParams
from tests.matrices import in_turn

PROMPTS = ["abcabcabc", "xyxyxy"]
SAMPLING = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
PIPELINES = [str(name) for name in PipelineName if name != PipelineName.plain]


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", list(in_turn(PIPELINES, times={"pearl": 0, "tree": 0, "pingpong": 0})))
def test_no_draft_is_longer_than_its_request_allows(open_engine, pipeline):
    engine = open_engine("model", pipeline=PipelineConfig(PipelineName(pipeline), adaptive=False))
    plain = engine.generate(PROMPTS, SAMPLING, drafter="none")
    free = engine.generate(PROMPTS, SAMPLING)
    bound = engine.generate(PROMPTS, SAMPLING, num_draft_tokens=1)
    assert [c.token_ids for c in plain] == [c.token_ids for c in free] == [c.token_ids for c in bound]
    assert all(c.stats.num_draft_tokens <= c.stats.num_spec_steps for c in bound)
    if pipeline not in AHEAD:  # whose target goes on without a draft that is not there yet
        assert any(c.stats.num_draft_tokens > c.stats.num_spec_steps for c in free)
        assert all(c.stats.num_draft_tokens > 0 for c in bound)


def test_it_holds_for_drafts_made_beside_the_target(open_engine):
    engine = open_engine(NgramDrafterConfig(min_ngram=1, placement="attached"))
    beside = engine.submit("abcabcabc", SAMPLING)
    bound = engine.submit("abcabcabc", SAMPLING, num_draft_tokens=1)
    assert beside.result().token_ids == bound.result().token_ids
    assert 0 < bound.stats.num_draft_tokens <= bound.stats.num_spec_steps
    assert beside.stats.num_draft_tokens > beside.stats.num_spec_steps


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_that_allows_no_draft_is_refused(open_engine, bound):
    with pytest.raises(ValueError, match=r"^num_draft_tokens: .* must be at least 1"):
        open_engine("ngram").submit("a", num_draft_tokens=bound)
