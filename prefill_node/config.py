"""Settings of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.limits import PrefillLimits
from kvrelay.option import option
from kvrelay.role_config import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(NodeConfig):
    """What a prefill node has beside every node's settings."""

    # A step of 512 tokens already fills the matrix units of a CPU; more of them only make short prompts wait longer.
    max_batched_tokens: int = option(512, "tokens of one step, shared by all prompts in work", unit="tokens", minimum=1)
    chunk_tokens: int = option(512, "tokens of one prompt in a step, at most", unit="tokens", minimum=1)
    max_prefills: int = option(4, "prompts that load or compute at a time; short ones may be as many more", minimum=1)
    # The coordinator keeps the long queue, where fairness and priority are known; this one hides its round trip.
    max_waiting: int = option(4, "prompts that wait on the node at most", minimum=0)
    prefix_load: str = option(
        "measured",
        "when a prefix is loaded from the kvstore: measured where that is quicker than computing it, by what both took "
        "lately, while the node computes what is late; always waits for it, load_limit_s at most",
        choices=("measured", "always"),
    )
    load_limit_s: float = option(
        5.0, "longest wait for a prefix from the kvstore; what has not come by then is computed", unit="s", minimum=0.0
    )
    handoff_stall_s: float = option(
        10.0, "longest wait for a decode node to take a block or to commit", unit="s", minimum=0.1
    )

    def check(self) -> None:
        """Raises ConfigError for what no node can be told to take on."""
        try:
            self.limits.validate()
            if self.marks is not None:
                self.marks.validate()
        except InvalidRequestError as error:
            raise ConfigError(error.message) from error

    @property
    def limits(self) -> PrefillLimits:
        """What the node starts with."""
        return PrefillLimits(self.max_batched_tokens, self.chunk_tokens, self.max_prefills, self.max_waiting)
