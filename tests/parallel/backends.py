"""The attention backends that this machine has, for tests that run each of them.

"triton" runs in Triton's interpreter, which takes milliseconds for what takes microseconds: by default it has tests of
its own (`model/test_split_kv.py`), and with `-m slow` those of all backends too. Their models are on
the CPU; `runtime/test_cuda.py` tests what Triton compiles for a GPU.
"""

import pytest
import torch

from parallel.kernels.attention import has_attention
from parallel.kernels.triton_launch import runs_on

HAS_TRITON = runs_on(torch.device("cpu"))
BACKENDS = ["sdpa", "padded", *(["ragged"] if has_attention() else [])]
FP8_BACKENDS = ["sdpa", "padded", *([pytest.param("triton", marks=pytest.mark.slow)] if HAS_TRITON else [])]
"""Those that read KV rows in FP8."""
EVERY_BACKEND = [*BACKENDS, *([pytest.param("triton", marks=pytest.mark.slow)] if HAS_TRITON else [])]
