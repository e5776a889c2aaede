"""The attention backends that this machine has, for tests that run each of them."""

from parallel.kernels.attention import has_attention

BACKENDS = ["sdpa", "padded", *(["ragged"] if has_attention() else [])]
