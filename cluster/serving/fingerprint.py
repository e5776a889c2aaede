"""`system_fingerprint` of replies: a short name of the weights that made them, in their version.

It is the same on every machine and after every start, as long as checkpoint, types of numbers and version are. It must
not know replies.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_SAMPLE = 4096
"""So many bytes of each tensor are read: a checkpoint may have hundreds of gigabytes, and training changes a tensor
everywhere or not at all."""
_NUM_PLACES = 1024
"""So many places are read of a file without a list of its tensors."""
_LONGEST_HEADER = 100 << 20
"""The limit of the safetensors library."""
_LENGTH = 12
"""Hexadecimal digits of a name."""


class WeightNames:
    """Names of the versions of one target's weights; `settings` are what else decides on its numbers."""

    def __init__(self, checkpoint: Path, settings: Sequence[str]) -> None:
        self._weights = _digest(checkpoint, settings)
        self._latest = 0
        self._named = -1, ""

    def of(self, version: int | None) -> str:
        """The name of a version, by default of the latest one that is known of."""
        version = self._latest if version is None else version
        self._latest = max(self._latest, version)
        if self._named[0] != version:
            name = hashlib.sha256(f"{self._weights} {version}".encode()).hexdigest()
            self._named = version, f"fp_{name[:_LENGTH]}"
        return self._named[1]


def _digest(checkpoint: Path, settings: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(settings).encode())
    for file in sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]):
        if file.is_file():
            digest.update(f"\0{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as content:
                for part in _parts(content, file):
                    digest.update(part)
    return digest.hexdigest()


def _parts(content: BinaryIO, file: Path) -> Iterator[bytes]:
    """What stands for a file: the list of its tensors and the beginning of each, or places everywhere."""
    size, places = file.stat().st_size, list[int]()
    if file.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", content.read(8).ljust(8, b"\0"))
        header = content.read(min(length, _LONGEST_HEADER))
        yield header
        tensors = json.loads(header)
        places = [8 + length + one["data_offsets"][0] for name, one in tensors.items() if name != "__metadata__"]
    else:
        places = sorted({place * max(0, size - _SAMPLE) // _NUM_PLACES for place in range(_NUM_PLACES + 1)})
    for place in places:
        content.seek(place)
        yield content.read(_SAMPLE)
