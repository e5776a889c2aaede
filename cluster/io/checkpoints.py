"""The checkpoints of a launch, checked before a process is started for them: their weights and their vocabularies.

Reads configurations, tokenizers and the headers of weights. Must not know engines.
"""

from __future__ import annotations

from pathlib import Path

from actors.drafters.config import DrafterConfig
from cluster.pocket import described
from parallel.model.checkpoint import find_tensors, tensor_shapes
from parallel.model.config_fields import read_config_file
from parallel.model.families.registry import read_config
from parallel.ranges import errors_of

_MARKS = {"speculator", "speculators_model_type"}
"""Fields of config.json that speculators alone have, ours and those of vLLM's library."""


def check_checkpoints(target: Path, drafter: DrafterConfig) -> None:
    """Raise ValueError, one line, unless all weights are there, all draft models but the translated ones have the
    target's vocabulary, and speculators were made for the target."""
    drafters = [*map(Path, drafter.models())]
    for path in drafters:
        with errors_of("drafter.path"):
            if _MARKS & read_config_file(path).keys():
                raise ValueError(f"{described(path)} is a speculator, no draft model; use drafter=speculator")
    for key, path in (("target.path", target), *(("drafter.path", one) for one in drafters)):
        with errors_of(key):
            find_tensors(path, tensor_shapes(read_config(path)))
    for path in drafter.speculators():
        from parallel.speculators.registry import check_speculator  # for speculators alone

        with errors_of("drafter.path"):
            check_speculator(path, read_config(target))
    for path in drafters:
        if str(path) not in drafter.translated_models():
            check_same_vocabulary(target, path)


def check_same_vocabulary(target: Path, drafter: Path) -> None:
    """Raise ValueError unless every token id has the same meaning in both checkpoints.

    Model families pad their embeddings differently: with equal tokenizers the drafter's vocabulary may be the smaller.
    """
    from actors.drafters.vocabulary.token_pieces import has_same_tokens

    target_size, size = (read_config_file(path).get("vocab_size") or 0 for path in (target, drafter))
    same_tokens = has_same_tokens(target, drafter)
    target_name, name, remedy = (
        described(target),
        described(drafter),
        "use a drafter of the same vocabulary or drafter=ngram",
    )
    if size > target_size or (size < target_size and not same_tokens):
        raise ValueError(f"drafter.path: {name} has {size} tokens, the target {target_name} {target_size}; {remedy}")
    if same_tokens is False:
        raise ValueError(f"drafter.path: the tokenizer of {name} gives other ids than that of {target_name}; {remedy}")
