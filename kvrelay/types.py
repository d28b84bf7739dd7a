"""Plain data that every room speaks of: ids, roles, tiers, and the accounts of tokens and blocks.

Nothing here knows protobuf or torch. What crosses a seam is in `messages` (between roles), `inference` (with a client)
and `cluster` (what a node says of itself); `kvrelay.rpc.convert_*` map all of it to and from the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from kvrelay.errors import InvalidRequestError

RequestId = NewType("RequestId", str)
ReservationId = NewType("ReservationId", str)
AnswerHandle = NewType("AnswerHandle", int)  # of an answer on the stream that brings it
InstanceId = NewType("InstanceId", str)  # new at every start of a process
BlockId = NewType("BlockId", int)  # index into a node's pool
BlockHash = NewType("BlockHash", bytes)  # 32 bytes; see kvrelay.kv.hashing


DEFAULT_TENANT = "default"  # whose a request is while nobody proves to be another one
MAX_TENANT_CHARS = 64


class Role(Enum):
    COORDINATOR = "coordinator"
    PREFILL_NODE = "prefill-node"
    DECODE_NODE = "decode-node"
    KVSTORE = "kvstore"


class Tier(Enum):
    """Where a block was found."""

    DEVICE = "device"
    MEMORY = "memory"
    DISK = "disk"
    NONE = "none"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed again, by the tier they were found in."""

    device: int = 0
    memory: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.memory + self.disk


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of a pool by state; the four add up to total."""

    total: int = 0
    free: int = 0
    reserved: int = 0
    held: int = 0
    cached: int = 0

    @property
    def available(self) -> int:
        """Blocks a new request could get: free ones and cached ones, which are evicted."""
        return self.free + self.cached


def check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    """Raises InvalidRequestError unless 0 <= token_id < vocab_size."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(f"{name} holds {token_id}; token ids are in [0, {vocab_size})")


def check_tenant_name(tenant: str) -> None:
    """Raises InvalidRequestError unless it is 1 to 64 printable characters."""
    if not (1 <= len(tenant) <= MAX_TENANT_CHARS and tenant.isprintable()):
        raise InvalidRequestError(
            f"tenant is {tenant[:MAX_TENANT_CHARS]!r}; allowed are 1 to {MAX_TENANT_CHARS} printable characters"
        )


def check_ttl_s(name: str, ttl_s: float | None) -> None:
    """A time to live in seconds: None leaves it to others, 0 has no end. Raises InvalidRequestError."""
    if ttl_s is not None and not 0 <= ttl_s < math.inf:
        raise InvalidRequestError(f"{name} is {ttl_s:g}; allowed is a number of seconds of at least 0 (0: no end)")
