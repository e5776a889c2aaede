from __future__ import annotations

import pytest
import torch

from parallel.kernels import pages
from parallel.kernels.activations import map_rows
from parallel.kernels.library import library
from parallel.kernels.norms import add_rows, layer_norm, rms_norm, weigh_rows
from parallel.kernels.products import Panels
from parallel.kernels.steps import Arena, NotRecordable, Recorder, Steps, join_rows, recording, room, take_rows

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")
ROWS = 8


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


MATRIX, BIAS, WEIGHT, TABLE, WEIGHTS = drawn(64, 32), drawn(64), drawn(32), drawn(50, 32), drawn(50, 1)


def work(panels: Panels, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Every kernel that can be recorded but attention and mixtures."""
    x = add_rows(rms_norm(x, WEIGHT, 1e-5, 1.0), take_rows(TABLE, ids))
    x = layer_norm(add_rows(x, panels.rows(ids)), WEIGHT, WEIGHT, 1e-6)
    x = add_rows(map_rows("soft_cap", x, 2.5), take_rows(TABLE, ids, shift=20, last=48))
    x = map_rows("gelu", join_rows(x, take_rows(TABLE, ids)), gated=True)
    x = weigh_rows(x, take_rows(WEIGHTS, ids))
    return panels.multiply(x, BIAS, gated=True)


def recorded(panels: Panels) -> tuple[Steps, torch.Tensor]:
    ids, x = torch.zeros(ROWS, dtype=torch.int64), torch.empty(ROWS, 32)
    with Recorder(Arena(), ROWS, [ids.data_ptr(), x.data_ptr()]) as recorder:
        result = work(panels, ids, x)
    return recorder.steps([result]), result


@pytest.mark.parametrize("num_rows", [1, 3, ROWS])
def test_recorded_calls_compute_what_the_calls_do(num_rows):
    panels = Panels(MATRIX)
    steps, like = recorded(panels)
    assert len(steps) == 15
    ids, x = torch.arange(num_rows) * 5, drawn(num_rows, 32)
    result = torch.full((num_rows + 1, like.shape[1]), 7.0)
    steps.run([num_rows, ids.data_ptr(), x.data_ptr(), result.data_ptr()])
    assert torch.equal(result[:-1], work(panels, ids, x))
    assert (result[-1] == 7).all(), "a row that is none of the run's was written"


def test_a_run_reads_what_a_matrix_holds_then():
    panels = Panels(MATRIX)
    steps, like = recorded(panels)
    panels.assign(MATRIX.flip(0).contiguous())
    ids, x, result = torch.zeros(2, dtype=torch.int64), drawn(2, 32), torch.empty(2, like.shape[1])
    steps.run([2, ids.data_ptr(), x.data_ptr(), result.data_ptr()])
    assert torch.equal(result, work(panels, ids, x)) and not torch.equal(result, work(Panels(MATRIX), ids, x))


def test_rows_behind_the_last_one_are_that():
    found = take_rows(TABLE, torch.tensor([0, 44, 45, 46, 1 << 40]), shift=2, last=47)
    assert torch.equal(found, TABLE[[2, 46, 47, 47, 47]])


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x[:2],
        lambda x: x.T,
        torch.nn.functional.silu,
        torch.empty_like,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.tensor([1.0]),
        lambda x: room(ROWS + 1, 4, torch.float32),
    ],
)
def test_an_operation_that_is_no_step_ends_the_recording(operation):
    x = torch.zeros(ROWS, 4)
    with pytest.raises(NotRecordable), Recorder(Arena(), ROWS, []):
        operation(x)
    assert recording() is None
    operation(x)


def test_memory_of_a_result_that_is_gone_is_given_out_again_and_no_other():
    arena = Arena()
    first, second = arena.give(4, 8, torch.float32), arena.give(4, 8, torch.float32)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first
    third, fourth = arena.give(4, 16, torch.bfloat16), arena.give(4, 8, torch.float32)
    assert third.data_ptr() in places - {second.data_ptr()} and fourth.data_ptr() not in places


def test_matrices_share_pages_without_overlap():
    tensors = [pages.empty(size, dtype) for size in (1, 100, 70_000, 9 << 20) for dtype in (torch.float32, torch.int8)]
    for place, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0 and not tensor.any()
        tensor.fill_(place + 1)
    assert all((tensor == place + 1).all() for place, tensor in enumerate(tensors))
