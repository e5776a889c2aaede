"""The Triton kernels of noise, race and truncation against their definition in PyTorch, on the GPU or in Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch

from actors.protocol.messages import NO_TOKEN, SamplingParams, TokenTree
from actors.sampling import logits as sampling
from actors.sampling.logits import LogitRows, choose, choose_batch, process_batch
from actors.sampling.noise import NoiseStream, gumbel, noise_key, spread_keys
from tests.actors.sampling.test_noise import unscramble

kernels = pytest.importorskip("actors.sampling.noise_kernels", reason="needs triton", exc_type=ImportError)


def keys_of(num: int) -> list[int]:
    return [noise_key(seed, NoiseStream.COUPLED, 3 * seed) for seed in range(num)]


@pytest.mark.parametrize("shared", [True, False])
def test_the_noise_is_that_of_the_definition(shared, device):
    keys, token_ids = keys_of(5), torch.arange(9001)
    if not shared:
        token_ids = torch.randint(0, 200_000, (5, 700), generator=torch.Generator().manual_seed(0))
    noise = kernels.gumbel(torch.from_numpy(spread_keys(keys)).to(device), token_ids.to(device)).cpu()
    torch.testing.assert_close(noise, gumbel(keys, token_ids), rtol=2e-6, atol=2e-7)


def test_the_noise_is_finite_at_both_ends_of_the_uniform(device):
    """The tokens of a key whose bits are 0 and 2^32 - 1 are found by inverting the mixer, which is a bijection."""
    low, high = 0x1234567, 0x89ABCDE
    keys = torch.tensor([[high, low]] * 2, dtype=torch.int32).to(device)
    tokens = torch.tensor([[unscramble(unscramble(bits) ^ low) ^ high] for bits in (0, (1 << 32) - 1)])
    noise = kernels.gumbel(keys, tokens.to(device)).cpu().flatten().tolist()
    expected = gumbel([high << 32 | low], tokens.flatten()).flatten().tolist()
    assert noise == pytest.approx(expected, rel=1e-6)
    assert noise[0] > 22 and -3 < noise[1] < -2


@pytest.mark.extended
def test_the_race_takes_the_tokens_of_the_definition(monkeypatch, device):
    """Sampled and greedy rows, ties, bans, impossible rows, more tokens than a block, rows that are not adjacent."""
    params = [SamplingParams(temperature=float(row % 3 > 0), seed=row) for row in range(12)]
    scores = torch.randn(12, 9000, generator=torch.Generator().manual_seed(1))[:, :8999] * 3
    scores[0] = 0.0
    scores[1, 5:] = -torch.inf
    scores[3, [40, 8000]] = 99.0
    scores[4, 8990] = torch.nan
    scores[6] = -torch.inf
    scores[8, 3] = torch.inf
    expected = choose(scores, params, range(12)).tolist()
    assert expected[0] == 0 and expected[3] == 40
    monkeypatch.setattr(sampling, "_has_kernels", lambda _: True)
    assert choose(scores.to(device), params, range(12)).tolist() == expected
    batch = [LogitRows(one, 1, [1] * row, TokenTree.root(1)) for row, one in enumerate(params, 1)]
    chosen = choose_batch(scores.to(device), batch, ()).tolist()
    assert [row for row in range(12) if chosen[row] == NO_TOKEN] == [4, 6, 8]
    monkeypatch.undo()
    assert device.type == "cuda" or chosen == choose_batch(scores, batch, ()).tolist()


@pytest.mark.extended
def test_the_rows_keep_the_tokens_of_the_definition(monkeypatch, device):
    """Combinations of the three; logits with many ties in turn, bans, both zeros, all banned, with a NaN."""
    limits = [(top_k, top_p, min_p) for top_k in (0, 1, 40) for top_p in (1.0, 0.7) for min_p in (0.0, 0.05)]
    limits.append((40, 1e-3, 0.05))
    made = torch.randn(len(limits), 4500, generator=torch.Generator().manual_seed(2))[:, :4400]
    rows = torch.arange(len(limits))[:, None]
    scores = torch.where((rows + rows // 2) % 2 == 0, made * 2, (made * 3).round() / 2)
    scores[3, 5:] = -torch.inf
    scores[5] = -torch.inf
    scores[8] = -made[8].abs().round().clamp(max=2.0)  # of negative zeros, too
    scores[11, 4390] = torch.nan
    params = [
        SamplingParams(temperature=float(row != 12), top_k=top_k, top_p=top_p, min_p=min_p)
        for row, (top_k, top_p, min_p) in enumerate(limits)
    ]
    batch = [LogitRows(one, 1, [1], TokenTree.root(1)) for one in params]
    expected = process_batch(scores, batch, ())
    monkeypatch.setattr(sampling, "_has_kernels", lambda _: True)
    kept = process_batch(scores.to(device), batch, ()).cpu()
    monkeypatch.undo()
    assert kept[11, 4390].isnan(), "the race finds it; what else stays in its row does not matter"
    kept[11] = expected[11] = 0.0
    assert torch.equal(kept, expected)
    assert (kept > -torch.inf).sum() < scores.numel() / 3
