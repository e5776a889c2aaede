"""What drafts behind long texts, and blocks of masks, through the engine: tokens are those of transformers."""

from __future__ import annotations

import pytest
import torch

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.model.config import DraftRows, ModelDrafterConfig
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import PipelineConfig, SchedulerConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from actors.roles.target import TargetRole
from cluster.io.text import load_tokenizer
from tests.actors.small_speculators import train_speculator
from tests.matrices import in_turn

PROMPTS = [
    "def median(values):",
    "x = x + 1\nx = x + 1\nx = ",
    "return return return",
    "class Stack:\n    def push",
    "a",
    "import os, sys",
    "1 2 3 4 5 6 7 8",
    "# the end of all texts",
]
GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)
NEWEST = dict(rows=DraftRows.streaming, sinks=2, window=9)
CHOSEN = dict(rows=DraftRows.chunks, chunk_size=2, num_chunks=4, choose_every=6)
"""Texts have more rows than either."""
BLOCK = 5
"""Of the draft model that fills masks."""
SYSTEMS = "model, streaming", "model, chunks", "self, streaming", "self, chunks", "TriForce", "LongSpec", "SpecDiff"
NOT_ADAPTIVE = PipelineConfig(adaptive=False)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint("Llama")).eval()


@pytest.fixture(scope="module")
def expected(reference, tiny_checkpoint):
    tokenizer = load_tokenizer(tiny_checkpoint("Llama"))
    prompts = [torch.tensor([tokenizer.encode(prompt).ids]) for prompt in PROMPTS]
    ended = dict(max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None)
    return [reference.generate(prompt, **ended)[0, prompt.shape[1] :].tolist() for prompt in prompts]


@pytest.fixture(scope="module")
def drafter(reference, half_agreeing_drafter, tmp_path_factory):
    """The configuration of a system with so many draft tokens."""
    paths = {
        recipe: str(train_speculator(recipe, reference, half_agreeing_drafter, tmp_path_factory.mktemp(recipe)))
        for recipe in ("longspec", "specdiff")
    }

    def configured(system: str, length: int):
        model = dict(path=str(half_agreeing_drafter), device="cpu", num_draft_tokens=length)
        small = ModelDrafterConfig(**(model | {"num_draft_tokens": 2}), **NEWEST)
        own = SelfDrafterConfig(num_draft_tokens=length, **CHOSEN)
        return {
            "model, streaming": lambda: ModelDrafterConfig(**model, **NEWEST),
            "model, chunks": lambda: ModelDrafterConfig(**model, **CHOSEN),
            "self, streaming": lambda: SelfDrafterConfig(num_draft_tokens=length, **NEWEST),
            "self, chunks": lambda: own,
            "TriForce": lambda: CascadeDrafterConfig(levels=(small, own), num_draft_tokens=length),
            "LongSpec": lambda: SpeculatorDrafterConfig(**(model | {"path": paths["longspec"]})),
            "SpecDiff": lambda: ModelDrafterConfig(**(model | {"path": paths["specdiff"]})),
        }[system]()

    return configured


def tokens_of(engine, prompts=PROMPTS):
    return [completion.token_ids for completion in engine.generate(prompts, GREEDY)]


@pytest.mark.extended
@pytest.mark.parametrize(("num_draft_tokens", "system"), list(in_turn(range(1, 9), SYSTEMS)))
def test_no_length_of_a_draft_changes_a_token(open_engine, drafter, expected, system, num_draft_tokens):
    """Eight requests at a time, and one."""
    config = drafter(system, num_draft_tokens)
    with open_engine(config, scheduler=SchedulerConfig(max_num_seqs=8), pipeline=NOT_ADAPTIVE) as engine:
        assert tokens_of(engine) == expected
        assert tokens_of(engine, PROMPTS[:1]) == expected[:1]
        counters = engine.report().counters
    longest = min(num_draft_tokens, BLOCK) if system == "SpecDiff" else num_draft_tokens
    assert counters["num_accepted_tokens"] > 0 and len(counters["num_drafted_per_pos"]) == longest


@pytest.mark.extended
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "TriForce"])
def test_ranks_that_share_a_target_preempt_and_die_and_no_token_changes(
    open_engine, drafter, expected, tiny_checkpoint, monkeypatch, system
):
    """The pool is short, and one of two ranks dies in the middle of the texts. Not TriForce, of which a successor does
    not get ready (docs/long_contexts.md)."""
    answers, answer = list[bool](), TargetRole.answer

    def failing(role, *arguments):
        if not role._is_lead:
            answers.append(True)
            if len(answers) == 9:
                raise MemoryError("once")
        return answer(role, *arguments)

    monkeypatch.setattr(TargetRole, "answer", failing)
    target = TargetConfig(path=str(tiny_checkpoint("Llama")), device="cpu", kv_slots=120)
    places = SchedulerConfig(max_num_seqs=8)
    with open_engine(drafter(system, 4), tp=2, target=target, scheduler=places, pipeline=NOT_ADAPTIVE) as engine:
        for _ in range(10):  # on a busy machine one request may end before the next one comes
            assert tokens_of(engine) == expected
            counters = engine.report().counters
            if counters["num_preemptions"] and counters["num_role_losses"]:
                break
        else:
            pytest.fail("no request lost its place")
        assert [incident.identity for incident in engine.supervisor.incidents] == ["target-1"]
        assert counters["num_accepted_tokens"] > 0
