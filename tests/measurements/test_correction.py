"""The program that makes a pocket encoder-decoder: what a smaller drafter begins with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BartForConditionalGeneration

from docs.measurements.correction import write_shallow
from tests.families import tiny_encoder_decoder


@torch.no_grad()
def test_a_shallow_drafter_begins_with_the_first_layers_of_the_decoder(tmp_path: Path):
    target = tiny_encoder_decoder("Bart", 0)
    target.save_pretrained(tmp_path / "target")
    write_shallow(tmp_path, 1)
    shallow = BartForConditionalGeneration.from_pretrained(tmp_path / "shallow").eval()
    assert target.config.decoder_layers > shallow.config.decoder_layers == len(shallow.model.decoder.layers) == 1
    whole = target.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in shallow.state_dict().items())
    assert shallow(torch.tensor([[5, 6, 7]]), decoder_input_ids=torch.tensor([[2, 9]])).logits.isfinite().all()
