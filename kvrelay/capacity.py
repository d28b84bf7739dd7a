"""How many requests a node's memory has KV for: arithmetic, in whole blocks as the pool counts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What of `memory_bytes` is left for KV beside the weights, and what that holds.

    Raises ConfigError for a count under 1 or a utilization that is no share.
    """

    memory_bytes: int  # of the node's device
    utilization: Fraction  # share of it for weights and KV; the rest is for activations and the runtime
    weight_bytes: int
    token_bytes: int  # KV of one token, all layers together
    block_tokens: int
    request_tokens: int  # prompt and answer of one request

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization is {float(self.utilization):g}; allowed is more than 0, at most 1")
        for name in ("memory_bytes", "token_bytes", "block_tokens", "request_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed is at least 1")
        if self.weight_bytes < 0:
            raise ConfigError(f"weight_bytes is {self.weight_bytes}; allowed is at least 0")

    @property
    def usable_bytes(self) -> int:
        """For weights and KV together."""
        return int(self.memory_bytes * self.utilization)

    @property
    def kv_bytes(self) -> int:
        """What the weights leave; 0 where they fill it all or do not fit."""
        return max(0, self.usable_bytes - self.weight_bytes)

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def num_blocks(self) -> int:
        return self.kv_bytes // self.block_bytes

    @property
    def request_blocks(self) -> int:
        """Blocks of one request, the last one perhaps in part."""
        return -(-self.request_tokens // self.block_tokens)

    @property
    def request_bytes(self) -> int:
        return self.request_blocks * self.block_bytes

    @property
    def num_requests(self) -> int:
        """Requests of this length that hold their blocks at a time, none of them shared."""
        return self.num_blocks // self.request_blocks
