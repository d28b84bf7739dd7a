"""The Triton kernel against the plain backend, which is held against float64 arithmetic in test_attention_plain."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention_plain import PlainPagedAttention
from tests.support.paged import make_config, random_cache, random_queries, random_rows
from tests.support.triton_device import DEVICE, TritonPagedAttention


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(12, 1), (3, 1), (0, 1), (127, 1), (128, 1)],
        [(129, 1), (400, 1), (2060, 1)],
        [(400, 1), (3, 1), (30, 1), (0, 20), (17, 3)],
        [(0, 20)],
    ],
    ids=["one_position", "short", "several_parts", "mixed", "prompt"],
)
def test_it_attends_as_the_plain_backend_does(rows: list[tuple[int, int]]) -> None:
    config = make_config()
    cache = random_cache(config.layout("float32", 4), 800, DEVICE)
    inp = random_rows(rows, cache)
    q_THD = random_queries(inp, config, cache.tensor)
    expected = PlainPagedAttention().plan(inp, cache).attend(q_THD, 1, cache)
    actual = TritonPagedAttention(config).plan(inp, cache).attend(q_THD, 1, cache)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_tokens"),
    [(4, 4, 16, 16), (32, 1, 8, 16), (6, 2, 24, 16), (8, 2, 64, 3), (2, 1, 128, 32), (1, 1, 80, 1)],
)
def test_every_shape_of_heads_and_blocks(num_heads: int, num_kv_heads: int, head_dim: int, block_tokens: int) -> None:
    config = make_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    cache = random_cache(config.layout("float32", block_tokens), 400 // block_tokens + 3, DEVICE)
    inp = random_rows([(250, 1), (7, 1)], cache)
    q_THD = random_queries(inp, config, cache.tensor)
    expected = PlainPagedAttention().plan(inp, cache).attend(q_THD, 0, cache)
    actual = TritonPagedAttention(config).plan(inp, cache).attend(q_THD, 0, cache)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_float16() -> None:
    config = make_config(head_dim=16)
    cache = random_cache(config.layout("float16"), 40, DEVICE)
    inp = random_rows([(300, 1), (20, 1)], cache)
    q_THD = random_queries(inp, config, cache.tensor)
    exact = _as_float32(cache)
    expected = PlainPagedAttention().plan(inp, exact).attend(q_THD.float(), 0, exact)
    actual = TritonPagedAttention(config).plan(inp, cache).attend(q_THD, 0, cache)
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=2e-3)


def test_what_an_earlier_owner_left_behind_a_rows_end_is_not_read() -> None:
    config = make_config()
    cache = random_cache(config.layout("float32", 16), 16, DEVICE)
    inp = random_rows([(17, 1), (32, 1), (130, 1)], cache)
    q_THD = random_queries(inp, config, cache.tensor)
    backend = TritonPagedAttention(config)
    expected = backend.plan(inp, cache).attend(q_THD, 0, cache)
    used = torch.zeros(cache.num_blocks + 1, 16, dtype=torch.bool)
    for row, context_len in enumerate(inp.context_lens):
        for position in range(context_len):
            used[int(inp.block_table_RB[row, position // 16]), position % 16] = True
    cache.keys(0)[~used] = torch.nan
    cache.values(0)[~used] = torch.nan
    assert torch.equal(backend.plan(inp, cache).attend(q_THD, 0, cache), expected)


def test_a_rows_result_does_not_depend_on_its_batch() -> None:
    config = make_config()
    cache = random_cache(config.layout("float32", 16), 60, DEVICE)
    inp = random_rows([(300, 1), (5, 1), (470, 1)], cache)
    q_THD = random_queries(inp, config, cache.tensor)
    backend = TritonPagedAttention(config)
    together = backend.plan(inp, cache).attend(q_THD, 1, cache)
    for row, context_len in enumerate(inp.context_lens):
        lens = torch.tensor([context_len], dtype=torch.int32, device=DEVICE)
        alone = backend.plan_decode(lens, inp.block_table_RB[row : row + 1], cache)
        assert torch.equal(alone.attend(q_THD[row : row + 1].contiguous(), 1, cache)[0], together[row])


def test_a_decode_plan_follows_its_tensors() -> None:
    """As in a CUDA graph: the same plan, other contents."""
    config = make_config()
    cache = random_cache(config.layout("float32", 16), 60, DEVICE)
    first, second = random_rows([(300, 1), (5, 1)], cache), random_rows([(2, 1), (299, 1)], cache)
    q_THD = random_queries(first, config, cache.tensor)
    lens = torch.tensor(first.context_lens, dtype=torch.int32, device=DEVICE)
    table = first.block_table_RB.clone()
    plan = TritonPagedAttention(config).plan_decode(lens, table, cache)
    for inp in (first, second, first):
        lens.copy_(torch.tensor(inp.context_lens))
        table.copy_(inp.block_table_RB)
        expected = PlainPagedAttention().plan(inp, cache).attend(q_THD, 0, cache)
        torch.testing.assert_close(plan.attend(q_THD, 0, cache), expected, rtol=0, atol=1e-5)


def _as_float32(cache: PagedKVCache) -> PagedKVCache:
    layout = cache.layout
    config = make_config(head_dim=layout.head_dim, num_kv_heads=layout.num_kv_heads)
    copy = PagedKVCache(config.layout("float32", layout.block_tokens), cache.num_blocks, DEVICE)
    copy.tensor.copy_(cache.tensor)
    return copy
