from __future__ import annotations

import threading

import pytest
import torch

from parallel.runtime.device import use_device, wait_for
from tests.parallel.cuda_twin import CudaTwin


@pytest.fixture
def twin(monkeypatch):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield CudaTwin().install(monkeypatch)
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_each_thread_has_the_device_of_its_rank(twin):
    """Ranks are threads with cluster=inprocess; a graph is captured and replayed on the thread's device."""
    found = {}

    def rank(index):
        use_device(f"cuda:{index}")
        found[index] = torch.cuda.current_device()

    threads = [threading.Thread(target=rank, args=(index,)) for index in (1, 3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert found == {1: 1, 3: 3} and torch.cuda.current_device() == 0
    use_device("cpu")
    assert torch.cuda.current_device() == 0


def test_the_host_waits_for_a_gpu_only(twin):
    for device, waits in (("cpu", 0), ("cuda:0", 1)):
        before = twin.num_syncs
        wait_for(torch.device(device))
        assert twin.num_syncs - before == waits


@pytest.mark.parametrize("capability, kept", [((8, 0), True), ((9, 0), False), ((10, 0), False)])
def test_attention_that_plans_every_shape_is_off_where_it_is_preferred(twin, monkeypatch, capability, kept):
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    use_device("cuda:0")
    assert torch.backends.cuda.cudnn_sdp_enabled() is kept
