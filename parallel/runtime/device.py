"""The CUDA device of the calling thread, and PyTorch's settings on it. Knows no models."""

from __future__ import annotations

import torch

_STALLS_FROM = (9, 0)


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has done what this thread gave it: for a clock where no result is read.

    Not until the whole device is idle: that is an error while another thread captures a graph on it.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        event.synchronize()


def use_device(device: torch.device | str) -> None:
    """Make a CUDA device the current one of this thread, and start its context; nothing for a CPU.

    Streams, graphs and NCCL take the current device, not that of the tensors, and every thread has its own. The context
    takes seconds where many ranks start at once: it is made here, before the ranks wait for each other.

    From compute capability 9.0 on PyTorch (2.9, with cuDNN 9.15) prefers cuDNN's attention, which plans every exact
    shape anew for 0.3 to 0.5 s, and the engine's passes have many; the other kernels need no plan.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.cuda.init()
    if torch.cuda.get_device_capability(device) >= _STALLS_FROM:
        torch.backends.cuda.enable_cudnn_sdp(False)
