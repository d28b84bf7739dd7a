"""The noise of draws against whole numbers computed in plain Python, and what it makes of almost equal logits."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch

from kvrelay.model.noise import noise_key
from kvrelay.model.noise import waiting_times as waiting_times_of_keys
from kvrelay.model.sampler import Sampler, SamplingRow
from kvrelay.sampling import GeneratedToken, SamplingParams

BITS_64 = 2**64 - 1


def waiting_times(seed: int, position: int, num_tokens: int) -> torch.Tensor:
    return waiting_times_of_keys(torch.tensor([[noise_key(seed, position)]]), num_tokens)[0]


def splitmix64(state: int) -> int:
    """The published finalizer, on unbounded integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & BITS_64
    return state ^ (state >> 31)


def reference(seed: int, position: int, token_id: int) -> float:
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"kvrelay-draw-v2").digest()
    state = (int.from_bytes(digest, "little") + (token_id + 1) * 0x9E3779B97F4A7C15) & BITS_64
    return -math.log1p(-((splitmix64(state) >> 11) + 0.5) * 2.0**-53)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (0, 1), (7, 300), (2**64 - 1, 131_071)])
def test_the_noise_is_splitmix64_of_seed_position_and_token(seed: int, position: int) -> None:
    times = waiting_times(seed, position, 500)
    assert times.dtype == torch.float32
    assert times.tolist() == pytest.approx([reference(seed, position, token_id) for token_id in range(500)], rel=1e-5)


def test_the_noise_is_the_same_in_every_release() -> None:
    assert waiting_times(1, 2, 3).tolist() == pytest.approx([0.338430067, 0.681885957, 0.630232686], rel=1e-6)


def test_a_tokens_noise_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert torch.equal(waiting_times(5, 6, 100), waiting_times(5, 6, 50_000)[:100])


def test_draws_side_by_side_have_each_its_own_noise() -> None:
    keys = torch.tensor([[noise_key(5, 6)], [noise_key(5, 7)], [noise_key(4, 6)]])
    together = waiting_times_of_keys(keys, 100)
    assert torch.equal(together, torch.stack([waiting_times(*pair, 100) for pair in ((5, 6), (5, 7), (4, 6))]))
    assert not torch.equal(together[0], together[1])


def test_waiting_times_have_mean_one_and_never_end_or_vanish() -> None:
    times = torch.cat([waiting_times(seed, 0, 50_000) for seed in range(20)])
    assert float(times.mean()) == pytest.approx(1.0, abs=0.005)
    assert float((times > 1.0).double().mean()) == pytest.approx(math.exp(-1), abs=0.002)
    assert bool((times > 0).all())
    assert bool(times.isfinite().all())


def test_logits_that_differ_by_rounding_draw_the_same_tokens_almost_always() -> None:
    """A bfloat16 engine's logits move by some hundredths with the batch; draws move only as far as probabilities do."""
    generator = torch.Generator().manual_seed(3)
    num_draws = 400
    logits_V = torch.randn(49_152, generator=generator) * 2.5
    rounded_V = logits_V + torch.randn(49_152, generator=generator) * 0.02
    rows = [SamplingRow(SamplingParams(seed=seed), 9, (), 0, (0,)) for seed in range(num_draws)]
    drawn, again = (Sampler().sample(v.expand(num_draws, -1), rows) for v in (logits_V, rounded_V))
    num_equal = sum(a == b for a, b in zip(drawn, again, strict=True))
    assert len({token.token_id for token in drawn if isinstance(token, GeneratedToken)}) > 300
    assert num_equal >= 0.97 * num_draws
