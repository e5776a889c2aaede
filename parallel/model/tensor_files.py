"""A file of tensors: safetensors, or a state dictionary that `torch.save` wrote (`pytorch_model.bin`, `.pt`, `.pth`).

Both are opened without reading a tensor. A pickle is a program, so of the second kind only what cannot run one is
accepted: an archive of uncompressed parts whose pickle is short, read by PyTorch's unpickler of tensors alone
(`weights_only`), with the numbers mapped from the file. Knows no checkpoint's layout; loads PyTorch for pickles only.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor

PICKLED = {
    "pytorch_model.bin": "",
    "medusa_lm_head.pt": "",
    "consolidated.pth": "",
    "trimlp.pt": "trimlp.",
    "fast_layer1.pt": "fast_layer1.",
    "chimera_head.pt": "chimera_head.",
}
"""Files that published checkpoints consist of -> what stands before the names within, where each holds one module."""
LONGEST_PICKLE = 1 << 24
"""Bytes of the pickle beside the numbers, at most: some hundred for each tensor."""
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


class TensorSlice(Protocol):
    """One tensor of a file, of which a part can be read by indexing it."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> Any: ...


class TensorFile(Protocol):
    """The tensors of one file, by name."""

    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> TensorSlice: ...
    def get_tensor(self, name: str) -> Any: ...


def open_tensors(file: Path, framework: Literal["np", "pt"] = "pt") -> AbstractContextManager[TensorFile]:
    """`framework` "np": for names, shapes and types alone. SafetensorError, OSError or ValueError, one line, if the
    file is none of tensors."""
    if file.suffix == ".safetensors":
        return safe_open(file, framework=framework)
    return nullcontext(PickledTensors(file))


class PickledTensors:
    """The state dictionary in a file; ValueError, one line, if it is anything else."""

    def __init__(self, file: Path) -> None:
        import torch

        _check_archive(file)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle raises whatever its instructions lead to
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{file}: holds more than tensors, or is damaged ({reason}); fetch it again") from None
        if not isinstance(content, dict) or not all(map(_is_plain, content, content.values())):
            raise ValueError(f"{file}: is no state dictionary of plain tensors; save one")
        prefix = PICKLED.get(file.name, "")
        self._tensors: dict[str, Tensor] = {prefix + name: tensor for name, tensor in content.items()}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> TensorSlice:
        return _PickledSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class _PickledSlice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        name = str(self._tensor.dtype).removeprefix("torch.")
        return _CODES.get(name, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _check_archive(file: Path) -> None:
    """ValueError unless nothing in the file needs more memory than it has bytes, and its pickle only few."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error}); fetch it") from None
    except (zipfile.BadZipFile, ValueError, RuntimeError) as error:
        remedy = "fetch it again, or save it as safetensors"
        raise ValueError(f"{file}: is not whole, or was saved before PyTorch 1.6 ({error}); {remedy}") from None
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise ValueError(f"{file}: has compressed parts, which torch.save never writes; save it as safetensors")
    if any(part.file_size > LONGEST_PICKLE for part in parts if part.filename.endswith(".pkl")):
        raise ValueError(f"{file}: its pickle is longer than {LONGEST_PICKLE >> 20} MiB; save it as safetensors")


def _is_plain(name: object, tensor: object) -> bool:
    """Whether it is a dense tensor in memory, with no more numbers than are stored for it."""
    import torch

    if not isinstance(name, str) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    assert isinstance(tensor, torch.Tensor)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
