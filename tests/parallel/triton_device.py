"""The device on which tests run Triton's kernels: on the GPU, and without one on a device of the test's own, in
Triton's interpreter.

Either way the tensors of kernels lie on a device, so that one left in host memory fails a test on every machine, and
not only on those with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from parallel.kernels.triton_launch import INTERPRETS, has_triton
from tests.parallel.fake_accelerator import DeviceTensor, FakeAccelerator, MixedDevices


@contextmanager
def triton_device() -> Iterator[torch.device]:
    """The device, inside of the block. Skips the test where neither a GPU nor the interpreter is there."""
    if not has_triton():
        pytest.skip("needs triton: pip install triton; on a GPU also a C compiler: apt-get install gcc")
    if not INTERPRETS:
        if not torch.cuda.is_available():
            pytest.skip("TRITON_INTERPRET=0 is for machines with a CUDA device")
        yield torch.device("cuda", torch.cuda.current_device())
        return
    from triton.runtime.interpreter import GridExecutor

    with patch.object(GridExecutor, "__call__", _from_device(GridExecutor.__call__)), FakeAccelerator() as accelerator:
        yield accelerator.device


def _from_device(run):
    """Launches in the interpreter with tensors taken from the device; like a compiled kernel it takes no others."""

    def launch(executor, *arguments, **options):
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, DeviceTensor) for one in tensors):
            raise MixedDevices(f"{executor.fn.__name__}: arguments on {[str(one.device) for one in tensors]}")
        with _disable_current_modes():
            run(executor, *(getattr(one, "on_cpu", one) for one in arguments), **options)

    return launch
