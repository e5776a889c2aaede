"""A field that a record leaves out asks for nothing, counts nothing and switches nothing on, but for these."""

from __future__ import annotations

import pytest

from actors.protocol.messages import HASH_SEED
from tests.record_defaults import defaults_that_say_something

SAYS_SOMETHING: dict[str, dict[str, float]] = {
    "actors.coordinator.clients": {},
    "actors.coordinator.membership": {"RoleMembership.epoch": 1},
    "actors.coordinator.port": {},
    "actors.coordinator.round": {},
    "actors.coordinator.sequence": {"Sequence.prefix_hash": HASH_SEED},
    "actors.coordinator.spec": {"CoordinatorSpec.num_seats": 1},
    "actors.coordinator.stats": {},
    "actors.drafters.adjacency.config": {
        "RecyclingDrafterConfig.num_draft_tokens": 24,
        "RecyclingDrafterConfig.width": 8,
        "RecyclingDrafterConfig.reads_prompts": True,
        "AdedDrafterConfig.num_draft_tokens": 16,
        "AdedDrafterConfig.min_probability": 0.01,
        "AdedDrafterConfig.iterations": 150,
        "AdedDrafterConfig.width": 12,
        "AdedDrafterConfig.max_pairs": 100000,
        "AdedDrafterConfig.learns": True,
        "AdedDrafterConfig.reads_prompts": True,
    },
    "actors.drafters.auto.config": {},
    "actors.drafters.cascade.config": {},
    "actors.drafters.cascade.level": {"LevelSpec.width": 1, "LevelSpec.child_width": 1, "LevelSpec.is_last": True},
    "actors.drafters.cascade.request_state": {"RequestState.share": 1},
    "actors.drafters.draft_ahead.width": {"Step.num_passes": 1},
    "actors.drafters.interface": {"Context.prefix_hash": HASH_SEED},
    "actors.drafters.jacobi.config": {
        "JacobiDrafterConfig.num_draft_tokens": 4,
        "JacobiDrafterConfig.width": 8,
        "LookaheadDrafterConfig.num_draft_tokens": 28,
        "LookaheadDrafterConfig.window": 5,
        "LookaheadDrafterConfig.ngram": 4,
        "LookaheadDrafterConfig.guesses": 5,
        "LookaheadDrafterConfig.reads_text": True,
    },
    "actors.drafters.lookup.copy": {"CopyDrafterConfig.num_draft_tokens": 10, "CopyDrafterConfig.trigger_len": 2},
    "actors.drafters.lookup.maxgram": {
        "MaxgramDrafterConfig.num_draft_tokens": 5,
        "MaxgramDrafterConfig.max_places": 64,
        "MaxgramDrafterConfig.shared_bigrams": True,
    },
    "actors.drafters.lookup.ngram": {
        "NgramDrafterConfig.num_draft_tokens": 5,
        "NgramDrafterConfig.max_ngram": 4,
        "NgramDrafterConfig.min_ngram": 2,
    },
    "actors.drafters.lookup.suffix": {
        "SuffixDrafterConfig.num_draft_tokens": 8,
        "SuffixDrafterConfig.min_match": 2,
        "SuffixDrafterConfig.tokens_per_match": 2.0,
        "SuffixDrafterConfig.min_probability": 0.1,
        "SuffixDrafterConfig.width": 1,
        "SuffixDrafterConfig.shared_tokens": 250000,
    },
    "actors.drafters.model.config": {
        "PassDrafterConfig.num_draft_tokens": 5,
        "PassDrafterConfig.depth": 5,
        "PassDrafterConfig.width": 2,
        "PassDrafterConfig.fan_out": 6,
        "PassDrafterConfig.ahead_width": 8,
        "PassDrafterConfig.calibrate_every": 1,
        "PassDrafterConfig.sinks": 4,
        "PassDrafterConfig.window": 508,
        "PassDrafterConfig.chunk_size": 8,
        "PassDrafterConfig.num_chunks": 128,
        "PassDrafterConfig.choose_every": 64,
        "LearningDrafterConfig.online_rate": 0.0003,
        "LearningDrafterConfig.online_strength": 1.0,
        "LearningDrafterConfig.online_budget": 1.0,
        "LearningDrafterConfig.online_memory": 16384,
        "ModelDrafterConfig.mask_drafts": 1,
        "ModelDrafterConfig.ranks": 1,
        "ModelDrafterConfig.prefix_confidence": 0.6,
    },
    "actors.drafters.model.tree_growth": {},
    "actors.drafters.online.windows": {},
    "actors.drafters.retrieval.config": {
        "RestDrafterConfig.num_draft_tokens": 16,
        "RestDrafterConfig.longest_match": 16,
        "RestDrafterConfig.shortest_match": 2,
        "RestDrafterConfig.depth": 10,
        "RestDrafterConfig.max_matches": 1000,
    },
    "actors.drafters.self_speculation.config": {
        "SelfDrafterConfig.skip_share": 0.45,
        "SelfDrafterConfig.search_every": 8,
        "SelfDrafterConfig.search_window": 32,
        "SelfDrafterConfig.search_trials": 120,
        "SelfDrafterConfig.least_cosine": 0.95,
        "SelfDrafterConfig.resume": True,
    },
    "actors.drafters.speculator.config": {"SpeculatorDrafterConfig.ranks": 1},
    "actors.options": {
        "TargetConfig.num_states": 4,
        "TargetConfig.tp": 1,
        "VerifyConfig.law_size": 64,
        "PipelineConfig.adaptive": True,
        "SchedulerConfig.max_num_seqs": 64,
        "SchedulerConfig.max_num_batched_tokens": 2048,
        "SchedulerConfig.prefill_chunk": 512,
        "SchedulerConfig.prefix_cache": True,
        "SchedulerConfig.text_pass_ms": 150,
        "SamplingConfig.top_p": 1.0,
        "SamplingConfig.repetition_penalty": 1.0,
        "SamplingConfig.max_tokens": 128,
    },
    "actors.protocol.draft_tree": {"DraftNode.row": -1},
    "actors.protocol.membership": {"Alive.waiting": True},
    "actors.protocol.messages": {
        "DraftBatch.works_ahead": True,
        "ReportOrder.spans": True,
        "VerifyBatch.may_draft": True,
    },
    "actors.protocol.sampling_params": {
        "SamplingParams.top_p": 1.0,
        "SamplingParams.repetition_penalty": 1.0,
        "SamplingParams.max_tokens": 128,
    },
    "actors.verification.verifier": {"VerifyInput.drafts_follow": True},
    "actors.worker.spec": {"RankSpec.memory_part": 1.0},
}


@pytest.mark.parametrize("module", SAYS_SOMETHING)
def test_what_is_left_out_says_nothing_but_this(module):
    assert defaults_that_say_something(module) == SAYS_SOMETHING[module]
