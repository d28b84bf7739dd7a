from __future__ import annotations

import pytest
import torch

from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.layout import KVLayout
from kvrelay.model.attention_plain import PlainPagedAttention, group_rows
from tests.support.steps import Row, step_input


@pytest.mark.parametrize(
    ("num_blocks", "max_wasted", "expected"),
    [
        ([], 16, []),
        ([5], 16, [[0]]),
        ([5, 5, 5], 0, [[0, 1, 2]]),
        ([1, 4, 2, 4], 0, [[1, 3], [2], [0]]),
        ([1, 4, 2, 4], 2, [[1, 3, 2], [0]]),
        ([1, 4, 2, 4], 5, [[1, 3, 2, 0]]),
        ([100, 1, 1, 1, 1], 16, [[0], [1, 2, 3, 4]]),
    ],
)
def test_rows_are_grouped_longest_first_within_the_waste(
    num_blocks: list[int], max_wasted: int, expected: list[list[int]]
) -> None:
    assert group_rows(range(len(num_blocks)), num_blocks, max_wasted) == expected


def test_only_the_rows_asked_for_are_grouped() -> None:
    assert group_rows([3, 1], [9, 2, 9, 1], 16) == [[1, 3]]


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 5)],
        [(7, 9)],
        [(12, 1), (3, 1), (0, 1)],
        [(400, 1), (3, 1), (30, 1), (0, 20), (17, 3)],
    ],
    ids=["whole_prompt", "later_chunk", "decode", "mixed"],
)
def test_plain_attention_is_softmax_over_what_each_token_may_see(rows: list[tuple[int, int]]) -> None:
    """Rows are (earlier tokens, tokens of this step); the reference goes token by token in float64."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(layout, 150)
    cache.tensor.normal_(generator=generator)
    free = torch.randperm(150, generator=generator).tolist()
    laid = []
    for earlier, count in rows:
        blocks = [free.pop() for _ in range(layout.blocks_for(earlier + count))]
        laid.append((Row([0] * (earlier + count), blocks, num_done=earlier), count))
    inp = step_input(laid, 4)
    q = torch.randn(inp.query_starts[-1], 6, 8, generator=generator)
    out = PlainPagedAttention().plan(inp, cache).attend(q, 1, cache)
    token = 0
    for row, count in laid:
        keys = cache.keys(1)[row.block_ids].flatten(0, 1).double()
        values = cache.values(1)[row.block_ids].flatten(0, 1).double()
        for position in range(row.num_done, row.num_done + count):
            for head in range(6):
                scores = keys[: position + 1, head // 3] @ q[token, head].double() / 8**0.5
                expected = scores.softmax(0) @ values[: position + 1, head // 3]
                torch.testing.assert_close(out[token, head].double(), expected, rtol=0, atol=1e-5)
            token += 1
