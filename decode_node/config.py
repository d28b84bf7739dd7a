"""Settings of a decode node."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.limits import DecodeLimits
from kvrelay.option import option
from kvrelay.role_config import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(NodeConfig):
    max_batch: int = option(64, "sequences that decode together in one step", minimum=1)
    max_batched_tokens: int = option(
        512, "tokens of one step, the tails of prompts that are computed here included; at least max_batch", minimum=1
    )
    max_requests: int = option(
        128, "requests that may hold blocks here, in the batch or on their way to it; more are turned away", minimum=1
    )
    reserve_output_tokens: int = option(
        0,
        "output tokens that blocks are set aside for when a request is admitted; an answer takes more as it grows, "
        "from the youngest request if there are none; 0: all of max_tokens, so that nobody has to give way",
        minimum=0,
    )
    itl_target_s: float = option(
        0.0,
        "time between two tokens of an answer that the node keeps to: while a step takes longer, fewer join its batch "
        "and shorter parts of prompts are computed beside it; 0: none",
        unit="s",
        minimum=0.0,
    )
    lease_s: float = option(10.0, "how long blocks are kept for a request that nobody renews", unit="s", minimum=0.1)

    def check(self) -> None:
        """Raises ConfigError where fields contradict each other."""
        try:
            self.limits.validate()
            if self.marks is not None:
                self.marks.validate()
        except InvalidRequestError as error:
            raise ConfigError(error.message) from error

    @property
    def limits(self) -> DecodeLimits:
        """What the node starts with."""
        return DecodeLimits(self.max_batch, self.max_batched_tokens, self.max_requests, self.reserve_output_tokens)
