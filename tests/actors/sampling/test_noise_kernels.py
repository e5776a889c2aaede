"""The Triton kernels of the noise and the race against their definition in PyTorch; without a GPU, in Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch

from actors.protocol.messages import NO_TOKEN, SamplingParams, TokenTree
from actors.sampling import logits as sampling
from actors.sampling.logits import LogitRows, choose, choose_batch
from actors.sampling.noise import NoiseStream, gumbel, noise_key, spread_keys

kernels = pytest.importorskip("actors.sampling.noise_kernels", reason="needs triton", exc_type=ImportError)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def keys_of(num: int) -> list[int]:
    return [noise_key(seed, NoiseStream.COUPLED, 3 * seed) for seed in range(num)]


def on_device(keys: list[int]) -> torch.Tensor:
    return torch.from_numpy(spread_keys(keys)).to(DEVICE)


@pytest.mark.parametrize("shared", [True, False])
def test_the_noise_is_that_of_the_definition(shared):
    keys, token_ids = keys_of(5), torch.arange(9001)
    if not shared:
        token_ids = torch.randint(0, 200_000, (5, 700), generator=torch.Generator().manual_seed(0))
    noise = kernels.gumbel(on_device(keys), token_ids.to(DEVICE)).cpu()
    torch.testing.assert_close(noise, gumbel(keys, token_ids), rtol=2e-6, atol=2e-7)


def test_the_noise_is_finite_at_both_ends_of_the_uniform():
    """Of a key, tokens whose bits are 0 and 2^32 - 1: found by inverting the mixer, which is a bijection."""
    low, high = 0x1234567, 0x89ABCDE
    keys = torch.tensor([[high, low]] * 2, dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([[unscramble(unscramble(bits) ^ low) ^ high] for bits in (0, (1 << 32) - 1)])
    noise = kernels.gumbel(keys, tokens.to(DEVICE)).flatten().tolist()
    expected = gumbel([high << 32 | low], tokens.flatten()).flatten().tolist()
    assert noise == pytest.approx(expected, rel=1e-6)
    assert noise[0] > 22 and -3 < noise[1] < -2


def unscramble(word: int) -> int:
    """The inverse of one round of lowbias32."""
    mask = (1 << 32) - 1
    word ^= word >> 16
    word = word * pow(0x846CA68B, -1, 1 << 32) & mask
    word ^= word >> 15 ^ word >> 30
    word = word * pow(0x7FEB352D, -1, 1 << 32) & mask
    return word ^ word >> 16


def test_the_race_takes_the_tokens_of_the_definition(monkeypatch):
    """Sampled and greedy rows, ties, banned tokens, a NaN, more tokens than a block, rows that are not adjacent."""
    params = [SamplingParams(temperature=float(row % 3 > 0), seed=row) for row in range(12)]
    scores = torch.randn(12, 9000, generator=torch.Generator().manual_seed(1))[:, :8999] * 3
    scores[0] = 0.0
    scores[1, 5:] = -torch.inf
    scores[3, [40, 8000]] = 99.0
    scores[4, 8990] = torch.nan
    scores[6] = -torch.inf
    expected = choose(scores, params, range(12)).tolist()
    assert expected[0] == 0 and expected[3] == 40
    monkeypatch.setattr(sampling, "_races_on_device", lambda _: True)
    assert choose(scores.to(DEVICE), params, range(12)).tolist() == expected
    batch = [LogitRows(one, 1, [1] * row, TokenTree.root(1)) for row, one in enumerate(params, 1)]
    chosen = choose_batch(scores.to(DEVICE), batch, ()).tolist()
    assert chosen[4] == NO_TOKEN and chosen[6] == 0
    monkeypatch.undo()
    assert DEVICE == "cuda" or chosen == choose_batch(scores, batch, ()).tolist()
