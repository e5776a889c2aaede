"""Drafts of a model that fills blocks: chosen in one call where no draft token changes a choice, else one by one.

Both ways draft the same tokens, whatever was accepted before, and what asks for the tokens before a place takes the
longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context, Draft
from actors.drafters.model.chain_rules import ChainRule
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.model.drafter import ModelDrafter
from actors.protocol.messages import Commit, SamplingParams
from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.specdec import MaskedBlockDrafter, SpecDecOptions
from cluster.tools.training.speculators.specdiff import SpecdiffDrafter, SpecdiffOptions
from parallel.runtime.runner import open_model
from parallel.speculators.pard import filling_masks
from tests.families import tiny_encoder_decoder
from tests.matrices import in_turn

VOCAB, DEPTH, EOS, TEXT, SOURCE = 11, 6, 0, [1, 3, 9, 2, 1], (5, 6, 7, 8, 2)
BUDGETS = [DEPTH, 3]
BY_PLACE = {
    "greedy": {},
    "sampled": dict(temperature=1.0),
    "truncated": dict(temperature=0.8, top_k=4, top_p=0.9),
    "a forced end": dict(forced_eos_token_id=EOS, max_tokens=8),
    "a forced beginning": dict(forced_bos_token_id=4, temperature=1.0),
    "no early end": dict(min_tokens=4, logit_bias=((EOS, 30.0),), stop_token_ids=(4,)),
    "a bias and bad words": dict(logit_bias=((5, 2.5), (6, -1.0)), bad_words=((1,), (7,)), temperature=1.0),
    "all banned": dict(bad_words=tuple((token,) for token in range(VOCAB))),
    "all banned early": dict(min_tokens=3, stop_token_ids=tuple(range(VOCAB)), forced_bos_token_id=3),
}
BY_TEXT = {
    "no n-gram twice": dict(no_repeat_ngram_size=1),
    "longer bad words": dict(bad_words=tuple((one, one) for one in range(VOCAB))),
    "repetition": dict(repetition_penalty=3.0, temperature=1.0),
    "presence": dict(presence_penalty=2.0, temperature=1.0),
    "frequency": dict(frequency_penalty=2.0, forced_eos_token_id=EOS, max_tokens=9),
}


class Endless(ChainRule):
    """Never ends a chain, and is asked after every token."""

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        return True

    def update(self, request_id: int, num_accepted: int) -> None:
        pass

    def release(self, request_id: int) -> None:
        pass


@pytest.fixture(scope="module", params=["decoder", "filled in steps", "with an encoder"])
def checkpoint(request, tmp_path_factory) -> tuple[Path, bool]:
    """A draft model of random weights, and whether it reads a source."""
    path = tmp_path_factory.mktemp("blocks")
    if request.param == "with an encoder":
        model = tiny_encoder_decoder("Bart", 0, vocab_size=VOCAB, max_position_embeddings=64, init_std=0.3)
        MaskedBlockDrafter(model, SpecDecOptions(block=DEPTH, mask_token=VOCAB - 1)).save(path)
        return path, True
    config = drafter_config(VOCAB)
    config.initializer_range = 0.3
    options = SpecdiffOptions(depth=DEPTH, mask_token=VOCAB - 1, steps=1 + 2 * (request.param == "filled in steps"))
    SpecdiffDrafter(initialised(config, 0, "cpu"), options).save(path)
    return path, False


def rounds(checkpoint, sampling: dict, rule: str, *, one_by_one: bool) -> tuple[list[list[Draft]], list[int]]:
    """The drafts of four rounds of two requests, of which more and more tokens are accepted, and passes of each."""
    path, has_source = checkpoint
    runner = filling_masks(open_model(path, num_slots=400), path)
    drafter = ModelDrafter(runner, ModelDrafterConfig(num_draft_tokens=DEPTH), ModelOptions(rule, VOCAB, (EOS,), 512))
    if one_by_one:
        drafter.end_chains_by(Endless())
    forward, num_passes = runner.forward, [0]

    def counted(*args, **options):
        num_passes[-1] += 1
        return forward(*args, **options)

    runner.forward = counted
    params = SamplingParams(**{"max_tokens": 64, "seed": 3, **sampling})
    source = SOURCE if has_source else ()
    contexts = [Context(i, 0, TEXT[i:], len(TEXT) - i, replace(params, seed=i), source=source) for i in range(2)]
    for context in contexts:
        drafter.open(context)
    drafts = []
    for num_accepted in (0, 2, DEPTH, 1):
        drafts.append(drafter.propose(contexts, BUDGETS))
        num_passes.append(0)
        for context, draft in zip(contexts, drafts[-1], strict=True):
            path = tuple(range(1, 1 + min(num_accepted, draft.tree.num_draft_tokens)))
            tokens = (*(draft.tree.token_ids[node] for node in path), 8)
            drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), path, tokens))
            context.extend(tokens)
    return drafts, num_passes[:-1]


@pytest.mark.parametrize(
    ("what", "rule"),
    list(in_turn([*BY_PLACE, *BY_TEXT], ["coupled", "rejection"], extended=[*BY_PLACE, *BY_TEXT][1::2])),
)
def test_both_ways_draft_the_same_tokens(checkpoint, what, rule):
    sampling = (BY_PLACE | BY_TEXT)[what] | (dict(temperature=0.0) if rule == "rejection" else {})
    found, num_passes = rounds(checkpoint, sampling, rule, one_by_one=False)
    expected, num_longer = rounds(checkpoint, sampling, rule, one_by_one=True)
    assert found == expected
    longest = [max(draft.tree.num_draft_tokens for draft in drafts) for drafts in expected]
    assert max(longest) == (0 if what == "all banned" else DEPTH)
    assert num_longer >= longest
    assert num_passes == ([1] * 4 if what in BY_PLACE else num_longer)
