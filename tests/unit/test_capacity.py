"""The arithmetic of `kvrelay plan`, against published worked examples and by its bounds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.capacity import Capacity
from kvrelay.errors import ConfigError

GIB = 2**30
# Llama-3-8B in 16 bits on 80 GiB.
LLAMA_8B = Capacity(
    memory_bytes=80 * GIB,
    utilization=Fraction("0.9"),
    weight_bytes=16_060_522_496,
    token_bytes=131_072,
    block_tokens=16,
    request_tokens=8192,
)


def test_what_fits_beside_the_weights_in_whole_blocks() -> None:
    assert LLAMA_8B.usable_bytes == 77_309_411_328
    assert LLAMA_8B.kv_bytes == 61_248_888_832
    assert LLAMA_8B.block_bytes == 2_097_152
    assert LLAMA_8B.num_blocks == 29_205
    assert (LLAMA_8B.request_blocks, LLAMA_8B.request_bytes) == (512, GIB)
    assert LLAMA_8B.num_requests == 57


@pytest.mark.parametrize(
    ("request_tokens", "num_blocks", "num_requests"), [(1, 1, 4), (16, 1, 4), (17, 2, 2), (48, 3, 1), (80, 5, 0)]
)
def test_a_block_that_is_begun_counts_whole(request_tokens: int, num_blocks: int, num_requests: int) -> None:
    """Memory of four blocks and 150 bytes of a fifth one."""
    plan = Capacity(
        memory_bytes=1100,
        utilization=Fraction("0.5"),
        weight_bytes=0,
        token_bytes=8,
        block_tokens=16,
        request_tokens=request_tokens,
    )
    assert (plan.num_blocks, plan.request_blocks, plan.num_requests) == (4, num_blocks, num_requests)


def test_a_share_is_taken_exactly() -> None:
    """As a float, 0.29 of 100 is 28.999999999999996."""
    assert replace(LLAMA_8B, memory_bytes=100, utilization=Fraction("0.29")).usable_bytes == 29


def test_weights_that_do_not_fit_leave_nothing() -> None:
    plan = replace(LLAMA_8B, weight_bytes=80 * GIB)
    assert (plan.kv_bytes, plan.num_blocks, plan.num_requests) == (0, 0, 0)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("memory_bytes", 0, "memory_bytes is 0; allowed is at least 1"),
        ("token_bytes", 0, "token_bytes is 0"),
        ("block_tokens", 0, "block_tokens is 0"),
        ("request_tokens", -1, "request_tokens is -1"),
        ("weight_bytes", -1, "weight_bytes is -1; allowed is at least 0"),
        ("utilization", Fraction(0), "utilization is 0; allowed is more than 0, at most 1"),
        ("utilization", Fraction("1.5"), "utilization is 1.5; allowed is more than 0, at most 1"),
    ],
)
def test_numbers_that_make_no_plan(field: str, value: int | Fraction, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(LLAMA_8B, **{field: value})


@given(
    memory_bytes=st.integers(1, 10**9),
    weight_bytes=st.integers(0, 10**9),
    token_bytes=st.integers(1, 10**6),
    block_tokens=st.integers(1, 1024),
    request_tokens=st.integers(1, 10**6),
)
def test_requests_fit_and_one_more_would_not(
    memory_bytes: int, weight_bytes: int, token_bytes: int, block_tokens: int, request_tokens: int
) -> None:
    plan = Capacity(
        memory_bytes=memory_bytes,
        utilization=Fraction("0.9"),
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        block_tokens=block_tokens,
        request_tokens=request_tokens,
    )
    assert plan.request_bytes >= request_tokens * token_bytes
    assert plan.request_bytes - request_tokens * token_bytes < plan.block_bytes
    assert plan.num_requests * plan.request_bytes <= plan.kv_bytes < (plan.num_requests + 1) * plan.request_bytes
