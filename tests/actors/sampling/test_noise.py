"""Noise: the same bits for ever, on every device, in every batch; uniform and independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import actors.sampling.noise
from actors.sampling.noise import NoiseStream, gumbel, noise_bits, noise_key, uniform
from parallel.kernels.noise import has_noise

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1


def reference_bits(key: int, token: int) -> int:
    """The same hash in unbounded integers: shows that int64 neither overflows nor shifts in a sign."""
    word = token ^ (key >> 32)
    for half in (key & MASK_32, 0):
        word ^= word >> 16
        word = word * 0x7FEB352D & MASK_32
        word ^= word >> 15
        word = word * 0x846CA68B & MASK_32
        word ^= word >> 16
        word ^= half
    return word


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """Five standard deviations above the mean of a chi-square."""
    return degrees + 5 * (2 * degrees) ** 0.5


def test_keys_and_bits_never_change():
    assert noise_key(0, NoiseStream.COUPLED, 0) == 0x238275BC38FCBE91
    assert noise_key(42, NoiseStream.ACCEPT, 7, 3) == 0xD11735529D20C57B
    assert noise_key(-1, NoiseStream.DRAFT, 1 << 40, 2, 1) == 0x293799D0A2FDFC53
    keys = [noise_key(0, NoiseStream.COUPLED, 0), noise_key(42, NoiseStream.DRAFT, 7, 3)]
    assert noise_bits(keys, torch.tensor([0, 1, 2, 151935])).tolist() == [
        [0xFEC2D503, 0x154FCD2B, 0x7AE4414B, 0x64549685],
        [0x1D83080A, 0xB3CF7BD6, 0x4A1DD904, 0xC139C8A5],
    ]


def test_bits_equal_unbounded_integer_arithmetic():
    keys = [noise_key(seed, NoiseStream.COUPLED, 11) for seed in range(40)] + [0, MASK_64, MASK_32, MASK_32 << 32]
    token_ids = [0, 1, 2, 1000, 4095, 151935, MASK_32]
    expected = [[reference_bits(key, token) for token in token_ids] for key in keys]
    assert noise_bits(keys, torch.tensor(token_ids)).tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_are_the_same_on_cuda():
    keys = [noise_key(seed, NoiseStream.COUPLED, seed * 3) for seed in range(64)]
    token_ids = torch.arange(50_001)
    assert torch.equal(noise_bits(keys, token_ids), noise_bits(keys, token_ids.cuda()).cpu())
    torch.testing.assert_close(gumbel(keys, token_ids.cuda()).cpu(), gumbel(keys, token_ids), rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_batch_or_on_other_tokens():
    keys = [noise_key(5, NoiseStream.COUPLED, position) for position in range(9)]
    token_ids = torch.arange(1009)
    together = gumbel(keys, token_ids)
    for row, key in enumerate(keys):
        assert torch.equal(gumbel([key], token_ids)[0], together[row])
    some = torch.tensor([3, 1008, 17, 640, 2])
    assert torch.equal(gumbel(keys, some), together[:, some])
    assert torch.equal(gumbel(keys, some.expand(9, -1)), together[:, some])


def test_gumbel_is_finite_at_both_ends_of_the_uniform(monkeypatch):
    ends = torch.tensor([[0, MASK_32]])
    monkeypatch.setattr("parallel.kernels.noise.has_noise", lambda: False)
    monkeypatch.setattr(actors.sampling.noise, "noise_bits", lambda keys, token_ids: ends.clone())
    best, worst = gumbel([0], torch.arange(2))[0].tolist()
    assert best == pytest.approx(33 * np.log(2), rel=1e-6)
    assert worst == pytest.approx(-np.log(24 * np.log(2)), rel=1e-6)


@pytest.mark.skipif(not has_noise(), reason="no compiler")
@pytest.mark.parametrize("size", [1, 15, 16, 1009, 20_000])
@pytest.mark.parametrize("shared", [True, False])
def test_the_kernel_computes_the_same_noise(size, shared, monkeypatch):
    keys = [noise_key(seed, NoiseStream.COUPLED, 11) for seed in range(7)]
    token_ids = torch.arange(size) * 1013 % MASK_32
    token_ids = token_ids if shared else token_ids + torch.arange(7)[:, None]
    noise = gumbel(keys, token_ids)
    monkeypatch.setattr("parallel.kernels.noise.has_noise", lambda: False)
    torch.testing.assert_close(noise, gumbel(keys, token_ids), rtol=2e-6, atol=4e-7)


@pytest.mark.skipif(not has_noise(), reason="no compiler")
def test_the_kernel_is_exact_at_both_ends_of_the_uniform():
    """The tokens of a key with given bits are found by inverting the mixer, which is a bijection."""
    low, high = 0x1234567, 0x89ABCDE
    bits = [0, 1, 2, 1 << 7, 1 << 16, 1 << 31, MASK_32 - 300, MASK_32]
    tokens = torch.tensor([unscramble(unscramble(own) ^ low) ^ high for own in bits])
    assert noise_bits([high << 32 | low], tokens).tolist() == [bits]
    uniform_ = np.minimum(
        (np.array(bits).astype(np.float32) + np.float32(0.5)).astype(np.float64) / 2**32, 1 - 2.0**-24
    )
    expected = -np.log(-np.log1p(-uniform_))
    assert gumbel([high << 32 | low], tokens)[0].tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=2e-7)


def unscramble(word: int) -> int:
    """The inverse of one round of lowbias32."""
    word ^= word >> 16
    word = word * pow(0x846CA68B, -1, 1 << 32) & MASK_32
    word ^= word >> 15 ^ word >> 30
    word = word * pow(0x7FEB352D, -1, 1 << 32) & MASK_32
    return word ^ word >> 16


def test_gumbel_follows_its_law():
    noise = gumbel([noise_key(s, NoiseStream.COUPLED, 0) for s in range(200)], torch.arange(1000)).double().flatten()
    quantiles = torch.exp(-torch.exp(-noise)).numpy()  # uniform if the noise is Gumbel
    counts = np.histogram(quantiles, bins=100, range=(0, 1))[0]
    assert chi_square(counts, 2000.0) < limit(99)


@pytest.mark.extended
@pytest.mark.parametrize("flip", ["seed", "stream", "position", "token"])
def test_one_changed_bit_of_the_input_changes_half_of_the_output(flip):
    rng = np.random.default_rng(1)
    changed = []
    for _ in range(400):
        seed, position, token = (int(rng.integers(1 << 20)) for _ in range(3))
        stream, bit = NoiseStream.COUPLED, 1 << int(rng.integers(20))
        before = noise_bits([noise_key(seed, stream, position)], torch.tensor([token])).item()
        if flip == "seed":
            seed ^= bit
        elif flip == "stream":
            stream = NoiseStream(int(rng.integers(1, 4)))
        elif flip == "position":
            position ^= bit
        else:
            token ^= bit
        after = noise_bits([noise_key(seed, stream, position)], torch.tensor([token])).item()
        changed.append([(before ^ after) >> i & 1 for i in range(32)])
    rates = np.array(changed).mean(axis=0)  # per output bit; standard deviation 0.025
    assert abs(rates.mean() - 0.5) < 0.02
    assert np.all(np.abs(rates - 0.5) < 0.125)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift):
    bits = noise_bits([noise_key(0, NoiseStream.COUPLED, position) for position in range(64)], torch.arange(4096))
    counts = torch.bincount((bits.flatten() >> shift) & 255, minlength=256).numpy()
    assert chi_square(counts, 64 * 4096 / 256) < limit(255)


@pytest.mark.parametrize("neighbour", ["seed", "stream", "position", "token", "node"])
def test_neighbouring_inputs_are_independent(neighbour):
    """Joint law of (number, number of the next seed / stream / position / token / node) on a 16 x 16 grid."""
    seeds, token_ids = range(300), torch.arange(300)
    here = noise_bits([noise_key(seed, NoiseStream.DRAFT, 9, 4) for seed in seeds], token_ids)
    moved = {
        "seed": lambda: noise_bits([noise_key(seed + 1, NoiseStream.DRAFT, 9, 4) for seed in seeds], token_ids),
        "stream": lambda: noise_bits([noise_key(seed, NoiseStream.ACCEPT, 9, 4) for seed in seeds], token_ids),
        "position": lambda: noise_bits([noise_key(seed, NoiseStream.DRAFT, 10, 4) for seed in seeds], token_ids),
        "token": lambda: noise_bits([noise_key(seed, NoiseStream.DRAFT, 9, 4) for seed in seeds], token_ids + 1),
        "node": lambda: noise_bits([noise_key(seed, NoiseStream.DRAFT, 9, 5) for seed in seeds], token_ids),
    }[neighbour]()
    for shift in (28, 0):  # of the top bits, and of the lowest
        cells = ((here >> shift & 15) * 16 + (moved >> shift & 15)).flatten()
        counts = torch.bincount(cells, minlength=256).numpy()
        assert chi_square(counts, 300 * 300 / 256) < limit(255)


def test_uniform_fills_the_half_open_unit_interval():
    assert uniform(0) == 0.0
    assert uniform(MASK_64) == 1.0 - 2.0**-53
    sampling_kinds = np.array(
        [uniform(noise_key(1, NoiseStream.ACCEPT, step, node)) for step in range(200) for node in range(100)]
    )
    assert chi_square(np.histogram(sampling_kinds, bins=50, range=(0, 1))[0], 400.0) < limit(49)
