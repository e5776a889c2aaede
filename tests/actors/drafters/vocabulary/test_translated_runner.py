"""A draft model with another tokenizer as a model of the target's tokens: token-level intersection."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.loading import open_draft_model
from actors.drafters.vocabulary.translated_runner import TranslatedRunner
from actors.options import SchedulerConfig
from actors.protocol.messages import Commit, SamplingKind, SamplingParams
from actors.verification.rules import RULES
from parallel.comm.group import SINGLE
from parallel.runtime.runner import Span, open_model
from tests.actors.conftest import save_tokenizer
from tests.actors.drafters.vocabulary.small_tokenizers import AWKWARD, save, train
from tests.actors.verification.conftest import random_law
from tests.actors.verification.rule_enumeration import emission, enumerate_drafts, total_variation
from tests.matrices import in_turn

TARGET_SIZE, DRAFT_SIZE = 330, 400


def save_model(path, vocab_size, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=vocab_size, **shape, max_position_embeddings=512, initializer_range=0.5)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a target's and a draft model's checkpoint with different tokenizers."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    save(save_model(target, TARGET_SIZE), "bytes", TARGET_SIZE)
    save(save_model(draft, DRAFT_SIZE, seed=1), "pieces", DRAFT_SIZE)
    return target, draft


def open_translated(pair, **options) -> tuple[ModelDrafterConfig, Any, dict[str, object]]:
    target, draft = pair
    config = ModelDrafterConfig(path=str(draft), tokenizer=str(target), kv_slots=2000, **options)
    runner, facts = open_draft_model(config, SchedulerConfig(), SINGLE, "cpu")
    return config, runner, facts


def test_what_is_asked_of_the_model_behind_the_tokens_reaches_it(pair):
    _, runner, _ = open_translated(pair)
    runner.runner = Narrow(runner.runner)
    assert runner.longest_draft == 3, "a model that fills masks has no logits below its deepest one"
    assert runner.longest_text == 70 and runner.drops_rows, "one that drops rows reads longer texts than its positions"
    runner.run_eagerly()
    assert runner.runner.eager, "only the parts of an eager pass can be timed"


class Narrow:
    """A runner that drafts three tokens at most."""

    longest_draft = 3
    longest_text = 70
    drops_rows = True
    eager = False

    def __init__(self, runner) -> None:
        self.runner = runner

    def run_eagerly(self) -> None:
        self.eager = True


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("kind", [SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT])
def test_four_tokens_and_three_of_which_two_are_shared(tmp_path, rule, kind):
    """The law that drafts are drawn from, read off the model itself, enumerated against a random target."""
    save_tokenizer(save_model(tmp_path / "target", 4), [0, 1, 2, 3])
    save_tokenizer(save_model(tmp_path / "draft", 3), [3, 9, 1])
    _, runner, facts = open_translated((tmp_path / "target", tmp_path / "draft"))
    assert facts["draft_vocabulary"] == 2 and runner.config.vocab_size == 4
    names = itertools.count()

    def draft_law(context):
        seq_id, tokens = next(names), [2, 0, *context]
        runner.open(seq_id)
        logits = runner.forward([Span(seq_id, len(tokens))], tokens).logits
        runner.close(seq_id)
        return torch.softmax(logits[0].double(), -1).numpy()

    law = draft_law(())
    assert np.flatnonzero(law).tolist() == [1, 3] and law.sum() == pytest.approx(1)
    target = random_law(4, seed=3)
    drafts = list(enumerate_drafts(draft_law, [(kind,) * 2, (kind,)]))
    assert total_variation(emission(RULES[rule], drafts, target, 3), target, 3) < 1e-9


def awkward_tokens(choose):
    tokenizer = train("bytes", TARGET_SIZE)
    return tokenizer.encode("".join(choose.sample(AWKWARD, len(AWKWARD)))).ids


def check_rows(runner, draft, seq_id):
    """The rows that are kept are those of reading the draft model's text from scratch."""
    text, inner = runner._sequences[seq_id].text, runner.runner
    cached = inner.cached_len(seq_id)
    fresh = open_model(draft, num_slots=1000)
    fresh.open("fresh")
    fresh.forward([Span("fresh", cached)], text.token_ids[:cached])
    ours, theirs = inner.pool.slots(seq_id)[:cached], fresh.pool.slots("fresh")
    for kept, read in ((inner.pool.keys, fresh.pool.keys), (inner.pool.values, fresh.pool.values)):
        torch.testing.assert_close(kept[:, ours], read[:, theirs], atol=2e-5, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("strategy", "rule"), list(in_turn([Strategy.chain, Strategy.tree, Strategy.best_first], ["coupled", "rejection"]))
)
def test_rows_and_laws_after_any_verdict_over_awkward_text(pair, strategy, rule):
    config, runner, _ = open_translated(pair, strategy=strategy, num_draft_tokens=6, depth=3, width=2)
    drafter = ModelDrafter(runner, config, ModelOptions(rule, 8, (0,), 16))
    choose = random.Random(f"{strategy}{rule}")
    written = awkward_tokens(choose)
    context = Context(1, 0, written[:20], 20, SamplingParams(seed=1, temperature=1.0))
    drafter.open(context)
    for start in range(20, min(len(written), 90), 3):
        (draft,) = drafter.propose([context], [6])
        assert draft.tree.num_draft_tokens and all(0 <= token < TARGET_SIZE for token in draft.tree.token_ids)
        for law in (one for one in draft.distributions if one is not None):
            assert sum(law.probs) == pytest.approx(1) and all(0 <= token < TARGET_SIZE for token in law.token_ids)
        last = choose.randrange(len(draft.tree.parents)) if choose.random() < 0.5 else 0
        path = tuple(draft.tree.path_to(last)) if last else ()
        tokens = (*(draft.tree.token_ids[node] for node in path), *written[start : start + 3])
        drafter.observe(context, Commit(1, 0, len(context.token_ids), path, tokens))
        context.token_ids += tokens
        runner.runner.pool.check()
        check_rows(runner, pair[1], 1)
        if choose.random() < 0.2:
            context.cut(len(context.token_ids) - choose.randrange(1, 9))
            drafter.truncate(context)
            check_rows(runner, pair[1], 1)
    drafter.release(1)


def test_a_piece_of_text_that_takes_more_rows_than_the_pool_has_is_cut(pair):
    config, _, _ = open_translated(pair)
    small = open_draft_model(replace(config, kv_slots=30), SchedulerConfig(), SINGLE, "cpu")[0]
    tokens = train("bytes", TARGET_SIZE).encode("\U0001f600 hello \u4f60\u597d " * 4).ids[:25]
    assert isinstance(small, TranslatedRunner)
    small.open(0)
    assert small.can_reserve(25)
    assert small.forward([Span(0, 25)], tokens).logits.shape == (1, TARGET_SIZE)
    small.commit(0, range(25))
    assert small.cached_len(0) == 25 == small.runner.cached_len(0), "as many rows as it has target tokens"
    check_rows(small, pair[1], 0)
