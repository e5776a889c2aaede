"""The checkpoints of a launch, checked before a process is started for them: their weights and their vocabularies.

Reads configurations, tokenizers and the headers of weights. Must not know engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.drafters.vocabulary.token_pieces import has_same_tokens
from cluster.pocket import described
from parallel.model.checkpoint import find_tensors, tensor_shapes
from parallel.model.config_fields import read_config_file
from parallel.model.families.registry import read_config


def check_checkpoints(target: Path, drafters: Sequence[Path], translated: Sequence[Path] = ()) -> None:
    """Raise ValueError, one line, unless all weights are there, and all drafters but those `translated` have the
    target's vocabulary."""
    for key, path in (("target.path", target), *(("drafter.path", drafter) for drafter in drafters)):
        try:
            find_tensors(path, tensor_shapes(read_config(path)))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    for drafter in (one for one in drafters if one not in translated):
        check_same_vocabulary(target, drafter)


def check_same_vocabulary(target: Path, drafter: Path) -> None:
    """Raise ValueError unless every token id has the same meaning in both checkpoints.

    Model families pad their embeddings differently: with equal tokenizers the drafter's vocabulary may be the smaller.
    """
    sizes = [read_config_file(path).get("vocab_size") or 0 for path in (target, drafter)]
    same_tokens = has_same_tokens(target, drafter)
    names, remedy = (described(target), described(drafter)), "use a drafter of the same vocabulary or drafter=ngram"
    if sizes[0] != sizes[1] and not (same_tokens and sizes[1] < sizes[0]):
        raise ValueError(f"drafter.path: {names[1]} has {sizes[1]} tokens, the target {names[0]} {sizes[0]}; {remedy}")
    if same_tokens is False:
        raise ValueError(f"drafter.path: the tokenizer of {names[1]} gives other ids than that of {names[0]}; {remedy}")
