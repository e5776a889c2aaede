"""The levels of a cascade on the command line: names, keys, defaults, and what is refused in one line."""

from __future__ import annotations

import pytest

from actors.options import ModelDrafterConfig, NgramDrafterConfig, Strategy, checkpoints
from cluster import pocket
from cluster.config import load_config


def cascade(*overrides: str):
    return load_config(["drafter=cascade", *overrides]).drafter


def test_names_and_keys_become_records_and_paths_exist():
    drafter = cascade("drafter.levels=[maxgram,{name: model, num_draft_tokens: 3, dtype: float32},model]")
    base, middle, last = drafter.levels
    assert base.name == "maxgram" and base.max_places == 64
    assert isinstance(middle, ModelDrafterConfig) and (middle.num_draft_tokens, middle.dtype) == (3, "float32")
    assert checkpoints(drafter) == [str(pocket.DRAFTER)] * 2 and last.strategy is Strategy.chain


def test_the_draft_length_is_the_last_levels_and_its_tails_unless_it_is_given():
    assert cascade().num_draft_tokens == 5 and isinstance(cascade().levels[0], NgramDrafterConfig)
    assert cascade("drafter.tails=[0,3]").num_draft_tokens == 8
    assert cascade("drafter.num_draft_tokens=2").num_draft_tokens == 2


def test_a_checked_configuration_can_be_checked_again():
    """As `job=bench` does with every setting of its axes, which it also collects in a dictionary."""
    from dataclasses import replace

    from cluster.config import checked

    config = load_config(["drafter=cascade"])
    assert checked(config).drafter == config.drafter
    assert hash(replace(config.drafter, num_draft_tokens=9)) != hash(config.drafter)


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["drafter.levels=[ngram]"], "drafter.levels=['ngram']: must be at least two"),
        (["drafter.levels=[ngram,eagle]"], "drafter.levels[1]=eagle: is no level; give a name or"),
        (["drafter.levels=[model,ngram]"], "drafter.levels[1]=ngram: only the first level may lack a model"),
        (["drafter.levels=[{name: ngram, pace: 2},model]"], "drafter.levels[0].pace: no such key"),
        (["drafter.levels=[{name: ngram, max_ngram: n},model]"], "drafter.levels[0].max_ngram=n: must be of type"),
        (["drafter.levels=[{name: ngram, min_ngram: 0},model]"], "drafter.levels[0].min_ngram=0: must be at least 1"),
        (["drafter.levels=[ngram,{name: model, strategy: bush}]"], "drafter.levels[1].strategy=bush: is unknown"),
        (["drafter.levels=[ngram,{name: model, strategy: tree}]"], "drafter.levels[1].strategy=tree: a level that"),
        (["drafter.levels=[ngram,{name: model, path: nowhere}]"], "drafter.levels[1].path=nowhere"),
        (["drafter.tails=[1]"], "drafter.tails=[1]: give one for each of the 2 levels"),
        (["drafter.tails=[1,0]"], "drafter.tails[0]=1: must be 0 or above, and 0 for the first"),
        (["drafter.tails=[0,2]", "verify=kseq"], "drafter.tails=(0, 2): are not drawn as verify=kseq needs"),
        (["drafter.levels=[{name: model, ranks: 2, parallel: tensor},model]"], "drafter.levels[0]=model: lives with"),
    ],
)
def test_refusals(overrides, line):
    with pytest.raises(ValueError) as caught:
        cascade(*overrides)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
