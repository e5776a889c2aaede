"""Ranks that share a head, of which the lead alone follows grammars: the verdicts of one rank."""

from __future__ import annotations

from actors.grammars.compiler import GrammarCompiler
from actors.grammars.masks import GrammarMasks
from actors.protocol.grammar import Grammar
from actors.protocol.messages import (
    HASH_SEED,
    Admit,
    Proposal,
    SamplingParams,
    TokenTree,
    VerifyBatch,
    VerifyItem,
    extend_hash,
)
from actors.roles.target import TargetRole
from parallel.runtime.runner import open_model
from tests.actors.conftest import byte_level_tokenizer, save_tokenizer
from tests.parallel.conftest import make_checkpoint, on_ranks  # noqa: F401  fixtures

EOS, TEXT = 1, (5, 9, 60, 33, 2)
TREE = TokenTree((2, 70, 71, 40), (-1, 0, 0, 1))
ALLOWED = range(ord("a") - 33, ord("z") - 33 + 1)


def verdicts(path, tokenizer, group=None):
    """Those of a pass over a text with a grammar, whose draft begins as it allows, and one without."""
    is_lead = group is None or group.rank == 0
    runner = open_model(path, num_slots=64, **({} if group is None else {"group": group}))
    grammars = (lambda: GrammarMasks(GrammarCompiler(lambda: tokenizer, (EOS,)))) if is_lead else None
    role = TargetRole(runner, "coupled", [EOS], is_lead=is_lead, grammars=grammars)
    sampling, letters = SamplingParams(temperature=1.0, seed=3), Grammar("regex", "[a-z]{2,9}")
    admits = tuple(Admit(i, 0, TEXT, len(TEXT), sampling, grammar=(letters, None)[i]) for i in (0, 1))
    proposal = Proposal(0, 0, len(TEXT), extend_hash(HASH_SEED, TEXT), TREE, (0, 1, 1, 1), (None,) * 4)
    items = VerifyItem(0, len(TEXT), proposal), VerifyItem(1, len(TEXT))
    ((answer,), first) = list(role.answer(VerifyBatch(1, admits, items=items))), role.splits_choice
    return answer.verdicts, first


def test_ranks_agree_with_one_rank(make_checkpoint, on_ranks, tmp_path):  # noqa: F811
    path = make_checkpoint("Llama").path
    save_tokenizer(tmp_path, range(97))
    tokenizer = byte_level_tokenizer(tmp_path)
    expected, _ = verdicts(path, tokenizer)
    assert expected[0].token_ids[0] in ALLOWED and expected[1].token_ids[0] not in ALLOWED
    lead, other = on_ranks(2, lambda group: verdicts(path, tokenizer, group))
    assert lead == (expected, True) and other == ((), True)
