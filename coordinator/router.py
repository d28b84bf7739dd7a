"""Which nodes to try, best first: least work still to do, counting what a node's cache already spares. Pure.

The work is that of the requests that are there and of the new one, over the node's weight: of two idle nodes the one of
more weight comes first, and one of twice the weight is given twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.members import Member
from kvrelay.types import InstanceId

# What one request on a node costs a new one there, in blocks of prompt: a cached prefix draws a request to its node
# until the queue there costs more than the prefix spares.
PREFILL_REQUEST_BLOCKS = 32  # it computes prompts one after another
DECODE_REQUEST_BLOCKS = 4  # a batch row slows the others a little


def rank_decode(
    members: Sequence[Member],
    matched: Mapping[InstanceId, int],
    *,
    num_blocks: int,
    num_blocks_now: Callable[[Member], int] | None = None,
    suspects: Collection[InstanceId] = (),
    avoid: Collection[InstanceId] = (),
) -> list[Member]:
    """Decode nodes that could ever hold `num_blocks`, the one to ask first in front; `suspects`, which failed others
    lately, are asked late, and `avoid`, which failed this very request, last.

    `num_blocks_now` says how many a node sets aside at first: all of them, unless its answers grow.
    """

    def cost(member: Member) -> tuple[bool, bool, bool, float, int, InstanceId]:
        status, instance_id = member.status, member.info.instance_id
        cached = matched.get(instance_id, 0)
        needed = num_blocks if num_blocks_now is None else num_blocks_now(member)
        crowded = needed - cached > status.blocks.available
        return (
            instance_id in avoid,
            instance_id in suspects,
            crowded,
            DECODE_REQUEST_BLOCKS * (member.load.num_requests + 1) / status.weight - cached,
            -status.blocks.available,
            instance_id,
        )

    return sorted((member for member in members if _may_take(member, num_blocks)), key=cost)


def rank_prefill(
    members: Sequence[Member],
    matched: Mapping[InstanceId, int],
    *,
    num_blocks: int,
    suspects: Collection[InstanceId] = (),
    avoid: Collection[InstanceId] = (),
) -> list[Member]:
    """Prefill nodes that could ever hold `num_blocks`, the one to ask first in front; the others as in rank_decode."""

    def cost(member: Member) -> tuple[bool, bool, bool, float, InstanceId]:
        status, instance_id = member.status, member.info.instance_id
        cached = matched.get(instance_id, 0)
        return (
            instance_id in avoid,
            instance_id in suspects,
            not has_slot(member),
            PREFILL_REQUEST_BLOCKS * (member.load.num_requests + 1) / status.weight - cached,
            instance_id,
        )

    return sorted((member for member in members if _may_take(member, num_blocks)), key=cost)


def _may_take(member: Member, num_blocks: int) -> bool:
    """Whether the node could ever hold so many blocks, and wants anything at all."""
    return member.status.weight > 0 and num_blocks <= member.status.blocks.total


def has_slot(member: Member) -> bool:
    """Whether the node would take one more request now, as far as its last status tells."""
    return member.load.has_slot
