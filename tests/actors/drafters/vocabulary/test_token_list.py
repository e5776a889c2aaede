"""Token lists, and drafts of a draft model whose head has the rows of a list only."""

from __future__ import annotations

import json
import random

import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.loading import head_rows, open_draft_model
from actors.drafters.vocabulary.token_list import count_tokens, ranked_tokens, read_token_list, write_token_list
from actors.options import SchedulerConfig
from actors.protocol.messages import SamplingParams
from parallel.comm.group import SINGLE
from tests.actors.drafters.vocabulary.small_list import LISTED, every_other

VOCAB_SIZE = 97
SAMPLINGS = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=1.0, top_k=5, repetition_penalty=1.3, bad_words=((3,), (5, 7)), logit_bias=((9, 3.0), (10, 50.0))),
    dict(temperature=1.0, bad_words=tuple((token,) for token in LISTED)),  # every token of the list
]


def test_end_tokens_come_first_then_the_most_frequent():
    counts = count_tokens([[5, 5, 7], [7, 5, 9, 8]])
    assert ranked_tokens(counts, first=[1]) == [1, 5, 7, 8, 9]
    assert ranked_tokens(counts, first=[7, 1], size=3) == [7, 1, 5]
    assert ranked_tokens(counts, first=[1, 2], size=1) == [1, 2], "end tokens always stay"


def test_what_is_no_list_is_refused_in_one_line(tmp_path):
    path = tmp_path / "list.json"
    write_token_list(path, [4, 2], {4: 3}, "digest")
    assert read_token_list(path) == [4, 2]
    assert json.loads(path.read_text())["counts"] == [3, 0]
    for content in ("", "[]", '{"version": 1, "tokens": []}', '{"version": 1, "tokens": ["a"]}', '{"version": 2}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"^drafter.vocabulary=.*list.json: is no token list") as refusal:
            read_token_list(path)
        assert "\n" not in str(refusal.value)


def test_the_most_frequent_that_the_model_has_are_its_rows(tmp_path, models):
    path = tmp_path / "list.json"
    write_token_list(path, [90, 3, 2000, 7], {}, "")
    config = ModelDrafterConfig(path=str(models["drafter"]), vocabulary=str(path))
    head = head_rows(config)
    assert head is not None and (head.rows, head.columns, head.width) == ((3, 7, 90), (3, 7, 90), VOCAB_SIZE)
    head = head_rows(ModelDrafterConfig(path=str(models["drafter"]), vocabulary=str(path), vocabulary_size=2))
    assert head is not None and head.rows == (3, 90)


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["coupled", "rejection", "kseq"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("strategy", [Strategy.chain, Strategy.tree, Strategy.best_first])
def test_only_listed_tokens_are_drafted_from_laws_that_sum_to_one(models, strategy, sampling, rule):
    config = ModelDrafterConfig(
        path=str(models["drafter"]),
        strategy=strategy,
        num_draft_tokens=9,
        depth=3,
        width=3,
        kv_slots=512,
        vocabulary=every_other(),
    )
    runner, facts = open_draft_model(config, SchedulerConfig(), SINGLE, "cpu")
    assert facts["draft_vocabulary"] == len(LISTED) and facts["weight_bytes"] == runner.decoder.nbytes()
    drafter = ModelDrafter(runner, config, ModelOptions(rule, 8, (1,), 512))
    choose = random.Random(7)
    contexts = [
        Context(i, 0, [choose.randrange(2, VOCAB_SIZE) for _ in range(9)], 9, SamplingParams(seed=i, **sampling))
        for i in range(4)
    ]
    for context in contexts:
        drafter.open(context)
    drafts = drafter.propose(contexts, [9] * 4)
    bans_all = len(sampling.get("bad_words", ())) == len(LISTED)
    if not bans_all:
        assert {token for draft in drafts for token in draft.tree.token_ids[1:]} <= {*LISTED}
        assert sum(draft.tree.num_draft_tokens for draft in drafts) > 4
    for distribution in (one for draft in drafts for one in draft.distributions if one is not None):
        assert sum(distribution.probs) == pytest.approx(1) and all(prob > 0 for prob in distribution.probs)
        assert bans_all or {*distribution.token_ids} <= {*LISTED}
