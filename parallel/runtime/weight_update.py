"""Other weights for a runner that is loaded: checked on every rank first, then copied to where the present ones are.

Pool, captured passes and others that share the decoder's layers stay as they are. No sequence may be open, and no row
of a text be kept, since rows are made of weights. Knows no requests, and no reason for new weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from parallel.comm.group import SINGLE, Group
from parallel.model.weights import check_weights, read_kv_scales, reload_weights
from parallel.runtime.decoder_runner import DecoderRunner

_LINE_BYTES = 400


def update_weights(runner: DecoderRunner, path: str | Path, *, alone: bool = False) -> None:
    """Fill the runner's decoder from another checkpoint of the same layout.

    All ranks call it, and if one of them refuses the checkpoint, ValueError, one line, comes of it on every rank, and
    none has changed anything. A rank that does it `alone` asks no other.
    """
    why = ""
    try:
        check_weights(runner.decoder, path)
        _check_scales(runner, path)
    except (ValueError, OSError, SafetensorError) as error:
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    group = SINGLE if alone else runner.decoder.group
    if refusals := _lines_of_all(why, group, runner.decoder.device):
        raise ValueError(refusals[0])
    reload_weights(runner.decoder, path)


def _check_scales(runner: DecoderRunner, path: str | Path) -> None:
    pool = runner.pool
    if pool.is_fp8 and read_kv_scales(runner.decoder, path) != pool.scales:
        raise ValueError(f"{path}: has other scales of FP8 keys and values than the checkpoint that is served")


def _lines_of_all(line: str, group: Group, device: torch.device) -> list[str]:
    """The lines of all ranks that are not empty."""
    own = torch.zeros(_LINE_BYTES, dtype=torch.int32, device=device)  # collectives of gloo and NCCL take no bytes
    encoded = line.encode()[:_LINE_BYTES]
    own[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.int32)
    gathered = group.all_gather(own[None]).reshape(-1, _LINE_BYTES).tolist()
    lines = [bytes(byte for byte in row if byte).decode(errors="replace") for row in gathered]
    return [one for one in lines if one]
