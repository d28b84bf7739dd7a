"""Settings of a decode node."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config import NodeConfig, option
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(NodeConfig):
    max_batch: int = option(64, "sequences that decode together in one step", minimum=1)
    max_batched_tokens: int = option(
        512, "tokens of one step, the tails of prompts that are computed here included; at least max_batch", minimum=1
    )
    max_requests: int = option(
        128, "requests that may hold blocks here, in the batch or on their way to it; more are turned away", minimum=1
    )
    lease_s: float = option(10.0, "how long blocks are kept for a request that nobody renews", unit="s", minimum=0.1)

    def check(self) -> None:
        """Raises ConfigError where fields contradict each other."""
        if self.max_batch > self.max_batched_tokens:
            raise ConfigError(
                f"max_batch is {self.max_batch}; allowed is at most max_batched_tokens, {self.max_batched_tokens}: "
                "every sequence of the batch takes one token of a step"
            )
