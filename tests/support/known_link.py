"""Turns on a link that has proven fast already, for tests of what happens at full speed."""

from __future__ import annotations

from prefill_node.turns import Turns


def known_link(slab_bytes: int) -> Turns:
    """Its handoffs may have two full messages on the way."""
    turns = Turns(slab_bytes)
    for _ in range(20):  # doublings: from one byte to a mebibyte
        turns.pace.answered(turns.pace.sent(turns.pace.message_bytes, 0.0), 0.0)
    return turns
