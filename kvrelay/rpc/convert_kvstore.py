"""Tiers of kvstore.proto to ours and back."""

from __future__ import annotations

from kvrelay.pb import kvstore_pb2
from kvrelay.rpc.convert_types import check
from kvrelay.types import Tier

_TIERS = {
    Tier.NONE: kvstore_pb2.TIER_NONE,
    Tier.MEMORY: kvstore_pb2.TIER_MEMORY,
    Tier.DISK: kvstore_pb2.TIER_DISK,
}
_TIERS_FROM_PB = {wire: tier for tier, wire in _TIERS.items()}


def tier_to_pb(tier: Tier) -> kvstore_pb2.Tier.ValueType:
    """A store's tiers; raises KeyError for DEVICE, which is no store's."""
    return _TIERS[tier]


def tier_from_pb(wire: kvstore_pb2.Tier.ValueType) -> Tier:
    check(wire in _TIERS_FROM_PB, f"tier {wire} is unknown")
    return _TIERS_FROM_PB[wire]
