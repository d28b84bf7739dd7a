"""Bounds of what a node's scheduler may be told, beside those that its own tests hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.limits import DecodeLimits, PrefillLimits
from prefill_node.config import PrefillConfig

PREFILL = PrefillLimits(max_batched_tokens=512, chunk_tokens=512, max_prefills=4, max_waiting=4)
DECODE = DecodeLimits(max_batch=64, max_batched_tokens=512)


@pytest.mark.parametrize(
    ("field", "most"), [("max_batched_tokens", 131_072), ("max_prefills", 65_536), ("max_waiting", 65_536)]
)
def test_a_prefill_node_is_told_no_more_than_its_status_can_say(field: str, most: int) -> None:
    replace(PREFILL, **{field: most}).validate()
    with pytest.raises(InvalidRequestError, match=f"{field} is {most + 1}; allowed is at most {most}"):
        replace(PREFILL, **{field: most + 1}).validate()


@pytest.mark.parametrize(("field", "most"), [("max_batched_tokens", 131_072), ("max_requests", 65_536)])
def test_nor_is_a_decode_node(field: str, most: int) -> None:
    replace(DECODE, **{field: most}).validate()
    with pytest.raises(InvalidRequestError, match=f"{field} is {most + 1}; allowed is at most {most}"):
        replace(DECODE, **{field: most + 1}).validate()


def test_settings_are_held_to_the_same_bounds() -> None:
    with pytest.raises(ConfigError, match="max_prefills is 4294967295; allowed is at most 65536"):
        PrefillConfig(model=Path("model.gguf"), max_prefills=2**32 - 1).check()
