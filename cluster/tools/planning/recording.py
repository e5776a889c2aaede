"""Records a transcript: one pass of the draft model over each text, and what it would have listed at every place.

Given the true text in front, a draft model's choices do not depend on how drafts are made; only the time does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import SamplingParams, TokenTree
from actors.sampling.logits import NodeRows, process_batch, top_children
from cluster.tools.planning.rounds import Text
from cluster.tools.planning.transcript import Recorded, Transcript
from parallel.kv.pass_plan import Span
from parallel.runtime.kv_sizing import choose_dtype
from parallel.runtime.runner import ModelRunner, open_model

CHOICES = 8
"""Ranked choices kept of every place."""


def record(
    config: ModelDrafterConfig,
    device: str,
    texts: Sequence[Text],
    sampling: SamplingParams,
    eos_token_ids: tuple[int, ...],
) -> Transcript:
    longest = max(len(text.token_ids) for text in texts)
    runner = open_model(config.path, device=device, dtype=choose_dtype(config.dtype, device), num_slots=longest)
    tokens = [token for text in texts for token in _ranked(runner, text, sampling, eos_token_ids)]
    return Transcript(tuple(tokens))


@torch.inference_mode()
def _ranked(
    runner: ModelRunner, text: Text, sampling: SamplingParams, eos_token_ids: tuple[int, ...]
) -> list[Recorded]:
    prompt, written = text.token_ids[: text.prompt_len], text.token_ids[text.prompt_len :]
    rows = NodeRows(sampling, text.prompt_len, prompt, TokenTree.chain(prompt[-1], written[:-1]))
    runner.open(0)
    spans = [Span(0, len(text.token_ids) - 1, num_logits=len(written))]
    scores = process_batch(runner.forward(spans, text.token_ids[:-1]).logits, [rows], eos_token_ids)
    runner.close(0)
    found = top_children(scores, [sampling] * len(written), rows.positions(), CHOICES)
    choices, log_probs = (values.tolist() for values in found)
    return [
        Recorded(token, tuple(best), tuple(probs))
        for token, best, probs in zip(written, choices, log_probs, strict=True)
    ]
