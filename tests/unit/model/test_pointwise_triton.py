"""The fused kernels against torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.pointwise import TorchPointwise
from kvrelay.model.rotary import RotaryTable
from tests.support.paged import make_config
from tests.support.triton_device import DEVICE, TritonPointwise

BOTH = (TorchPointwise(torch.float32), TritonPointwise(torch.float32))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("size", [64, 96])
def test_the_residual_grows_in_place_and_its_norm_is_returned(size: int) -> None:
    weight, delta = random(size, seed=1), random(3, size, seed=2)
    streams = [random(3, size) for _ in BOTH]
    normals = [each.add_and_normalize(x, delta, weight, 1e-5) for each, x in zip(BOTH, streams, strict=True)]
    torch.testing.assert_close(normals[1], normals[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(streams[1], random(3, size) + delta)
    assert torch.equal(streams[1], streams[0])


def test_without_an_addition_the_residual_stays() -> None:
    x, weight = random(2, 64), random(64, seed=1)
    torch.testing.assert_close(
        BOTH[1].add_and_normalize(x, None, weight, 1e-5), BOTH[0].add_and_normalize(x, None, weight, 1e-5)
    )
    assert torch.equal(x, random(2, 64))


def test_norms_come_in_the_models_dtype() -> None:
    x, weight = random(2, 64), random(64, seed=1)
    half = TritonPointwise(torch.float16).add_and_normalize(x, random(2, 64, seed=3).half(), weight, 1e-5)
    assert half.dtype == torch.float16
    exact = TorchPointwise(torch.float32).add_and_normalize(
        random(2, 64), random(2, 64, seed=3).half().float(), weight, 1e-5
    )
    torch.testing.assert_close(half.float(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 8), (3, 3, 24), (4, 1, 64)])
def test_queries_are_turned_and_keys_and_values_stored(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    config = make_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_model_len=64)
    qkv = random(4, (num_heads + 2 * num_kv_heads) * head_dim)
    cos, sin = RotaryTable(config, torch.float32, DEVICE).at(torch.tensor([0, 1, 17, 63], device=DEVICE))
    slots = torch.tensor([5, 16 * 2 + 15, 16, 16 * 3], device=DEVICE)
    caches = [PagedKVCache(config.layout("float32"), 4, DEVICE) for _ in BOTH]
    queries = [
        each.rotate_and_store(qkv, cos, sin, cache, 1, cache.rows_of(slots))
        for each, cache in zip(BOTH, caches, strict=True)
    ]
    assert queries[1].is_contiguous()
    torch.testing.assert_close(queries[1], queries[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(caches[1].tensor, caches[0].tensor, rtol=0, atol=1e-6)
    assert caches[1].tensor.count_nonzero() == 4 * 2 * num_kv_heads * head_dim


@pytest.mark.parametrize("inner", [128, 1500])
def test_the_gate(inner: int) -> None:
    gate_up = random(3, 2 * inner) * 4
    torch.testing.assert_close(BOTH[1].gate(gate_up), BOTH[0].gate(gate_up), rtol=1e-5, atol=1e-6)
