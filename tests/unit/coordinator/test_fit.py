"""What can never run is refused, with the numbers."""

from __future__ import annotations

import pytest

from coordinator.fit import Capacity, check_capacity, settle_max_tokens
from kvrelay.cluster import ModelInfo
from kvrelay.errors import NeverFitsError, PromptTooLongError
from kvrelay.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")  # 16 tokens a block
MODEL = ModelInfo("m", "aa", "llama", 100, 300, (2,), LAYOUT, "float32", "plain")


@pytest.mark.parametrize(("num_prompt", "asked", "settled"), [(90, 10, 10), (50, None, 32), (90, None, 10), (99, 1, 1)])
def test_what_the_model_takes(num_prompt: int, asked: int | None, settled: int) -> None:
    assert settle_max_tokens(num_prompt, asked, 32, MODEL) == settled


@pytest.mark.parametrize(
    ("num_prompt", "asked", "message"),
    [(100, None, "has 100 tokens; m takes 100"), (100, 1, "has 100"), (90, 11, "together 101; m takes 100")],
)
def test_what_the_model_does_not_take(num_prompt: int, asked: int | None, message: str) -> None:
    with pytest.raises(PromptTooLongError, match=message):
        settle_max_tokens(num_prompt, asked, 32, MODEL)


def test_what_no_node_can_hold() -> None:
    capacity = Capacity(decode_blocks=4, prefill_blocks=3)
    check_capacity(48, 16, LAYOUT, capacity)
    check_capacity(48, 1, LAYOUT, Capacity(decode_blocks=0, prefill_blocks=3))  # no decode node takes part
    with pytest.raises(NeverFitsError, match="need 5 KV blocks of 16 tokens; the largest decode node has 4"):
        check_capacity(48, 17, LAYOUT, capacity)
    with pytest.raises(NeverFitsError, match="the prompt needs 4 KV blocks"):
        check_capacity(49, 1, LAYOUT, capacity)
