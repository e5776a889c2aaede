"""The checkpoints of a launch: what is refused before a process is started."""

from __future__ import annotations

import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from cluster import pocket
from cluster.io.checkpoints import check_checkpoints, check_same_vocabulary
from tests.cluster.io.test_text import save


@pytest.mark.parametrize(("broken", "key"), [("a", "target.path"), ("b", "drafter.path")])
def test_missing_weights_name_the_option_and_the_file(tiny_checkpoint, tmp_path, broken, key):
    paths = [shutil.copytree(tiny_checkpoint("Llama"), tmp_path / name) for name in "ab"]
    check_checkpoints(paths[0], ModelDrafterConfig(path=str(paths[1])))
    (tmp_path / broken / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"^{key}: {tmp_path / broken}: holds neither model.safetensors nor"):
        check_checkpoints(paths[0], ModelDrafterConfig(path=str(paths[1])))


def test_the_same_vocabulary_is_fine(tmp_path):
    check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b"))


def test_a_drafter_without_a_tokenizer_is_believed(tmp_path):
    check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b", tokenizer=None))


def test_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^drafter\.path: .*/b has 300 tokens, the target .*/a 257; use"):
        check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b", vocab_size=300))


def test_a_family_may_pad_its_smaller_model_less(tmp_path):
    check_same_vocabulary(save(tmp_path / "a", vocab_size=320), save(tmp_path / "b", vocab_size=300))
    with pytest.raises(ValueError, match="has 320 tokens, the target .* 300;"):
        check_same_vocabulary(save(tmp_path / "c", vocab_size=300), save(tmp_path / "d", vocab_size=320))


def test_other_ids_for_the_same_tokens_are_refused(tmp_path):
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)]
    other = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    with pytest.raises(ValueError, match=r"^drafter\.path: the tokenizer of .*/b gives other ids"):
        check_same_vocabulary(save(tmp_path / "a"), save(tmp_path / "b", tokenizer=other))


def test_a_speculator_is_of_its_target(tiny_checkpoint):
    drafter = SpeculatorDrafterConfig(path=str(pocket.SPECULATOR))
    check_checkpoints(pocket.TARGET, drafter)
    with pytest.raises(ValueError, match=r"^drafter\.path: "):
        check_checkpoints(tiny_checkpoint("Llama"), drafter)


def test_a_speculator_is_no_draft_model():
    with pytest.raises(ValueError, match=r"^drafter\.path: .*/speculator \(bundled\) is a speculator"):
        check_checkpoints(pocket.TARGET, ModelDrafterConfig(path=str(pocket.SPECULATOR)))


def test_a_draft_model_of_another_vocabulary_is_refused_unless_it_is_translated(tiny_checkpoint):
    target, other = tiny_checkpoint("Llama"), str(tiny_checkpoint("Llama", vocab_size=300, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"^drafter\.path: .* has 300 tokens, the target .* 257;"):
        check_checkpoints(target, ModelDrafterConfig(path=other))
    check_checkpoints(target, ModelDrafterConfig(path=other, tokenizer="own"))
